"""The rows on InfoSeek: a vision-language model alone, asked for a short answer.

They ask as RMR's rows without triplets do (papers/rmr.py, `rmr_direct`). No published system is
among them. What retrieves from Wikipedia with its pictures is not here yet.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

PAPER = "infoseek"

DATA = "data/infoseek"
MADE_BY = {DATA: f"mmqa prepare infoseek --raw=downloads/infoseek --out={DATA}"}

_rows = config_beside(__file__, "../rows.py")
MADE_BY |= dict(_rows.QWEN_VL.values())

ROWS = {
    **_rows.alone(),
}
MISSING: dict[str, tuple[dict, ...]] = {}
CITED: dict[str, tuple[dict, ...]] = {}
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
