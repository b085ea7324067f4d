"""Milvus as an index, with its embedded form: filled once, whatever happens; found as exactly."""

import sys

import numpy as np
import pytest
from pymilvus import MilvusClient

from mmqa_jax.core.errors import UserError
from mmqa_jax.retrieval.embeddings import Embeddings
from mmqa_jax.retrieval.indexes import milvus
from mmqa_jax.retrieval.indexes.exact import ExactIndex
from mmqa_jax.retrieval.indexes.index import recall_against
from mmqa_jax.retrieval.indexes.milvus import Place, ingest, open_milvus, parse_place

DIM, ROWS = 16, 600


def vectors(rows=ROWS, seed=0):
    found = np.random.default_rng(seed).standard_normal((rows, DIM)).astype(np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


EMBEDDINGS = Embeddings(vectors(), "model-1", "corpus-1")
QUERIES = vectors(40, seed=1)


class Killed(Exception):
    """As by kill -9: nothing after it runs."""


class Counting:
    """A client that counts the rows it sends, and is killed after some chunks."""

    def __init__(self, client, most_chunks=None):
        self._client, self._left, self.sent = client, most_chunks, 0

    def __getattr__(self, name):
        return getattr(self._client, name)

    def upsert(self, collection, rows):
        if self._left is not None:
            if self._left == 0:
                raise Killed
            self._left -= 1
        self.sent += len(rows)
        return self._client.upsert(collection, rows)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A collection that is filled."""
    text = f"milvus://{tmp_path_factory.mktemp('milvus')}/one.db/sources"
    assert ingest(text, EMBEDDINGS)
    return text


@pytest.fixture
def index(place):
    return open_milvus(place, "model-1", "corpus-1")


def test_a_killed_job_is_finished_and_nothing_is_sent_twice(tmp_path, monkeypatch):
    text = f"milvus://{tmp_path}/two.db/sources"
    monkeypatch.setattr(milvus, "_CHUNK_BYTES", 100 * 4 * DIM)  # six chunks
    connect, clients = milvus._connect, []

    def connected(most_chunks=None):
        def make(place):
            clients.append(Counting(connect(place), most_chunks))
            return clients[-1]

        monkeypatch.setattr(milvus, "_connect", make)

    connected(most_chunks=2)
    with pytest.raises(Killed):
        ingest(text, EMBEDDINGS)
    connected()
    with pytest.raises(UserError, match="is not filled yet; run `mmqa index` again"):
        open_milvus(text, "model-1", "corpus-1")
    seen = []
    assert ingest(text, EMBEDDINGS, on_progress=seen.append)
    assert seen == [100, 200, 300, 400, 500, 600]
    assert [client.sent for client in clients] == [200, 0, 400]
    # A chunk of which only a part arrived is sent again, under the same numbers.
    clients[-1].delete("sources", filter="row >= 150 and row < 160")
    assert ingest(text, EMBEDDINGS)
    assert clients[-1].sent == 100
    assert not ingest(text, EMBEDDINGS)
    assert clients[-1].sent == 0
    found = open_milvus(text, "model-1", "corpus-1")
    assert recall_against(found, ExactIndex(EMBEDDINGS), 20) == 1.0


@pytest.mark.parametrize("top_k", [1, 20, ROWS])
def test_search_is_exact_for_few_rows(index, top_k):
    assert index.is_exact
    assert len(index) == ROWS
    rows, scores = index.search(QUERIES, top_k)
    wanted, wanted_scores = ExactIndex(EMBEDDINGS).search(QUERIES, top_k)
    np.testing.assert_array_equal(rows, wanted)
    np.testing.assert_allclose(scores, wanted_scores, atol=1e-5)


@pytest.mark.parametrize("few_runs", [256, 1])
@pytest.mark.parametrize("every", [2, 7])
def test_only_allowed_rows_are_found(index, every, few_runs, monkeypatch):
    monkeypatch.setattr(milvus, "_FEW_RUNS", few_runs)
    for allowed in (np.arange(ROWS) % every == 0, np.arange(ROWS) % every != 0):
        rows, _ = index.search(QUERIES, 20, allowed)
        wanted, _ = ExactIndex(EMBEDDINGS).search(QUERIES, 20, allowed)
        np.testing.assert_array_equal(rows, wanted)


def test_candidates_are_ranked(index):
    candidates = [[5, 90, 17], [], [17, 599, 0, 5]] + [[1]] * 37
    found = index.search_within(QUERIES, candidates, 3)
    wanted = ExactIndex(EMBEDDINGS).search_within(QUERIES, candidates, 3)
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_allclose(found[1], wanted[1], atol=1e-6)
    with pytest.raises(UserError, match=r"0\.\.599, got 3\.\.600; the index belongs to another"):
        index.search_within(QUERIES[:1], [[3, 600]], 2)


def test_more_rows_are_searched_by_a_graph(tmp_path, monkeypatch):
    monkeypatch.setattr(milvus, "FLAT_ROWS", 100)
    text = f"milvus://{tmp_path}/graph.db/sources"
    ingest(text, EMBEDDINGS)
    found = open_milvus(text, "model-1", "corpus-1")
    assert not found.is_exact
    assert recall_against(found, ExactIndex(EMBEDDINGS), 20) >= 0.99


@pytest.mark.parametrize(
    ("model", "corpus", "message"),
    [
        ("model-2", "corpus-1", "model_fingerprint is 'model-1' but 'model-2' was expected"),
        ("model-1", "corpus-2", "corpus_fingerprint is 'corpus-1' but 'corpus-2'"),
    ],
)
def test_another_model_or_corpus_is_refused(place, model, corpus, message):
    with pytest.raises(UserError, match=message):
        open_milvus(place, model, corpus)
    other = Embeddings(EMBEDDINGS.vectors, model, corpus)
    with pytest.raises(UserError, match="name another collection"):
        ingest(place, other)
    with pytest.raises(UserError, match="with rows 600, these have 599"):
        ingest(place, Embeddings(EMBEDDINGS.vectors[1:], "model-1", "corpus-1"))


def test_what_is_not_there(place, index, monkeypatch):
    with pytest.raises(UserError, match="other: no such collection; run `mmqa index`"):
        open_milvus(place.replace("/sources", "/other"), "model-1", "corpus-1")
    with pytest.raises(UserError, match="top_k=601 is out of range"):
        index.search(QUERIES, 601)
    with pytest.raises(UserError, match="do not fit the index's dimension 16"):
        index.search(QUERIES[:, :4], 1)
    monkeypatch.setattr(milvus, "_MOST_RESULTS", 30)
    with pytest.raises(UserError, match="top_k=31 is more than Milvus gives, 30"):
        index.search(QUERIES, 31)


def test_a_collection_of_others_is_left_alone(tmp_path):
    client = MilvusClient(str(tmp_path / "theirs.db"))
    client.create_collection("papers", dimension=DIM)
    text = f"milvus://{tmp_path}/theirs.db/papers"
    for use in (lambda: open_milvus(text, "m", "c"), lambda: ingest(text, EMBEDDINGS)):
        with pytest.raises(UserError, match=r"papers: was not made by `mmqa index`; name another"):
            use()
    assert client.get_collection_stats("papers")["row_count"] == 0


def test_what_milvus_refuses_is_told(tmp_path):
    text = f"milvus://{tmp_path}/three.db/sources"
    ingest(text, EMBEDDINGS)
    index = open_milvus(text, "model-1", "corpus-1")
    MilvusClient(str(tmp_path / "three.db")).drop_collection("sources")
    for search in (
        lambda: index.search(QUERIES, 1),
        lambda: index.search_within(QUERIES[:1], [[1]], 1),
    ):
        with pytest.raises(UserError, match=r"sources: Milvus refuses \(.+\); look at its log or"):
            search()


def test_a_server_that_does_not_answer_is_named():
    with pytest.raises(UserError, match=r"milvus://127\.0\.0\.1:1/sources: .*; start Milvus there"):
        open_milvus("milvus://127.0.0.1:1/sources", "m", "c")


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    with pytest.raises(UserError, match="the package pymilvus is missing; install the extra"):
        open_milvus("milvus://localhost:19530/sources", "m", "c")


@pytest.mark.parametrize(
    "text",
    [
        "milvus://",
        "milvus://host/sources",
        "milvus://host:19530/",
        "milvus://h:1/a-b",
        "milvus://h:65536/a",
        "milvus://h:0/a",
        "milvus:///f/a",
    ],
)
def test_places_that_cannot_be_read(text):
    with pytest.raises(UserError, match="was expected"):
        parse_place(text)


def test_places():
    assert parse_place("milvus://db.lab:19530/webqa") == Place("http://db.lab:19530", "webqa")
    assert parse_place("milvus:///runs/a.db/webqa") == Place("/runs/a.db", "webqa")
    assert str(parse_place("milvus://db.lab:19530/webqa")) == "milvus://db.lab:19530/webqa"
