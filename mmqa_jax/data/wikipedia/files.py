"""Large files read once from the beginning to the end: as they are, or packed (.gz, .bz2, .zip)."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from mmqa_jax.core.errors import UserError

LONGEST_LINE = 1 << 26  # bytes; Wikipedia's longest articles have 2 MB
PACKED = ("", ".gz", ".bz2", ".zip")
_BUFFER = 1 << 20
# Text packs to a third or a tenth. What unpacks to more than this is no text, but fills disks.
_MOST_UNPACKED, _ALLOWED = 250, 1 << 26


class InputFile:
    """An open file; its content is `stream`.

    Args:
      path: a packed file by its ending; of a .zip the only file that is in it.

    Attributes:
      size: bytes of the file, packed.
    """

    def __init__(self, path: Path):
        self.path = path
        with self._named_errors():
            self._raw = open(path, "rb")  # noqa: SIM115 (`close` does)
            self.size = os.fstat(self._raw.fileno()).st_size
            unpacked = self._unpacked()
        bounded = self._raw if unpacked is self._raw else _Bounded(unpacked, self._raw, path)
        self.stream = io.BufferedReader(bounded, _BUFFER) if unpacked is not self._raw else bounded

    def done(self) -> int:
        """Bytes of the file, packed, that have been read."""
        return self._raw.tell()

    def lines(self) -> Iterator[bytes]:
        """The lines, without their ends; of one that is too long its beginning alone."""
        with self._named_errors():
            while line := self.stream.readline(LONGEST_LINE):
                if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                    while (rest := self.stream.readline(LONGEST_LINE)) and rest[-1:] != b"\n":
                        pass
                yield line.rstrip(b"\r\n")

    def blocks(self, size: int = _BUFFER) -> Iterator[bytes]:
        """The content, some bytes at a time; UserError as of the class."""
        with self._named_errors():
            while block := self.stream.read(size):
                yield block

    def close(self) -> None:
        """Closes the file."""
        self._raw.close()

    def _unpacked(self) -> IO[bytes]:
        match self.path.suffix:
            case ".gz":
                return gzip.GzipFile(fileobj=self._raw)
            case ".bz2":
                return bz2.BZ2File(self._raw)
            case ".zip":
                try:
                    return self._only_member(zipfile.ZipFile(self._raw))
                # A password, or what zipfile does not know; of a damaged one also an IndexError.
                except (RuntimeError, IndexError) as error:
                    raise UserError(
                        f"{self.path}: cannot be unpacked here ({error}); unpack it, and give the "
                        "file that is in it."
                    ) from error
        return self._raw

    def _only_member(self, packed: zipfile.ZipFile) -> IO[bytes]:
        inside = [one for one in packed.infolist() if not one.is_dir()]
        if len(inside) != 1:
            raise UserError(
                f"{self.path}: holds {len(inside)} files, one was expected; unpack it, and give "
                "the one that is to be read."
            )
        return packed.open(inside[0])

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, OSError) as error:
            said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise UserError(
                f"{self.path}: cannot be read ({said or 'it ends too early'}); fetch the file "
                "again."
            ) from error


class _Bounded(io.RawIOBase):
    """An unpacked stream that ends with an error where it grows beyond all that text does."""

    def __init__(self, unpacked: IO[bytes], packed: IO[bytes], path: Path):
        self._unpacked, self._packed, self._path = unpacked, packed, path
        self._count = 0

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: memoryview) -> int:
        """Reads into a buffer, as io.RawIOBase defines it."""
        data = self._unpacked.read(len(buffer))
        self._count += len(data)
        if self._count > _ALLOWED + _MOST_UNPACKED * self._packed.tell():
            raise UserError(
                f"{self._path}: unpacks to more than {_MOST_UNPACKED} times its size, which is no "
                "text; fetch the file again."
            )
        buffer[: len(data)] = data
        return len(data)


def find_file(raw: Path, names: Sequence[str], what: str) -> Path:
    """The file in a folder with one of these names (glob patterns), packed or not; or `raw`."""
    if raw.is_file():
        return raw
    patterns = [f"{name}{packed}" for name in names for packed in PACKED]
    found = sorted({path for pattern in patterns for path in raw.glob(pattern) if path.is_file()})
    if len(found) != 1:
        there = f"has {len(found)} files of" if found else "has no file of"
        listed = ", ".join(path.name for path in found) or " or ".join(names)
        raise UserError(f"--raw={raw}: {there} {what} ({listed}); name the file itself.")
    return found[0]
