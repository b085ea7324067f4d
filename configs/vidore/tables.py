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
_DENSE, MADE_BY = _rows.encoder_inputs(
    "vidore",
    {name: f"downloads/{name}" for name in TASKS},
    "Qwen/Qwen3-VL-Embedding-2B",
    "qwen3_vl_embedding",
)
MADE_BY |= {
    f"data/vidore/{name}_text": (
        f"mmqa prepare vidore --raw=downloads/{name} --pages=text --out=data/vidore/{name}_text"
    )
    for name in TASKS
}


ROWS = {
    **{
        f"bm25_{name}": _rows.ranking_row({"method": "bm25"}, DEPTH, f"data/vidore/{name}_text")
        for name in V3
    },
    **{
        f"qwen3_vl_embedding_{name}": _rows.ranking_row(_DENSE[name], DEPTH, f"data/vidore/{name}")
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
