"""The rows on MathVista's testmini split: models alone, as controls.

They ask by the authors' prompts (papers/mathvista.py). `gpt4` is the authors' text-only GPT-4,
whose answers and scores are in their repository. Rows `*_rules` extract by rules alone, the others
ask the model itself for what the rules do not find; `gpt4_extracts` asks GPT-4 for that of a
finished run.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

PAPER = "mathvista"

DATA, FINISHED = "data/mathvista", "runs/tables/mathvista/qwen3_vl_rules"
MADE_BY = {
    DATA: f"mmqa prepare mathvista --raw=downloads/mathvista --out={DATA}",
    FINISHED: f"mmqa run --config=configs/mathvista/tables.py:qwen3_vl_rules --workdir={FINISHED}",
}

_rows = config_beside(__file__, "../rows.py")
MADE_BY |= dict(_rows.LLAVA15.values()) | dict(_rows.QWEN_VL.values())
_GPT4 = _rows.language_model("gpt-4-0613", "openai")
_LLAVA = _rows.language_model(_rows.LLAVA15["llava15_13b"][0], length=4096)
# results/gpt4/scores_gpt4.json of the authors' repository.
_CELLS = tuple(
    {
        "table": "results/gpt4",
        "row": "GPT-4, zero shots",
        "column": column,
        "published": round(value / 100, 4),
        "tolerance": 0.02,
        "scorer": "mathvista/official",
        "group": group,
    }
    for column, group, value in (
        ("ALL", "", 26.1),
        ("FQA", "task: figure question answering", 22.30),
        ("GPS", "task: geometry problem solving", 37.02),
        ("MWP", "task: math word problem", 6.99),
        ("TQA", "task: textbook question answering", 39.24),
        ("VQA", "task: visual question answering", 27.37),
    )
)


def _row(llm: dict, extract: str = "llm", *, picture: bool = True, **more: object) -> dict:
    options = {"extract": extract, "picture": picture}
    return {"setting": "mathvista", "parts": {"llm": llm}, "options": options, **more}


ROWS = {
    "gpt4": _row(_GPT4, picture=False, published=_CELLS),
    "llava15_13b": _row(_LLAVA),
    **{name: _row(_rows.qwen_vl(name)) for name in _rows.QWEN_VL},
    **{f"{name}_rules": _row(_rows.qwen_vl(name), "rules") for name in _rows.QWEN_VL},
    **{f"{name}_test": _row(_rows.qwen_vl(name), split="test") for name in _rows.QWEN_VL},
    "gpt4_extracts": {
        "setting": "extracted",
        "parts": {"llm": _GPT4, "finished": {"run": FINISHED}},
    },
    # From the words of the question alone.
    "smollm2": _row(_rows.language_model("smollm2", length=2048), "rules", picture=False),
}
MISSING: dict[str, tuple[dict, ...]] = {}
CITED: dict[str, tuple[dict, ...]] = {}
MODES = tuple(ROWS)


def get_config(mode: str = "qwen3_vl") -> ConfigDict:
    """`mode`: a row, of MODES."""
    return _rows.make_row(
        mode,
        ROWS[mode],
        system="mathvista",
        dataset="mathvista",
        data=DATA,
        split="val",
        made_by=MADE_BY,
    )
