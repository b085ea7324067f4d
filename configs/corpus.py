"""A corpus of one's own, read by a language model: `mmqa run --config=configs/corpus.py:ROW`.

    mmqa prepare corpus --raw=my-files --out=data/mine   # sources.jsonl and questions.jsonl
    mmqa run --config=configs/corpus.py:llm_retrieved --config.data.dir=data/mine --workdir=runs/llm

BM25 finds the sources. For an encoder's index: --config.parts.retriever.method=dense, and .model
and .index of `mmqa embed` and `mmqa index`. For another model: --config.parts.llm.model and
.backend (prompting/README.md).
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

_rows = config_beside(__file__, "rows.py")
_BM25 = {"method": "bm25", "model": "", "index": "", "second_hop": False}
_LLM = _rows.language_model("smollm2", length=2048)
_SEARCHER = {"system": "search_r1", "parts": {"retriever": _BM25, "llm": _LLM}}
_BY_TOOLS = {"system": "tool_search", "setting": "tool_search"}
ROWS = _rows.llm_rows(_LLM, _BM25) | {
    # Of models that search by turns (PeterJinGo/SearchR1-nq_hotpotqa_train-qwen2.5-7b-em-ppo,
    # lmms-lab/MMSearch-R1-7B): --config.parts.llm.model=ORG/NAME, and .engine.length of 8192.
    "search_r1": {"setting": "search_r1", **_SEARCHER},
    "mmsearch_r1": {"setting": "mmsearch_r1", **_SEARCHER},
    # OpenSearch-VL/OpenSearch-VL-8B, with the prompt that it was trained with, of a clone:
    # --config.options.published=OpenSearch-VL/opensearch_vl/opensearch_infer
    "opensearch_vl": {**_SEARCHER, "system": "opensearch_vl", "setting": "opensearch_vl"},
    # Any chat model, by function calls.
    "tool_search": {**_SEARCHER, **_BY_TOOLS},
}
MODES = tuple(ROWS)


def get_config(mode: str = "llm_retrieved") -> ConfigDict:
    """`mode`: a row, of MODES."""
    return _rows.make_row(
        mode,
        ROWS[mode],
        system="webqa",
        dataset="corpus",
        data="data/mine",
        split="test",
        made_by={"data/mine": "mmqa prepare corpus --raw=FOLDER --out=data/mine"},
    )
