"""`python -m tests.bench retrieval`: the peers give the same answers, the inputs are what they say."""

import json

import numpy as np
import pytest

from mmqa_jax.data.formats.webqa import ImagesTsv
from tests.bench import retrieval as bench
from tests.bench import retrieval_data as inputs

pytestmark = pytest.mark.slow

SIZES = {"rows": 600, "dim": 16, "queries": 20, "snippets": 300}


def test_numpy_search_is_exact():
    vectors = inputs.ClusteredVectors(40_000, 8)
    matrix = np.concatenate(list(vectors.blocks()))  # more than one block of numpy's
    queries = vectors.queries(7)
    expected = np.argsort(-(queries @ matrix.T), axis=1, kind="stable")[:, :20]
    found = bench._numpy_search(matrix, queries)
    np.testing.assert_array_equal(np.sort(found), np.sort(expected))


def test_vectors_are_unit_clustered_and_the_same_every_time(tmp_path):
    vectors = inputs.ClusteredVectors(70_000, 32)
    inputs.write_vectors(tmp_path / "vectors.npy", vectors)
    written = np.load(tmp_path / "vectors.npy")
    assert written.shape == (70_000, 32)
    assert written.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(written, axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(
        written, np.concatenate(list(inputs.ClusteredVectors(70_000, 32).blocks()))
    )
    best = (vectors.queries(50) @ written.T).max(axis=1)
    spread = np.random.default_rng(0).standard_normal((50, 32)).astype(np.float32)
    spread /= np.linalg.norm(spread, axis=1, keepdims=True)
    # Queries lie in clusters, random directions do not.
    assert np.median(best) > np.median((spread @ written.T).max(axis=1)) + 0.05


def test_pictures_are_read_back(tmp_path):
    encoded = inputs.write_pictures(tmp_path, 5, distinct=2)
    pictures = ImagesTsv(tmp_path / "imgs.tsv")
    assert [pictures.read(row) for row in range(5)] == encoded
    assert encoded[0] != encoded[1]


def test_rows(tmp_path, short_readings, monkeypatch):
    for name, size in {"_INDEXED": 300, "_EMBEDDED": 3, "_ASKED": 2}.items():
        monkeypatch.setattr(bench, name, size)
    sizes = {**SIZES, "rounds": 1}
    steps = {name: step(tmp_path, sizes) for name, step in bench._STEPS.items()}
    rows = [row for name in ("search", "bm25", "bm25_index", "embed") for row in steps[name]]
    assert {row["name"] for row in rows} == set(bench.ROWS) - {
        "index_build", "index_memory", "bm25_memory",
    }  # fmt: skip
    by_name = {row["name"]: row for row in rows}
    assert by_name["scann_recall"]["ours"] == 1.0  # so few are searched exactly
    assert all(row["ours"] > 0 and {"peer", "ratio", "unit", "floor"} <= row.keys() for row in rows)
    json.dumps(rows)
