"""mmqa_jax: multimodal, multi-hop question answering in JAX.

`import mmqa_jax as mmqa` gives the names below, those of api/: documents as a corpus,
retrievers, readers, answers that cite their sources; vectors, scores and training over lists; the
models by themselves. JAX is imported when one of them is used.
"""

import importlib

__version__ = "0.1.0"

# Public name -> the module that defines it.
_PLACES = {
    **dict.fromkeys(
        ("Answer", "Reader", "Retriever", "ask", "open_corpus", "open_llm", "open_reader"),
        "api.answers",
    ),
    **dict.fromkeys(("open_reranker", "open_retriever"), "api.answers"),
    **dict.fromkeys(
        ("Scored", "Scores", "Tuning", "embed", "evaluate", "rerank", "to_frame", "train"),
        "api.lists",
    ),
    **dict.fromkeys(("LoadedModel", "load_model"), "api.ports"),
    **dict.fromkeys(("read_rankings", "write_rankings"), "retrieval.rankings"),
    "UserError": "core.errors",
}
__all__ = sorted(_PLACES)


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # By their names: written as imports, what imports this package's version would import itself.
    importlib.import_module("mmqa_jax.core.host").skip_absent_tpu()
    return getattr(importlib.import_module(f"mmqa_jax.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
