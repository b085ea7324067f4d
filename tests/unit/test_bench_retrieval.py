"""`python -m tests.bench retrieval`: the peers give the same answers, the inputs are what they say."""

import json

import numpy as np
import pytest

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


def test_rows(tmp_path, short_readings, monkeypatch):
    for name, size in {"_INDEXED": 300, "_EMBEDDED": 3, "_ASKED": 2}.items():
        monkeypatch.setattr(bench, name, size)
    sizes = {**SIZES, "rounds": 1}
    steps = {name: step(tmp_path, sizes) for name, step in bench._STEPS.items()}
    rows = [row for name in steps if name not in ("vectors", "build") for row in steps[name]]
    assert {row["name"] for row in rows} == set(bench.ROWS) - {
        "index_build", "index_memory", "bm25_memory",
    }  # fmt: skip
    by_name = {row["name"]: row for row in rows}
    assert by_name["scann_recall"]["ours"] == 1.0  # so few are searched exactly
    assert all(row["ours"] > 0 and {"peer", "ratio", "unit", "floor"} <= row.keys() for row in rows)
    json.dumps(rows)
