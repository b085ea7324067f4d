"""Large TSV files with a .lineidx beside them: one line is read at a time, by its row."""

from __future__ import annotations

import codecs
import os
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.table_files import whole_number


class CutLine(UserError):
    """The file ends in the middle of this line."""


class IndexedTsv:
    """A TSV whose lineidx holds every line's byte offset. Threads may share it.

    Args:
      path: the TSV.
      lineidx: default: beside it, with the suffix .lineidx.
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
        """The columns of a row.

        Raises:
          CutLine: the file ends in the middle of it.
        """
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
            found = text[:20].decode("ascii", "replace")
            raise UserError(
                f"{where}: bytes {start} to {end}, where {self.lineidx} points, hold {found!r} and "
                "not that row's line; the two files do not belong together, fetch them again."
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
