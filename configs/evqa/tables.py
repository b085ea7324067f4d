"""The rows on Encyclopedic-VQA: a model alone, asked for a short answer."""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

PAPER = "evqa"

DATA = "data/evqa"
MADE_BY = {DATA: f"mmqa prepare evqa --raw=downloads/evqa --out={DATA}"}

_rows = config_beside(__file__, "../rows.py")
MADE_BY |= dict(_rows.QWEN_VL.values())

ROWS = _rows.alone()
MISSING: dict[str, tuple[dict, ...]] = {}
CITED: dict[str, tuple[dict, ...]] = {}
MODES = tuple(ROWS)


def get_config(mode: str = "qwen3_vl") -> ConfigDict:
    """`mode`: a row, of MODES."""
    return _rows.make_row(
        mode,
        ROWS[mode],
        system="rmr",
        dataset="evqa",
        data=DATA,
        split="test",
        made_by=MADE_BY,
    )
