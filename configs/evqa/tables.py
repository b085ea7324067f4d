"""The rows on Encyclopedic-VQA: a model alone, and EchoSight.

EchoSight's are asked of the first picture of single-hop questions, as by its authors.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

PAPER = "evqa"

DATA = "data/evqa"
WIKI = "data/evqa_wiki"
MADE_BY = {DATA: f"mmqa prepare evqa --raw=downloads/evqa --out={DATA}"}

_rows = config_beside(__file__, "../rows.py")
_echosight = config_beside(__file__, "../echosight.py")
MADE_BY |= {
    **dict(_rows.QWEN_VL.values()),
    **_echosight.made_by(WIKI, "downloads/encyclopedic_kb_wiki"),
}

ROWS = {**_rows.alone(), **_echosight.rows(WIKI, where={"hops": 1, "picture": 0})}
MISSING: dict[str, tuple[dict, ...]] = {}
CITED: dict[str, tuple[dict, ...]] = _echosight.cited(
    "E-VQA", 41.8, "evqa/bem", {1: 36.5, 20: 48.8}
)
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
