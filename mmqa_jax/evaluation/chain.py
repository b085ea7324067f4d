"""Where a chain of retriever, reranker and reader loses its answers.

A question belongs to the first stage that loses a gold source of it, and to reading if none does.

- retrieval: a gold source is not among the candidates
- selection: the candidates hold all gold sources, the reader was given fewer
- reading: the reader was given all gold sources

What its answer lacks of the full score is lost there, so that the score and the losses of all
stages add up to 1. An answer can be right without all of its sources; what a stage costs is told by
rows that skip it (gold sources in place of retrieval), this by the questions of one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.evaluation.tables import Table

STAGES = ("retrieval", "selection", "reading")


def stage_of(question: Question, candidates: Ranking, prediction: Prediction) -> str:
    """The first stage that loses a gold source, or `reading`."""
    gold = set(question.positives)
    if not gold <= set(candidates.sources):
        return "retrieval"
    return "reading" if gold <= set(prediction.read or prediction.sources) else "selection"


def losses_by_stage(
    questions: Sequence[Question],
    candidates: Sequence[Ranking],
    predictions: Sequence[Prediction],
    right: Mapping[str, float],
) -> dict[str, dict[str, float]]:
    """Stage -> its `questions`, their mean `score` (0 without one), and what of 1 is `lost` there.

    Questions without gold sources, and those that were not scored, are left out.

    Args:
      questions, candidates, predictions: aligned.
      right: question id -> score of the answer, 0..1.
    """
    found: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for question, ranking, prediction in zip(questions, candidates, predictions, strict=True):
        if question.positives and question.id in right:
            found[stage_of(question, ranking, prediction)].append(right[question.id])
    total = sum(map(len, found.values()))
    return {
        stage: {
            "questions": len(scores),
            "score": sum(scores) / len(scores) if scores else 0.0,
            "lost": (len(scores) - sum(scores)) / total,
        }
        for stage, scores in found.items()
        if total
    }


def losses_tables(scores: Mapping[str, Any]) -> list[Table]:
    """The table of `lost` of a row's scores.json; none of a row without it."""
    if "lost" not in scores:
        return []
    stages = scores["lost"]["stages"]
    total = sum(values["questions"] for values in stages.values())
    lost = sum(values["lost"] for values in stages.values())
    rows = [
        [
            stage,
            values["questions"],
            values["score"] if values["questions"] else None,
            values["lost"],
        ]
        for stage, values in stages.items()
    ]
    return [
        Table(
            "Where answers are lost",
            ("first stage that loses a gold source", "questions", scores["lost"]["scorer"], "lost"),
            [*rows, ["all", total, 1 - lost, lost]],
            "`reading` has the questions of which the reader was given all gold sources. The score "
            "of all and what is lost add up to 1.",
        )
    ]
