"""MMMU's Parquet files (https://github.com/MMMU-Benchmark/MMMU; MMMU/MMMU on the hub).

    {subject}/{dev,validation,test}-*.parquet   of any of the 30 subjects, or the files alone

Columns: id (`validation_Accounting_1`), question, options (a Python list as text), answer,
question_type, explanation, subfield, topic_difficulty, img_type, and image_1 to image_7, which
`<image 1>` to `<image 7>` in the question and its options stand for. Answers of test are `?`.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.datasets.benchmark import Benchmark, OfficialFiles
from mmqa_jax.data.datasets.parquet import PictureColumns, parquet_rows
from mmqa_jax.data.schema import Material, Question

# Keys of Question.extra: `multiple-choice` or `open`, and the topic's difficulty.
KIND, DIFFICULTY = "question_type", "topic_difficulty"
CHOICE = "multiple-choice"

# Disciplines and their subjects, in the order of the official table.
DISCIPLINES = {
    "Art and Design": ("Art", "Art_Theory", "Design", "Music"),
    "Business": ("Accounting", "Economics", "Finance", "Manage", "Marketing"),
    "Science": ("Biology", "Chemistry", "Geography", "Math", "Physics"),
    "Health and Medicine": (
        *("Basic_Medical_Science", "Clinical_Medicine"),
        *("Diagnostics_and_Laboratory_Medicine", "Pharmacy", "Public_Health"),
    ),
    "Humanities and Social Science": ("History", "Literature", "Sociology", "Psychology"),
    "Tech and Engineering": (
        *("Agriculture", "Architecture_and_Engineering", "Computer_Science", "Electronics"),
        *("Energy_and_Power", "Materials", "Mechanical_Engineering"),
    ),
}
SUBJECTS = tuple(subject for subjects in DISCIPLINES.values() for subject in subjects)

# The paper, table 1.
PUBLISHED_COUNTS = {"train questions": 150, "val questions": 900, "test questions": 10_500}
MATERIALS = (
    Material("MMMU", "Yue et al., CVPR 2024", "Apache-2.0; pictures under their sources' licenses"),
)

_SPLITS = {"dev": "train", "validation": "val", "test": "test"}
_ID = re.compile(r"(dev|validation|test)_(\w+)_(\d{1,9})")
_NEEDED = ("id", "question", "options", "answer", KIND)
_MORE = ("explanation", "subfield", DIFFICULTY, "img_type")
_PICTURES = tuple(f"image_{number}" for number in range(1, 8))
_LONGEST = 100_000  # characters of a list as text; MMMU's longest has 2,000
_HIDDEN = "?"


def read_mmmu(folder: Path) -> Benchmark:
    """Reads all Parquet files in a folder and in the subjects' folders below it.

    `Question.category` is the subject; the splits dev and validation are `train` and `val`. An open
    question has no `choices`, and all `answers` that count.
    """
    files = OfficialFiles(folder)
    tables = sorted([*folder.glob("*.parquet"), *folder.glob("*/*.parquet")])
    if not tables:
        raise UserError(
            f"{folder}: holds no Parquet file; put MMMU's folders of subjects there, such as "
            "Accounting/validation-00000-of-00001.parquet."
        )
    files.found += tables
    pictures = PictureColumns(tables, "id", _PICTURES)
    questions: dict[str, Question] = {}
    for path in tables:
        for number, row in parquet_rows(path, _NEEDED, _MORE):
            where = f"{path}, row {number}"
            question = _question(where, row)
            if question.id in questions:
                raise UserError(f"{where}: id {question.id} is there twice; keep one file of it.")
            questions[question.id] = _with_pictures(where, question, pictures)
    ordered = sorted(questions.values(), key=place_of)
    return Benchmark(
        name="mmmu",
        questions=ordered,
        counts=_counts(ordered),
        published=PUBLISHED_COUNTS,
        files=files.found,
        read_picture=pictures,
        inputs=pictures.signature(),
    )


def place_of(question: Question) -> tuple[str, int]:
    """Where the official scripts read a question: by subject, then by number."""
    return question.category, int(question.id.rpartition("_")[2])


def _question(where: str, row: dict[str, Any]) -> Question:
    named = _ID.fullmatch(str(row["id"]))
    if named is None or named[2] not in SUBJECTS:
        raise UserError(
            f"{where}: id is {row['id']!r:.60}; SPLIT_SUBJECT_NUMBER of one of MMMU's 30 subjects "
            "was expected; fetch MMMU's own files."
        )
    text, answer, kind = row["question"], row["answer"], row[KIND]
    texts = (text, answer, kind, row.get("explanation") or "")
    if not all(isinstance(one, str) for one in texts) or not text or not kind:
        raise UserError(
            f"{where}: question, answer, {KIND} or explanation is no text; fetch the file again."
        )
    choices, index, answers = (), None, ()
    if kind == CHOICE:
        choices = _texts(row["options"], f"{where}: options")
        if len(choices) < 2:
            raise UserError(f"{where}: has {len(choices)} options; two at least were expected.")
        if answer and answer != _HIDDEN:
            index = ord(answer[0]) - ord("A")
            if len(answer) > 1 or not 0 <= index < len(choices):
                raise UserError(
                    f"{where}: answer is {answer!r:.60}; the letter of one of {len(choices)} "
                    "options was expected; fetch the file again."
                )
            answers = (choices[index],)
    elif answer and answer != _HIDDEN:
        listed = answer.startswith("['") or answer.startswith('["')
        answers = _texts(answer, f"{where}: answer") if listed else (answer,)
    return Question(
        id=named[0],
        split=_SPLITS[named[1]],
        question=text,
        answers=answers,
        category=named[2],
        choices=choices,
        answer_index=index,
        rationale=row.get("explanation") or "",
        extra={key: row[key] for key in (KIND, *_MORE[1:]) if row.get(key)},
    )


def _with_pictures(where: str, question: Question, pictures: PictureColumns) -> Question:
    names = [f"{question.id}/{column}" for column in _PICTURES]
    there = [name in pictures for name in names]
    count = sum(there)
    if not all(there[:count]):  # `<image 3>` would stand for another one
        raise UserError(
            f"{where}: has image_{there.index(True) + 1} and not all before it; fetch it again."
        )
    if not count:
        return question
    return dataclasses.replace(question, image=names[0], more_images=tuple(names[1:count]))


def _texts(value: Any, where: str) -> tuple[str, ...]:
    """A list of texts, which the hub's files write as Python's literal."""
    found = value
    if isinstance(value, str):
        try:
            found = ast.literal_eval(value) if len(value) <= _LONGEST else None
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            found = None
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise UserError(f"{where} are {repr(value)[:60]}; a list of texts was expected.")
    return tuple(found)


def _counts(questions: Sequence[Question]) -> dict[str, int]:
    splits = Counter(question.split for question in questions)
    return {
        **{f"{split} questions": splits[split] for split in _SPLITS.values()},
        "subjects": len({question.category for question in questions}),
        "multiple-choice questions": sum(bool(question.choices) for question in questions),
        "open questions": sum(not question.choices for question in questions),
        "questions with several pictures": sum(bool(q.more_images) for q in questions),
        "questions without a picture": sum(question.image is None for question in questions),
        "questions without an answer": sum(not question.answers for question in questions),
    }
