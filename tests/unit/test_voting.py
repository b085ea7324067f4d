"""Votes among answers, and weights fitted to them."""

import itertools

import pytest

from mmqa_jax.extensions.mavl_votes import fit_weights
from mmqa_jax.papers.prophet import vote


@pytest.mark.parametrize("pattern", list(itertools.product("xyz", repeat=3)))
def test_two_agreeing_agents_win_else_the_manager(pattern):
    """With 2, 3 and 4 votes."""
    junior, senior, manager = pattern
    elected, sums = vote([(manager, 4), (senior, 3), (junior, 2)])
    assert elected == (junior if junior == senior else manager)
    assert sum(sums.values()) == 9


def test_answers_are_compared_normalized():
    assert vote([("The soup.", 1), ("stew", 1.5), ("soup", 1)]) == (
        "soup",
        {"soup": 2, "stew": 1.5},
    )


def test_empty_answers_lose_their_vote():
    assert vote([("", 4), ("the", 3), ("tea", 2)]) == ("tea", {"tea": 2})
    assert vote([("", 4), ("", 3)]) == ("", {})
    assert vote([]) == ("", {})


def test_of_equal_sums_the_first_wins():
    assert vote([("x", 1), ("y", 1)])[0] == "x"
    assert vote([("y", 1), ("x", 1)])[0] == "y"


def test_fitted_weights_elect_the_better_voter():
    """The second voter is right where the two others agree on a wrong answer."""
    answers = [["x", "y", "x"]] * 3 + [["u", "v", "w"]]
    scores = [[0.0, 1.0, 0.0]] * 3 + [[1.0, 0.0, 0.0]]
    weights = fit_weights(answers, scores, (2, 3, 4))
    elected = [vote(list(zip(row, weights, strict=True)))[0] for row in answers]
    assert elected[:3] == ["y"] * 3
    assert weights[1] > weights[0] + weights[2] - 1e-9


def test_without_a_gain_the_start_is_kept():
    assert fit_weights([["x", "x", "x"]], [[1.0, 1.0, 1.0]], (4, 3, 2)) == (4.0, 3.0, 2.0)
    assert fit_weights([], [], (4, 3, 2)) == (4.0, 3.0, 2.0)


def test_fitting_is_exhaustive():
    """Against a search over the questions one by one."""
    answers = [["x", "y", ""], ["x", "x", "z"], ["y", "x", "x"], ["p", "q", "r"]]
    scores = [[0.3, 1, 0], [0, 0, 1], [1, 0.6, 0.6], [0, 0.9, 0.3]]

    def total(weights) -> float:
        gained = 0.0
        for row, score in zip(answers, scores, strict=True):
            elected, _ = vote(list(zip(row, weights, strict=True)))
            gained += score[row.index(elected)] if elected else 0.0
        return gained

    best = max(total(w) for w in itertools.product(range(5), repeat=3) if any(w))
    assert total(fit_weights(answers, scores, (2, 3, 4))) == pytest.approx(best)
