"""The rows of Atlas, our own benchmark, that the demo runs: `mmqa run --config=...:ROW`.

The published figures are those of configs/atlas/RESULTS.md, which the demo measures on 300
questions of the test split, as every row here does; `--config.data.questions=0` takes all. Source
selection is VLP's with the retriever's similarity and a second hop (ours); `restricted_vlp` and
`full_vlp` count VLP's relevance alone.

`pica_*` and `smollm2_*` are the other papers' systems on the same test questions, with SmolLM2. To
these, whose benchmarks ask on a picture with a caption, a question brings its gold sources: its
picture is the first gold picture, its caption the text of all gold sources (snippets, and captions
that do not tell what the pictures show), as VLP's row `oracle` reads them. In
`smollm2_mavl_pictures` the caption is that of the pictures alone, and snippets come through the
knowledge tool, BM25 over Atlas's own, as VLP's row `full` has to find them. The VQA model is
mcan.py, which sees all gold pictures; RMR's examples are the nearest by the mean of
contrastive.py's embeddings of question and picture.
"""

from ml_collections import ConfigDict

from mmqa_jax.core.config import config_beside

PAPER = "atlas"
TOLERANCE = 0.03

DATA, CONTRASTIVE, INDEX, RERANK, ANSWER = (
    *("data/atlas", "runs/contrastive", "runs/index"),
    *("runs/rerank", "runs/answer"),
)
MADE_BY = {
    DATA: f"mmqa prepare atlas --out={DATA}",
    INDEX: f"mmqa embed --data={DATA} --model={CONTRASTIVE} --out={INDEX}; "
    f"mmqa index --embeddings={INDEX}",
    **{
        folder: f"mmqa train --config=configs/atlas/{folder.removeprefix('runs/')}.py "
        f"--config.data.dir={DATA} --workdir={folder}"
        for folder in (CONTRASTIVE, RERANK, ANSWER)
    },
}


def _retriever(method: str, *, second_hop: bool = False) -> dict:
    dense = {} if method == "bm25" else {"model": CONTRASTIVE, "index": INDEX}
    weight = {"fusion_weight": 0.9} if method == "fused" else {}  # chosen on val
    return {"method": method, **dense, "second_hop": second_hop, **weight}


def _reranker(weight: float) -> dict:
    return {
        "model": RERANK,
        "similarity": {"method": "dense", "model": CONTRASTIVE, "index": INDEX},
        "similarity_weight": weight,
    }


def _retrieval(method: str, second_hop: bool, recall: float) -> dict:
    return {
        "setting": "retrieve_full_scale",
        "parts": {"retriever": _retriever(method, second_hop=second_hop)},
        "options": {"cited": 2, "top_k": 100},
        "published": {"recall@20": recall},
    }


def _restricted(method: str, second_hop: bool, source_f1: float) -> dict:
    return {
        "setting": "retrieve_restricted",
        "parts": {"retriever": _retriever(method, second_hop=second_hop)},
        "options": {"cited": 2},
        "published": {"source_f1/official": source_f1},
    }


_rows = config_beside(__file__, "../rows.py")
_agents = config_beside(__file__, "../agents.py")
_MCAN = "runs/atlas_mcan"
MADE_BY |= _agents.ours_made_by(
    "atlas",
    f"mmqa train --config=configs/atlas/mcan.py --config.data.dir={DATA} --workdir={_MCAN}; "
    f"mmqa candidates --data={DATA} --model {_MCAN} --out=runs/atlas_candidates",
)
_SMOLLM2 = _rows.language_model("smollm2", length=2048)


_QUESTIONS = 300  # evenly over test, those that the demo answers


def _pica(setting: str, **options) -> dict:
    """WebQA's PICa with a small model; flags are their captions."""
    return {
        "system": "pica",
        "setting": setting,
        "parts": {"llm": _SMOLLM2, "library": _rows.library()},
        "options": {"max_new_tokens": 32, **options},
        "questions": _QUESTIONS,
        "published": {},
    }


def _rmr(**options) -> dict:
    """RMR with a small model: answers are Atlas's keywords, of which there are no rationales."""
    return {
        "system": "rmr",
        "setting": "rmr_direct",
        "parts": {
            "llm": _SMOLLM2,
            "library": _rows.library(text_model=CONTRASTIVE, image_model=CONTRASTIVE),
        },
        "options": {"template": "rmr.text", "max_new_tokens": 16, **options},
        "questions": _QUESTIONS,
        "context": "sources",
        "published": {},
    }


def _agent_rows() -> dict[str, dict]:
    """Prophet's and MAVL's: the train split is the library, Atlas's snippets are the knowledge."""
    rows = {
        name: {**row, "paper": PAPER, "context": "sources", "published": {}}
        for name, row in _agents.our_rows("atlas", {}, _QUESTIONS, knowledge="").items()
    }
    llm = _rows.language_model("smollm2", cache="runs/atlas_responses", length=2048)
    for row in rows.values():
        if "llm" in row["parts"]:
            row["parts"] = {**row["parts"], "llm": llm}
    rows["smollm2_mavl_pictures"] = {**rows["smollm2_mavl"], "context": "pictures"}
    return rows


def _llm_rows() -> dict[str, dict]:
    """SmolLM2 reads, and in two rows reranks; in `llm_*_vlp` it reads what VLP selected."""
    rows = _rows.llm_rows(_SMOLLM2, _retriever("dense", second_hop=True))
    reads = rows["llm_oracle"]["parts"]
    for name in ("restricted", "full"):
        row = ROWS[name]
        rows[f"llm_{name}_vlp"] = {**row, "parts": {**row["parts"], **reads}}
    return {name: {**row, "questions": _QUESTIONS, "published": {}} for name, row in rows.items()}


_READER = {"reader": {"model": ANSWER}}
_OURS, _ALONE = {"reranker": _reranker(160.0)}, {"reranker": _reranker(0.0)}
_ONE_HOP = {"retriever": _retriever("dense")}
_SECOND_HOP = {"retriever": _retriever("dense", second_hop=True)}
_OWN = {"cap": "none", "select": "best"}
_ACC, _F1 = "webqa_acc/no_lemma", "source_f1/official"

# Row -> setting of papers/webqa.py and others, parts, options, figures of RESULTS.md.
ROWS = {
    "question_only": {"setting": "question_only", "parts": _READER, "published": {_ACC: 0.21}},
    "constant": {"setting": "constant", "parts": {}, "published": {_ACC: 0.23}},
    "oracle": {"setting": "oracle", "parts": _READER, "published": {_ACC: 0.73}},
    "restricted": {
        "setting": "restricted",
        "parts": {**_OURS, **_READER},
        "options": {"threshold": 0.05, **_OWN},
        "published": {_ACC: 0.71, _F1: 0.914},
    },
    "full": {
        "setting": "full_scale",
        "parts": {**_SECOND_HOP, **_OURS, **_READER},
        "options": {"threshold": 0.05, "top_k": 20},
        "published": {_ACC: 0.68, _F1: 0.882},
    },
    "restricted_vlp": {
        "setting": "select_restricted",
        "parts": _ALONE,
        "options": {"threshold": 0.15, **_OWN},
        "published": {_F1: 0.762},
    },
    "full_vlp": {
        "setting": "select_full_scale",
        "parts": {**_SECOND_HOP, **_ALONE},
        "options": {"threshold": 0.15, "top_k": 20},
        "published": {_F1: 0.691},
    },
    # Candidates of a single pass of the retriever; the full rows' have those of its second hop.
    "full_one_hop": {
        "setting": "select_full_scale",
        "parts": {**_ONE_HOP, **_OURS},
        "options": {"threshold": 0.05, "top_k": 20},
        "published": {"recall@2": 0.91, _F1: 0.865},
    },
    "restricted_bm25": _restricted("bm25", False, 0.386),
    "restricted_dense": _restricted("dense", True, 0.709),
    "bm25": _retrieval("bm25", False, 0.892),
    "dense": _retrieval("dense", False, 0.952),
    "rrf": _retrieval("rrf", False, 0.935),
    "fused": _retrieval("fused", False, 0.950),
    "bm25_second_hop": _retrieval("bm25", True, 0.908),
    "dense_second_hop": _retrieval("dense", True, 0.993),
    "rrf_second_hop": _retrieval("rrf", True, 0.967),
    "fused_second_hop": _retrieval("fused", True, 0.993),
    "pica_question_only": _pica("pica_question_only"),
    "pica_oracle": _pica("pica_oracle"),
    "pica_oracle_zero_shot": _pica("pica_oracle", shots=0),
    "pica_oracle_random": _pica("pica_oracle", similarity="random"),
    "smollm2_rmr": _rmr(),
    "smollm2_rmr_text": _rmr(similarity="question"),
    "smollm2_rmr_zero_shot": _rmr(shots=0),
    **_agent_rows(),
}
ROWS |= _llm_rows()
MISSING: dict[str, tuple[dict, ...]] = {}
CITED: dict[str, tuple[dict, ...]] = {}
MODES = tuple(ROWS)


def get_config(mode: str = "full") -> ConfigDict:
    """`mode`: a row, of MODES."""
    config = _rows.make_row(
        mode,
        {
            "questions": _QUESTIONS,
            **ROWS[mode],
            "published": _cells(mode, ROWS[mode]["published"]),
        },
        system="webqa",
        dataset="atlas",
        data=DATA,
        split="test",
        made_by=MADE_BY,
    )
    config.scoring.lemmatizer = "none"
    return config


def _cells(row: str, values: dict[str, float]) -> tuple[dict, ...]:
    return tuple(
        {
            "table": "demo",
            "row": row,
            "column": scorer,
            "published": value,
            "tolerance": TOLERANCE,
            "scorer": scorer,
            "group": "",
        }
        for scorer, value in values.items()
    )
