"""MMBench's official tables (https://github.com/open-compass/MMBench), .tsv or .xlsx.

    index       number of the question; row k * 1,000,000 + index is its circular pass k
    image       the picture as base64, or the index of the row that holds it
    hint, question, A, B, C, D, answer (a letter), category, l2-category, split (dev or test)

captions.json, optional, is {index of a question, or of the row that holds its picture: caption};
all passes of a question have its caption.

A pass k shows the choices rotated by k. Where a file holds no passes above 0, they are made here:
N choices, N passes, and choice j stands at place (j + k) mod N, as VLMEvalKit's
`vlmutil circular` does for choices that may be rotated. A table of predictions is taken as it is.
"""

from __future__ import annotations

import binascii
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pybase64

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.datasets.benchmark import CAPTION, Benchmark, OfficialFiles, one_file
from mmqa_jax.data.datasets.coco import with_captions
from mmqa_jax.data.picture_bounds import PictureError, check_bytes
from mmqa_jax.data.schema import Material, Question
from mmqa_jax.data.table_files import SUFFIXES, read_table, whole_number

PASS_STEP = 1_000_000
# Keys of Question.extra: the question's index without the pass, the pass, and the ability.
BASE, PASS, L2 = "base_index", "pass", "l2-category"
NAN = "nan"  # pandas' missing value, written as text
PREDICTION = "prediction"  # a column of tables that hold a system's answers

# The repository's list of downloads; the paper (table 2) counts 2,974 in all.
PUBLISHED_COUNTS = {"val questions": 1_164, "test questions": 1_784}
MATERIALS = (Material("MMBench", "Liu et al., ECCV 2024", "Apache-2.0"),)

_LETTERS = "ABCDEFGH"
_NEEDED = ("index", "question", "A", "B")
_SPLITS = {"dev": "val", "val": "val", "test": "test", "train": "train"}
_READ = {*_NEEDED, *_LETTERS, "image", "answer", "category", "split", PREDICTION}
# An index has fewer characters, a picture more (VLMEvalKit image_base.py uses the same bound).
_LONGEST_REFERENCE = 64


class _Row(NamedTuple):
    """A row of a table: one pass of a question."""

    where: str
    index: int
    cells: Mapping[str, str]


class TablePictures:
    """Encoded pictures of tables by the index of the row that holds the base64 text."""

    def __init__(self, texts: Mapping[str, str]):
        self._texts = texts

    def __call__(self, name: str) -> bytes:
        """Encoded bytes; PictureError where the text is no base64."""
        check_bytes(len(self._texts[name]) * 3 // 4, f"index {name}")
        try:
            return pybase64.b64decode(self._texts[name], validate=True)
        except (binascii.Error, ValueError) as error:
            raise PictureError(f"index {name}: its image is no base64 ({error}).") from error

    def signature(self) -> str:
        """Identifies the pictures."""
        digest = hashlib.sha256()
        for name, text in self._texts.items():
            digest.update(f"{name} {len(text)} ".encode() + text[:1024].encode())
        return digest.hexdigest()


def read_mmbench(path: Path) -> Benchmark:
    """Reads all tables in a folder, or one of them; a question per circular pass.

    `Question.id` is the pass's index; `extra` keeps `base_index`, `pass`, `hint`, `l2-category`,
    `caption` and columns of no other use. Tables of several splits may be in the folder, but not
    two of one.
    """
    alone = one_file(path, SUFFIXES)
    files = OfficialFiles(path.parent if alone else path)
    tables = [path] if alone else _tables(files.folder)
    files.found += tables
    rows = [row for table in tables for row in mmbench_rows(table)]
    _require_unique(rows)
    shown, texts = _pictures(rows)
    pictures = TablePictures(texts)
    if not texts:
        files.missing["image"] = "no table has this column; questions stand without pictures"
    questions = [_question(row, shown.get(row.index)) for row in rows]
    questions = with_captions(files, questions, _caption_names, "indices of the table")
    if all(row.index < PASS_STEP and PREDICTION not in row.cells for row in rows):
        questions = [each for question in questions for each in circular_passes(question)]
    return Benchmark(
        name="mmbench",
        questions=questions,
        counts=_counts(questions, len(questions) - len(rows)),
        published=PUBLISHED_COUNTS,
        files=files.found,
        missing=files.missing,
        read_picture=pictures if texts else None,
        inputs=pictures.signature() if texts else None,
    )


def circular_passes(question: Question) -> list[Question]:
    """The N passes of a question of N choices, the question itself being the first."""
    choices, count = question.choices, len(question.choices)
    passes = []
    for shift in range(count):
        rotated = tuple(choices[(place - shift) % count] for place in range(count))
        index = question.answer_index
        passes.append(
            dataclasses.replace(
                question,
                id=str(int(question.id) + shift * PASS_STEP),
                choices=rotated,
                answer_index=None if index is None else (index + shift) % count,
                extra={**question.extra, PASS: shift},
            )
        )
    return passes


def mmbench_rows(path: Path, needed: Sequence[str] = _NEEDED) -> list[_Row]:
    """The rows of a table with their indices as numbers."""
    rows = []
    for where, cells in read_table(path, needed):
        index = whole_number(cells["index"])
        if index is None:
            raise UserError(
                f"{where}: index is {cells['index']!r:.60}; a whole number was expected; correct "
                "it."
            )
        rows.append(_Row(where, index, cells))
    empty = {"hint", "answer", "category", L2, "split", "image"}
    if _nan_is_empty([row.cells for row in rows]):
        empty |= {*_LETTERS}
    return [
        row._replace(cells={k: "" if k in empty and v == NAN else v for k, v in row.cells.items()})
        for row in rows
    ]


def _nan_is_empty(rows: Sequence[Mapping[str, str]]) -> bool:
    """Whether `nan` in a choice's column stands for no choice, and is not the choice's text.

    Writers that turn pandas' missing values into text (lmms-lab/MMBench on the hub) write it into
    every empty cell. So it is a text where a cell is truly empty, where it is the choice A or B,
    the answer, or stands before another choice. VLMEvalKit reads tables with pandas' defaults,
    which take the texts `nan`, `NA`, `None` for missing: the choice is not shown, and where it is
    correct the question cannot be answered.
    """
    for cells in rows:
        choices = [cells[letter] for letter in _LETTERS if letter in cells]
        while choices and choices[-1] == NAN:
            choices.pop()
        if NAN in choices or len(choices) < 2 or cells.get(cells.get("answer", "")) == NAN:
            return False
        if not all(cells[key] for key in ("hint", *_LETTERS) if key in cells):
            return False
    return True


def _tables(folder: Path) -> list[Path]:
    tables = sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file())
    if not tables:
        raise UserError(
            f"{folder}: holds no .tsv or .xlsx table; put MMBench's official file there, such as "
            "MMBench_DEV_EN.tsv."
        )
    return tables


def _require_unique(rows: Iterable[_Row]) -> None:
    seen: dict[int, str] = {}
    for row in rows:
        if row.index in seen:
            raise UserError(
                f"{row.where}: index {row.index} is already in {seen[row.index]}; keep one row, or "
                "prepare the two tables apart."
            )
        seen[row.index] = row.where


def _pictures(rows: Sequence[_Row]) -> tuple[dict[int, str], dict[str, str]]:
    """Index -> name of its picture; name -> base64 text."""
    cells = {row.index: row.cells.get("image", "") for row in rows}
    shown, texts = {}, {}
    for row in rows:
        index, text = row.index, cells[row.index]
        if text and len(text) <= _LONGEST_REFERENCE:
            held_by = whole_number(text)
            index = -1 if held_by is None else held_by
            text = cells.get(index, "")
            if len(text) <= _LONGEST_REFERENCE:
                raise UserError(
                    f"{row.where}: image refers to index {cells[row.index]!r}, and no row of that "
                    "index holds a picture; fetch the file again."
                )
        if text:
            shown[row.index] = str(index)
            texts[str(index)] = text
    return shown, texts


def _question(row: _Row, picture: str | None) -> Question:
    where, index, cells = row
    if not cells["question"]:
        raise UserError(f"{where}: question is empty; correct that row.")
    choices = [cells.get(letter, "") for letter in _LETTERS]
    count = next((n for n, text in enumerate(choices) if not text), len(choices))
    if count < 2 or any(choices[count:]):
        raise UserError(
            f"{where}: its choices are {', '.join(c for c in _LETTERS if cells.get(c))}; choices "
            "A, B, ... without a gap were expected; correct that row."
        )
    answer = cells.get("answer", "").strip()
    if answer and answer not in tuple(_LETTERS[:count]):
        raise UserError(
            f"{where}: answer is {answer!r}; a letter from A to {_LETTERS[count - 1]} was "
            "expected; correct that row."
        )
    answer_index = _LETTERS.index(answer) if answer else None
    split = cells.get("split", "").lower() or ("dev" if answer else "test")
    if split not in _SPLITS:
        raise UserError(
            f"{where}: split is {split!r}; expected {' or '.join(_SPLITS)}; correct that row."
        )
    extra = {k: v for k, v in cells.items() if k and v and k not in _READ}
    return Question(
        id=str(index),
        split=_SPLITS[split],
        question=cells["question"],
        image=picture,
        answers=() if answer_index is None else (choices[answer_index],),
        category=cells.get("category", ""),
        choices=tuple(choices[:count]),
        answer_index=answer_index,
        extra={**extra, BASE: str(index % PASS_STEP), PASS: index // PASS_STEP},
    )


def _caption_names(question: Question) -> Sequence[str]:
    base = question.extra[BASE]
    return (base,) if question.image is None else (base, question.image)


def _counts(questions: Sequence[Question], made: int) -> dict[str, int]:
    firsts = [question for question in questions if question.extra[PASS] == 0]
    by_split = Counter(question.split for question in firsts)
    counts: dict[str, int] = {f"{split} questions": by_split[split] for split in ("val", "test")}
    if by_split["train"]:
        counts["train questions"] = by_split["train"]

    def count(accepts: Callable[[Question], bool]) -> int:
        return sum(map(accepts, firsts))

    return counts | {
        "circular passes": len(questions),
        "passes made here": made,
        "questions without a picture": count(lambda q: q.image is None),
        f"questions with {CAPTION}": count(lambda q: CAPTION in q.extra),
        "questions without an answer": count(lambda q: q.answer_index is None),
        "questions with equal choices": count(lambda q: len(set(q.choices)) < len(q.choices)),
    }
