"""Source selection beyond the paper: two readings, and VLP with the retriever's similarity."""

import numpy as np
import pytest

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Ranking, Source
from mmqa_jax.evaluation.webqa import CAPS, SELECTIONS, THRESHOLDS, select_sources
from mmqa_jax.extensions.second_hop import SecondHopRetriever
from mmqa_jax.extensions.similarity import WEIGHTS, Evidence, combine, interpolate, tune_selection
from mmqa_jax.retrieval.dense import DenseRetriever
from mmqa_jax.retrieval.embeddings import Embeddings
from mmqa_jax.retrieval.indexes.exact import ExactIndex
from mmqa_jax.retrieval.rankings import best_of, restricted_candidates


def ranking(**scores: float) -> Ranking:
    return Ranking("q", tuple(scores), tuple(scores.values()))


def test_two_passes_keep_the_higher_score_of_every_source():
    (merged,) = best_of([ranking(a=0.9, b=0.2, c=0.5)], [ranking(b=0.7, d=0.5)])
    assert merged == ranking(a=0.9, b=0.7, c=0.5, d=0.5)


def test_the_baselines_cap_is_sixteen_of_each_modality():
    sources = [Source(f"{m}{n}", m, "words") for m in ("text", "image") for n in range(20)]
    corpus = Corpus(sources)
    question = Question(
        "q", "val", "what?", positives=("text19",), negatives=tuple(s.id for s in sources[:-1])
    )
    (capped,) = restricted_candidates([question], corpus, CAPS["webqa"])
    assert len(capped.sources) == 32
    assert "text19" in capped.sources


def test_interpolation_adds_weighted_similarity_to_log_odds():
    relevance, similarity = [ranking(a=0.8, b=0.5)], [ranking(b=0.9, a=0.6)]
    (mixed,) = interpolate(relevance, similarity, 10.0)
    # b is the most similar: it keeps 0.5. a: logit 0.8 = ln 4, minus 10 * 0.3.
    assert mixed.sources == ("b", "a")
    np.testing.assert_allclose(mixed.scores, [0.5, 1 / (1 + np.exp(3) / 4)], rtol=1e-6)


def test_weight_nought_is_vlp_alone():
    relevance, similarity = [ranking(a=0.8, b=0.5)], [ranking(b=0.9, a=0.6)]
    (mixed,) = interpolate(relevance, similarity, 0.0)
    assert mixed.sources == ("a", "b")
    np.testing.assert_allclose(mixed.scores, [0.8, 0.5], rtol=1e-6)


def test_a_sure_vlp_stays_finite():
    (mixed,) = interpolate([ranking(a=1.0, b=0.0)], [ranking(a=0.1, b=0.9)], 5.0)
    assert np.isfinite(mixed.scores).all()
    assert mixed.sources == ("a", "b")


@pytest.mark.parametrize(("gold", "weight"), [("b", 5.0), ("a", 0.0)])
def test_the_weight_is_tuned_on_source_f1(gold, weight):
    """Where VLP is right alone, the similarity stays out; where it errs, the least that helps."""
    questions = [Question("q", "val", "what?", positives=(gold,))]
    hop = Evidence([ranking(a=0.6, b=0.5)], [ranking(b=0.9, a=0.5)])
    best, threshold, sweep = tune_selection(questions, [hop], SELECTIONS["best"])
    assert best == weight
    assert sweep[best, threshold] == max(sweep.values()) == pytest.approx(1.0, abs=1e-4)
    assert set(sweep) == {(w, t) for w in WEIGHTS for t in THRESHOLDS}


@pytest.mark.parametrize(("best", "largest"), [(80.0, 160.0), (320.0, 640.0), (1280.0, 1280.0)])
def test_larger_weights_are_tried_until_the_best_lies_inside(best, largest):
    """Of each question VLP is wrong, until a weight of its own outweighs it."""
    needed = [weight for weight in (40, 80, 160, 320, 640, 1280) if weight <= best]
    questions = [Question(str(w), "val", "what?", positives=("b",)) for w in needed]
    # 5.3 apart in log-odds, and never both above a threshold.
    relevance = [Ranking(q.id, ("a", "b"), (0.75, 0.015)) for q in questions]
    similarity = [Ranking(str(w), ("b", "a"), (0.5 + 5.5 / w, 0.5)) for w in needed]
    tuned = tune_selection(questions, [Evidence(relevance, similarity)], SELECTIONS["best"])
    assert tuned.weights == [*WEIGHTS, *(w for w in (80, 160, 320, 640, 1280) if w <= largest)]
    assert tuned.weight == best
    assert tuned.at_edge == (best == largest)


def test_hops_are_combined_by_the_higher_probability():
    """Each hop is measured against its own most similar source."""
    first = Evidence([ranking(a=0.6, b=0.3)], [ranking(a=0.9, b=0.5)])
    second = Evidence([ranking(b=0.7, c=0.2)], [ranking(b=0.6, c=0.5)])
    (mixed,) = combine([first, second], 10.0)
    assert mixed.sources == ("b", "a", "c")
    c = 1 / (1 + np.exp(np.log(4) + 10 * 0.1))  # logit of .2, a tenth behind b
    np.testing.assert_allclose(mixed.scores, [0.7, 0.6, c], rtol=1e-6)
    none = Evidence([Ranking("q", (), ())], [Ranking("q", (), ())])
    assert combine([first, none], 10.0) == combine([first], 10.0)
    (alone,) = combine([first, second], 0.0)
    assert alone == ranking(b=0.7, a=0.6, c=0.2)


def test_a_question_may_go_without_sources():
    relevance = [ranking(a=0.1, b=0.05)]
    assert select_sources(relevance, 0.2)[0].sources == ("a",)
    assert select_sources(relevance, 0.2, SELECTIONS["two_above"])[0].sources == ()
    assert select_sources(relevance, 0.08, SELECTIONS["two_above"])[0].sources == ("a",)


class Texts:
    """An embedder that knows its texts' vectors by heart, and notes what it was asked."""

    image_size = 1

    def __init__(self, **vectors):
        self.vectors, self.asked = vectors, []

    def embed_questions(self, texts, pictures=None):
        self.asked += texts
        return np.array([self.vectors[text.replace(" ", "_")] for text in texts], np.float32)


class NoPictures:
    """A picture store in which no question has pixels."""

    def question_pixels(self, question):
        return None


def two_hop_retriever() -> SecondHopRetriever:
    """Corpus of three snippets on orthogonal axes; the anthem leads to Kuwait."""
    sources = [
        Source("anthem", "text", "", title="Kuwait"),
        Source("independence", "text", "", title="Kuwait"),
        Source("other", "text", "", title="Chad"),
    ]
    embedder = Texts(
        when=[0.8, 0.0, 0.6], when_Kuwait=[0.6, 0.8, 0.0], when_did_kuwait=[0.6, 0.0, 0.8]
    )
    corpus = Corpus(sources)
    index = ExactIndex(Embeddings(np.eye(3, dtype=np.float32), "model", "corpus"))
    return SecondHopRetriever(DenseRetriever(corpus, embedder, index, NoPictures()), corpus)


def test_the_second_hop_follows_a_title_that_the_question_does_not_name():
    retriever = two_hop_retriever()
    asked = [Question("q", "", "when")]
    candidates = [ranking(anthem=0.0, independence=0.0, other=0.0)]
    first, second, questions = retriever.hops(asked, candidates)
    assert first[0].sources == ("anthem", "other", "independence")
    assert second[0].sources == ("independence", "other")  # without the first hop's best
    np.testing.assert_allclose(second[0].scores, [0.8, 0.0], atol=1e-6)
    assert [q.question for q in questions] == ["when Kuwait"]
    (best,) = retriever.search_within(asked, candidates)
    assert set(best.sources[:2]) == {"anthem", "independence"}


def test_no_second_hop_where_the_title_adds_nothing():
    """The question names the title already, or asks about a picture of its own."""
    retriever = two_hop_retriever()
    candidates = [ranking(anthem=0.0, independence=0.0, other=0.0)]
    named = [Question("q", "", "when did kuwait")]
    first, second, asked = retriever.hops(named, [ranking(anthem=0.0, independence=0.0)])
    assert (first[0].sources[0], second[0].sources, asked) == ("anthem", (), [None])
    assert retriever.retriever.embedder.asked == ["when did kuwait"]
    shown = [Question("q", "", "when", image="flag.png")]
    _, second, asked = retriever.hops(shown, candidates)
    assert (second[0].sources, asked) == ((), [None])
