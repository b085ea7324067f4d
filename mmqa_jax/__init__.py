"""mmqa_jax: multimodal, multi-hop question answering in JAX.

`import mmqa_jax as mmqa` gives the names below, which are those of api.py: documents as a corpus,
retrievers, readers, answers that cite their sources. JAX is imported when one of them is used.
"""

import importlib

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "Reader",
    "Retriever",
    "UserError",
    "ask",
    "open_corpus",
    "open_llm",
    "open_reader",
    "open_reranker",
    "open_retriever",
    "read_rankings",
    "write_rankings",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # By their names: written as imports, what imports this package's version would import itself.
    importlib.import_module("mmqa_jax.core.host").skip_absent_tpu()
    return getattr(importlib.import_module("mmqa_jax.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
