"""BM25 against a plain restatement of the formula, and its edges."""

import math
import re

import bm25s
import numpy as np
import pytest

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Ranking, Source, source_text
from mmqa_jax.data.text_analysis import Analyzer
from mmqa_jax.evaluation.retrieval import score_rankings
from mmqa_jax.extensions.second_hop import SecondHopRetriever
from mmqa_jax.extensions.similarity import interpolate
from mmqa_jax.retrieval.bm25 import in_memory as bm25
from mmqa_jax.retrieval.bm25.in_memory import BM25, BM25Retriever, kept_words, words, words_of
from mmqa_jax.retrieval.fusion import RankFusion
from tests.refusals import refuses

ALL, PLAIN = Analyzer(), Analyzer(stop_words=False)
WORDS = [
    "flag",
    "star",
    "red",
    "blue",
    "capital",
    "river",
    "island",
    "king",
    "mountain",
    "green",
    "sea",
    "north",
    "old",
]


def random_texts(count, seed=0):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(1, 12))) for _ in range(count)]


def plain_bm25(texts, query, k1, b):
    """Robertson's formula with Lucene's idf, document by document."""
    documents = [re.findall(r"\w+", text.lower()) for text in texts]
    mean_length = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        score = 0.0
        for word in re.findall(r"\w+", query.lower()):
            containing = sum(word in other for other in documents)
            if containing == 0:
                continue
            idf = math.log(1 + (len(documents) - containing + 0.5) / (containing + 0.5))
            f = document.count(word)
            score += idf * f / (f + k1 * (1 - b + b * len(document) / mean_length))
        scores.append(score)
    return np.array(scores)


@pytest.mark.parametrize(("k1", "b"), [(1.5, 0.75), (0.9, 0.4), (2.0, 0.0)])
def test_search_equals_the_formula(k1, b):
    texts = random_texts(300)
    queries = ["red star", "Capital CAPITAL island?", "unknown river"]
    rows, scores = BM25(texts, k1, b, analyzer=PLAIN).search(queries, 300)
    for query, found, values in zip(queries, rows, scores, strict=True):
        expected = plain_bm25(texts, query, k1, b)
        matched = np.count_nonzero(expected)
        assert 0 < matched < 300
        assert sorted(found[:matched]) == np.flatnonzero(expected).tolist()
        np.testing.assert_allclose(values[:matched], expected[found[:matched]], rtol=1e-5)
        assert (np.diff(values) <= 0).all()
        assert (found[matched:] == -1).all()
        assert (values[matched:] == 0).all()


@pytest.mark.parametrize(("k1", "b"), [(1.5, 0.75), (0.9, 0.4)])
def test_scores_are_those_of_bm25s_to_the_bit(k1, b):
    texts = [text.lower() for text in random_texts(400, seed=5)]
    peer = bm25s.BM25(k1=k1, b=b, method="lucene", backend="numpy")
    peer.index([text.split() for text in texts], show_progress=False)
    index = BM25(texts, k1, b, analyzer=PLAIN)
    for query in ("red star", "sea north old sea king", "capital"):
        wanted = peer.get_scores(query.split())
        np.testing.assert_array_equal(index.scores(query, range(len(texts))), wanted)


def test_top_k_is_the_head_of_the_full_ranking_with_ties_in_row_order():
    texts = random_texts(700, seed=1) + ["same words here"] * 30
    index = BM25(texts)
    queries = ["words", "red old sea", "nothingknown"]
    full_rows, full_scores = index.search(queries, len(texts))
    for top_k in (1, 7, 200):
        rows, scores = index.search(queries, top_k)
        np.testing.assert_array_equal(rows, full_rows[:, :top_k])
        np.testing.assert_array_equal(scores, full_scores[:, :top_k])
    np.testing.assert_array_equal(full_rows[0, :30], np.arange(700, 730))  # thirty equal scores
    assert (full_rows[0, 30:] == -1).all()  # the others share no word with the query
    assert (full_rows[2] == -1).all()
    assert (full_scores == 0)[full_rows == -1].all()


def test_allowed_rows():
    texts = random_texts(200, seed=2)
    allowed = np.zeros(200, bool)
    allowed[50:90] = True
    index = BM25(texts)
    rows, scores = index.search(["red star"], 40, allowed)
    full_rows, full_scores = index.search(["red star"], 200)
    kept = allowed[full_rows[0]] & (full_rows[0] >= 0)
    assert 0 < kept.sum() < 40
    np.testing.assert_array_equal(rows[0, : kept.sum()], full_rows[0][kept])
    np.testing.assert_array_equal(scores[0, : kept.sum()], full_scores[0][kept])
    assert (rows[0, kept.sum() :] == -1).all()
    refuses("40 sources are available", index.search, ["red star"], 41, allowed)


def test_restricted_search_is_a_corpus_of_its_own():
    texts = random_texts(100, seed=3)
    index = BM25(texts, analyzer=PLAIN)
    candidates = [70, 3, 41, 12, 99, 5]
    expected = plain_bm25([texts[row] for row in candidates], "red star sea", 1.5, 0.75)
    rows, scores = index.search_within("red star sea", candidates, 4)
    order = np.argsort(-expected, kind="stable")[:4]
    np.testing.assert_array_equal(rows, np.array(candidates)[order])
    np.testing.assert_allclose(scores, expected[order], rtol=1e-5)
    rows, scores = index.search_within("unheard of", candidates, 10)
    assert (rows.tolist(), scores.tolist()) == ([], [])
    assert index.search_within("red", [], 5)[0].tolist() == []
    refuses("another corpus", index.search_within, "red", [100], 1)


def test_words_and_source_text():
    assert words("The FLAG of Côte d'Ivoire, 1960") == ["flag", "côte", "d", "ivoire", "1960"]
    assert PLAIN.words("The flag") == ["the", "flag"]
    pictured = Source("1", "image", "a red flag", title="Peru", image="1.png")
    assert source_text(pictured) == "Peru a red flag"
    index = BM25(["a caption", source_text(Source("1", "image", "a flag", title="Peru"))])
    assert index.search(["peru"], 1)[0].tolist() == [[1]]


def test_words_of_a_corpus_are_counted_once(tmp_path, monkeypatch):
    corpora = [
        Corpus([Source(f"s{i}", "text", text) for i, text in enumerate(texts)], fingerprint=name)
        for name, texts in (("a", random_texts(50)), ("b", ["the sea", ""]), ("c", ["a king"]))
    ]
    counted = []
    monkeypatch.setattr(bm25, "words_of", lambda *given: counted.append(1) or words_of(*given))

    def times(corpus, analyzer=ALL):
        before = len(counted)
        found = kept_words(tmp_path / "words", corpus, analyzer)
        wanted = words_of([source_text(source) for source in corpus.sources], analyzer)
        assert found.words == wanted.words
        for kept, new in zip(found[1:], wanted[1:], strict=True):
            np.testing.assert_array_equal(kept, new)
        return len(counted) - before

    assert [times(corpus) for corpus in (*corpora, *corpora)] == [1, 1, 1, 0, 0, 0]
    assert [times(corpora[1], PLAIN), times(corpora[1])] == [1, 0]
    for file in (tmp_path / "words").rglob("*.jsonl"):
        file.write_bytes(file.read_bytes()[:-3])
    assert [times(corpora[1]), times(corpora[1])] == [1, 0]  # what is damaged is counted again
    monkeypatch.setattr(bm25, "_KEPT", 2)
    assert times(Corpus(corpora[0].sources, fingerprint="d")) == 1
    assert len(list((tmp_path / "words").iterdir())) == 2
    assert times(Corpus(corpora[0].sources)) == 1  # a corpus without a name is not kept


def test_bad_input():
    refuses("corpus is empty", BM25, [])
    refuses("contains a word", BM25, ["", " .!"])
    index = BM25(["red", "blue", ""])
    for top_k in (0, 4):
        refuses(f"top_k={top_k} is out of range", index.search, ["red"], top_k)
    with pytest.raises(UserError, match="mask of allowed rows"):
        index.search(["red"], 1, np.ones(2, bool))


def test_a_source_without_a_word_of_the_question_is_no_result():
    """As in Lucene; a hit would be counted that nothing but the order of the rows made."""
    texts = ["a red star", "the blue sea", "an old king", "red sea"]
    corpus = Corpus([Source(f"s{i}", "text", text) for i, text in enumerate(texts)])
    retriever = BM25Retriever(corpus)
    asked = [Question("q0", "val", "Which star is red?"), Question("q1", "val", "Unheard of?"),
             Question("q2", "val", "The of and?")]  # fmt: skip
    found = retriever.search(asked, 3)
    assert [ranking.sources for ranking in found] == [("s0", "s3"), (), ()]
    assert all(score > 0 for score in found[0].scores)
    every = [Ranking(q.id, ("s3", "s2", "s1"), (0.0,) * 3) for q in asked]
    within = retriever.search_within(asked, every)
    assert [ranking.sources for ranking in within] == [("s3",), (), ()]
    # Given sources are scored all the same: others found them.
    assert retriever.score(asked[1:2], every[1:2]) == [every[1]]
    assert score_rankings([{"s1"}] * 3, [r.sources for r in found]).scores["recall@2"] == 0.0


def test_fused_and_second_hop_rankings_where_bm25_finds_little():
    texts = ["a red star", "the blue sea", "an old king", "red sea"]
    corpus = Corpus([Source(f"s{i}", "text", text, f"t{i}") for i, text in enumerate(texts)])
    asked = [Question("q0", "val", "red?"), Question("q1", "val", "unheard of?")]
    retriever = BM25Retriever(corpus)
    second = SecondHopRetriever(retriever, corpus)
    assert [r.sources for r in second.search(asked, 4)] == [("s0", "s3"), ()]
    every = [Ranking(q.id, ("s0", "s1", "s2", "s3"), (0.0,) * 4) for q in asked]
    hops = second.hops(asked, every)
    assert [r.sources for r in hops.first] == [("s0", "s3"), ()]
    assert hops.questions[1] is None
    relevance = [Ranking(q.id, ("s0", "s1", "s2", "s3"), (0.5,) * 4) for q in asked]
    combined = interpolate(relevance, hops.first, 2.0)
    assert combined[0].sources == ("s0", "s3", "s1", "s2")
    assert combined[1].scores == pytest.approx((0.5,) * 4)
    fused = RankFusion([retriever, retriever]).search(asked, 4)
    assert [r.sources for r in fused] == [("s0", "s3"), ()]


def test_coverage_is_the_share_of_a_questions_weight_that_one_row_has():
    index = BM25(["wash the filter", "wash the car", "a pump"])
    rare, common, unknown = (math.log(1 + (3 - n + 0.5) / (n + 0.5)) for n in (1, 2, 0))
    assert index.coverage("wash filter") == pytest.approx(1.0)
    assert index.coverage("wash pump") == pytest.approx(rare / (rare + common))
    assert index.coverage("filter soap") == pytest.approx(rare / (rare + unknown))
    assert (index.coverage("soap"), index.coverage("")) == (0.0, 0.0)
