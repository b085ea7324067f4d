"""Tables of text cells: tab- or comma-separated files with a header, and Excel's spreadsheets."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write, read_text

SUFFIXES = (".tsv", ".xlsx")
# A cell holds a whole picture as base64; csv refuses cells above 128 kB by default.
_LARGEST_CELL = 2**31 - 1


def read_table(path: Path, needed: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """(place for messages, {column: cell}) of each row; empty cells are "".

    A cell may be quoted, and then hold separators and line ends, as pandas writes it. `nan`, `None`
    and `N/A` are texts, which pandas would read as empty; what they mean is the caller's matter.

    Args:
      path: a .tsv, .csv or .xlsx file; of a spreadsheet the first sheet is read.
      needed: columns that must be there.
    """
    rows = iter(_spreadsheet(path) if path.suffix.lower() == ".xlsx" else _separated(path))
    header = [name.strip() for name in next(rows, (0, []))[1]]
    if missing := [name for name in needed if name not in header]:
        raise UserError(
            f"{path}: has no column {', '.join(missing)} (it has {', '.join(filter(None, header))}"
            "); the first row must name the columns."
        )
    table = []
    for number, cells in rows:
        if not any(cells):
            continue
        where = f"{path}, row {number}"
        if len(cells) > len(header):
            raise UserError(
                f"{where}: {len(cells)} cells, but the header has {len(header)}; repair that row "
                "or fetch the file again."
            )
        cells += [""] * (len(header) - len(cells))
        table.append((where, dict(zip(header, cells, strict=True))))
    if not table:
        raise UserError(f"{path}: holds no rows; a header and at least one row were expected.")
    return table


def write_spreadsheet(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Writes one sheet, the file whole or not at all; None is an empty cell."""
    openpyxl = _openpyxl(path)
    from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE

    book = openpyxl.Workbook(write_only=True)
    sheet = book.create_sheet("Sheet1")
    for row in (columns, *rows):
        cells = []
        for value in row:
            if isinstance(value, str):
                cell = openpyxl.cell.WriteOnlyCell(sheet, ILLEGAL_CHARACTERS_RE.sub("", value))
                cell.data_type = "s"  # text that begins with `=` is no formula
                value = cell
            cells.append(value)
        sheet.append(cells)
    with atomic_write(path, "wb") as file:
        book.save(file)


def _separated(path: Path) -> Iterator[tuple[int, list[str]]]:
    text = read_text(path)
    separator, name = (",", "comma") if path.suffix.lower() == ".csv" else ("\t", "tab")
    csv.field_size_limit(max(csv.field_size_limit(), _LARGEST_CELL))
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        for number, cells in enumerate(reader, start=1):
            yield number, [_text(cell) for cell in cells]
    except csv.Error as error:
        raise UserError(
            f"{path}, line {reader.line_num}: not {name}-separated text ({error}); fetch the file "
            "again."
        ) from error


def _spreadsheet(path: Path) -> Iterator[tuple[int, list[str]]]:
    openpyxl = _openpyxl(path)
    try:
        with open(path, "rb") as file:
            book = openpyxl.load_workbook(file, read_only=True, data_only=True)
            for number, cells in enumerate(book.worksheets[0].iter_rows(values_only=True), start=1):
                cells = [_text(cell) for cell in cells]
                while cells and not cells[-1]:  # cells that were once formatted
                    cells.pop()
                yield number, cells
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; check the path.") from error
    except Exception as error:  # of a broken archive or its XML nearly any
        raise UserError(
            f"{path}: cannot be read as a spreadsheet ({' '.join(str(error).split()):.100}); save "
            "it as .xlsx, or as tab-separated .tsv."
        ) from error


def _openpyxl(path: Path) -> Any:
    """The module, or UserError with what installs it."""
    try:
        import openpyxl
        import openpyxl.cell
    except ImportError as error:
        raise UserError(
            f"{path}: a spreadsheet needs the package openpyxl; install it with "
            "`pip install 'mmqa-jax[xlsx]'`."
        ) from error
    return openpyxl


def _text(cell: Any) -> str:
    if cell is None:
        return ""
    if isinstance(cell, float) and math.isnan(cell):
        return ""
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    return str(cell)


# Numbers as files write them: 11, "11" and pandas' 11.0; reals that a float holds.

_DIGITS = re.compile(r"(\d{1,19})(?:\.0+)?")
LARGEST = 2**63 - 1
_LARGEST_REAL = 10**308
_EXACT = 2**53  # a double above it may be the rounding of another number


def whole_number(value: Any) -> int | None:
    """The number from 0 to 2**63 - 1 that a value or its text is; None where it is none."""
    if isinstance(value, str):
        match = _DIGITS.fullmatch(value)
        value = int(match[1]) if match else None
    elif isinstance(value, float):
        value = int(value) if value.is_integer() and abs(value) <= _EXACT else None
    return value if type(value) is int and 0 <= value <= LARGEST else None


def real_number(value: Any, *, finite: bool = True) -> float | None:
    """A JSON number as a float; None for another value, or an integer that no float holds.

    Args:
      finite: whether NaN and infinity are None too.
    """
    if type(value) not in (int, float) or (type(value) is int and abs(value) > _LARGEST_REAL):
        return None
    return None if finite and not math.isfinite(value) else float(value)
