"""Prediction files of OK-VQA and A-OKVQA, read and written.

    OK-VQA    [{"question_id": number, "answer": text}, ...] (VQA's results format)
    A-OKVQA   {question_id: {"direct_answer": text, "multiple_choice": text of an option}}, either
              of the two may be absent (allenai/aokvqa, prepare_predictions.py)

Both readers also read our predictions.jsonl. Null is an empty answer, or no choice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.data.table_files import whole_number
from mmqa_jax.evaluation.prediction_lines import read_answers
from mmqa_jax.evaluation.scores import NO_OPTION, predictions_by_question

DIRECT, CHOICE = "direct_answer", "multiple_choice"
_LETTER_OR_NUMBER = re.compile(r"\(?([A-Za-z]|\d+)[).:]?")


def read_okvqa_predictions(path: Path, questions: Sequence[Question] = ()) -> list[Prediction]:
    """Reads VQA's results format or predictions.jsonl."""
    if path.suffix == ".jsonl":
        return read_answers(path, question_ids={question.id for question in questions})
    rows = read_json(path)
    if not isinstance(rows, list):
        raise UserError(
            f"{path}: a list of {{question_id, answer}} was expected; give OK-VQA's results format "
            "or predictions.jsonl."
        )
    found: dict[str, Prediction] = {}
    for number, row in enumerate(rows, start=1):
        where = f"{path}, entry {number}"
        name = _question_id(row)
        if name is None or not isinstance(row.get("answer", 0), str | None):
            raise UserError(
                f'{where}: {{"question_id": number, "answer": text}} was expected; correct that '
                "entry."
            )
        answer = row["answer"] or ""
        if name in found:
            raise UserError(
                f"{where}: question {name} is answered twice; keep one prediction per question."
            )
        found[name] = Prediction(name, answer)
    return list(found.values())


def write_okvqa_submission(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes VQA's results format, which needs an entry for every question.

    Missing answers are empty.
    """
    answers = {prediction.question_id: prediction.answer for prediction in predictions}
    rows = [
        {"question_id": int(question.id), "answer": answers.get(question.id, "")}
        for question in questions
    ]
    write_json(path, rows)


def read_aokvqa_predictions(path: Path, questions: Sequence[Question]) -> list[Prediction]:
    """Reads A-OKVQA's predictions or predictions.jsonl.

    A multiple_choice that is the text of none of its question's options is NO_OPTION, which counts
    0, as in the official evaluation where that is not strict.
    """
    if path.suffix == ".jsonl":
        return read_answers(path, question_ids={question.id for question in questions})
    rows = read_json(path, unique_keys=True)
    if not isinstance(rows, dict):
        raise UserError(
            f"{path}: one object of question_id -> {{{DIRECT}, {CHOICE}}} was expected; give "
            "A-OKVQA's format or predictions.jsonl."
        )
    choices = {question.id: question.choices for question in questions}
    found = [_aokvqa_prediction(f"{path}, {k}", k, row, choices) for k, row in rows.items()]
    said = {p.question_id: rows[p.question_id].get(CHOICE) for p in found}
    chosen = [p for p in found if said[p.question_id] is not None]
    if chosen and all(
        p.choice == NO_OPTION
        and p.question_id in choices
        and _LETTER_OR_NUMBER.fullmatch(said[p.question_id].strip())
        for p in chosen
    ):
        raise UserError(
            f"{path}: every {CHOICE} is a letter or a number, and none is the text of one of its "
            "question's options, as the official format has it; write the options' texts."
        )
    return found


def write_aokvqa_submission(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes the leaderboard's file: every question, with what was predicted of the two."""
    given = predictions_by_question(questions, predictions)
    rows: dict[str, dict[str, str]] = {}
    for question in questions:
        row = rows.setdefault(question.id, {})
        prediction = given.get(question.id)
        if prediction is not None and prediction.choice is not None:
            row[CHOICE] = question.choices[prediction.choice]
        if prediction is not None and prediction.answer:
            row[DIRECT] = prediction.answer
    write_json(path, rows)


def _question_id(row: Any) -> str | None:
    """The id of an entry, a whole number in any form; None where it has none."""
    number = whole_number(row.get("question_id")) if isinstance(row, dict) else None
    return None if number is None else str(number)


def _aokvqa_prediction(
    where: str, name: str, row: Any, choices: dict[str, tuple[str, ...]]
) -> Prediction:
    if not isinstance(row, dict) or not all(
        isinstance(row.get(key), str | None) for key in (DIRECT, CHOICE)
    ):
        raise UserError(
            f'{where}: {{"{DIRECT}": text, "{CHOICE}": text}} was expected; correct that entry.'
        )
    choice = None
    text = row.get(CHOICE)
    if text is not None:
        options = choices.get(name, ())
        choice = options.index(text) if text in options else NO_OPTION
    return Prediction(name, row.get(DIRECT) or "", choice=choice)
