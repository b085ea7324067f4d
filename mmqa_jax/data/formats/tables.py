"""Tables of text cells: tab- or comma-separated files with a header, and Excel's spreadsheets; and
the columns of tables that other libraries hand over."""

import codecs
import csv
import io
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError, import_optional
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
    openpyxl = import_optional("openpyxl", f"{path}: a spreadsheet", "xlsx")
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
    openpyxl = import_optional("openpyxl", f"{path}: a spreadsheet", "xlsx")
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

    `finite`: whether NaN and infinity are None too.
    """
    if type(value) not in (int, float) or (type(value) is int and abs(value) > _LARGEST_REAL):
        return None
    return None if finite and not math.isfinite(value) else float(value)


# Large TSV files with a .lineidx beside them: one line is read at a time, by its row.


class CutLine(UserError):
    """The file ends in the middle of this line."""


class IndexedTsv:
    """A TSV whose lineidx holds every line's byte offset. Threads may share it.

    The lineidx lies beside it with the suffix .lineidx, unless it is given.
    """

    def __init__(self, path: str | os.PathLike, lineidx: str | os.PathLike | None = None):
        self.path = Path(path)
        self.lineidx = Path(lineidx) if lineidx is not None else self.path.with_suffix(".lineidx")
        for file in (self.path, self.lineidx):
            if not file.is_file():
                raise UserError(
                    f"{file}: no such file; fetch {self.path.name} and {self.lineidx.name}."
                )
        offsets = read_offsets(self.lineidx)
        self._offsets = np.append(offsets, self.path.stat().st_size)  # [rows + 1]
        self._file = open(self.path, "rb")  # noqa: SIM115 - open as long as the object lives

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_file"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._file = open(self.path, "rb")  # noqa: SIM115 - as above

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def length(self, row: int) -> int:
        """Bytes of a row's line, as the lineidx has it; 0 where there is no such row."""
        return int(np.diff(self._offsets[row : row + 2]).sum()) if 0 <= row < len(self) else 0

    def columns(self, row: int) -> list[bytes]:
        """The columns of a row; CutLine where the file ends in the middle of it."""
        where = f"{self.path}, row {row}"
        if not 0 <= row < len(self):
            raise UserError(
                f"{where}: {self.lineidx} has {len(self)} rows; the files do not belong together "
                "or are cut off, fetch them again."
            )
        start, end, size = (int(self._offsets[n]) for n in (row, row + 1, -1))
        if start >= size:
            raise UserError(
                f"{where}: the file ends at byte {size}, before that row at byte {start}; it is "
                "cut off, fetch it again."
            )
        before = 1 if start else 0  # the preceding line break is checked too
        line = os.pread(self._file.fileno(), end - start + before, start - before)
        text = line[before:].rstrip(b"\r\n")
        ends = len(text) < len(line) - before
        if line[:before].strip() or b"\n" in text or not (ends or end >= size):
            beginning = text[:20].decode("ascii", "replace")
            raise UserError(
                f"{where}: bytes {start} to {end}, where {self.lineidx} points, hold {beginning!r} "
                "and not that row's line; the two files do not belong together, fetch them again."
            )
        if end > size:
            raise CutLine(f"{where}: the file ends within it; fetch it again.")
        return text.split(b"\t")


def read_offsets(path: Path) -> np.ndarray:
    """Byte offsets int64[rows] of a lineidx file, which must increase."""
    lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split()
    try:
        offsets = np.array(lines, dtype=np.int64)
        if (offsets < 0).any():
            raise ValueError
    except (ValueError, OverflowError):
        numbers = (whole_number(line.decode("ascii", "replace")) for line in lines)
        number = next((n for n, offset in enumerate(numbers, start=1) if offset is None), 1)
        raise UserError(
            f"{path}, line {number}: not a byte offset; fetch the lineidx again."
        ) from None
    falls = np.flatnonzero(np.diff(offsets) <= 0)
    if len(falls):
        raise UserError(
            f"{path}, line {falls[0] + 2}: offset not above that of the line before; fetch the "
            "lineidx again."
        )
    return offsets


# Columns of the tables that other libraries hand over: pandas, polars, pyarrow, `datasets`.


def columns_of(table: Any) -> dict[str, list[Any]] | None:
    """A table's columns as lists, missing values as None; None: the value is no table."""
    names = getattr(table, "column_names", None)  # of pyarrow and datasets
    if names is None and hasattr(table, "to_dict"):  # of pandas and polars
        names = getattr(table, "columns", None)
    if names is None or isinstance(table, Mapping):
        return None
    return {str(name): _values(table[name]) for name in names}


def take_column(columns: Mapping[str, list[Any]], names: tuple[str, ...], where: str) -> list[Any]:
    """The first column of these names that a table has; UserError if it has none of them."""
    for name in names:
        if name in columns:
            return columns[name]
    raise UserError(
        f"{where}: the table has no column {' or '.join(names)} (its columns are "
        f"{', '.join(columns) or 'none'}); rename the one that is meant."
    )


def _values(column: Any) -> list[Any]:
    values = column.to_pylist() if hasattr(column, "to_pylist") else list(column)
    return [None if isinstance(v, float) and math.isnan(v) else v for v in values]
