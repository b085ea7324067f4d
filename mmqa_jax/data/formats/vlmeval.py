"""VLMEvalKit's tables of questions, .tsv or .xlsx, which hold their pictures.

    index                 number of the question
    image                 the picture as base64, or the index of the row that holds it
    question, A, B, ...   with the choices, and with the columns that a benchmark adds

The choices end at the first empty cell.
"""

import binascii
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pybase64

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.formats.official import Entry
from mmqa_jax.data.formats.tables import SUFFIXES, read_table, whole_number
from mmqa_jax.data.pictures.bounds import PictureError, check_bytes
from mmqa_jax.data.schema import Prediction, Question

LETTERS = "ABCDEFGH"
NEEDED = ("index", "question", "A", "B")
PREDICTION = "prediction"  # the column of a system's answers
NAN = "nan"  # pandas' missing value, written as text
# An index has fewer characters, a picture more (VLMEvalKit image_base.py uses the same bound).
_LONGEST_REFERENCE = 64


class TablePictures:
    """Encoded pictures of tables by the index of the row that holds the base64 text."""

    def __init__(self, rows: Iterable[Entry]):
        # Number of a row that shows a picture -> the picture's name.
        self.name_of: dict[int, str] = {}
        self._texts: dict[str, str] = {}
        by_index = {row.number("index"): row for row in rows}
        for index, row in by_index.items():
            holder, text = index, row.get("image", "")
            if text and len(text) <= _LONGEST_REFERENCE:
                number = whole_number(text)
                holder = -1 if number is None else number
                text = by_index[holder].get("image", "") if holder in by_index else ""
                if len(text) <= _LONGEST_REFERENCE:
                    raise row.error(
                        f"image refers to index {row['image']!r}, and no row of that index holds a "
                        "picture"
                    )
            if text:
                self.name_of[index] = str(holder)
                self._texts[str(holder)] = text

    def __len__(self) -> int:
        return len(self._texts)

    def __call__(self, name: str) -> bytes:
        """Encoded bytes; PictureError where the text is no base64."""
        check_bytes(len(self._texts[name]) * 3 // 4, f"index {name}")
        try:
            return pybase64.b64decode(self._texts[name], validate=True)
        except (binascii.Error, ValueError) as error:
            raise PictureError(f"index {name}: its image is no base64 ({error}).") from error

    def signature(self, names: Iterable[str] = ()) -> str:
        """Identifies the pictures, whatever their names."""
        digest = hashlib.sha256()
        for name, text in self._texts.items():
            digest.update(f"{name} {len(text)} ".encode() + text[:1024].encode())
        return digest.hexdigest()


def tables_in(folder: Path, whose: str, example: str) -> list[Path]:
    """The tables in a folder; UserError where there are none, with `whose` and an `example`."""
    tables = sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file())
    if not tables:
        raise UserError(
            f"{folder}: holds no .tsv or .xlsx table; put {whose}'s official file there, such as "
            f"{example}."
        )
    return tables


def rows_of(
    path: Path, needed: Sequence[str] = NEEDED, nullable: Iterable[str] = ()
) -> list[Entry]:
    """The rows of a table, whose indices are whole numbers.

    Args:
      needed: columns that must be there.
      nullable: columns in which `nan` is an empty cell; in those of choices it is where every
        empty cell is written so.
    """
    rows = [Entry(where, cells) for where, cells in read_table(path, needed)]
    for row in rows:
        row.number("index")  # refuses another value
    empty = {*nullable, *(LETTERS if _nan_is_empty(rows) else ())}
    return [
        Entry(row.where, {k: "" if k in empty and v == NAN else v for k, v in row.items()})
        for row in rows
    ]


def read_predictions(path: Path, questions: Iterable[Question]) -> list[Prediction]:
    """Reads a table of `index` and `prediction`.

    `nan` is an empty answer, unless it is the text of one of the question's choices.
    """
    named_nan = {q.id for q in questions if NAN in (choice.lower() for choice in q.choices)}
    predictions = []
    for row in rows_of(path, ("index", PREDICTION)):
        name, answer = str(row.number("index")), row[PREDICTION]
        empty = answer == NAN and name not in named_nan
        predictions.append(Prediction(name, "" if empty else answer))
    return predictions


def named_row(row: dict[str, Any]) -> dict[str, Any]:
    """A JSON row of predictions with the `question_id` that others have; NaN is missing, as there,
    and a number is its text.
    """
    if PREDICTION not in row or "question_id" in row:
        return row
    value = row[PREDICTION]
    if isinstance(value, float) and math.isnan(value):
        value = None
    elif type(value) in (int, float):
        value = str(value)
    return {**row, "question_id": row.get("index"), PREDICTION: value}


def check_indices(rows: Iterable[Entry]) -> None:
    """UserError where two rows have one index."""
    places: dict[int, str] = {}
    for row in rows:
        index = row.number("index")
        if index in places:
            raise UserError(
                f"{row.where}: index {index} is already in {places[index]}; keep one row, or "
                "prepare the two tables apart."
            )
        places[index] = row.where


def choices_of(row: Entry) -> tuple[str, ...]:
    """The choices of a row, two at least."""
    choices = [row.get(letter, "") for letter in LETTERS]
    count = next((n for n, text in enumerate(choices) if not text), len(choices))
    if count < 2 or any(choices[count:]):
        raise row.error(
            f"its choices are {', '.join(c for c in LETTERS if row.get(c))}; choices A, B, ... "
            "without a gap were expected"
        )
    return tuple(choices[:count])


def _nan_is_empty(rows: Sequence[Mapping[str, str]]) -> bool:
    """Whether `nan` in a choice's column stands for no choice, and is not the choice's text.

    Writers that turn pandas' missing values into text (lmms-lab/MMBench on the hub) write it into
    every empty cell. So it is a text where a cell is truly empty, where it is the choice A or B,
    the answer, or stands before another choice. VLMEvalKit reads tables with pandas' defaults,
    which take the texts `nan`, `NA`, `None` for missing: the choice is not shown, and where it is
    correct the question cannot be answered.
    """
    for cells in rows:
        choices = [cells[letter] for letter in LETTERS if letter in cells]
        while choices and choices[-1] == NAN:
            choices.pop()
        if NAN in choices or len(choices) < 2 or cells.get(cells.get("answer", "")) == NAN:
            return False
        if not all(cells[key] for key in ("hint", *LETTERS) if key in cells):
            return False
    return True
