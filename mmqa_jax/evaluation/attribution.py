"""What answers cite, beside the gold sources, and what is refused: attribution.

As ALCE (Gao et al., EMNLP 2023) counts, an answer without citations has neither precision nor
recall; unlike there no model judges whether a source supports a statement, since gold sources are
known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmqa_jax.data.schema import Prediction, Question, is_answerable, says_not_found
from mmqa_jax.evaluation.scores import (
    Scores,
    predictions_by_question,
    questions_that_count,
    scores_of,
)


def score_citations(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Scores:
    """`citation_precision` and `citation_recall` of the questions that have gold sources.

    Precision is the share of an answer's cited sources that are gold, recall the share of the gold
    ones that it cites; both are 0 where it cites none.
    """
    by_question = predictions_by_question(questions, predictions)
    scored = questions_that_count(questions, lambda q: bool(q.positives), "gold sources")
    cited = [set(by_question[q.id].sources) if q.id in by_question else set() for q in scored]
    right = [len(names & set(q.positives)) for names, q in zip(cited, scored, strict=True)]
    per_question = {
        "citation_precision": np.array(
            [n / max(len(names), 1) for n, names in zip(right, cited, strict=True)]
        ),
        "citation_recall": np.array(
            [n / len(set(q.positives)) for n, q in zip(right, scored, strict=True)]
        ),
    }
    return scores_of(questions, scored, by_question, per_question)


def score_refusals(
    questions: Sequence[Question], predictions: Sequence[Prediction]
) -> list[Scores]:
    """Whether questions are refused, of those that a source answers and of those that none does.

    `refused/unanswerable` is 1 where no answer was given rightly, and 0 where one was made up;
    `refused/answerable` is 1 where an answer was withheld that the sources have. A missing
    prediction counts as no answer.

    Returns:
      One Scores for each kind of question that there is.
    """
    by_question = predictions_by_question(questions, predictions)
    scored = []
    for name, answerable in (("answerable", True), ("unanswerable", False)):
        asked = [question for question in questions if is_answerable(question) == answerable]
        refused = [q.id not in by_question or is_refusal(by_question[q.id]) for q in asked]
        if asked:
            per_question = {f"refused/{name}": np.array(refused, float)}
            scored.append(scores_of(questions, asked, by_question, per_question))
    return scored


def is_refusal(prediction: Prediction) -> bool:
    """Whether a prediction gives no answer: it says so, or has neither text nor choice."""
    if prediction.choice is not None:
        return False
    return not prediction.answer.strip() or says_not_found(prediction.answer)
