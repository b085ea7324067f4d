"""An index that FAISS reads: searched by FAISS beside our exact search."""

import sys

import faiss
import numpy as np
import pytest

from mmqa_jax.core.errors import UserError
from mmqa_jax.retrieval.embeddings import Embeddings
from mmqa_jax.retrieval.indexes import exact as faiss_export
from mmqa_jax.retrieval.indexes.exact import ExactIndex, export_faiss
from tests.refusals import refuses

IDS = [f"source {n} é" for n in range(500)]


@pytest.fixture(scope="module")
def vectors():
    drawn = np.random.default_rng(0).standard_normal((len(IDS), 24))
    return (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)


def test_faiss_finds_what_exact_search_finds(vectors, tmp_path, monkeypatch):
    monkeypatch.setattr(faiss_export, "_BLOCK", 128)  # the last block is shorter
    embeddings = Embeddings(vectors, "m", "c")
    export_faiss(tmp_path / "faiss", embeddings, IDS)
    assert sorted(path.name for path in (tmp_path / "faiss").iterdir()) == ["docid", "index"]
    # As pyserini's FaissSearcher opens a folder.
    index = faiss.read_index(str(tmp_path / "faiss" / "index"))
    ids = (tmp_path / "faiss" / "docid").read_text("utf-8").splitlines()
    assert (ids, index.ntotal, index.d) == (IDS, len(IDS), 24)
    queries = vectors[::50] + 0.1
    scores, rows = index.search(queries, 20)
    expected, similarities = ExactIndex(embeddings).search(queries, 20)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_allclose(scores, similarities, atol=1e-6)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (IDS[:-1], "499 sources but 500 vectors"),
        ([*IDS[:-1], "a\nb"], r"docid: the id 'a\\nb' is empty, or has a line break"),
        ([*IDS[:-1], "a "], "the id 'a ' .* spaces at its ends"),
        ([*IDS[:-1], ""], "the id '' is empty"),
    ],
)
def test_ids_that_lines_cannot_hold(vectors, tmp_path, ids, message):
    with pytest.raises(UserError, match=message):
        export_faiss(tmp_path / "faiss", Embeddings(vectors, "m", "c"), ids)
    assert list(tmp_path.iterdir()) == []


def test_without_faiss(vectors, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    message = r"--export=faiss: .*faiss-cpu; .*`pip install 'mmqa-jax\[faiss\]'`"
    refuses(message, export_faiss, tmp_path / "faiss", Embeddings(vectors, "m", "c"), IDS)
    assert list(tmp_path.iterdir()) == []


def test_a_vector_that_is_not_finite_is_not_exported(vectors, tmp_path):
    broken = vectors.copy()
    broken[7] = np.nan
    with pytest.raises(UserError, match="row 7 of 500 is not finite"):
        export_faiss(tmp_path / "faiss", Embeddings(broken, "m", "c"), IDS)
    assert list(tmp_path.iterdir()) == []
