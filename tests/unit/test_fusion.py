"""Fusion of dense retrieval and BM25: by reciprocal ranks, by a convex combination of scores."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Ranking, Source
from mmqa_jax.evaluation.retrieval import score_rankings
from mmqa_jax.extensions.fusion_tuning import tune_fusion
from mmqa_jax.extensions.second_hop import SecondHopRetriever
from mmqa_jax.papers.webqa import find_candidates
from mmqa_jax.retrieval.bm25.in_memory import BM25Retriever
from mmqa_jax.retrieval.dense import DenseRetriever
from mmqa_jax.retrieval.embeddings import Embeddings
from mmqa_jax.retrieval.fusion import (
    WEIGHTS,
    HybridSearch,
    Pool,
    ScoreFusion,
    convex_combination,
    reciprocal_rank_fusion,
)
from mmqa_jax.retrieval.indexes.exact import ExactIndex
from mmqa_jax.runs.ask_folder import Passages
from tests.refusals import refuses


def ranking(question, *sources):
    return Ranking(question, sources, tuple(float(-i) for i in range(len(sources))))


def test_hand_computed():
    fused = reciprocal_rank_fusion([[ranking("q", "a", "b", "c")], [ranking("q", "c", "a", "d")]])[
        0
    ]
    assert fused.sources == ("a", "c", "b", "d")
    np.testing.assert_allclose(
        fused.scores, [1 / 61 + 1 / 62, 1 / 63 + 1 / 61, 1 / 62, 1 / 63], rtol=1e-12
    )


def test_top_k_keeps_the_best():
    runs = [[ranking("q", "a", "b")], [ranking("q", "b", "c")]]
    assert reciprocal_rank_fusion(runs, top_k=2)[0].sources == ("b", "a")  # 1/62 + 1/61 > 1/61


def test_ties_go_to_the_better_rank_then_the_smaller_id():
    # x and y both once at rank 1: smaller id first, whatever the order of the runs.
    runs = [[ranking("q", "y", "m")], [ranking("q", "x", "n")]]
    assert reciprocal_rank_fusion(runs)[0].sources == ("x", "y", "m", "n")
    assert reciprocal_rank_fusion(runs[::-1])[0].sources == ("x", "y", "m", "n")


def test_runs_of_other_questions_are_refused():
    with pytest.raises(ValueError, match=r"too many values|unpack"):
        reciprocal_rank_fusion([[ranking("q1", "a")], [ranking("q2", "a")]])
    with pytest.raises(ValueError, match="zip"):
        reciprocal_rank_fusion([[ranking("q1", "a")], []])


# The convex combination of scores


SIZE, DIM = 60, 8


class Vectors:
    """An embedder that knows every question's vector; counts how often it is asked."""

    image_size = 1

    def __init__(self, vectors):
        self.vectors, self.calls = vectors, 0

    def embed_questions(self, texts, pixels):
        self.calls += 1
        return np.stack([self.vectors[text] for text in texts])


class NoPictures:
    def question_pixels(self, question):
        return None


def collection(seed=0, count=12, **fields):
    """Random sources and questions: (corpus, questions, dense, bm25); gold is what both like."""
    rng = np.random.default_rng(seed)
    words = [f"w{i}" for i in range(25)]
    texts = [" ".join(rng.choice(words, rng.integers(3, 9))) for _ in range(SIZE)]
    vectors = rng.normal(size=(SIZE, DIM)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    corpus = Corpus([Source(f"s{i:02}", "text", texts[i], f"t{i % 7}") for i in range(SIZE)])
    questions, asked = [], {}
    for n in range(count):
        gold = int(rng.integers(SIZE))
        text = " ".join([*rng.choice(texts[gold].split(), 2), rng.choice(words)])
        vector = vectors[gold] + rng.normal(scale=0.5, size=DIM)
        asked[text] = (vector / np.linalg.norm(vector)).astype(np.float32)
        questions.append(Question(f"q{n}", "val", text, positives=(f"s{gold:02}",), **fields))
    index = ExactIndex(Embeddings(vectors, "model", "corpus"))
    dense = DenseRetriever(corpus, Vectors(asked), index, NoPictures())
    return corpus, questions, dense, BM25Retriever(corpus)


def restated(question, corpus, dense, bm25, weight, depth):
    """The combination in plain numpy, from all scores of the collection: id -> score."""
    cosines = dense.index.embeddings.vectors @ dense.embedder.vectors[question.question]
    counts = bm25.bm25.scores(question.question, range(len(corpus)))
    own = question.extra.get("from_source")
    kept = [i for i in range(len(corpus)) if corpus.sources[i].id != own]
    matched = [i for i in kept if counts[i] > 0]  # BM25 finds no others
    best = {
        i
        for scores, among in ((cosines, kept), (counts, matched))
        for i in sorted(among, key=lambda i: -scores[i])[:depth]
    }
    dense_most, bm25_most = (max(scores[i] for i in best) for scores in (cosines, counts))
    return {
        corpus.sources[i].id: weight * (cosines[i] + 1) / (dense_most + 1)
        + (1 - weight) * counts[i] / bm25_most
        for i in best
    }


def test_the_index_is_searched_once_for_fused_and_nearest_sources(monkeypatch):
    _, questions, dense, bm25 = collection()
    nearest = dense.search(questions, 1)
    searched, search = [], dense.index.search
    monkeypatch.setattr(dense.index, "search", lambda *a: [searched.append(a), search(*a)][1])
    passages = Passages(ScoreFusion(HybridSearch(dense, bm25), 0.5), dense)
    assert [found.nearest for found in passages.find(questions[1:], 3)] == nearest[1:]
    assert len(searched) == 1


@pytest.mark.parametrize("weight", [0.15, 0.5, 0.9])
@pytest.mark.parametrize("own", [False, True])
def test_combined_scores_are_those_of_plain_numpy(weight, own):
    """Also those of a source that only one retriever found; a question's own source is left out."""
    fields = {"extra": {"from_source": "s07"}} if own else {}
    corpus, questions, dense, bm25 = collection(**fields)
    found = ScoreFusion(HybridSearch(dense, bm25), weight, depth=10).search(questions, 10)
    one_only = 0
    for question, ranking in zip(questions, found, strict=True):
        expected = restated(question, corpus, dense, bm25, weight, 10)
        assert len(expected) > 10  # the retrievers found different ones
        order = sorted(expected, key=lambda name: -expected[name])[:10]
        np.testing.assert_allclose(
            ranking.scores, [expected[name] for name in order], rtol=1e-5, atol=1e-6
        )
        assert [expected[name] for name in ranking.sources] == pytest.approx(ranking.scores)
        own_lists = [r.search([question], 10)[0].sources for r in (dense, bm25)]
        one_only += sum(any(n not in names for names in own_lists) for n in ranking.sources)
        assert "s07" not in ranking.sources or not own
    assert one_only > 0
    assert dense.embedder.calls == 1 + len(questions)  # the fusion embeds its questions once


@pytest.mark.parametrize("second_hop", [False, True])
@pytest.mark.parametrize("top_k", [3, 15])
def test_the_ends_of_the_weight_are_the_retrievers_themselves(second_hop, top_k):
    corpus, questions, dense, bm25 = collection(1)
    dense.embedder.vectors = Nearby(dense.embedder.vectors)
    for weight, alone in ((0.0, bm25), (1.0, dense)):
        fused = ScoreFusion(HybridSearch(dense, bm25), weight, depth=10)
        if second_hop:
            fused, alone = (SecondHopRetriever(r, corpus) for r in (fused, alone))
        ours, theirs = fused.search(questions, top_k), alone.search(questions, top_k)
        assert [r.sources for r in ours] == [r.sources for r in theirs]
        candidates = [
            Ranking(q.id, tuple(f"s{i:02}" for i in range(0, 50, 3)), ()) for q in questions
        ]
        if not second_hop:
            ours, theirs = (r.search_within(questions, candidates) for r in (fused, alone))
            assert [r.sources for r in ours] == [r.sources for r in theirs]


class Nearby(dict):
    """A second hop's question has the vector of the question that it repeats."""

    def __missing__(self, text):
        return self[text.rsplit(" ", 1)[0]]


def test_ties_of_scores_go_to_the_better_rank_then_the_smaller_id():
    pool = made_pool({"b": 0.5, "a": 0.5, "d": 0.5}, {"c": 2.0, "d": 1.0})
    # Cosines alike: the order of the list, not of the ids. c has BM25's 1 and no cosine's.
    assert convex_combination(pool, 1.0).sources == ("b", "a", "d")
    assert convex_combination(pool, 0.0).sources == ("c", "d")
    tied = made_pool({"y": 0.2, "x": 0.2}, {"x": 3.0, "y": 3.0})
    assert convex_combination(tied, 0.5).sources == ("x", "y")  # both once first
    assert convex_combination(tied, 0.5, top_k=1).sources == ("x",)


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_nothing_found_and_nothing_matched(weight):
    assert convex_combination(made_pool({}, {}), weight) == Ranking("q", (), ())
    # No word in common: BM25 says nothing, the cosines decide.
    pool = made_pool({"a": 0.3, "b": -0.2}, {"b": 0.0, "a": 0.0})
    ranking = convex_combination(pool, weight)
    assert set(ranking.sources) == {"a", "b"}
    assert np.isfinite(ranking.scores).all()
    if weight:
        assert ranking.sources == ("a", "b")
        np.testing.assert_allclose(ranking.scores, [weight, weight * 0.8 / 1.3])
    opposite = made_pool({"a": -1.0}, {"a": 0.0})  # the least possible scores
    assert convex_combination(opposite, weight).scores == (0.0,)


def made_pool(cosines, lexical):
    """A pool whose sources that one retriever missed have its least score."""
    dense, bm25 = (Ranking("q", tuple(s), tuple(s.values())) for s in (cosines, lexical))
    names = [*cosines, *lexical]
    return Pool(
        dense, bm25, dict.fromkeys(names, -1.0) | cosines, dict.fromkeys(names, 0.0) | lexical
    )


def test_the_tuned_weight_is_the_best_of_the_grid():
    _, questions, dense, bm25 = collection(2, count=40)
    hybrid = HybridSearch(dense, bm25, remember=True)
    tuned = tune_fusion(questions, lambda weight: ScoreFusion(hybrid, weight, depth=20), 20)
    assert dense.embedder.calls == 1  # one search for all weights
    assert list(tuned.sweep) == list(WEIGHTS)
    assert (WEIGHTS[0], WEIGHTS[-1]) == (0.0, 1.0)
    gold = [set(question.positives) for question in questions]
    for weight in WEIGHTS:
        found = find_candidates(
            questions, ScoreFusion(HybridSearch(dense, bm25), weight, depth=20), 20
        )
        scores = score_rankings(gold, [r.sources for r in found], [2, 20]).scores
        assert tuned.sweep[weight]["ndcg"] == pytest.approx(scores["ndcg@20"], abs=1e-12)
        assert tuned.sweep[weight]["recall@2"] == pytest.approx(scores["recall@2"], abs=1e-12)
    values = {weight: scores["ndcg"] for weight, scores in tuned.sweep.items()}
    assert values[tuned.weight] == max(values.values())
    assert values[tuned.weight] > max(values[0.0], values[1.0])  # both know something


def test_weights_that_are_alike_leave_the_default():
    _, questions, dense, bm25 = collection(3, count=5)
    same = ScoreFusion(HybridSearch(dense, bm25), 0.5)
    assert tune_fusion(questions, lambda _: same, 5).weight == 0.8


def test_weights_out_of_range_and_questions_without_gold_are_refused():
    _, questions, dense, bm25 = collection()
    hybrid = HybridSearch(dense, bm25)
    for weight in (-0.1, 1.01, float("nan")):
        refuses(r"fusion_weight=.*from 0 \(BM25 alone\) to 1", ScoreFusion, hybrid, weight)
    bare = [Question(q.id, "val", q.question) for q in questions]
    with pytest.raises(UserError, match="none of the 12 questions has gold sources"):
        tune_fusion(bare, lambda weight: ScoreFusion(hybrid, weight), 5)


NAMES = "abcdefgh"
RUNS = st.lists(st.lists(st.sampled_from(NAMES), unique=True), min_size=1, max_size=3)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(RUNS, st.integers(0, 8))
def test_ranks_fuse_the_same_in_any_order(runs, top_k):
    """All sources once, by falling scores that are sums of reciprocals; the first ones of them."""
    runs = [[ranking("q", *found)] for found in runs]
    (fused,) = reciprocal_rank_fusion(runs)
    assert sorted(fused.sources) == sorted({name for (run,) in runs for name in run.sources})
    assert list(fused.scores) == sorted(fused.scores, reverse=True)
    for name, score in zip(fused.sources, fused.scores, strict=True):
        ranks = [run.sources.index(name) + 1 for (run,) in runs if name in run.sources]
        assert score == pytest.approx(sum(1 / (60 + rank) for rank in ranks))
    (reversed_runs,) = reciprocal_rank_fusion(runs[::-1])
    assert reversed_runs.sources == fused.sources
    np.testing.assert_allclose(reversed_runs.scores, fused.scores, rtol=1e-12)
    (first,) = reciprocal_rank_fusion(runs, top_k)
    assert first.sources == fused.sources[:top_k]


# Scores of all sources by both: of cosines in steps of 1/8, so that ties happen.
SCORES = st.lists(
    st.tuples(st.integers(-8, 8).map(lambda n: n / 8), st.integers(0, 12)), min_size=1, max_size=8
)


def pool_of(scores):
    named = dict(zip(NAMES, scores, strict=False))
    cosines = {name: pair[0] for name, pair in named.items()}
    bm25 = {name: float(pair[1]) for name, pair in named.items()}
    by = [sorted(found, key=lambda name: (-found[name], name)) for found in (cosines, bm25)]
    rankings = [
        Ranking("q", tuple(order), tuple(found[name] for name in order))
        for order, found in zip(by, (cosines, bm25), strict=True)
    ]
    return Pool(*rankings, cosines, bm25)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SCORES, st.sampled_from(WEIGHTS), st.sampled_from([0.25, 4.0]))
def test_a_combination_keeps_what_both_agree_on(scores, weight, scale):
    pool = pool_of(scores)
    fused = convex_combination(pool, weight)
    assert sorted(fused.sources) == sorted(pool.cosines)
    assert list(fused.scores) == sorted(fused.scores, reverse=True)
    assert all(-1e-12 <= score <= 1 + 1e-12 for score in fused.scores)
    place = {name: at for at, name in enumerate(fused.sources)}
    for a in place:
        for b in place:
            if pool.cosines[a] > pool.cosines[b] and pool.bm25_scores[a] > pool.bm25_scores[b]:
                assert place[a] < place[b]
    # In what units BM25 counts makes no difference: powers of two divide out exactly.
    other = pool._replace(bm25_scores={k: scale * v for k, v in pool.bm25_scores.items()})
    assert convex_combination(other, weight) == fused
    assert convex_combination(pool, weight, 3).sources == fused.sources[:3]
    for end, found in ((1.0, pool.dense), (0.0, pool.bm25)):
        assert convex_combination(pool, end).sources == found.sources
