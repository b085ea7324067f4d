"""Prediction files of ScienceQA, MMBench and SEED-Bench, read and written.

    ScienceQA   {"results": {pid: index}, "outputs": {pid: text}}, either may be absent
                (models/run_gpt3.py and LLaVA's eval_science_qa.py write both)
    MMBench     a table (.xlsx, .tsv) with the columns index and prediction, a row per pass; or a
                JSON list of such rows: VLMEvalKit's PRED_FORMAT is one of the three
    SEED-Bench  JSON lines: {"question_id", "prediction": letter}, the leaderboard's; the first
                eval.py (July 2023) writes {"q_id", "prediction": letter of the choice of least
                loss}, the later ones `question_id`, which are then the leaderboard's lines; or
                {"question_id", "losses": [of each choice]}
    LLaVA       JSON lines of {"question_id", "text"}, for any of them; of MMBench with --all-rounds
                also "round_id"

All readers also read our predictions.jsonl. Lines may end in a comma, as in SEED-Bench's
evaluate_result/, or be a JSON list. The first line says of which kind all of a file are. Null, a
choice out of range and losses that are not numbers are answers that name no choice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, read_text, write_json, write_jsonl
from mmqa_jax.core.json_text import parse_json
from mmqa_jax.data.datasets.mmbench import (
    BASE,
    L2,
    NAN,
    PASS_STEP,
    PREDICTION,
    mmbench_rows,
)
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.data.table_files import SUFFIXES, real_number, write_spreadsheet
from mmqa_jax.evaluation import multiple_choice as rules
from mmqa_jax.evaluation.prediction_lines import OTHERS, Row, answers_of, json_rows
from mmqa_jax.evaluation.question_ids import id_of
from mmqa_jax.evaluation.scores import NO_OPTION, predictions_by_question

_HUB_ID = re.compile(r"(train|val|test)-\d+")  # of ScienceQA's questions in the hub's Parquet
_SPREADSHEET = ("index", "question", "hint", *"ABCDEFGH", "answer", "category", L2, "split")


def read_scienceqa_predictions(path: Path, questions: Sequence[Question]) -> list[Prediction]:
    """Reads results and outputs, LLaVA's lines or predictions.jsonl.

    An index that is none of the question's choices is no choice, such as -1, LLaVA's mark of an
    answer without a letter.
    """
    if _holds_lines(path):
        predictions = read_choice_lines(path, questions)
    else:
        known = {question.id for question in questions}
        predictions = _scienceqa_object(path, read_json(path, unique_keys=True), known)
    _check_pids(path, predictions, questions)
    return predictions


def _holds_lines(path: Path) -> bool:
    """Whether a file holds lines with a question each, whatever its name."""
    if path.suffix == ".jsonl":
        return True
    first = read_text(path).lstrip().partition("\n")[0]
    try:
        row = parse_json(first.rstrip().removesuffix(","), str(path))
    except UserError:  # an object of many lines, or damage that its reader names
        return False
    return isinstance(row, dict) and "question_id" in row


def _scienceqa_object(path: Path, data: Any, known: Container[str]) -> list[Prediction]:
    """The predictions of {"results": {pid: index}, "outputs": {pid: text}}."""
    parts = ("results", "outputs")
    if not isinstance(data, dict) or not any(isinstance(data.get(p), dict) for p in parts):
        raise UserError(
            f'{path}: {{"results": {{pid: index}}}} was expected, or "outputs": {{pid: text}}; '
            "give ScienceQA's or LLaVA's results file, or predictions.jsonl."
        )
    results, outputs = (_by_pid(f"{path}, {part}", data.get(part) or {}, known) for part in parts)
    for pid, value in outputs.items():
        if not isinstance(value, str | None):
            raise UserError(
                f"{path}, outputs, problem {pid}: {value!r} was found and text expected; correct "
                "it."
            )
    choices = {pid: _index(f"{path}, results, problem {pid}", x) for pid, x in results.items()}
    return [
        Prediction(pid, outputs.get(pid) or "", choice=choices.get(pid))
        for pid in dict.fromkeys((*results, *outputs))
    ]


def _by_pid(where: str, part: Any, known: Container[str]) -> dict[str, Any]:
    """pid -> value; UserError where `11` and `11.0` name one problem twice."""
    if not isinstance(part, dict):
        raise UserError(f"{where}: an object {{pid: ...}} was expected; correct it.")
    found: dict[str, Any] = {}
    for written, value in part.items():
        pid = id_of(written, where, known, "pid")
        if pid in found:
            raise UserError(f"{where}: problem {pid} is there twice; keep one.")
        found[pid] = value
    return found


def _index(where: str, value: Any) -> int | None:
    """A choice's number, by `int` as in tools/evaluate_acc.py; null is None, NaN no option."""
    if value is None:
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return NO_OPTION
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return int(value)
        except ValueError:  # no number, or a text of too many digits
            pass
    raise UserError(
        f"{where}: {value!r} was found and a choice's number from 0 expected; correct it."
    )


def _check_pids(
    path: Path, predictions: Sequence[Prediction], questions: Sequence[Question]
) -> None:
    """UserError for pids where the questions are the hub's, which have none."""
    if predictions and all(_HUB_ID.fullmatch(question.id) for question in questions):
        name = predictions[0].question_id
        if name.isdecimal():
            raise UserError(
                f"{path}: answers problem {name}, but the hub's Parquet has no pids; give "
                "--references ScienceQA's problems.json."
            )


def write_scienceqa_submission(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes {"results": {pid: index}} of every question, as tools/evaluate_acc.py reads it.

    The given choice; else the one that the text names by LLaVA's rule; else ScienceQA's random
    choice. -1 where there is no prediction.
    """
    given = predictions_by_question(questions, predictions)
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


def read_mmbench_predictions(path: Path, questions: Sequence[Question]) -> list[Prediction]:
    """Reads a table or JSON rows with a prediction per pass, LLaVA's lines or predictions.jsonl.

    A table's `nan` is an empty answer, unless it is the text of one of the question's choices.
    """
    if path.suffix.lower() not in SUFFIXES:
        return _choices_of(path, _with_passes(json_rows(path), questions), questions)
    named_nan = {q.id for q in questions if NAN in (choice.lower() for choice in q.choices)}
    predictions = []
    for row in mmbench_rows(path, ("index", PREDICTION)):
        name, said = str(row.index), row.cells[PREDICTION]
        empty = said == NAN and name not in named_nan
        predictions.append(Prediction(name, "" if empty else said))
    return predictions


def _with_passes(
    rows: Iterable[tuple[str, Row]], questions: Sequence[Question]
) -> list[tuple[str, Row]]:
    """The rows; those of LLaVA's later rounds have the index of their pass as question_id."""
    by_id = {question.id: question for question in questions}
    passes: dict[str, list[Question]] = {}
    for question in questions:
        passes.setdefault(question.extra.get(BASE, question.id), []).append(question)
    named = []
    for where, row in rows:
        if PREDICTION in row and "question_id" not in row:  # VLMEvalKit's
            row = {**row, "question_id": row.get("index"), PREDICTION: _text_of(row[PREDICTION])}
        turn = row.get("round_id", 0)
        question = by_id.get(name := _known_id(row, by_id))
        if question is not None and turn != 0:
            count = len(question.choices)
            if type(turn) is not int or not 0 < turn < count:
                raise UserError(
                    f"{where}: round_id is {turn!r}; question {name} has {count} choices, so that "
                    f"0 to {count - 1} were expected; correct it."
                )
            alike = passes[question.extra.get(BASE, name)]
            row = {**row, "question_id": _pass_of_round(question, turn, alike)}
        named.append((where, row))
    return named


def _text_of(value: Any) -> Any:
    """A cell of VLMEvalKit's rows as text: numbers by `str`, a missing value is NaN there."""
    if isinstance(value, float) and math.isnan(value):
        return None
    return str(value) if type(value) in (int, float) else value


def _known_id(row: Row, known: Container[str]) -> str | None:
    """The row's question_id, where it is one of a question."""
    try:
        return id_of(row.get("question_id"), "", known)
    except UserError:  # named with its line by the reader of all lines
        return None


def _pass_of_round(question: Question, turn: int, passes: Sequence[Question]) -> str:
    """The id of the pass that shows the choices as round `turn` of LLaVA does.

    LLaVA (llava/eval/model_vqa_mmbench.py) rotates the choices to the left by one each round, a
    pass k to the right by k, unless the official table has passes of its own.
    """
    count = len(question.choices)
    rotated = (*question.choices[turn:], *question.choices[:turn])
    expected = str(int(question.id) + (count - turn) * PASS_STEP)
    alike = [one.id for one in passes if one.choices == rotated]
    return expected if expected in alike or not alike else alike[0]


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
    given = predictions_by_question(questions, predictions)
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


def read_seed_bench_predictions(path: Path, questions: Sequence[Question]) -> list[Prediction]:
    """Reads the leaderboard's or eval.py's lines, LLaVA's lines or predictions.jsonl."""
    return read_choice_lines(path, questions)


def write_seed_bench_submission(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes the leaderboard's lines {"question_id", "prediction": letter}.

    A missing prediction is an empty text.
    """
    given = predictions_by_question(questions, predictions)
    rows = []
    for question in questions:
        prediction = given.get(question.id)
        said = ""
        if prediction is not None:
            by_letter = prediction.choice is not None
            said = rules.LETTERS[prediction.choice or 0] if by_letter else prediction.answer
        rows.append({"question_id": question.id, PREDICTION: said})
    write_jsonl(path, rows)


def read_choice_lines(path: Path, questions: Sequence[Question]) -> list[Prediction]:
    """Reads JSON lines with a text, a letter or losses; or predictions.jsonl."""
    return _choices_of(path, list(json_rows(path)), questions)


def _choices_of(
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


def _said(prediction: Prediction) -> str:
    if prediction.answer or prediction.choice is None:
        return prediction.answer
    return rules.LETTERS[prediction.choice]
