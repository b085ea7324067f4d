"""The rows on MMEB-V2's image tasks: an encoder ranks each query's own candidates.

A row is RETRIEVER_TASK. BM25 stands where candidates are texts, and ranks those that share a word.
"""

from ml_collections import ConfigDict

from mmqa_jax.benchmarks.mmeb import TASKS
from mmqa_jax.core.config import config_beside

PAPER = "mmeb"
DEPTH = 10

_rows = config_beside(__file__, "../rows.py")
_MODEL = "downloads/Qwen3-VL-Embedding-2B"
MADE_BY = {_MODEL: "Qwen/Qwen3-VL-Embedding-2B of the Hugging Face hub"}
for _task in TASKS:
    _data, _index = f"data/mmeb/{_task}", f"runs/mmeb/qwen3_vl_embedding/{_task}"
    MADE_BY |= {
        _data: f"mmqa prepare mmeb --raw=downloads/MMEB/{_task} --out={_data}",
        _index: f"mmqa embed --data={_data} --model={_MODEL} --out={_index}; "
        f"mmqa index --embeddings={_index} --kind=exact",
    }

ROWS = {
    f"{name}_{task}": {
        "setting": "retrieve_restricted",
        "parts": {"retriever": retriever},
        "options": {"cited": DEPTH},
        "data": f"data/mmeb/{task}",
    }
    for task in TASKS
    for name, retriever in (
        ("bm25", {"method": "bm25"}),
        (
            "qwen3_vl_embedding",
            {"method": "dense", "model": _MODEL, "index": f"runs/mmeb/qwen3_vl_embedding/{task}"},
        ),
    )
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
