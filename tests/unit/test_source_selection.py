"""Source selection beyond the paper: two readings, and VLP with the retriever's similarity."""

from __future__ import annotations

import numpy as np
import pytest

from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.retrieval.rankings import best_of
from mmqa_jax.systems import webqa


def ranking(**scores: float) -> Ranking:
    return Ranking("q", tuple(scores), tuple(scores.values()))


def test_two_passes_keep_the_higher_score_of_every_source():
    (merged,) = best_of([ranking(a=0.9, b=0.2, c=0.5)], [ranking(b=0.7, d=0.5)])
    assert merged == ranking(a=0.9, b=0.7, c=0.5, d=0.5)


def test_interpolation_adds_weighted_similarity_to_log_odds():
    relevance, similarity = [ranking(a=0.8, b=0.5)], [ranking(b=0.9, a=0.6)]
    (mixed,) = webqa.interpolate(relevance, similarity, 10.0)
    # b is the most similar: it keeps 0.5. a: logit 0.8 = ln 4, minus 10 * 0.3.
    assert mixed.sources == ("b", "a")
    np.testing.assert_allclose(mixed.scores, [0.5, 1 / (1 + np.exp(3) / 4)], rtol=1e-6)


def test_weight_nought_is_vlp_alone():
    relevance, similarity = [ranking(a=0.8, b=0.5)], [ranking(b=0.9, a=0.6)]
    (mixed,) = webqa.interpolate(relevance, similarity, 0.0)
    assert mixed.sources == ("a", "b")
    np.testing.assert_allclose(mixed.scores, [0.8, 0.5], rtol=1e-6)


def test_a_sure_vlp_stays_finite():
    (mixed,) = webqa.interpolate([ranking(a=1.0, b=0.0)], [ranking(a=0.1, b=0.9)], 5.0)
    assert np.isfinite(mixed.scores).all()
    assert mixed.sources == ("a", "b")


@pytest.mark.parametrize(("gold", "weight"), [("b", 5.0), ("a", 0.0)])
def test_the_weight_is_tuned_on_source_f1(gold, weight):
    """Where VLP is right alone, the similarity stays out; where it errs, the least that helps."""
    questions = [Question("q", "val", "what?", positives=(gold,))]
    best, threshold, sweep = webqa.tune_selection(
        questions, [ranking(a=0.6, b=0.5)], [ranking(b=0.9, a=0.5)]
    )
    assert best == weight
    assert sweep[best, threshold] == max(sweep.values()) == pytest.approx(1.0, abs=1e-4)
    assert set(sweep) == {(w, t) for w in webqa.WEIGHTS for t in webqa.THRESHOLDS}
