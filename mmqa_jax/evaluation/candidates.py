"""How good a VQA model's answer candidates are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mmqa_jax.data.answer_text import official_of_weight
from mmqa_jax.data.datasets.benchmark import SOFT_LABELS
from mmqa_jax.data.datasets.webqa import has_keywords
from mmqa_jax.data.schema import Question
from mmqa_jax.evaluation.vqa import official_accuracy, soft_label_accuracy
from mmqa_jax.evaluation.webqa import keyword_accuracy

RECALL_AT = (1, 3, 5, 10)


def score_candidates(
    questions: Sequence[Question], candidates: Mapping[str, Sequence[tuple[str, float]]]
) -> dict[str, float]:
    """Scores over the questions; one without candidates counts 0.

        accuracy     VQA accuracy of the first candidate: official, from annotators' answers, or
                     from soft labels where those stand for them; WebQA's without lemmas, from
                     keywords
        recall@k     share of questions with an answer of any annotator among the first k
        oracle@k     accuracy of the best of the first k

    Args:
      questions: with answers.
      candidates: question_id -> (answer, confidence), best first.
    """
    worth = np.zeros((len(questions), max(RECALL_AT)))
    for row, question in enumerate(questions):
        for column, (answer, _) in enumerate(candidates.get(question.id, ())[: max(RECALL_AT)]):
            worth[row, column] = _accuracy(answer, question)
    scores = {"accuracy": float(worth[:, 0].mean())}
    for k in RECALL_AT:
        best = worth[:, :k].max(axis=1)
        scores[f"recall@{k}"] = float((best > 0).mean())
        scores[f"oracle@{k}"] = float(best.mean())
    return scores


def _accuracy(answer: str, question: Question) -> float:
    if has_keywords(question):
        return keyword_accuracy(answer, question)
    labels = question.extra.get(SOFT_LABELS)
    if labels is None:
        return official_accuracy(answer, question.answers)
    return official_of_weight(soft_label_accuracy(answer, labels))
