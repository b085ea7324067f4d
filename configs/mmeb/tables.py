"""The rows on MMEB-V2's image tasks: an encoder ranks each query's own candidates.

A row is RETRIEVER_TASK. BM25 stands where candidates are texts, and ranks those that share a word.
"""

from ml_collections import ConfigDict

from mmqa_jax.benchmarks.mmeb import TASKS
from mmqa_jax.core.config import config_beside

PAPER = "mmeb"
DEPTH = 10

_rows = config_beside(__file__, "../rows.py")
_DENSE, MADE_BY = _rows.encoder_inputs(
    "mmeb",
    {task: f"downloads/MMEB/{task}" for task in TASKS},
    "Qwen/Qwen3-VL-Embedding-2B",
    "qwen3_vl_embedding",
)

ROWS = {
    f"{name}_{task}": {
        "setting": "retrieve_restricted",
        "parts": {"retriever": retriever},
        "options": {"cited": DEPTH},
        "data": f"data/mmeb/{task}",
    }
    for task in TASKS
    for name, retriever in (("bm25", {"method": "bm25"}), ("qwen3_vl_embedding", _DENSE[task]))
}
MISSING: dict[str, tuple[dict, ...]] = {}
CITED: dict[str, tuple[dict, ...]] = {}
MODES = tuple(ROWS)


def get_config(mode: str = "bm25_OK-VQA") -> ConfigDict:
    """`mode`: a row, of MODES."""
    return _rows.make_row(
        mode,
        ROWS[mode],
        system="webqa",
        dataset="mmeb",
        data=ROWS[mode]["data"],
        split="test",
        made_by=MADE_BY,
    )
