"""How much of exact search's results an approximate index finds."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmqa_jax.retrieval.exact import ExactIndex

_QUERIES = 200
_NOISE = 0.6  # length of what is added to a source: near it, but not it


def recall_against(index: Any, exact: ExactIndex, top_k: int, *, seed: int = 0) -> float:
    """The mean share of the exact top k that the index finds too.

    The queries are drawn sources with noise added, so that their neighbors are those of a question
    about them; real questions may be harder.
    """
    rng = np.random.default_rng(seed)
    vectors = exact.embeddings.vectors
    drawn = np.sort(rng.choice(len(vectors), min(_QUERIES, len(vectors)), replace=False))
    noise = rng.standard_normal((len(drawn), vectors.shape[1]))
    queries = vectors[drawn] + _NOISE * noise / np.linalg.norm(noise, axis=1, keepdims=True)
    queries = (queries / np.linalg.norm(queries, axis=1, keepdims=True)).astype(np.float32)
    found, wanted = index.search(queries, top_k)[0], exact.search(queries, top_k)[0]
    shared = [len({*a} & {*b}) for a, b in zip(found.tolist(), wanted.tolist(), strict=True)]
    return float(np.mean(shared) / top_k)
