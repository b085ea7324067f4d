"""Multiple choice in a corpus of one's own: `choice_accuracy/recorded_choice`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.scores import (
    Scores,
    predictions_by_question,
    questions_that_count,
    scores_of,
)

CHOICE_ACCURACY = "choice_accuracy/recorded_choice"


def score_choices(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Scores:
    """Accuracy of the predictions' choices; a missing one is wrong."""
    given = predictions_by_question(questions, predictions)
    scored = questions_that_count(
        questions, lambda question: question.answer_index is not None, "a known choice"
    )
    right = [q.id in given and given[q.id].choice == q.answer_index for q in scored]
    per_question = {CHOICE_ACCURACY: np.array(right, float)}
    groups = None if any(question.category for question in scored) else {}
    return scores_of(questions, scored, given, per_question, groups)


def chance(questions: Sequence[Question]) -> float:
    """The accuracy of a random choice."""
    counts = [len(q.choices) for q in questions if q.answer_index is not None]
    return float(np.mean([1 / count for count in counts]))
