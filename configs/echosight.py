"""EchoSight's rows, of the benchmarks whose questions are on an entity. Not an experiment itself.

The authors' encoder (EVA-CLIP 8B) and their Q-Former are not here: rows of ours retrieve with CLIP
ViT-L/14, which they compare with, and rerank with bge-reranker-v2-m3, which their code has too.
"""

from typing import Any

from mmqa_jax.core.config import config_beside

PAPER = "echosight"
CLIP = "weights/clip_l14"
RERANKER = "BAAI/bge-reranker-v2-m3"
# Each with what its authors' code says before a question, and how it samples.
LLMS = {
    "mistral": (
        "mistralai/Mistral-7B-Instruct-v0.2",
        {"system": "", "temperature": 0.9, "top_p": 0.9},
    ),
    "llama3": (
        "meta-llama/Meta-Llama-3-8B-Instruct",
        {
            "system": "You are a helpful assistant for answering encyclopedic questions.",
            "temperature": 0.6,
            "top_p": 0.9,
        },
    ),
    "smollm2": ("smollm2", {"system": "", "temperature": 0.0, "top_p": 1.0}),
}

_rows = config_beside(__file__, "rows.py")


def made_by(wiki: str, raw: str) -> dict[str, str]:
    """Where the inputs of `rows` come from.

    Args:
      wiki: folder of the articles' sections and pictures.
      raw: of the articles' own files.
    """
    return {
        CLIP: f"mmqa convert --model=clip --source=downloads/ViT-L-14.pt --out={CLIP}",
        wiki: (
            f"mmqa prepare infoseek_wiki --raw={raw} --out={wiki} "
            "--passage_words=10000"  # whole sections
        ),
        _index(wiki): (
            f"mmqa embed --data={wiki} --model={CLIP} --out={_index(wiki)}; then mmqa index "
            f"--embeddings={_index(wiki)}"
        ),
    }


def rows(wiki: str, **data: Any) -> dict[str, dict[str, Any]]:
    """Retrieval by picture, text and both; reranked sections; what each LLM makes of them.

    Args:
      wiki: as `made_by`.
      data: which questions are asked: `where` of a row's data.
    """
    reranker = {"model": RERANKER, "similarity": None, "similarity_weight": 0.0}
    by_picture = {"retriever": _retriever(wiki, "picture")}
    found = {
        "clip_by_picture": ("echosight_retrieve", by_picture),
        "clip_by_text": ("echosight_retrieve", {"retriever": _retriever(wiki, "text")}),
        "clip_by_both": ("echosight_retrieve", {"retriever": _retriever(wiki, "both")}),
        "clip_reranked": ("echosight_rerank", {**by_picture, "reranker": reranker}),
    }
    content = {
        name: {"setting": setting, "parts": parts, "options": {}}
        for name, (setting, parts) in found.items()
    }
    for name, (model, options) in LLMS.items():
        llm = {"llm": _rows.language_model(model, length=2048 if name == "smollm2" else 8192)}
        taken = {
            "alone": llm,
            "oracle": {"reranker": reranker, **llm},
            "reranked": {**by_picture, "reranker": reranker, **llm},
        }
        for kind, parts in taken.items():
            setting = "echosight" if kind == "reranked" else f"echosight_{kind}"
            content[f"{name}_{kind}"] = {"setting": setting, "parts": parts, "options": options}
    return {
        name: {
            **row,
            "paper": PAPER,
            "system": PAPER,
            "sources": "" if row["setting"] == "echosight_alone" else wiki,
            **data,
        }
        for name, row in content.items()
    }


def cited(column: str, accuracy: float, scorer: str, recalls: dict[int, float]) -> dict:
    """Figures of the authors' system, which cannot be run here.

    Args:
      column: the benchmark.
      accuracy: of the answers, in percent (abstract).
      recalls: k -> recall@k of the right article, in percent, reranked.
    """

    def cell(table: str, column: str, value: float, scorer: str) -> dict[str, Any]:
        return {
            "paper": PAPER,
            "table": table,
            "row": "EchoSight",
            "column": column,
            "published": round(value / 100, 4),
            "tolerance": 0.01,
            "scorer": scorer,
            "group": "",
        }

    return {
        "EchoSight": (
            cell("abstract", column, accuracy, scorer),
            *(
                cell("retrieval", f"{column} R@{k}", value, f"article_recall@{k}")
                for k, value in recalls.items()
            ),
        )
    }


def _index(wiki: str) -> str:
    return wiki.replace("data/", "runs/") + "_clip_l14"


def _retriever(wiki: str, asks: str) -> dict[str, Any]:
    """Pictures of articles alone are searched, as the authors do; by texts too."""
    return {
        "method": "dense",
        "model": CLIP,
        "index": _index(wiki),
        "modality": "image",
        "asks": asks,
    }
