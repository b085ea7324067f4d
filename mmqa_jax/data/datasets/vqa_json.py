"""Questions and annotations in the JSON of VQA, which VQAv2 and OK-VQA share.

Each of the two files is one object.

    questions     {"questions": [{"image_id", "question", "question_id"}]}
    annotations   {"annotations": [{"question_id", "image_id", "answers": [{"answer"}]}]}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.data.table_files import whole_number


class Reference(NamedTuple):
    """What is known of one question's answer."""

    image_id: int
    answers: tuple[str, ...]
    category: str
    extra: dict[str, Any]


def read_questions(path: Path) -> dict[int, tuple[int, str]]:
    """question_id -> (image_id, question)."""
    found: dict[int, tuple[int, str]] = {}
    for where, row, question_id in entries(path, "questions"):
        found[question_id] = (number(row, "image_id", where), text_of(row, "question", where))
    return found


def read_annotations(path: Path, key: str, names: Mapping[str, str]) -> dict[int, Reference]:
    """question_id -> the annotators' answers and the category.

    Args:
      key: of an annotation's category.
      names: of categories; others keep the name that they have in the file.
    """
    found: dict[int, Reference] = {}
    for where, row, question_id in entries(path, "annotations"):
        answers = row.get("answers")
        if not isinstance(answers, list) or not answers:
            raise UserError(f"{where}: holds no list of answers; fetch the annotations again.")
        rows = [answer if isinstance(answer, dict) else {} for answer in answers]
        kind = str(row.get(key, ""))
        extra: dict[str, Any] = {}
        if all(isinstance(answer.get("raw_answer"), str) for answer in rows):
            extra["raw_answers"] = [answer["raw_answer"] for answer in rows]
        found[question_id] = Reference(
            number(row, "image_id", where),
            tuple(text_of(answer, "answer", f"{where}, answers") for answer in rows),
            names.get(kind, kind),
            extra,
        )
    return found


def entries(path: Path, key: str | None) -> Iterator[tuple[str, dict[str, Any], int]]:
    """(place for messages, entry, question_id) of a JSON list, or of the list under `key`."""
    data = read_json(path)
    rows = data.get(key) if key is not None and isinstance(data, dict) else data
    if not isinstance(rows, list):
        expected = "a list" if key is None else f'an object with a list "{key}"'
        raise UserError(f"{path}: {expected} was expected; fetch the file again.")
    seen: set[int] = set()
    for count, row in enumerate(rows, start=1):
        where = f"{path}, entry {count}"
        if not isinstance(row, dict):
            raise UserError(f"{where}: an object was expected; fetch the file again.")
        question_id = number(row, "question_id", where)
        if question_id in seen:
            raise UserError(f"{where}: question_id {question_id} appears twice; remove one.")
        seen.add(question_id)
        yield where, row, question_id


def check_same(
    known: Mapping[int, Reference],
    asked: Mapping[int, tuple[int, str]],
    answers_in: Path | None,
    asked_in: Path,
) -> None:
    """UserError for answers to other questions, or to questions on other pictures."""
    for question_id, reference in known.items():
        if question_id not in asked:
            raise UserError(
                f"{answers_in}: answers question {question_id}, which is not in {asked_in.name}; "
                "take both files from the same release and split."
            )
        if reference.image_id != asked[question_id][0]:
            raise UserError(
                f"{answers_in}: question {question_id} is on picture {reference.image_id} there, "
                f"but on {asked[question_id][0]} in {asked_in.name}; take both from one release."
            )


def number(row: Mapping[str, Any], key: str, where: str) -> int:
    """A whole number of an entry, in any of a file's forms; UserError for another value."""
    found = whole_number(row.get(key))
    if found is None:
        raise UserError(f"{where}: {key} is {row.get(key)!r:.60}; expected a whole number.")
    return found


def text_of(row: Mapping[str, Any], key: str, where: str) -> str:
    """A text of an entry; UserError for another value."""
    value = row.get(key)
    if not isinstance(value, str):
        raise UserError(f"{where}: {key} is {value!r:.60}; expected text.")
    return value
