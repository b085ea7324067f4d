"""Search on eight devices against one and against numpy; prints what was compared as JSON."""

from __future__ import annotations

import json
import re

import jax
import numpy as np

from mmqa_jax.retrieval.embeddings import Embeddings
from mmqa_jax.retrieval.exact import ExactIndex
from mmqa_jax.retrieval.mesh_index import MeshIndex, _search_program

DIM = 24


def unit(x):
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def whole(rng, *shape):
    """Small whole numbers: their products are exact in any order, and many are equal."""
    return rng.integers(-3, 4, shape).astype(np.float32)


def check_same(index, exact, queries, top_k, allowed=None):
    """Rows and scores are equal, also the order of equal scores."""
    for found, wanted in zip(
        index.search(queries, top_k, allowed), exact.search(queries, top_k, allowed), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


def main():
    assert len(jax.devices()) == 8
    rng = np.random.default_rng(0)
    queries = whole(rng, 300, DIM)  # more than a batch
    cases = 0
    for rows, block in ((1003, 50), (1003, 65_536), (5, 65_536), (64, 3)):
        embeddings = Embeddings(whole(rng, rows, DIM), "m", "c")
        exact, index = ExactIndex(embeddings), MeshIndex(embeddings, block_rows=block)
        for top_k in sorted({1, min(5, rows), min(200, rows)}):
            check_same(index, exact, queries, top_k)
            cases += 1
        check_same(index, exact, queries[:1], 3)
        allowed = np.zeros(rows, bool)
        allowed[[0, rows // 2, rows - 1]] = True
        check_same(index, exact, queries, 3, allowed)
        cases += 2

    queries = unit(rng.standard_normal((300, DIM)))
    embeddings = Embeddings(unit(rng.standard_normal((4001, DIM))), "m", "c")
    exact, approximate = ExactIndex(embeddings), MeshIndex(embeddings, approximate=True)
    wanted, wanted_scores = exact.search(queries, 20)
    found, scores = approximate.search(queries, 20)
    recall = np.mean([len({*a} & {*b}) / 20 for a, b in zip(found, wanted, strict=True)])
    half = np.arange(4001) % 2 == 0
    only = bool(half[approximate.search(queries, 20, half)[0]].all())

    index = MeshIndex(embeddings)
    program = _search_program(index._mesh, index._block, index._blocks, 20, True)
    arguments = index._on_all(queries[:256]), index._vectors, index._mask(None)
    text = program.lower(*arguments).compile().as_text()
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    collectives = re.findall(rf"= \(?(\w+)\[([\d,]+)\]\S* ({kinds})\(", text)
    sizes = [int(np.prod([int(n) for n in shape.split(",")])) for _, shape, _ in collectives]
    print(
        json.dumps(
            {
                "cases": cases,
                "recall": float(recall),
                "score_error": float(np.abs(scores - wanted_scores).max()),
                "only_allowed": only,
                "collectives": sorted({kind for _, _, kind in collectives}),
                "gathered": max(sizes),
            }
        )
    )


main()
