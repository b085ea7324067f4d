"""The rows on MultimodalQA: a language model or VLM that reads what was retrieved, and cites it.

The settings are WebQA's (papers/webqa.py): a question's own context (`restricted`, about 24
paragraphs, pictures and a table), the whole collection (`retrieved`, `reranked`), its gold sources
alone (`oracle`), none (`question_only`). No published system is among them.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

PAPER = "multimodalqa"

DATA = "data/multimodalqa"
MADE_BY = {DATA: f"mmqa prepare multimodalqa --raw=downloads/multimodalqa --out={DATA}"}

_rows = config_beside(__file__, "../rows.py")
MADE_BY |= dict(_rows.QWEN_VL.values())
_SMOLLM2 = _rows.language_model("smollm2", length=2048)
_BM25 = {"method": "bm25"}

ROWS = {
    "bm25_restricted": {
        "setting": "retrieve_restricted",
        "parts": {"retriever": _BM25},
        "options": {"cited": 2},
    },
    "bm25_full": {
        "setting": "retrieve_full_scale",
        "parts": {"retriever": _BM25},
        "options": {"cited": 2},
    },
    **{
        name.replace("llm_", "smollm2_"): row
        for name, row in _rows.llm_rows(_SMOLLM2, _BM25).items()
    },
    **{
        name.replace("llm_", f"{vlm}_"): row
        for vlm in _rows.QWEN_VL
        for name, row in _rows.llm_rows(_rows.qwen_vl(vlm), _BM25).items()
    },
}
MISSING: dict[str, tuple[dict, ...]] = {}
CITED: dict[str, tuple[dict, ...]] = {}
MODES = tuple(ROWS)


def get_config(mode: str = "smollm2_restricted") -> ConfigDict:
    """`mode`: a row, of MODES."""
    return _rows.make_row(
        mode,
        ROWS[mode],
        system="webqa",
        dataset="multimodalqa",
        data=DATA,
        split="val",
        made_by=MADE_BY,
    )
