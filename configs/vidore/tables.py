"""The rows on ViDoRe: a retriever over the pages of each set, v1 in MTEB's layout, v2 and v3.

A row is RETRIEVER_SET. Qwen3-VL-Embedding sees the pages; BM25 reads the text that v3 has of them.
No published system is among them: those of the leaderboards compare many vectors for a page.
"""

from ml_collections import ConfigDict

from mmqa_jax.benchmarks.vidore import TASKS, V3
from mmqa_jax.core.config import config_beside

PAPER = "vidore"
DEPTH = 100

_rows = config_beside(__file__, "../rows.py")
_MODEL = "downloads/Qwen3-VL-Embedding-2B"
MADE_BY = {_MODEL: "Qwen/Qwen3-VL-Embedding-2B of the Hugging Face hub"}
for _name in TASKS:
    _data, _index = f"data/vidore/{_name}", f"runs/vidore/qwen3_vl_embedding/{_name}"
    _prepare = f"mmqa prepare vidore --raw=downloads/{_name}"
    MADE_BY |= {
        _data: f"{_prepare} --out={_data}",
        f"{_data}_text": f"{_prepare} --pages=text --out={_data}_text",
        _index: f"mmqa embed --data={_data} --model={_MODEL} --out={_index}; "
        f"mmqa index --embeddings={_index} --kind=exact",
    }


ROWS = {
    **{
        f"bm25_{name}": _rows.ranking_row({"method": "bm25"}, DEPTH, f"data/vidore/{name}_text")
        for name in V3
    },
    **{
        f"qwen3_vl_embedding_{name}": _rows.ranking_row(
            {
                "method": "dense",
                "model": _MODEL,
                "index": f"runs/vidore/qwen3_vl_embedding/{name}",
            },
            DEPTH,
            f"data/vidore/{name}",
        )
        for name in TASKS
    },
}
MISSING: dict[str, tuple[dict, ...]] = {}
CITED: dict[str, tuple[dict, ...]] = {}
MODES = tuple(ROWS)


def get_config(mode: str = "bm25_vidore_v3_hr") -> ConfigDict:
    """`mode`: a row, of MODES."""
    return _rows.make_row(
        mode,
        ROWS[mode],
        system="webqa",
        dataset="vidore",
        data=ROWS[mode]["data"],
        split="test",
        made_by=MADE_BY,
    )
