"""The rows on FactualVQA: a model alone, asked for a short answer, without any search.

They ask as RMR's rows without triplets do (papers/rmr.py, `rmr_direct`).
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

PAPER = "fvqa"

_rows = config_beside(__file__, "../rows.py")
ROWS = _rows.alone()
MISSING: dict[str, tuple[dict, ...]] = {}
CITED: dict[str, tuple[dict, ...]] = {}
MODES = tuple(ROWS)


def get_config(mode: str = "qwen3_vl") -> ConfigDict:
    """`mode`: a row, of MODES."""
    return _rows.make_alone(mode, PAPER, "downloads/FVQA")
