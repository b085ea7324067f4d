"""MathVista's files (https://github.com/lupantech/MathVista; AI4Math/MathVista on the hub).

    testmini.json, test.json, here or in data/   {pid: problem}
    images/{pid}.jpg, here or in data/           the pictures of these
    {testmini,test}-*.parquet, here or in data/  instead of all these; pictures in decoded_image

A problem has pid, question, choices or null, unit, precision, answer, question_type (multi_choice
or free_form), answer_type (text, integer, float, list) and metadata. Answers of test are hidden.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.data.datasets.benchmark import Benchmark, OfficialFiles, PictureFiles
from mmqa_jax.data.datasets.parquet import ParquetPictures, parquet_rows
from mmqa_jax.data.schema import Material, Question
from mmqa_jax.data.table_files import real_number

# Keys of Question.extra that decide how an answer is normalized, and the unit that prompts name.
KIND, ANSWER_TYPE, PRECISION, UNIT = "question_type", "answer_type", "precision", "unit"
CHOICE, FREE = "multi_choice", "free_form"
ANSWER_TYPES = ("text", "integer", "float", "list")
# Keys of `metadata`, kept in extra: by these the official script groups its scores.
GROUPS = ("language", "source", "category", "task", "context", "grade", "skills")

# The paper, table 1.
PUBLISHED_COUNTS = {"val questions": 1_000, "test questions": 5_141}
MATERIALS = (
    Material(
        "MathVista",
        "Lu et al., ICLR 2024",
        "CC BY-SA 4.0; pictures under their data sets' licenses",
    ),
)

_SPLITS = {"testmini": "val", "test": "test"}
_NEEDED = ("pid", "question", "choices", "answer", KIND, ANSWER_TYPE, PRECISION, UNIT, "metadata")
_PICTURE = "decoded_image"


class _Row(NamedTuple):
    """A problem before it is checked."""

    where: str
    split: str
    problem: Mapping[str, Any]


def read_mathvista(folder: Path) -> Benchmark:
    """Reads what there is of testmini, which becomes `val`, and test.

    `Question.category` is the task; `extra` keeps unit, precision, both types and the metadata.
    """
    files = OfficialFiles(folder)
    tables = {
        split: sorted(folder.glob(f"{name}-*.parquet"))
        or sorted(folder.glob(f"data/{name}-*.parquet"))
        for name, split in _SPLITS.items()
    }
    paths = [path for found in tables.values() for path in found]
    files.found += paths
    rows = list(_table_rows(tables)) if paths else list(_json_rows(files))
    questions: dict[str, Question] = {}
    for row in rows:
        question = _question(row)
        if question.id in questions:
            raise UserError(f"{row.where}: pid {question.id} is there twice; keep one of them.")
        questions[question.id] = question
    if not questions:
        raise UserError(
            f"{folder}: holds none of MathVista's problems; put testmini.json and images/, or the "
            "hub's Parquet files, there."
        )
    pictures: ParquetPictures | PictureFiles
    if paths:
        pictures = ParquetPictures(paths, "pid", _PICTURE)
    else:
        places = {q.id: tuple(_places(q.extra.get("image"))) for q in questions.values()}
        pictures = PictureFiles(folder, places)
    shown = [
        dataclasses.replace(question, image=question.id) if question.id in pictures else question
        for question in questions.values()
    ]
    names = [question.image for question in shown if question.image is not None]
    if len(names) < len(shown):
        files.missing["images/"] = f"{len(shown) - len(names):,} questions have no picture file"
    inputs = pictures.signature() if paths else pictures.signature(names)
    return Benchmark(
        name="mathvista",
        questions=shown,
        counts=_counts(shown),
        published=PUBLISHED_COUNTS,
        files=files.found,
        missing=files.missing,
        read_picture=pictures if names else None,
        inputs=inputs if names else None,
    )


def _table_rows(tables: Mapping[str, Sequence[Path]]) -> Iterator[_Row]:
    for split, paths in tables.items():
        for path in paths:
            for number, row in parquet_rows(path, _NEEDED, ("image",)):
                yield _Row(f"{path}, row {number}", split, row)


def _json_rows(files: OfficialFiles) -> Iterator[_Row]:
    for name, split in _SPLITS.items():
        path = files.optional(
            f"{name}.json", f"data/{name}.json", without=f"there are no {split} questions"
        )
        data = {} if path is None else read_json(path, unique_keys=True)
        if not isinstance(data, dict):
            raise UserError(f"{path}: {{pid: problem}} was expected; fetch the file again.")
        for pid, problem in data.items():
            where = f"{path}, problem {pid}"
            if not isinstance(problem, dict):
                raise UserError(f"{where}: is no object; fetch the file again.")
            yield _Row(where, split, {"pid": pid, **problem})


def _question(row: _Row) -> Question:
    where, problem = row.where, row.problem
    choices = problem.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(one, str) for one in choices):
        raise UserError(f"{where}: choices are {choices!r:.60}; a list of texts was expected.")
    kind, answer_type = problem.get(KIND), problem.get(ANSWER_TYPE)
    if (
        kind not in (CHOICE, FREE)
        or answer_type not in ANSWER_TYPES
        or (kind == CHOICE) != (answer_type == "text")
        or (kind == CHOICE and len(choices) < 2)
    ):
        raise UserError(
            f"{where}: {KIND} is {kind!r}, {ANSWER_TYPE} {answer_type!r}, with {len(choices)} "
            f"choices; {CHOICE}, text and two choices at least, or {FREE} and a number or list "
            "were expected; fetch the file again."
        )
    text, answer = problem.get("question"), problem.get("answer") or ""
    pid, metadata = problem.get("pid"), problem.get("metadata")
    texts = (text, answer, pid)
    if not all(isinstance(one, str) for one in texts) or not text or not isinstance(metadata, dict):
        raise UserError(f"{where}: pid, question, answer or metadata is wrong; fetch it again.")
    precision = problem.get(PRECISION)
    number = None if precision is None else real_number(precision)
    if answer_type == "float" and number is None:
        raise UserError(f"{where}: precision is {precision!r}; a number was expected; correct it.")
    kept = {
        **{key: problem[key] for key in (KIND, ANSWER_TYPE, UNIT, "image") if problem.get(key)},
        **({} if number is None else {PRECISION: int(number)}),
        **{key: metadata[key] for key in GROUPS if metadata.get(key)},
    }
    return Question(
        id=pid,
        split=row.split,
        question=text,
        answers=(answer,) if answer else (),
        category=str(metadata.get("task", "")),
        choices=tuple(choices),
        answer_index=choices.index(answer) if answer in choices else None,
        extra=kept,
    )


def _places(image: Any) -> Iterator[str]:
    """Where the file of `images/1.jpg` may lie."""
    if isinstance(image, str) and image:
        yield from (image, f"data/{image}")


def _counts(questions: Sequence[Question]) -> dict[str, int]:
    splits = Counter(question.split for question in questions)
    return {
        **{f"{split} questions": splits[split] for split in _SPLITS.values()},
        "multiple-choice questions": sum(bool(question.choices) for question in questions),
        "pictures found": sum(question.image is not None for question in questions),
        "questions without an answer": sum(not question.answers for question in questions),
    }
