"""When a question is refused: a threshold on the similarity of the nearest source."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from mmqa_jax.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A threshold and what it does to the questions that it was chosen on.

    Attributes:
      threshold: questions whose nearest source is less similar are refused.
      answerable: the share of questions with an answer that are refused, wrongly.
      foreign: the share of questions without one that are refused, rightly.
    """

    threshold: float
    answerable: float
    foreign: float


def refused_share(similarities: Sequence[float], threshold: float) -> float:
    """The share of questions that a threshold refuses."""
    return float(np.mean(np.asarray(similarities) < threshold))


def tune_refusal(answerable: Sequence[float], foreign: Sequence[float]) -> Refusal:
    """The threshold with the best balanced accuracy: the mean of both shares that are right.

    Halfway between two similarities that occur; of thresholds that are equally good the lowest,
    which refuses the fewest.

    Args:
      answerable, foreign: the similarity of each question's nearest source, of questions that the
        corpus answers and of others.
    """
    if not len(answerable) or not len(foreign):
        raise UserError(
            f"refusals: {len(answerable)} questions with an answer and {len(foreign)} without one; "
            "some of both are needed."
        )
    values = np.unique(np.concatenate([answerable, foreign]))
    thresholds = [values[0], *(values[:-1] + values[1:]) / 2]

    def gain(threshold: float) -> float:
        return refused_share(foreign, threshold) - refused_share(answerable, threshold)

    best = max(thresholds, key=gain)  # the first of equals
    shares = refused_share(answerable, best), refused_share(foreign, best)
    return Refusal(float(best), *shares)
