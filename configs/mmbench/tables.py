"""The rows on MMBench: RMR's figure 4, and the same system with models that run here.

The library is ScienceQA's train split. A row asks every circular pass of a question. `gemini*` need
a server with OpenAI's API; `llava*` run LLaVA-1.5-13B here; `smollm2_*` choose by likelihood from
the text alone, which shows how far MMBench goes without its pictures. Rows `*_test` write letters
for the leaderboard (`mmqa evaluate mmbench --submission`), since the answers of test are hidden.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

PAPER = "rmr"

DATA, SCIENCEQA, CLIP, LLAVA = "data/mmbench", "data/scienceqa", "weights/clip", "weights/llava"
MADE_BY = {
    DATA: f"mmqa prepare mmbench --raw=downloads/mmbench --out={DATA} (MMBench_DEV_EN.tsv, "
    "MMBench_TEST_EN.tsv)",
    SCIENCEQA: f"mmqa prepare scienceqa --raw=downloads/scienceqa --out={SCIENCEQA}",
    CLIP: f"mmqa convert --model=clip --source=downloads/ViT-L-14.pt --out={CLIP}",
    LLAVA: f"mmqa convert --model=llava --source=downloads/llava-v1.5-13b --out={LLAVA}",
}
TOLERANCE = 0.02
# Columns of figure 4 -> MMBench's l2-category (abbreviated as by VLMEvalKit).
COLUMNS = {
    "overall": "",
    "CP": "coarse_perception",
    "FP-S": "finegrained_perception (instance-level)",
    "FP-C": "finegrained_perception (cross-instance)",
    "AR": "attribute_reasoning",
    "LR": "logic_reasoning",
    "RR": "relation_reasoning",
}

_rows = config_beside(__file__, "../rows.py")
MADE_BY |= dict(_rows.LLAVA15.values()) | dict(_rows.QWEN_VL.values())
_GEMINI = _rows.language_model("gemini-pro-vision", "openai")
_LLAVA = _rows.language_model(LLAVA, length=4096)
_SMOLLM2 = _rows.language_model("smollm2", length=2048)
_LIBRARY = _rows.library(data=SCIENCEQA, text_model=CLIP, image_model=CLIP)
_MINILM = _rows.library(data=SCIENCEQA, text="question_and_choices")


def _cells(split: str, row: str, *values: float) -> tuple[dict, ...]:
    """Published figures (percent) in the order of COLUMNS; of Gemini the overall one alone."""
    return tuple(
        {
            "table": f"figure 4, {split}",
            "row": row,
            "column": column,
            "published": round(value / 100, 6),
            "tolerance": TOLERANCE,
            "scorer": "mmbench/circular",
            "group": group and f"l2-category: {group}",
        }
        for (column, group), value in zip(COLUMNS.items(), values, strict=False)
    )


def _letter(model: dict, shots: int, published: tuple[dict, ...] = (), split: str = "val") -> dict:
    return {
        "paper": "rmr",
        "setting": "rmr_letter",
        "parts": {"llm": model, "library": _LIBRARY},
        "options": {"shots": shots, "chat": True, "pictures": True, **_rows.RMR},
        "published": published,
        "split": split,
    }


def _ours(**options) -> dict:
    return {
        "paper": "rmr",
        "setting": "rmr_choice",
        "parts": {"llm": _SMOLLM2, "library": _MINILM},
        "options": {"calibrated": True, **options},
    }


_DEV = (70.96, 76.01, 72.70, 65.03, 75.38, 55.93, 68.70)
_TEST = (67.26, 69.16, 69.10, 61.54, 77.43, 53.18, 63.98)

# Row -> setting of papers/rmr.py or llava.py, parts, options, published figures.
ROWS = {
    "gemini": _letter(_GEMINI, 0, _cells("dev", "Gemini", 57.9)),
    "gemini_rmr": _letter(_GEMINI, 3, _cells("dev", "Gemini+RMR", *_DEV)),
    "gemini_test": _letter(_GEMINI, 0, _cells("test", "Gemini", 57.23), "test"),
    "gemini_rmr_test": _letter(_GEMINI, 3, _cells("test", "Gemini+RMR", *_TEST), "test"),
    "llava": _letter(_LLAVA, 0),
    "llava_rmr": _letter(_LLAVA, 3),
    **{
        name: _rows.llava15(name, [("MM-Bench", "", value)], "mmbench/circular")
        for name, value in (("llava15_7b", 64.3), ("llava15_13b", 67.7))
    },
    **{name: _letter(_rows.qwen_vl(name), 0) for name in _rows.QWEN_VL},
    **{f"rmr_{name}": _letter(_rows.qwen_vl(name), 3) for name in _rows.QWEN_VL},
    "smollm2_k0": _ours(shots=0),
    "smollm2_k3": _ours(shots=3),
}
MISSING: dict[str, tuple[dict, ...]] = {}
CITED: dict[str, tuple[dict, ...]] = {}
MODES = tuple(ROWS)


def get_config(mode: str = "smollm2_k3") -> ConfigDict:
    """`mode`: a row, of MODES."""
    return _rows.make_row(
        mode,
        ROWS[mode],
        system="rmr",
        dataset="mmbench",
        data=DATA,
        split="val",
        made_by=MADE_BY,
    )
