"""The rows on InfoSeek: a model alone, asked for a short answer, and EchoSight.

They ask as RMR's rows without triplets do (papers/rmr.py, `rmr_direct`). EchoSight's retrieve from
articles of Wikipedia with their pictures.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

PAPER = "infoseek"

DATA = "data/infoseek"
WIKI = "data/infoseek_wiki"
MADE_BY = {DATA: f"mmqa prepare infoseek --raw=downloads/infoseek --out={DATA}"}

_rows = config_beside(__file__, "../rows.py")
_echosight = config_beside(__file__, "../echosight.py")
MADE_BY |= {**dict(_rows.QWEN_VL.values()), **_echosight.made_by(WIKI, "downloads/wiki6m")}

ROWS = {**_rows.alone(), **_echosight.rows(WIKI)}
MISSING: dict[str, tuple[dict, ...]] = {}
CITED: dict[str, tuple[dict, ...]] = _echosight.cited(
    "InfoSeek", 31.3, "infoseek/official", {1: 53.2, 20: 77.9}
)
MODES = tuple(ROWS)


def get_config(mode: str = "qwen3_vl") -> ConfigDict:
    """`mode`: a row, of MODES."""
    return _rows.make_row(
        mode,
        ROWS[mode],
        system="rmr",
        dataset="infoseek",
        data=DATA,
        split="val",
        made_by=MADE_BY,
    )
