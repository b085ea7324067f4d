"""trace.jsonl: how a prompted system came to each of its answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmqa_jax.data.schema import Prediction, Question


def trace_rows(
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    scores: Mapping[str, Mapping[str, float]],
) -> Iterator[dict[str, Any]]:
    """One line per question: its prompts, shots, raw outputs, answer and scores."""
    for question, prediction in zip(questions, predictions, strict=True):
        yield {
            "question_id": question.id,
            "question": question.question,
            "answer": prediction.answer,
            "choice": prediction.choice,
            "references": list(question.answers or question.choices),
            "scores": dict(scores.get(question.id, {})),
            **prediction.trace,
        }


def trace_counts(predictions: Sequence[Prediction]) -> dict[str, int]:
    """What scores.json says of the prompts: dropped shots, failures and empty answers."""
    traces = [prediction.trace for prediction in predictions if prediction.trace]
    return {
        "questions_with_dropped_shots": sum(bool(t.get("dropped_shots")) for t in traces),
        "dropped_shots": sum(t.get("dropped_shots", 0) for t in traces),
        "too_long": sum(bool(t.get("too_long")) for t in traces),
        "failed": sum(bool(t.get("failed")) for t in traces),
        "empty_answers": sum(not p.answer for p in predictions if p.trace),
    }
