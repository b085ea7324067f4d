"""The rows on BRIGHT: BM25 and Qwen3-Embedding over the documents of each task.

A row is RETRIEVER_TASK. No published system is among them.
"""

from ml_collections import ConfigDict

from mmqa_jax.benchmarks.bright import TASKS
from mmqa_jax.core.config import config_beside

PAPER = "bright"
DEPTH = 100

_rows = config_beside(__file__, "../rows.py")
_DENSE, MADE_BY = _rows.encoder_inputs(
    "bright",
    {task: f"downloads/BRIGHT/documents/{task}-00000-of-00001.parquet" for task in TASKS},
    "Qwen/Qwen3-Embedding-0.6B",
    "qwen3_embedding",
)

ROWS = {
    f"{name}_{task}": _rows.ranking_row(retriever, DEPTH, f"data/bright/{task}")
    for task in TASKS
    for name, retriever in (("bm25", {"method": "bm25"}), ("qwen3_embedding", _DENSE[task]))
}
MISSING: dict[str, tuple[dict, ...]] = {}
CITED: dict[str, tuple[dict, ...]] = {}
MODES = tuple(ROWS)


def get_config(mode: str = "bm25_biology") -> ConfigDict:
    """`mode`: a row, of MODES."""
    return _rows.make_row(
        mode,
        ROWS[mode],
        system="webqa",
        dataset="bright",
        data=ROWS[mode]["data"],
        split="test",
        made_by=MADE_BY,
    )
