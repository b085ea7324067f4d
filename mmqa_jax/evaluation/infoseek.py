"""InfoSeek's score and its prediction file (edchengg/infoseek_eval, infoseek_eval.py).

    infoseek/official   string and time questions: the answer is one of the spellings that count,
                        normalized as SQuAD's; numerical ones: its number lies in the range, or its
                        range within that or over half of their union

The final score is the harmonic mean of the scores on unseen questions and on unseen entities; it
stands in a note. The file has a line {"data_id", "prediction"} for each question.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mmqa_jax.core.files import write_jsonl
from mmqa_jax.data.datasets.infoseek import RANGE, TYPES, UNSEEN
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.prediction_lines import read_answers_by
from mmqa_jax.evaluation.scores import (
    group_of,
    predictions_by_question,
    questions_that_count,
    scores_of,
)
from mmqa_jax.evaluation.scoring import Evaluation
from mmqa_jax.evaluation.squad import squad_exact_match

SCORER = "infoseek/official"
_NUMBER = re.compile(r"[-+]?[.]?\d+(?:,\d\d\d)*\.?\d*(?:[eE][-+]?\d+)?")
_LEAST_OVERLAP = 0.5
_EPS = 1e-12


def has_typed_answer(question: Question) -> bool:
    """Whether a question has an answer, and the type by which it is scored."""
    return bool(question.category) and (bool(question.answers) or RANGE in question.extra)


def is_right(said: str, question: Question) -> bool:
    """The official judgment of an answer."""
    if question.category == "numerical":
        return numbers_match(numbers_of(said), question.extra[RANGE])
    return bool(squad_exact_match(said, question.answers))


def numbers_of(text: str) -> list[float]:
    """The number in a text, or the two of a range: the first two, if they ascend.

    [0, 0] where there is none. A hyphen behind a digit is no sign.
    """
    apart = "".join(
        " - " if sign == "-" and before.isdigit() else sign
        for before, sign in zip(f" {text}", text, strict=False)
    )
    found = [one.replace(",", "").strip(".") for one in _NUMBER.findall(apart)]
    numbers = [float(one) for one in found if one.count(".") < 2][:2]  # at -.2.3 the script stops
    if not numbers:
        return [0.0, 0.0]
    return numbers if len(numbers) == 2 and numbers[0] <= numbers[1] else numbers[:1]


def numbers_match(said: Sequence[float], bounds: Sequence[float]) -> bool:
    """Whether a number lies in the range, or a range within it or over half of their union."""
    low, high = bounds
    if all(low <= number <= high for number in said):
        return True
    if len(said) == 1:
        return False
    overlap = max(0.0, min(said[1], max(bounds)) - max(said[0], min(bounds)))
    union = (said[1] - said[0] + _EPS) + (max(bounds) - min(bounds) + _EPS) - overlap
    return overlap / union >= _LEAST_OVERLAP - _EPS


def harmonic_mean(values: Sequence[float]) -> float:
    """As the script's: a score of 0 counts as 1e-12."""
    return len(values) / sum(1 / (value or _EPS) for value in values)


def score_infoseek(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """The score, by what is unseen and by type; a missing prediction is wrong.

    The script leaves questions without a prediction out of its means.
    """
    given = predictions_by_question(questions, predictions)
    scored = questions_that_count(questions, has_typed_answer, "an answer and a type")
    right = [q.id in given and is_right(given[q.id].answer, q) for q in scored]
    groups = _groups(scored)
    scores = scores_of(questions, scored, given, {SCORER: np.array(right, float)}, groups)
    evaluation = Evaluation([scores], has_modalities=False)
    halves = [scores.of_category(SCORER, name) for name in ("unseen question", "unseen entity")]
    if all(map(len, halves)):
        final = harmonic_mean([round(100 * float(half.mean()), 2) for half in halves])
        evaluation.notes.append(
            f"final score, the harmonic mean of unseen question and unseen entity: {final:.2f} %"
        )
    return evaluation


def read_infoseek_predictions(path: Path, questions: Sequence[Question] = ()) -> list[Prediction]:
    """Reads the official lines, or predictions.jsonl."""
    return read_answers_by(path, "data_id", "prediction", {question.id for question in questions})


def write_infoseek_submission(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes the official lines, one for every question."""
    given = predictions_by_question(questions, predictions)
    write_jsonl(
        path,
        (
            {"data_id": q.id, "prediction": given[q.id].answer if q.id in given else ""}
            for q in questions
        ),
    )


def _groups(questions: Sequence[Question]) -> dict[str, np.ndarray]:
    return {
        "unseen question": group_of(questions, lambda q: q.extra.get(UNSEEN) == "unseen_question"),
        "unseen entity": group_of(questions, lambda q: q.extra.get(UNSEEN) == "unseen_entity"),
        **{kind: group_of(questions, lambda q, kind=kind: q.category == kind) for kind in TYPES},
    }
