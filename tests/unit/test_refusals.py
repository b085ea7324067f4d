"""The threshold below which a question is refused."""

import pytest

from mmqa_jax.evaluation.webqa import refused_share, tune_refusal
from tests.refusals import refuses


def test_the_threshold_lies_between_both_kinds():
    found = tune_refusal([0.6, 0.7, 0.9], [0.1, 0.3, 0.4])
    assert found.threshold == pytest.approx(0.5)
    assert (found.answerable, found.foreign) == (0.0, 1.0)


def test_both_kinds_count_the_same_however_many_there_are():
    # 0.45 loses one of 10 answers (0.1) and refuses one question more of 2 (0.5).
    answerable = [0.4, *[0.8] * 9]
    found = tune_refusal(answerable, [0.3, 0.42])
    assert found.threshold == pytest.approx(0.61)
    assert (found.answerable, found.foreign) == (0.1, 1.0)


def test_nothing_is_refused_where_that_would_only_cost_answers():
    found = tune_refusal([0.1, 0.2], [0.8, 0.9])
    assert (found.answerable, found.foreign) == (0.0, 0.0)
    assert refused_share([0.1, 0.05], found.threshold) == 0.5


def test_questions_of_both_kinds_are_needed():
    refuses("0 questions with an answer and 1 without one", tune_refusal, [], [0.5])
