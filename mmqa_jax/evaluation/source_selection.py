"""Selects the sources to cite by relevance; source F1, and the sweep of the threshold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.schema import Question, Ranking

# Thresholds tried on val; the paper settles on 0.2 (section 6.1).
THRESHOLDS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# Candidates of each modality that are scored in the restricted setting; `webqa` is the baseline's
# limit (run_webqa.py:208-209, --txt_filter_max_choices and --img_filter_max_choices), which keeps
# the gold sources first (webqa_loader.py:484,489) and so cannot be had where they are hidden.
CAPS: dict[str, int | None] = {"none": None, "webqa": 16}
Cap = Literal["none", "webqa"]


class Selection(NamedTuple):
    """Limits on the number of sources cited per question, whatever the threshold.

    The best `fewest` are always cited, and no more than `most` (None: no limit); if `inclusive`, a
    source whose probability equals the threshold is cited too.
    """

    fewest: int
    most: int | None
    inclusive: bool = False

    def cites(self, rank: int, relevance: float, threshold: float) -> bool:
        """Whether the source at `rank` (0 is the best) is cited."""
        if rank < self.fewest or (self.inclusive and relevance == threshold):
            return True
        return relevance > threshold


# `best`: always the best source, and the second from the threshold on (WebQA 6.2: `>=` in
# CLIP_encodings.ipynb, cell 43). `above`: every source above the threshold, possibly none (the
# restricted setting: `>` in modeling.py:1106-1123). `two_above`: two at most, possibly none, for a
# question with a picture of its own.
SELECTIONS = {
    "best": Selection(1, 2, inclusive=True),
    "above": Selection(0, None),
    "two_above": Selection(0, 2),
}
Select = Literal["best", "above", "two_above"]


def check_threshold(threshold: float, name: str) -> None:
    """UserError unless the threshold, which the user knows as `name`, is a probability."""
    if not 0 <= threshold <= 1:
        raise UserError(
            f"{name}={threshold}: a probability from 0 to 1 was expected; give one, such as 0.2."
        )


def select_sources(
    relevance: Sequence[Ranking], threshold: float, selection: Selection = SELECTIONS["best"]
) -> list[Ranking]:
    """Returns the sources to cite: above the threshold, as the selection says."""
    selected = []
    for ranking in relevance:
        places = [
            i
            for i, score in enumerate(ranking.scores[: selection.most])
            if selection.cites(i, score, threshold)
        ]
        names, scores = (
            tuple(values[i] for i in places) for values in (ranking.sources, ranking.scores)
        )
        selected.append(Ranking(ranking.question_id, names, scores))
    return selected


def tune_threshold(
    questions: Sequence[Question], relevance: Sequence[Ranking], selection: Selection
) -> tuple[float, dict[float, float]]:
    """The threshold with the best mean source F1 (on val), and threshold -> F1 for every one."""
    sweep = {
        threshold: mean_source_f1(questions, select_sources(relevance, threshold, selection))
        for threshold in THRESHOLDS
    }
    return best_threshold(sweep), sweep


def best_threshold(sweep: Mapping[float, float]) -> float:
    """The threshold with the best source F1; ties go to the one nearest the paper's 0.2."""
    return max(sweep, key=lambda threshold: (sweep[threshold], -abs(threshold - 0.2)))


def mean_source_f1(questions: Sequence[Question], cited: Sequence[Ranking]) -> float:
    """Mean source F1 of cited sources; 0 if no question has gold sources."""
    values = source_f1s(questions, cited)
    return float(values.mean()) if values.size else 0.0


def source_f1s(questions: Sequence[Question], cited: Sequence[Ranking]) -> np.ndarray:
    """Source F1 of every question that has gold sources, float64."""
    from mmqa_jax.evaluation.webqa import source_f1

    return np.array(
        [
            source_f1(ranking.sources, question.positives, variant="official")
            for question, ranking in zip(questions, cited, strict=True)
            if question.positives
        ]
    )


# When a question is refused: a threshold on the similarity of the nearest source.


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A threshold of the nearest source's similarity, below which questions are refused, and the
    shares of the questions that it refuses: of those with an answer wrongly, of foreign ones
    rightly.
    """

    threshold: float
    answerable: float
    foreign: float


def refused_share(similarities: Sequence[float], threshold: float) -> float:
    """The share of questions that a threshold refuses."""
    return float(np.mean(np.asarray(similarities) < threshold))


def tune_refusal(answerable: Sequence[float], foreign: Sequence[float]) -> Refusal:
    """The threshold with the best balanced accuracy: the mean of both shares that are right.

    It lies halfway between two similarities that occur, each of a question's nearest source; of
    thresholds that are equally good the lowest is taken, which refuses the fewest. The corpus
    answers the `answerable` questions, and not the `foreign` ones.
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
