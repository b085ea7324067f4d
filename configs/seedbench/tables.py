"""The rows on SEED-Bench: RMR's figure 5, and the same system with models that run here.

The library is ScienceQA's train split. RMR reports the nine dimensions on pictures, so that the
rows leave videos out. `*_letter` rows write a letter; the others choose by the likelihood of the
option's text, SEED-Bench's own rule. The paper's figures per dimension are a picture without
numbers.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

PAPER = "rmr"

DATA, SCIENCEQA, CLIP, LLAVA = "data/seedbench", "data/scienceqa", "weights/clip", "weights/llava"
MADE_BY = {
    DATA: f"mmqa prepare seedbench --raw=downloads/seedbench --out={DATA} (SEED-Bench.json, "
    "SEED-Bench-image/)",
    SCIENCEQA: f"mmqa prepare scienceqa --raw=downloads/scienceqa --out={SCIENCEQA}",
    CLIP: f"mmqa convert --model=clip --source=downloads/ViT-L-14.pt --out={CLIP}",
    LLAVA: f"mmqa convert --model=llava --source=downloads/llava-v1.5-13b --out={LLAVA}",
}
TOLERANCE = 0.02

_rows = config_beside(__file__, "../rows.py")
MADE_BY |= dict(_rows.LLAVA15.values()) | dict(_rows.QWEN_VL.values())
_GEMINI = _rows.language_model("gemini-pro-vision", "openai")
_LLAVA = _rows.language_model(LLAVA, length=4096)
_SMOLLM2 = _rows.language_model("smollm2", length=2048)
_LIBRARY = _rows.library(data=SCIENCEQA, text_model=CLIP, image_model=CLIP)
_MINILM = _rows.library(data=SCIENCEQA, text="question_and_choices")
_PICTURES = {"data_type": "image"}  # dimensions 1 to 9


def _cell(row: str, value: float) -> tuple[dict, ...]:
    return (
        {
            "table": "figure 5",
            "row": row,
            "column": "overall",
            "published": round(value / 100, 6),
            "tolerance": TOLERANCE,
            "scorer": "seed_bench/letter",
            "group": "pictures, 1-9",
        },
    )


def _letter(model: dict, shots: int, published: tuple[dict, ...] = ()) -> dict:
    return {
        "paper": "rmr",
        "setting": "rmr_letter",
        "parts": {"llm": model, "library": _LIBRARY},
        "options": {"shots": shots, "chat": True, "pictures": True, **_rows.RMR},
        "published": published,
        "where": _PICTURES,
    }


def _likelihood(model: dict, library: dict, **options) -> dict:
    return {
        "paper": "rmr",
        "setting": "rmr_choice",
        "parts": {"llm": model, "library": library},
        "options": options,
        "where": _PICTURES,
    }


# Row -> setting of papers/rmr.py or llava.py, parts, options, published figures.
ROWS = {
    "gemini_letter": _letter(_GEMINI, 0, _cell("Gemini", 56.53)),
    "gemini_rmr_letter": _letter(_GEMINI, 3, _cell("Gemini+RMR", 64.72)),
    "llava_letter": _letter(_LLAVA, 0),
    "llava_rmr_letter": _letter(_LLAVA, 3),
    **{
        name: _rows.llava15(name, [("SEED", "", value)], "seed_bench/letter", max_new_tokens=128)
        for name, value in (("llava15_7b", 58.6), ("llava15_13b", 61.6))
    },
    **{name: _letter(_rows.qwen_vl(name), 0) for name in _rows.QWEN_VL},
    **{f"rmr_{name}": _letter(_rows.qwen_vl(name), 3) for name in _rows.QWEN_VL},
    "smollm2_k0": _likelihood(_SMOLLM2, _MINILM, shots=0),
    "smollm2_k3": _likelihood(_SMOLLM2, _MINILM, shots=3),
    "smollm2_k3_calibrated": _likelihood(_SMOLLM2, _MINILM, shots=3, calibrated=True),
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
        dataset="seedbench",
        data=DATA,
        split="test",
        made_by=MADE_BY,
    )
