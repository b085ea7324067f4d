"""Answers that are one of a question's choices: read from JSON lines, chosen by a rule, counted.

A prediction that has a choice and no text, or no text but that choice's, counts by its choice under
every rule. Lines are {"question_id", "text"} (LLaVA), {"question_id", "prediction"} or
{"question_id", "losses"}; they may end in a comma, as in SEED-Bench's evaluate_result/, or be a
JSON list. The first line says of which kind all of a file are. Null, a choice out of range and
losses that are not numbers are answers that name no choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.data.table_files import real_number
from mmqa_jax.evaluation import multiple_choice as rules
from mmqa_jax.evaluation.prediction_lines import OTHERS, Row, answers_of, id_of, json_rows
from mmqa_jax.evaluation.scores import NO_OPTION

Given = Mapping[str, Prediction]
Rule = Callable[[str, Question], int | None]


def has_answer(question: Question) -> bool:
    """Whether the correct choice is published."""
    return question.answer_index is not None


def chosen_by(questions: Sequence[Question], given: Given, rule: Rule) -> list[int | None]:
    """Each question's choice: by the rule from the answer's text, or as given where it has none."""
    choices: list[int | None] = []
    for question in questions:
        prediction = given.get(question.id)
        if prediction is None:
            choices.append(None)
        elif by_choice(prediction, question):
            choices.append(prediction.choice)
        else:
            choices.append(rule(prediction.answer, question))
    return choices


def by_choice(prediction: Prediction, question: Question) -> bool:
    """Whether a prediction is a choice, and no text that a rule could read otherwise."""
    if prediction.choice is None:
        return False
    text = question.choices[prediction.choice]
    return prediction.answer in ("", text, f"{rules.LETTERS[prediction.choice]}. {text}")


def right_choices(questions: Sequence[Question], choices: Sequence[int | None]) -> np.ndarray:
    """1.0 where the choice is the correct one; [question]."""
    pairs = zip(questions, choices, strict=True)
    return np.array([float(choice == question.answer_index) for question, choice in pairs])


def unparsed_choices(
    questions: Sequence[Question], given: Given, choices: Sequence[int | None]
) -> int:
    """How many predictions name none of their question's choices."""
    pairs = zip(questions, choices, strict=True)
    return sum(question.id in given and choice is None for question, choice in pairs)


def read_choice_lines(path: Path, questions: Sequence[Question]) -> list[Prediction]:
    """Reads JSON lines with a text, a letter or losses; or predictions.jsonl."""
    return choices_of(path, list(json_rows(path)), questions)


def choices_of(
    path: Path, rows: Sequence[tuple[str, Row]], questions: Sequence[Question]
) -> list[Prediction]:
    """The predictions of a file's rows, which are all of the first one's kind."""
    first = rows[0][1] if rows else {}
    kind = next((key for key in OTHERS if key in first), None)
    counts = {question.id: len(question.choices) for question in questions}
    if kind is None:
        return answers_of(path, rows, question_ids=counts)
    predictions = []
    for where, row in rows:
        if kind not in row or ("q_id" in row) != ("q_id" in first):
            raise UserError(
                f"{where}: its keys are {', '.join(row)}, but those of the first line are "
                f"{', '.join(first)}; write all lines alike."
            )
        predictions.append(_line(where, row, kind, counts))
    return predictions


def _line(where: str, row: Row, kind: str, counts: Mapping[str, int]) -> Prediction:
    """The prediction of a row; `counts` is question id -> number of choices."""
    id_key = "q_id" if "q_id" in row else "question_id"
    name, value = id_of(row.get(id_key), where, counts, id_key), row[kind]
    if kind == "losses":
        return Prediction(name, choice=_likeliest(where, value, counts.get(name)))
    if not isinstance(value, str | None):
        raise UserError(f"{where}: {kind} is {value!r:.60}; text was expected.")
    if id_key == "q_id" and value:  # the first official eval.py, which ranks by loss
        index = rules.letter_index(value, counts.get(name, 0))
        return Prediction(name, choice=NO_OPTION if index is None else index)
    return Prediction(name, value or "")


def _likeliest(where: str, losses: Any, count: int | None) -> int | None:
    """The choice of least loss; NO_OPTION where one is NaN or null, None for null alone."""
    if losses is None:
        return None
    if (
        not isinstance(losses, list)
        or not all(x is None or real_number(x, finite=False) is not None for x in losses)
        or not 0 < len(losses) == (count or len(losses))
    ):
        raise UserError(
            f"{where}: losses is {losses!r:.60}; a number for each choice was expected."
        )
    if any(loss is None or math.isnan(loss) for loss in losses):
        return NO_OPTION
    return rules.likeliest_choice(losses)


def shown_answer(prediction: Prediction) -> str:
    """The answer as a file shows it: its text, or the letter of its choice."""
    if prediction.answer or prediction.choice is None:
        return prediction.answer
    return rules.LETTERS[prediction.choice]
