"""Dense search over eight devices finds what one finds."""

import re

import numpy as np
import pytest

from mmqa_jax.retrieval.embeddings import Embeddings
from mmqa_jax.retrieval.indexes.exact import ExactIndex
from mmqa_jax.retrieval.indexes.mesh import MeshIndex, _search_program

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


@pytest.mark.parametrize(("rows", "block"), [(1003, 50), (1003, 65_536), (5, 65_536), (64, 3)])
def test_the_same_rows_and_scores(rows, block):
    rng = np.random.default_rng(rows + block)
    queries = whole(rng, 300, DIM)  # more than a batch
    embeddings = Embeddings(whole(rng, rows, DIM), "m", "c")
    exact, index = ExactIndex(embeddings), MeshIndex(embeddings, block_rows=block)
    for top_k in sorted({1, min(5, rows), min(200, rows)}):
        check_same(index, exact, queries, top_k)
    check_same(index, exact, queries[:1], 3)
    allowed = np.zeros(rows, bool)
    allowed[[0, rows // 2, rows - 1]] = True
    check_same(index, exact, queries, 3, allowed)


@pytest.fixture(scope="module")
def embedded():
    """300 queries and the embeddings of 4,001 rows, of length 1."""
    rng = np.random.default_rng(0)
    queries = unit(rng.standard_normal((300, DIM)))
    return queries, Embeddings(unit(rng.standard_normal((4001, DIM))), "m", "c")


def test_an_approximate_search_finds_nearly_all(embedded):
    """On a CPU approx_max_k is exact: what is lost is bfloat16's; float32 orders the candidates."""
    queries, embeddings = embedded
    exact, approximate = ExactIndex(embeddings), MeshIndex(embeddings, approximate=True)
    expected, expected_scores = exact.search(queries, 20)
    rows, scores = approximate.search(queries, 20)
    assert np.mean([len({*a} & {*b}) / 20 for a, b in zip(rows, expected, strict=True)]) > 0.995
    assert np.abs(scores - expected_scores).max() < 1e-5
    even = np.arange(4001) % 2 == 0
    assert even[approximate.search(queries, 20, even)[0]].all()


def test_scores_and_rows_are_gathered_and_no_vectors(embedded):
    queries, embeddings = embedded
    index = MeshIndex(embeddings)
    program = _search_program(index._mesh, index._block, index._blocks, 20, True)
    arguments = index._on_all(queries[:256]), index._vectors, index._mask(None)
    text = program.lower(*arguments).compile().as_text()
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    collectives = re.findall(rf"= \(?(\w+)\[([\d,]+)\]\S* ({kinds})\(", text)
    sizes = [int(np.prod([int(n) for n in shape.split(",")])) for _, shape, _ in collectives]
    assert {kind for _, _, kind in collectives} == {"all-gather"}
    assert max(sizes) <= 8 * 256 * 20  # [devices x queries x top_k]
