"""`mmqa rerank` with a model whose sources are read once: as the plain reranker scores them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli_runs import done, rows_of, traced_loss, train_flags
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.schema import Ranking
from mmqa_jax.extensions.similarity import read_all
from mmqa_jax.inference.reranker import CachedReranker, Reranker
from mmqa_jax.models.vlp.two_sided import TwoSidedVLP, TwoSides
from mmqa_jax.papers.webqa import restricted_candidates
from mmqa_jax.tasks.rerank import load_reranker, load_selector

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

TWO_SIDED = {
    "model.changes.layers": 2,
    "model.joint_layers": 1,
    "packing.buckets": "((1,64),)",
    "packing.max_question_tokens": 20,
    "inference.batch_size": 4,
}


@pytest.fixture(scope="module")
def run(data, tmp_path_factory, quiet):
    """A two-sided model before its first step, whose loss is traced alone.

    Its gradient is compared in test_two_sided_vlp.
    """
    folder = tmp_path_factory.mktemp("two_sided") / "run"
    done("train", *_flags(data, folder), "--only_start")
    assert traced_loss(folder)["inputs"].input_ids.shape[0] == 4
    return folder


def _flags(data, folder, **changes) -> list[str]:
    flags = train_flags("rerank", data, folder, **{**TWO_SIDED, **changes})
    return [flag.replace("rerank.py", "rerank_cached.py") for flag in flags]


@pytest.fixture(scope="module")
def corpus(data):
    return open_corpus(data)


@pytest.fixture(scope="module")
def parts(run, corpus):
    """What rerankers are made of; larger weights than the first, so that scores differ.

    Those of the source head are large from the beginning: larger ones bring all scores near 1.
    """
    task, tokenizer, vlp = load_selector(run)
    graphdef, state = nnx.split(vlp)
    head = state.pop("source_head")
    state = jax.tree.map(lambda x: jnp.asarray(np.asarray(x) * 4) if x.ndim > 1 else x, state)
    state["source_head"] = head
    model = TwoSidedVLP.of(nnx.merge(graphdef, state), TwoSides(1, 5, 1))
    return task, corpus, tokenizer, model


@pytest.fixture(scope="module")
def reranker(parts):
    return CachedReranker(*parts)


@pytest.fixture(scope="module")
def plain(parts):
    """The same model, every pair read anew as one masked sequence."""
    return Reranker(*parts)


def as_dicts(rankings: list[Ranking]) -> list[dict[str, float]]:
    return [dict(zip(r.sources, r.scores, strict=True)) for r in rankings]


def same(found: list[Ranking], expected: list[Ranking]) -> None:
    assert [r.question_id for r in found] == [r.question_id for r in expected]
    for ours, theirs in zip(as_dicts(found), as_dicts(expected), strict=True):
        assert ours.keys() == theirs.keys()
        np.testing.assert_allclose([ours[k] for k in theirs], list(theirs.values()), atol=1e-5)
    for ranking in found:
        assert list(ranking.scores) == sorted(ranking.scores, reverse=True)


@pytest.mark.parametrize("hinted", [False, True])
def test_scores_are_those_of_the_pairs_read_one_by_one(hinted, corpus, reranker, plain):
    questions = corpus.questions("test")
    candidates = restricted_candidates(questions, corpus)
    assert {len(r.sources) for r in candidates} >= {0, 3, 8}
    if hinted:  # as the second hop asks them, with a title behind
        titles = ["Gondal", "", "Hav Hav", "flag", "Florin"]
        questions = [
            dataclasses.replace(q, question=f"{q.question} {title}")
            for q, title in zip(questions, titles, strict=True)
        ]
    expected = plain.score(questions, candidates)
    same(reranker.score(questions, candidates), expected)
    values = np.concatenate([r.scores for r in expected])
    assert np.ptp(values) > 1e-2  # a thousand times the tolerance


def test_the_whole_collection_is_ranked_as_pairs_are(corpus, reranker, plain, monkeypatch):
    questions = corpus.questions("test")
    ids = tuple(source.id for source in corpus.sources)
    everything = [Ranking(q.id, ids, (0.0,) * len(ids)) for q in questions]
    expected = [
        Ranking(r.question_id, r.sources[:4], r.scores[:4])
        for r in plain.score(questions, everything)
    ]
    same(reranker.search(questions, 4), expected)
    # Of more sources than there are, all; and in small pieces the same.
    monkeypatch.setattr(reranker, "_pairs", 8)
    assert [len(r.sources) for r in reranker.search(questions, 100)] == [len(ids)] * len(questions)
    same(reranker.search(questions, 4), expected)


def test_each_source_is_read_once(corpus, reranker, monkeypatch):
    questions = corpus.questions("test") * 3
    questions = [dataclasses.replace(q, id=f"{n}") for n, q in enumerate(questions)]
    read = []
    source = reranker._source
    monkeypatch.setattr(reranker, "_source", lambda row, *x: read.append(row) or source(row, *x))
    reranker.score(questions, restricted_candidates(questions, corpus))
    assert len(read) == len(set(read)) == 10  # all but one picture


def test_nothing_to_score(corpus, reranker):
    assert reranker.score([], []) == []
    assert reranker.search([], 5) == []
    question = corpus.questions("test")[:1]
    assert reranker.score(question, [Ranking(question[0].id, (), ())])[0].sources == ()


def test_mmqa_rerank_takes_it(data, run, corpus, tmp_path):
    flags = ("rerank", f"--data={data}", f"--model={run}")
    result = done(*flags, "--candidates=all", "--top_k=3", f"--out={tmp_path / 'all.jsonl'}")
    assert result["questions"] == 5
    assert 0 <= result["source_f1"] <= 1
    reranker = load_reranker(run, corpus)
    assert isinstance(reranker, CachedReranker)
    expected = reranker.search(corpus.questions("test"), 3)
    rows = rows_of(tmp_path / "all.jsonl")
    assert [tuple(row["sources"]) for row in rows] == [r.sources for r in expected]
    done(*flags, f"--out={tmp_path / 'own.jsonl'}")
    assert {len(row["sources"]) for row in rows_of(tmp_path / "own.jsonl")} >= {0, 3, 8}


def test_all_pairs_of_plain_vlp_are_refused(corpus, plain):
    message = r"--candidates=all: this model computes every pair .*rerank_cached\.py"
    with pytest.raises(UserError, match=message):
        read_all(corpus.questions("test"), plain, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.joint_layers": 3}, r"model\.joint_layers=3: 1 to the 2 layers"),
        ({"packing.match_types": "(1,)"}, r"packing\.match_types=\(1,\): marks words"),
    ],
)
def test_a_config_that_cannot_be_cached_is_refused(changes, message, data, refused, tmp_path):
    refused("train", *_flags(data, tmp_path / "run", **changes), message=message)
