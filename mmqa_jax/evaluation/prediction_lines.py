"""Files of one prediction a line, as they are scored: our predictions.jsonl and others' lines.

Odd answers are no mistakes of the file: null is an empty answer, and is counted as one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import ONE_A_LINE, parse_json, read_json, read_text
from mmqa_jax.data.formats.tables import whole_number
from mmqa_jax.data.schema import Prediction, Question, prediction_of

# Keys by which lines give an answer: ours, of which there may be several, and others'.
OURS = ("answer", "choice", "sources")
OTHERS = ("text", "prediction", "losses")
_LIST = re.compile(r"\s*\[\s*[{\]]")  # a JSON list of objects, or an empty one

Row = dict[str, Any]


def json_rows(path: str | os.PathLike) -> Iterator[tuple[str, Row]]:
    """(place for messages, object) of every line, or of every entry of a JSON list.

    A comma may end a line, as in SEED-Bench's published results.
    """
    text = read_text(path)
    if _LIST.match(text):
        rows = ((f"{path}, entry {n}", row) for n, row in enumerate(read_json(path), start=1))
    else:
        lines = enumerate(text.split("\n"), start=1)
        places = ((f"{path}, line {n}", line) for n, line in lines if line.strip())
        rows = ((place, _parsed(place, line)) for place, line in places)
    for where, row in rows:
        if not isinstance(row, dict):
            raise UserError(f"{where}: expected an object; correct it.")
        yield where, row


def holds_lines(path: Path) -> bool:
    """Whether a file holds lines with a question each, whatever its name."""
    if path.suffix == ".jsonl":
        return True
    first = read_text(path).lstrip().partition("\n")[0]
    try:
        row = parse_json(first.rstrip().removesuffix(","), str(path))
    except UserError:  # an object of many lines, or damage that its reader names
        return False
    return isinstance(row, dict) and "question_id" in row


def read_answers(
    path: str | os.PathLike,
    source_ids: Container[str] | None = None,
    question_ids: Container[str] = (),
) -> list[Prediction]:
    """Reads predictions.jsonl; see `answers_of`."""
    return answers_of(path, json_rows(path), source_ids, question_ids)


def read_own_lines(path: Path, questions: Iterable[Question] = ()) -> list[Prediction]:
    """Reads predictions.jsonl of these questions."""
    return read_answers(path, question_ids={question.id for question in questions})


def read_lines(
    path: Path, questions: Iterable[Question] = (), *, id_key: str, text_key: str
) -> list[Prediction]:
    """Reads a benchmark's lines {id_key: text, text_key: text or null}, or predictions.jsonl."""
    question_ids = {question.id for question in questions}
    rows = list(json_rows(path))
    if not any(id_key in row and text_key in row for _, row in rows):
        return answers_of(path, rows, question_ids=question_ids)
    predictions = []
    for where, row in rows:
        name, text = row.get(id_key), row.get(text_key)
        if not isinstance(name, str) or not isinstance(text, str | None):
            raise UserError(
                f'{where}: {{"{id_key}": text, "{text_key}": text}} was expected; correct it.'
            )
        predictions.append(Prediction(name, text or ""))
    return predictions


def answers_of(
    path: str | os.PathLike,
    rows: Iterable[tuple[str, Row]],
    source_ids: Container[str] | None = None,
    question_ids: Container[str] = (),
) -> list[Prediction]:
    """The predictions of predictions.jsonl's rows, as `json_rows` gives them.

    Cited sources are checked where the corpus's `source_ids` are given; for `question_ids` see
    `id_of`.
    """
    rows = list(rows)
    if rows and not any(key in row for _, row in rows for key in OURS):
        keys = ", ".join(rows[0][1]) or "none"
        raise UserError(
            f"{path}: no line has `answer`, `choice` or `sources` (the keys of the first are "
            f"{keys}); put the text under `answer`, or the option's number under `choice`."
        )
    predictions = []
    for where, row in rows:
        _check(where, row)
        name = row.get("question_id", row.get("id"))  # `id` is that of `mmqa prompt`
        row["question_id"] = id_of(name, where, question_ids)
        for name in row.get("sources", ()):
            if source_ids is not None and name not in source_ids:
                raise UserError(
                    f"{where}: source {name!r} is not in the corpus; the file belongs to another "
                    "corpus."
                )
        answer = row.get("answer")
        predictions.append(prediction_of({**row, "answer": answer or "", "trace": {}}))
    return predictions


def _check(where: str, row: Row) -> None:
    """UserError for a row that has not the types of predictions.jsonl, or other keys."""
    other = [key for key in OTHERS if key in row]
    if other and not any(key in row for key in OURS):
        raise UserError(
            f"{where}: has `{other[0]}`, but other lines have `answer`, `choice` or `sources`; "
            "write all lines alike."
        )
    if not isinstance(row.get("answer"), str | None):
        raise UserError(f'{where}: "answer" must be text or null; correct it.')
    if row.get("choice") is not None and type(row["choice"]) is not int:
        raise UserError(
            f'{where}: "choice" must be the number of an option, counted from 0, or null; correct '
            "it."
        )
    sources = row.get("sources", [])
    if not isinstance(sources, list) or not all(isinstance(name, str) for name in sources):
        raise UserError(f'{where}: "sources" must be a list of id strings; correct it.')


def _parsed(where: str, line: str) -> Any:
    return parse_json(line.rstrip().removesuffix(","), where, remedy=ONE_A_LINE)


def read_object(path: Path, expected: str) -> dict[str, Any]:
    """Reads a prediction file that is one JSON object, id of a question -> what was predicted."""
    rows = read_json(path, unique_keys=True)
    if not isinstance(rows, dict):
        raise UserError(f"{path}: {expected}.")
    return rows


# Ids of questions as prediction files write them: text, a number, or 11.0, as pandas writes it.


_WHOLE = re.compile(r"\d+\.0+")


def id_of(value: Any, where: str, known: Container[str] = (), key: str = "question_id") -> str:
    """The question's id as text; errors begin with `where` and name the value `key`.

    The official vqa.py compares sets of numbers, in which 11.0 is 11, and VLMEvalKit calls int. Of
    the `known` ids of questions the text `11.0` is `11` only where that is one of them and `11.0`
    is not, since a corpus of one's own may have any ids.
    """
    if isinstance(value, str) and value:
        if value not in known and _WHOLE.fullmatch(value):
            digits = str(whole_number(value))
            return digits if digits in known else value
        return value
    number = whole_number(value)
    if number is None:
        raise UserError(
            f"{where}: {key} is {value!r:.60}; text or a whole number was expected; correct it."
        )
    return str(number)
