"""Prediction files of ScienceQA, MMBench and SEED-Bench, read and written.

    ScienceQA   {"results": {pid: index}, "outputs": {pid: text}}, either may be absent
                (models/run_gpt3.py and LLaVA's eval_science_qa.py write both)
    MMBench     a table (.xlsx, .tsv) with the columns index and prediction, a row per pass
    SEED-Bench  JSON lines: {"question_id", "prediction": letter}; as written by the official
                eval.py, {"q_id", "prediction": letter of the choice of least loss}; or
                {"question_id", "losses": [of each choice]}
    LLaVA       JSON lines of {"question_id", "text"}, for any of them

All readers also read our predictions.jsonl.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import check_text, read_jsonl, write_json, write_jsonl
from mmqa_jax.data.datasets.mmbench import L2, PREDICTION, mmbench_rows
from mmqa_jax.data.datasets.webqa import read_unique_json
from mmqa_jax.data.predictions import read_predictions
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.data.table_files import SUFFIXES, write_spreadsheet
from mmqa_jax.evaluation import multiple_choice as rules

_SPREADSHEET = ("index", "question", "hint", *"ABCDEFGH", "answer", "category", L2, "split")


def read_scienceqa_predictions(path: Path, questions: Sequence[Question] = ()) -> list[Prediction]:
    """Reads results and outputs, LLaVA's lines or predictions.jsonl.

    A negative index, LLaVA's mark of a failed extraction, is no choice.

    Raises:
      UserError: names the file and the problem or line that is malformed.
    """
    if path.suffix == ".jsonl":
        return read_choice_lines(path)
    data = read_unique_json(path)
    parts = ("results", "outputs")
    if not isinstance(data, dict) or not any(isinstance(data.get(p), dict) for p in parts):
        raise UserError(
            f'{path}: {{"results": {{pid: index}}}} was expected, or "outputs": {{pid: text}}; '
            "give ScienceQA's or LLaVA's results file, or predictions.jsonl."
        )
    results, outputs = ((data.get(part) or {}) for part in parts)
    for part, values, kind in (("results", results, int), ("outputs", outputs, str)):
        for pid, value in values.items():
            if type(value) is not kind:
                expected = "a choice's number from 0" if kind is int else "text"
                raise UserError(
                    f"{path}, {part}, problem {pid}: {value!r} was found and {expected} expected; "
                    "correct it."
                )
    check_text(outputs, str(path))
    return [
        Prediction(
            pid,
            outputs.get(pid, ""),
            choice=results[pid] if results.get(pid, -1) >= 0 else None,
        )
        for pid in dict.fromkeys((*results, *outputs))
    ]


def write_scienceqa_submission(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes {"results": {pid: index}} of every question, as tools/evaluate_acc.py reads it.

    The given choice; else the one that the text names by LLaVA's rule; else ScienceQA's random
    choice. -1 where there is no prediction.
    """
    given = {prediction.question_id: prediction for prediction in predictions}
    results = {}
    for question in questions:
        prediction, count = given.get(question.id), len(question.choices)
        choice: int | None = -1
        if prediction is not None:
            choice = prediction.choice
            if choice is None:
                choice = rules.llava_choice(prediction.answer, count)
            if choice is None:
                choice = rules.random_choice(question.id, count)
        results[question.id] = choice
    write_json(path, {"results": results})


def read_mmbench_predictions(path: Path, questions: Sequence[Question] = ()) -> list[Prediction]:
    """Reads a table with a prediction per pass, LLaVA's lines or predictions.jsonl.

    Raises:
      UserError: names the file and the row that is malformed, or a column that is missing.
    """
    if path.suffix.lower() not in SUFFIXES:
        return read_choice_lines(path)
    rows = mmbench_rows(path, ("index", PREDICTION))
    return [Prediction(str(row.index), row.cells[PREDICTION]) for row in rows]


def holds_answers(path: Path) -> bool:
    """Whether a file is a table of MMBench, which holds questions and answers of its own."""
    return path.suffix.lower() in SUFFIXES


def write_mmbench_submission(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes the spreadsheet that VLMEvalKit and the leaderboard read, a row per pass.

    A choice without text is written as its letter.
    """
    if path.suffix.lower() != ".xlsx":
        raise UserError(f"--submission={path}: a spreadsheet is written; name a file .xlsx.")
    given = {prediction.question_id: prediction for prediction in predictions}
    widest = max(len(question.choices) for question in questions)
    columns = [c for c in _SPREADSHEET if c not in rules.LETTERS[max(widest, 4) :]]
    rows = []
    for question in questions:
        answer = question.answer_index
        cells: dict[str, Any] = {
            **question.extra,
            **dict(zip(rules.LETTERS, question.choices, strict=False)),
            "index": int(question.id),
            "question": question.question,
            "answer": None if answer is None else rules.LETTERS[answer],
            "category": question.category,
            "split": {"val": "dev"}.get(question.split, question.split),
        }
        said = _said(given[question.id]) if question.id in given else None
        rows.append([*(cells.get(column) for column in columns), said])
    write_spreadsheet(path, [*columns, PREDICTION], rows)


def read_seed_bench_predictions(path: Path, questions: Sequence[Question] = ()) -> list[Prediction]:
    """Reads the leaderboard's or eval.py's lines, LLaVA's lines or predictions.jsonl.

    Raises:
      UserError: names the file and the line that is malformed.
    """
    return read_choice_lines(path)


def write_seed_bench_submission(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes the leaderboard's lines {"question_id", "prediction": letter}.

    A missing prediction is an empty text.
    """
    given = {prediction.question_id: prediction for prediction in predictions}
    rows = []
    for question in questions:
        prediction = given.get(question.id)
        said = ""
        if prediction is not None:
            by_letter = prediction.choice is not None
            said = rules.LETTERS[prediction.choice or 0] if by_letter else prediction.answer
        rows.append({"question_id": question.id, PREDICTION: said})
    write_jsonl(path, rows)


def read_choice_lines(path: Path) -> list[Prediction]:
    """Reads JSON lines with a text, a letter or losses; or predictions.jsonl.

    Raises:
      UserError: names the file and line of a malformed row.
    """
    predictions = []
    for number, row in read_jsonl(path):
        where = f"{path}, line {number}"
        if not isinstance(row, dict):
            raise UserError(f"{where}: expected an object; correct that line.")
        kinds = [key for key in ("text", PREDICTION, "losses") if key in row]
        if not kinds:
            return read_predictions(path)
        predictions.append(_line(where, row, kinds[0]))
    return predictions


def _line(where: str, row: dict[str, Any], kind: str) -> Prediction:
    name = row.get("question_id", row.get("q_id"))
    if not isinstance(name, str | int) or isinstance(name, bool) or name == "":
        raise UserError(f"{where}: question_id is {name!r}; text or a number was expected.")
    value = row[kind]
    if kind == "losses":
        if not isinstance(value, list) or not value or not all(map(_is_number, value)):
            raise UserError(f"{where}: losses is {value!r:.60}; a list of numbers was expected.")
        return Prediction(str(name), choice=rules.likeliest_choice(value))
    if not isinstance(value, str):
        raise UserError(f"{where}: {kind} is {value!r:.60}; text was expected.")
    check_text(value, where)
    if "q_id" in row:  # the official eval.py ranks by loss
        return Prediction(str(name), choice=rules.letter_index(value, len(rules.LETTERS)))
    return Prediction(str(name), value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and value == value


def _said(prediction: Prediction) -> str:
    if prediction.answer or prediction.choice is None:
        return prediction.answer
    return rules.LETTERS[prediction.choice]
