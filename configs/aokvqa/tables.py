"""The rows on A-OKVQA: RMR's table 2, and PICa and RMR with a small model that anybody can run.

RMR's library is ScienceQA's train split. Our PICa rows take one half of val as the library of the
other, because captions of the train pictures are not at hand.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

PAPER = "rmr"

DATA, SCIENCEQA, CLIP = "data/aokvqa", "data/scienceqa", "weights/clip"
MADE_BY = {
    DATA: f"mmqa prepare aokvqa --raw=downloads/aokvqa --out={DATA}",
    SCIENCEQA: f"mmqa prepare scienceqa --raw=downloads/scienceqa --out={SCIENCEQA}",
    CLIP: f"mmqa convert --model=clip --source=downloads/ViT-L-14.pt --out={CLIP}",
}
TOLERANCE = 0.02

_rows = config_beside(__file__, "../rows.py")
_SMOLLM2 = _rows.language_model("smollm2")
_GEMINI = _rows.language_model("gemini-pro-vision", "openai")
_HALVES = _rows.library(split="val", folds=2)
_LIBRARY = _rows.library(data=SCIENCEQA, text_model=CLIP, image_model=CLIP)


def _published(row: str, value: float) -> tuple[dict, ...]:
    return (
        {
            "table": "2",
            "row": row,
            "column": "direct answer",
            "published": round(value / 100, 4),
            "tolerance": TOLERANCE,
            "scorer": "a_okvqa_da/official",
            "group": "",
        },
    )


def _gemini(row: str, value: float, shots: int) -> dict:
    return {
        "paper": "rmr",
        "system": "rmr",
        "setting": "rmr_direct",
        "parts": {"llm": _GEMINI, "library": _LIBRARY},
        "options": {"shots": shots, "chat": True, "pictures": True},
        "published": _published(row, value),
    }


def _direct(**options) -> dict:
    return {
        "paper": "pica",
        "setting": "pica",
        "parts": {"llm": _SMOLLM2, "library": _HALVES},
        "options": {
            "shots": 8,
            "similarity": "question",
            "shot_answer": "majority",
            "max_new_tokens": 8,
            **options,
        },
    }


def _choice(**options) -> dict:
    return {
        "paper": "pica",
        "setting": "pica_choice",
        "parts": {"llm": _SMOLLM2, "library": _HALVES},
        "options": {"shots": 8, "similarity": "question", "shot_answer": "majority", **options},
    }


# Row -> setting of systems/pica.py or rmr.py, parts, options, published figures (RMR, table 2).
ROWS = {
    "gemini": _gemini("Gemini", 44.2, 0),
    "gemini_rmr": _gemini("Gemini+RMR", 63.1, 3),
    "smollm2_zero_shot": _direct(shots=0),
    "smollm2_random": _direct(similarity="random"),
    "smollm2_similar": _direct(),
    "smollm2_choice": _choice(),
    "smollm2_choice_mean": _choice(score="mean"),
    "smollm2_choice_calibrated": _choice(calibrated=True),
    "smollm2_choice_zero_shot": _choice(shots=0, calibrated=True),
}
MISSING: dict[str, tuple[dict, ...]] = {}
CITED = {
    name: _published(name, value)
    for name, value in {
        "Pythia": 25.2,
        "ViLBERT": 30.6,
        "LXMERT": 30.7,
        "KRISP": 33.7,
        "GPV-2": 48.6,
        "BLIP-2": 53.2,
        "PaLM-CoT": 41.5,
        "PICa": 42.4,
        "IPVR": 46.4,
        "PromptCap": 56.3,
        "Prophet": 58.2,
        "PaLI-3-VPD generalist": 56.5,
        "PaLI-X-VPD generalist": 62.7,
    }.items()
}
MODES = tuple(ROWS)


def get_config(mode: str = "smollm2_similar") -> ConfigDict:
    """`mode`: a row, of MODES."""
    return _rows.make_row(
        mode,
        ROWS[mode],
        system="pica",
        dataset="aokvqa",
        data=DATA,
        split="val",
        made_by=MADE_BY,
    )
