"""The rows on OK-VQA: PICa's table, and the same systems with a small model that anybody can run.

`pica_*` are the paper's, for a server with the completion model that the user names; `smollm2_*`
are ours. The library of examples and the questions are the two halves of one split in our rows,
because captions of the train pictures are not at hand; the paper's take the train split.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

PAPER = "pica"

DATA = "data/okvqa"
MADE_BY = {DATA: f"mmqa prepare okvqa --raw=downloads/okvqa --out={DATA}"}
CLIP = "weights/clip"
MADE_BY[CLIP] = f"mmqa convert --model=clip --source=downloads/ViT-B-16.pt --out={CLIP}"
TOLERANCE = 0.02

_rows = config_beside(__file__, "../rows.py")
_SMOLLM2 = _rows.language_model("smollm2")
_DAVINCI = _rows.language_model("davinci-002", "openai")
_HALVES = _rows.library(split="test", folds=2)
_CLIP = _rows.library(text_model=CLIP, image_model=CLIP)


def _published(row: str, value: float) -> tuple[dict, ...]:
    return (
        {
            "table": "2",
            "row": row,
            "column": "accuracy",
            "published": round(value / 100, 4),
            "tolerance": TOLERANCE,
            "scorer": "vqa_accuracy/official",
            "group": "",
        },
    )


def _paper(row: str, value: float, **options) -> dict:
    return {
        "paper": "pica",
        "setting": "pica",
        "parts": {"llm": _DAVINCI, "library": _CLIP},
        "options": {"shots": 16, **options},
        "published": _published(row, value),
    }


def _ours(**options) -> dict:
    return {
        "paper": "pica",
        "setting": "pica",
        "parts": {"llm": _SMOLLM2, "library": _HALVES},
        "options": {"shots": 8, "similarity": "question", "max_new_tokens": 8, **options},
        "questions": 1000,
    }


def _baseline(setting: str, **options) -> dict:
    return {
        "paper": "pica",
        "setting": setting,
        "parts": {"library": _HALVES},
        "options": {"similarity": "question", **options},
        "questions": 1000,
    }


# Row -> setting of systems/pica.py, parts, options, published figures (PICa, table 2).
ROWS = {
    "pica_base": _paper("PICa-Base (C)", 42.0, similarity="random"),
    "pica_base_tags": _paper("PICa-Base (C+T)", 43.3, similarity="random", tags=True),
    "pica_full": _paper("PICa-Full (C)", 46.9, ensemble=5),
    "pica_full_tags": _paper("PICa-Full (C+T)", 48.0, ensemble=5, tags=True),
    "smollm2_zero_shot": _ours(shots=0),
    "smollm2_random": _ours(similarity="random"),
    "smollm2_similar": _ours(),
    "smollm2_similar_tags": _ours(tags=True),
    "smollm2_ensemble": _ours(ensemble=5),
    "copy_nearest": _baseline("copy_nearest"),
    "vote_of_nearest": _baseline("vote_of_nearest", shots=16),
}
MISSING: dict[str, tuple[dict, ...]] = {}
CITED: dict[str, tuple[dict, ...]] = {}
MODES = tuple(ROWS)


def get_config(mode: str = "smollm2_similar") -> ConfigDict:
    """`mode`: a row, of MODES."""
    return _rows.make_row(
        mode,
        ROWS[mode],
        system="pica",
        dataset="okvqa",
        data=DATA,
        split="test",
        made_by=MADE_BY,
    )
