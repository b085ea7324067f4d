"""The rows on MMMU's validation split: vision-language models alone, as controls.

They ask by the benchmark's own prompts (papers/mmmu.py). The authors' repository holds the answers
of LLaVA-1.5-13B to all 900 questions; its figure is that of their script on these answers, which
were sampled (temperature 1, 5 beams) where the row here is greedy. Rows `*_test` write the
leaderboard's file, since answers of test are hidden.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

PAPER = "mmmu"

DATA = "data/mmmu"
MADE_BY = {DATA: f"mmqa prepare mmmu --raw=downloads/mmmu --out={DATA}"}

_rows = config_beside(__file__, "../rows.py")
MADE_BY |= dict(_rows.LLAVA15.values()) | dict(_rows.QWEN_VL.values())
# Columns of the official table -> figures of its script on the authors' answers of LLaVA-1.5-13B.
_LLAVA_13B = {
    "Overall": 0.367,
    "Overall-Art and Design": 0.525,
    "Overall-Business": 0.227,
    "Overall-Science": 0.293,
    "Overall-Health and Medicine": 0.387,
    "Overall-Humanities and Social Science": 0.55,
    "Overall-Tech and Engineering": 0.31,
}
_CELLS = tuple(
    {
        "table": "mmmu/example_outputs",
        "row": "LLaVA-1.5 13B",
        "column": column,
        "published": value,
        "tolerance": 0.03,
        "scorer": "mmmu/official",
        "group": "" if column == "Overall" else column,
    }
    for column, value in _LLAVA_13B.items()
)


def _row(llm: dict, pictures: str, split: str = "val", published: tuple[dict, ...] = ()) -> dict:
    return {
        "setting": "mmmu",
        "parts": {"llm": llm},
        "options": {"pictures": pictures},
        "split": split,
        "published": published,
    }


def _llava(name: str) -> dict:
    return _rows.language_model(_rows.LLAVA15[name][0], length=4096)


ROWS = {
    "llava15_7b": _row(_llava("llava15_7b"), "first"),
    "llava15_13b": _row(_llava("llava15_13b"), "first", published=_CELLS),
    **{name: _row(_rows.qwen_vl(name), "placed") for name in _rows.QWEN_VL},
    **{f"{name}_test": _row(_rows.qwen_vl(name), "placed", "test") for name in _rows.QWEN_VL},
    # From the words of the question alone.
    "smollm2": _row(_rows.language_model("smollm2", length=2048), "none"),
}
MISSING: dict[str, tuple[dict, ...]] = {}
CITED: dict[str, tuple[dict, ...]] = {}
MODES = tuple(ROWS)


def get_config(mode: str = "qwen3_vl") -> ConfigDict:
    """`mode`: a row, of MODES."""
    return _rows.make_row(
        mode,
        ROWS[mode],
        system="mmmu",
        dataset="mmmu",
        data=DATA,
        split="val",
        made_by=MADE_BY,
    )
