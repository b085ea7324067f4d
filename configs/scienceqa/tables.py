"""The rows on ScienceQA: RMR's tables 1, 3 and 4, and the same system with a small model.

The library is ScienceQA's train split. `gemini_*`, `qwen_vl*` and `internlm*` need a server with
OpenAI's API that serves the model; `llava*` runs LLaVA-1.5-13B here, and `llava15_*` both sizes
with its authors' prompt; `qwen25_vl`, `qwen3_vl` and `rmr_*` of these are successors of RMR's
Qwen-VL, without published figures; `mmcot_*` are Multimodal-CoT, which learns from ScienceQA;
`smollm2_*` are ours, with a text model that anybody can run, on captions.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

PAPER = "rmr"

DATA, CLIP, LLAVA = "data/scienceqa", "weights/clip", "weights/llava"
OPENSTAX = "data/openstax"
FINETUNED, RETRIEVER = "data/runs/rmr-finetune", "data/runs/rmr-retriever"
MADE_BY = {
    DATA: f"mmqa prepare scienceqa --raw=downloads/scienceqa --out={DATA} (problems.json, "
    "pid_splits.json, captions.json, images/)",
    CLIP: f"mmqa convert --model=clip --source=downloads/ViT-L-14.pt --out={CLIP}",
    OPENSTAX: f"mmqa prepare corpus --raw=downloads/openstax --out={OPENSTAX}",
    LLAVA: f"mmqa convert --model=llava --source=downloads/llava-v1.5-13b --out={LLAVA}",
    FINETUNED: "mmqa train --config=configs/scienceqa/rmr_finetune.py "
    f"--config.data.dir={DATA} --workdir={FINETUNED}",
    RETRIEVER: "mmqa judge and mmqa train with configs/scienceqa/rmr_retriever.py, as it says "
    f"(--workdir={RETRIEVER})",
}
# Multimodal-CoT's checkpoints, of two stages each, and the vectors of all pictures by DETR.
VECTORS = "downloads/vision_features"
_MMCOT = {
    (size, stage): f"weights/mm-cot-{size}-{stage}"
    for size in ("base", "large")
    for stage in ("rationale", "answer")
}
MADE_BY |= {
    _MMCOT["base", stage]: "mmqa convert --model=multimodal_t5 "
    f"--source=downloads/mm-cot/MM-CoT-UnifiedQA-base-{stage.capitalize()} "
    f"--out={_MMCOT['base', stage]}"
    for stage in ("rationale", "answer")
}
MADE_BY |= {  # of which no checkpoint of that version is public
    _MMCOT["large", stage]: f"mmqa train --config=configs/scienceqa/multimodal_cot.py:{stage} "
    f"--config.data.dir={DATA} --config.init=downloads/unifiedqa-t5-large "
    f"--workdir={_MMCOT['large', stage]}"
    for stage in ("rationale", "answer")
}
MADE_BY |= {
    f"{VECTORS}/detr.npy": "the vision features that README.md of amazon-science/mm-cot names",
    f"{VECTORS}/name_map.json": "data/name_map.json of amazon-science/mm-cot",
}
TOLERANCE = 0.02
COLUMNS = ("NAT", "SOC", "LAN", "TXT", "IMG", "NO", "G1-6", "G7-12", "AVG")
_SCORER = "scienceqa/letter_or_wrong"

_rows = config_beside(__file__, "../rows.py")
MADE_BY |= dict(_rows.LLAVA15.values()) | dict(_rows.QWEN_VL.values())
_MODELS = {
    "llava": _rows.language_model(LLAVA, length=4096),
    "qwen_vl": _rows.language_model("qwen-vl", "openai"),
    "internlm": _rows.language_model("internlm-xcomposer2-vl", "openai"),
    "gemini": _rows.language_model("gemini-pro-vision", "openai"),
}
_NAMES = {
    "llava": "LLaVA-1.5",
    "qwen_vl": "Qwen-VL",
    "internlm": "InternLM-XComposer2-VL",
    "gemini": "Gemini",
}
_SMOLLM2 = _rows.language_model("smollm2", length=2048)
_MINILM = _rows.library(text="question_and_choices")
_FINETUNED = _rows.language_model(FINETUNED, length=2048)
_TRAINED = _rows.library(text="question_and_choices", text_model=RETRIEVER)


def _cells(table: str, row: str, values: tuple[float | None, ...]) -> tuple[dict, ...]:
    """Published figures (percent), a cell for each of COLUMNS; None: not in the table."""
    return tuple(
        {
            "table": table,
            "row": row,
            "column": column,
            "published": round(value / 100, 6),
            "tolerance": TOLERANCE,
            "scorer": _SCORER,
            "group": "" if column == "AVG" else column,
        }
        for column, value in zip(COLUMNS, values, strict=True)
        if value is not None
    )


def _library(modality: str) -> dict:
    return _rows.library(text_model=CLIP, image_model=CLIP, modality=modality)


def _paper(model: str, shots: int, cells: tuple[dict, ...], modality: str = "") -> dict:
    return {
        "paper": "rmr",
        "setting": "rmr",
        "parts": {"llm": _MODELS[model], "library": _library(modality)},
        "options": {"shots": shots, "chat": True, "pictures": True, **_rows.RMR},
        "modality": modality,
        "published": cells,
    }


# Model -> figures without and with RMR: table 1 (all questions), table 4 (with a picture: T&I;
# without: T).
_TABLE1 = {
    "llava": (
        (70.12, 76.72, 67.64, 70.48, 71.89, 68.92, 76.06, 61.5, 70.86),
        (78.11, 84.25, 74.73, 79.81, 78.33, 74.36, 82.05, 72.18, 78.52),
    ),
    "qwen_vl": (
        (67.01, 66.37, 59.36, 68.52, 67.03, 57.00, 69.75, 56.16, 64.89),
        (70.07, 86.16, 75.36, 70.77, 76.50, 72.68, 78.67, 67.90, 74.82),
    ),
    "internlm": (
        (88.19, 93.48, 78.64, 88.47, 89.14, 80.77, 88.66, 83.52, 86.82),
        (94.85, 97.19, 82.55, 95.11, 96.03, 85.23, 93.98, 88.86, 92.15),
    ),
    "gemini": (
        (59.68, 74.24, 41.73, 57.72, 64.01, 47.46, 65.20, 45.29, 58.08),
        (91.79, 94.26, 89.64, 91.40, 89.69, 91.01, 92.84, 89.78, 91.75),
    ),
}
_TABLE3 = {  # Gemini by the number of triplets; 0 and 3 are those of table 1
    1: (88.41, 89.43, 84.82, 87.34, 84.53, 87.11, 89.72, 84.05, 87.69),
    2: (87.79, 91.00, 84.55, 86.75, 84.93, 86.90, 88.88, 85.37, 87.62),
    4: (88.54, 92.80, 84.27, 88.03, 86.37, 86.41, 89.76, 85.76, 88.33),
    5: (87.83, 89.09, 84.45, 86.46, 83.59, 86.69, 89.24, 83.59, 87.22),
}
_TABLE4 = {
    ("llava", "image"): (
        (69.56, 74.74, 86.36, 69.69, 71.89, None, 78.03, 56.97, 71.89),
        (75.19, 82.33, 95.45, 75.58, 78.33, None, 82.58, 68.03, 78.33),
    ),
    ("llava", "text"): (
        (70.76, 88.80, 66.86, 71.74, None, 68.92, 73.90, 64.37, 69.92),
        (81.50, 96.00, 73.86, 86.57, None, 74.36, 81.47, 74.81, 78.69),
    ),
    ("qwen_vl", "image"): (
        (67.25, 66.10, 77.27, 65.23, 67.03, None, 73.06, 52.38, 67.03),
        (70.31, 85.47, 90.91, 68.50, 76.50, None, 82.44, 62.07, 76.50),
    ),
    ("qwen_vl", "text"): (
        (66.73, 68.00, 58.62, 73.76, None, 57.00, 66.10, 58.56, 62.95),
        (69.80, 90.40, 74.72, 74.40, None, 72.68, 74.52, 71.58, 73.29),
    ),
    ("internlm", "image"): (
        (85.77, 93.98, 97.73, 86.32, 89.14, None, 90.83, 85.03, 89.14),
        (95.29, 97.25, 95.45, 95.31, 96.03, None, 96.78, 94.22, 96.03),
    ),
    ("internlm", "text"): (
        (90.99, 90.40, 77.84, 91.89, None, 80.77, 86.25, 82.56, 84.71),
        (94.34, 96.80, 82.01, 94.8, None, 85.23, 90.89, 85.47, 88.62),
    ),
    ("gemini", "image"): (
        (55.75, 76.83, 68.18, 54.89, 64.01, None, 69.91, 49.66, 64.01),
        (86.85, 93.72, 97.73, 87.03, 89.69, None, 91.18, 86.05, 89.69),
    ),
    ("gemini", "text"): (
        (64.24, 58.40, 40.62, 62.23, None, 47.46, 60.00, 42.52, 52.70),
        (97.51, 97.60, 89.30, 98.35, None, 91.01, 94.67, 92.14, 93.62),
    ),
}
_SHORT = {"image": "T&I", "text": "T"}


def _of_all(model: str, shots: int, values: tuple[float | None, ...]) -> tuple[dict, ...]:
    """The figures of a row over all questions, as tables 1, 4 and (Gemini) 3 print them."""
    name = _NAMES[model]
    cells = _cells("1", f"{name}{'+RMR' if shots else ''}", values)
    cells += _cells("4", f"{name}-All{' w/ RMR' if shots else ''}", values)
    if model == "gemini":
        cells += _cells("3", f"Gemini {f'w/ R = {shots}' if shots else 'w/o retrieval'}", values)
    return cells


def _paper_rows() -> dict[str, dict]:
    rows = {}
    for model, figures in _TABLE1.items():
        for name, shots, values in (("", 0, figures[0]), ("_rmr", 3, figures[1])):
            rows[f"{model}{name}"] = _paper(model, shots, _of_all(model, shots, values))
    for shots, values in _TABLE3.items():
        cells = _cells("3", f"Gemini w/ R = {shots}", values)
        rows[f"gemini_rmr_k{shots}"] = _paper("gemini", shots, cells)
    for (model, modality), figures in _TABLE4.items():
        for name, shots, values in (("", 0, figures[0]), ("_rmr", 3, figures[1])):
            row = f"{_NAMES[model]}-{_SHORT[modality]}{' w/ RMR' if shots else ''}"
            cells = _cells("4", row, values)
            rows[f"{model}{name}_{modality}"] = _paper(model, shots, cells, modality)
    return rows


def _mmcot(size: str, values: tuple[float, ...]) -> dict:
    """Multimodal-CoT; RMR's table 1 has none of it, since it learns from ScienceQA."""
    pictures = {"vectors": f"{VECTORS}/detr.npy", "names": f"{VECTORS}/name_map.json"}
    cells = _cells("main results", f"Multimodal-CoT {size.capitalize()}", values)
    return {
        "paper": "mmcot",
        "system": "mmcot",
        "setting": "mmcot",
        "parts": {
            stage: {"model": _MMCOT[size, folder], **pictures}
            for stage, folder in (("rationale_model", "rationale"), ("answer_model", "answer"))
        },
        "options": {"decoding": "forced"},  # as the commands of these figures
        "published": tuple({**cell, "scorer": "scienceqa/recorded_choice"} for cell in cells),
    }


def _written(row: dict) -> dict:
    """A row of Multimodal-CoT whose texts are generated: ours, no published figure is of it."""
    return {**row, "options": {"decoding": "written"}, "published": ()}


def _successor(model: str, shots: int) -> dict:
    """RMR as in table 1, with a model that came after the paper."""
    row = _ours("rmr", _rows.qwen_vl(model), _library(""), shots=shots)
    row["options"] |= {"chat": True, "pictures": True, **_rows.RMR}
    return row


def _ours(
    setting: str = "rmr_choice", llm: dict = _SMOLLM2, library: dict = _MINILM, **options
) -> dict:
    return {
        "paper": "rmr",
        "setting": setting,
        "parts": {"llm": llm, "library": library},
        "options": options,
    }


def _reasoned(rationale: str) -> dict:
    """One triplet with its rationale between question and answer."""
    shown = {"shots": 1, "template": "rmr.text_rationale", "rationale": rationale}
    return _ours(**shown, calibrated=True) | {"questions": 500}


def _knowing(shots: int, **knowledge) -> dict:
    """With the best paragraph of OpenStax's textbooks in the context."""
    row = _ours(shots=shots, calibrated=True)
    found = _rows.knowledge(data=OPENSTAX, modality="text", **knowledge)
    row["parts"] = {**row["parts"], "knowledge": found}
    return row


# The paper's first version (February 2023), table of main results.
_MMCOT_ROWS = {
    "mmcot_base": _mmcot("base", (87.52, 77.17, 85.82, 87.88, 82.90, 86.83, 84.65, 85.37, 84.91)),
    "mmcot_large": _mmcot("large", (95.91, 82.00, 90.82, 95.26, 88.80, 92.89, 92.44, 90.31, 91.68)),
}
# Row -> setting of papers/rmr.py, llava.py or mmcot.py, parts, options, published figures.
ROWS = {
    **_paper_rows(),
    **{
        name: _rows.llava15(
            name, [("SQA-IMG", "IMG", value)], _SCORER, template="llava.scienceqa", read="choice"
        )
        for name, value in (("llava15_7b", 66.8), ("llava15_13b", 71.6))
    },
    **{name: _successor(name, 0) for name in _rows.QWEN_VL},
    **{f"rmr_{name}": _successor(name, 3) for name in _rows.QWEN_VL},
    **_MMCOT_ROWS,
    **{f"{name}_written": _written(row) for name, row in _MMCOT_ROWS.items()},
    **{f"smollm2_k{k}": _ours(shots=k, calibrated=True) for k in range(6)},
    "smollm2_k3_uncalibrated": _ours(shots=3),
    "smollm2_k3_letter": _ours(shots=3, template="rmr.answer", options="letter"),
    "smollm2_k3_random": _ours(shots=3, similarity="random", calibrated=True),
    **{f"smollm2_k1_{name}": _reasoned(name) for name in ("solution", "lecture_solution")},
    "smollm2_k0_openstax": _knowing(0),
    "smollm2_k0_openstax_random": _knowing(0, retriever="random"),
    "smollm2_k1_openstax": _knowing(1),
    **{
        f"smollm2_finetuned_k{k}": _ours(llm=_FINETUNED, shots=k, calibrated=True)
        for k in (0, 1, 3)
    },
    "smollm2_trained_retriever_k3": _ours(library=_TRAINED, shots=3, calibrated=True),
    "smollm2_k3_rationale": _ours("rmr", shots=3, max_new_tokens=128) | {"questions": 500},
}
MISSING: dict[str, tuple[dict, ...]] = {}
CITED = {
    name: _cells("1", name, values)
    for name, values in {
        "Random Choice": (40.28, 46.13, 29.25, 47.75, 40.08, 33.66, 39.35, 40.67, 39.83),
        "Human": (90.23, 84.97, 87.48, 89.60, 87.50, 88.10, 91.59, 82.42, 88.40),
        "MCAN": (56.08, 46.23, 58.09, 59.43, 51.17, 55.40, 51.65, 59.72, 54.54),
        "Top-Down": (59.50, 54.33, 61.82, 62.90, 54.88, 59.79, 57.27, 62.16, 59.02),
        "BAN": (60.88, 46.57, 66.64, 62.61, 52.60, 65.51, 56.83, 63.94, 59.37),
        "DFAF": (64.03, 48.82, 63.55, 65.88, 54.49, 64.11, 57.12, 67.17, 60.72),
        "ViLT": (60.48, 63.89, 60.27, 63.20, 61.38, 57.00, 60.72, 61.90, 61.14),
        "Patch-TRM": (65.19, 46.79, 65.55, 66.96, 55.28, 64.95, 58.04, 67.50, 61.42),
        "VisualBERT": (59.33, 69.18, 61.18, 62.71, 62.17, 58.54, 62.96, 59.92, 61.87),
        "UnifiedQA-Base": (68.16, 69.18, 74.91, 63.78, 61.38, 77.84, 72.98, 65.00, 70.12),
        "UnifiedQA-Base w/ CoT": (71.00, 76.04, 78.91, 66.42, 66.53, 81.81, 77.06, 68.82, 74.11),
        "GPT-3.5": (74.64, 69.74, 76.00, 74.44, 67.28, 77.42, 76.80, 68.89, 73.97),
        "GPT-3.5 w/ CoT": (75.44, 70.87, 78.09, 74.68, 67.43, 79.93, 78.23, 69.68, 75.17),
        "ChatGPT w/ CoT": (78.82, 70.98, 83.18, 77.37, 67.92, 86.13, 80.72, 74.03, 78.31),
        "GPT-4 w/ CoT": (85.48, 72.44, 90.27, 82.65, 71.49, 92.89, 86.66, 79.04, 83.99),
        "Chameleon + ChatGPT": (81.62, 70.64, 84.00, 79.77, 70.80, 86.62, 81.86, 76.53, 79.93),
        "Chameleon + GPT-4": (89.83, 74.13, 89.82, 88.27, 77.64, 92.13, 88.03, 83.72, 86.54),
    }.items()
}
MODES = tuple(ROWS)


def get_config(mode: str = "smollm2_k3") -> ConfigDict:
    """`mode`: a row, of MODES."""
    return _rows.make_row(
        mode,
        ROWS[mode],
        system="rmr",
        dataset="scienceqa",
        data=DATA,
        split="test",
        made_by=MADE_BY,
    )
