"""A weighted vote among short answers."""

from __future__ import annotations

from collections.abc import Sequence

from mmqa_jax.data.answer_text import prep_ans


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
