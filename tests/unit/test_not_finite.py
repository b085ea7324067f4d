"""NaN and infinity never rank first: they are refused wherever scores or vectors come from."""

import json
import math

import numpy as np
import pytest
from cli_runs import done

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.core.store import Store, read_head
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.extensions.similarity import interpolate
from mmqa_jax.retrieval import rankings
from mmqa_jax.retrieval.embeddings import Embeddings, cached_vectors, not_finite
from mmqa_jax.retrieval.fusion import Pool, convex_combination
from mmqa_jax.retrieval.indexes.exact import search_within
from mmqa_jax.retrieval.indexes.index import KINDS, build_index, load_index, scann_available
from mmqa_jax.retrieval.indexes.milvus import ingest
from mmqa_jax.runs.part import Resumable, Seconds
from tests.refusals import refuses

NOT_FINITE = [math.nan, math.inf, -math.inf, 1e30]  # of 1e30 the square is infinite
# MaxSim is tested in test_token_vectors.py.
kinds = [kind for kind in KINDS if kind not in ("auto", "scann") or scann_available()]
kinds = [kind for kind in kinds if kind not in ("maxsim", "tokens")]


def embeddings(bad: float | None = None) -> Embeddings:
    vectors = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    if bad is not None:
        vectors[17, 2] = bad
    return Embeddings(vectors, "m", "c")


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_which_rows_are_not_finite(bad, monkeypatch):
    monkeypatch.setattr("mmqa_jax.retrieval.embeddings._BLOCK", 10)
    assert not_finite(embeddings(bad).vectors).tolist() == [17]
    assert not_finite(embeddings().vectors).tolist() == []
    # The products of rows that are let through are finite, however large they are.
    large = np.full((2, 4), 9e18, np.float32)
    assert not_finite(large).tolist() == []
    assert np.isfinite(large @ large.T).all()


@pytest.mark.parametrize("kind", kinds)
@pytest.mark.parametrize("bad", NOT_FINITE)
def test_no_index_of_rows_that_are_not_finite(kind, bad, tmp_path):
    message = r"index: the embeddings: row 17 of 50 is not finite .*; run `mmqa embed` again"
    refuses(message, build_index, embeddings(bad), kind)
    build_index(embeddings(), kind).save(tmp_path / "index")
    refuses(message, load_index, tmp_path / "index", embeddings(bad))


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_no_collection_of_milvus_either(bad):
    with pytest.raises(UserError, match=r"index: the embeddings: row 17 of 50 is not finite"):
        ingest("milvus://localhost:1/none", embeddings(bad))


@pytest.mark.parametrize("kind", kinds)
@pytest.mark.parametrize("bad", NOT_FINITE)
def test_no_query_that_is_not_finite(kind, bad):
    index = build_index(embeddings(), kind)
    queries = embeddings().vectors[:3].copy()
    queries[1, 0] = bad
    for search in (
        lambda: index.search(queries, 2),
        lambda: index.search_within(queries, [[1], [2], [3]], 1),
    ):
        refuses(r"index: the queries: row 1 of 3 is not finite", search)


def test_candidates_whose_vectors_are_not_finite():
    with pytest.raises(UserError, match=r"embeddings of the candidates: row 1 of 2 is not finite"):
        search_within(embeddings(math.nan), embeddings().vectors[:1], [[3, 17]], 2)


@pytest.mark.parametrize("verb", ["index", "search"])
def test_embeddings_without_checksums_are_looked_at(verb, data, models, index, tmp_path, refused):
    """As older versions, or others' programs, wrote them."""
    folder = tmp_path / "index"
    (folder / "embeddings").mkdir(parents=True)
    for file in ("embeddings/manifest.json", "index/manifest.json"):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes((index / file).read_bytes())
    vectors = np.load(index / "embeddings" / "embeddings.npy")
    flags = {
        "index": ["index", f"--embeddings={folder}", "--kind=exact"],
        "search": [
            *("search", f"--data={data}", "--method=dense", f"--model={models / 'contrastive'}"),
            *(f"--index={folder}", f"--out={tmp_path / 'found.jsonl'}"),
        ],
    }[verb]
    (folder / "index" / "manifest.json").write_text(
        json.dumps({**read_json(index / "index" / "manifest.json"), "kind": "exact"})
    )
    vectors[2, 0] = np.nan
    np.save(folder / "embeddings" / "embeddings.npy", vectors)
    refused(*flags, message="index: the embeddings: row 2 of .* is not finite")
    vectors[2, 0] = 0
    np.save(folder / "embeddings" / "embeddings.npy", vectors)
    done(*flags)


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_no_cached_vector(bad, tmp_path):
    texts = [f"text {row}" for row in range(50)]
    with pytest.raises(UserError, match=r"embed: the vectors of texts: row 17 of 50 is not finite"):
        cached_vectors(tmp_path, "m", texts, lambda rows: embeddings(bad).vectors[rows])
    assert not [*tmp_path.iterdir()]
    vectors = cached_vectors(tmp_path, "m", texts, lambda rows: embeddings().vectors[rows])
    (folder,) = tmp_path.iterdir()
    with Store(folder, read_head(folder)["job"]) as store:
        (key,) = store
        store.add({key: embeddings(bad).vectors})  # as a faulty version may have kept them
    again = cached_vectors(tmp_path, "m", texts, lambda rows: embeddings().vectors[rows])
    np.testing.assert_array_equal(again, vectors)


BAD = Ranking("q1", ("a", "b"), (0.5, math.nan))
GOOD = Ranking("q1", ("a", "b"), (0.5, 0.25))
NAMED = r"question 'q1': the score of source 'b' is nan; the checkpoint that gave it is broken"


@pytest.mark.parametrize(
    "rank",
    [
        lambda: rankings.by_score("q1", {"a": 0.5, "b": math.nan}),
        lambda: rankings.best_of([GOOD], [BAD]),
        lambda: rankings.rescored([GOOD], np.array([0.5, math.nan])),
        lambda: rankings.to_rankings(["q1"], np.array([[0, 1]]), np.array([[0.5, math.nan]]), "ab"),
        lambda: rankings.ranking_of(
            {"question_id": "q1", "sources": ["a", "b"], "scores": [1, math.nan]}
        ),
        lambda: convex_combination(Pool(BAD, GOOD, {"a": 1.0, "b": math.nan}, {"a": 1.0}), 0.5),
        lambda: convex_combination(Pool(GOOD, BAD, {"a": 1.0}, {"a": 1.0, "b": math.nan}), 0.5),
        lambda: interpolate([BAD], [GOOD], 1.0),
        lambda: interpolate([GOOD], [BAD], 1.0),
    ],
    ids=[
        *("by_score", "best_of", "rescored", "to_rankings", "ranking_of", "cosines", "bm25"),
        *("relevance", "similarity"),
    ],
)
def test_no_score_that_is_not_finite_is_ranked(rank):
    refuses(NAMED, rank)


@pytest.mark.parametrize("score", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400])
def test_rankings_that_are_read(score, tmp_path):
    path = tmp_path / "candidates.jsonl"
    path.write_text(f'{{"question_id": "q1", "sources": ["a"], "scores": [{score}]}}\n')
    refuses(r"line 1: scores must be a list of finite numbers", rankings.read_rankings, path)


def test_a_score_that_is_not_finite_is_not_kept(tmp_path):
    """A store that held it would end every restart."""

    class Broken:
        def score_batches(self, questions, candidates):
            yield type("Batch", (), {"indices": np.arange(2), "scores": np.array([0.5, math.nan])})

    with Store(tmp_path / "kept", {"model": "m"}) as store:
        reranker = Resumable(Broken(), store, Seconds(float))
        refuses(NAMED, reranker.score, [Question("q1", "", "why?")], [GOOD])
    assert not (tmp_path / "kept").exists()
