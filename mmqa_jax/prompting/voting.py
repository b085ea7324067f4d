"""Votes among short answers, with given weights or with weights fitted to answers and scores."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from mmqa_jax.evaluation.answer_text import prep_ans

_LARGEST_WEIGHT = 4


def vote(ballots: Sequence[tuple[str, float]]) -> tuple[str, dict[str, float]]:
    """The answer with the largest sum of weights, and the sums.

    Answers are equal if Prophet's `prep_ans` makes them so; empty ones lose their vote. Of equal
    sums the answer that comes first wins. "" if no answer is left.

    Args:
      ballots: (answer, weight of at least 0).
    """
    sums: dict[str, float] = {}
    for answer, weight in ballots:
        if answer := prep_ans(answer):
            sums[answer] = sums.get(answer, 0.0) + weight
    return max(sums, key=lambda answer: sums[answer], default=""), sums


def fit_weights(
    answers: Sequence[Sequence[str]],
    scores: Sequence[Sequence[float]],
    start: Sequence[float],
) -> tuple[float, ...]:
    """Weights of voters that maximize the mean score of the answers that they elect.

    Whole numbers from 0 to 4 are tried, all combinations. Of equally good ones the nearest to
    `start` is taken, and of these the first.

    Args:
      answers: of every question, one per voter, in the order in which `vote` prefers them.
      scores: of these answers.
      start: one weight per voter.
    """
    voters = len(start)
    given = [[(prep_ans(answer), score) for answer, score in zip(a, s, strict=True)]
             for a, s in zip(answers, scores, strict=True)]  # fmt: skip
    # The same pattern of agreement and scores occurs in many questions.
    patterns: dict[tuple, int] = {}
    for row in given:
        texts = [text for text, _ in row]
        names = tuple(texts.index(text) if text else -1 for text in texts)
        key = (names, tuple(score for _, score in row))
        patterns[key] = patterns.get(key, 0) + 1

    def total(weights: tuple[float, ...]) -> float:
        value = 0.0
        for (names, score), count in patterns.items():
            ballots = [
                (str(name) if name >= 0 else "", w) for name, w in zip(names, weights, strict=True)
            ]
            winner, _ = vote(ballots)
            value += count * (score[int(winner)] if winner else 0.0)
        return value

    tried = [
        tuple(map(float, weights))
        for weights in itertools.product(range(_LARGEST_WEIGHT + 1), repeat=voters)
        if any(weights)
    ]
    tried.sort(key=lambda weights: float(np.abs(np.subtract(weights, start)).sum()))
    return max(tried, key=total)
