"""Pictures in an uncompressed tar file, read by their place in it; its headers are not believed."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.pictures.bounds import PictureError, check_bytes


class PictureTar:
    """A tar file's pictures by their path in it; `others` are links and sparse files, which hold
    none.
    """

    def __init__(self, path: Path):
        self._members: dict[str, tuple[int, int]] = {}  # path -> (offset, bytes)
        self.others: set[str] = set()
        try:
            listed = list(_members(path))
        # Damaged headers end in several kinds of error, endless chains of them in a RecursionError.
        except (tarfile.TarError, OSError, ValueError, OverflowError, RecursionError) as error:
            raise UserError(
                f"{path}: not an uncompressed tar file ({error}); write it with `tar cf`."
            ) from error
        for member in listed:
            # A sparse member's size is what it claims, not what the file holds.
            if member.isfile() and not member.issparse():
                self._members[plain_path(member.name)] = member.offset_data, member.size
            elif not member.isdir():
                self.others.add(plain_path(member.name))
        self.others -= set(self._members)
        self._file = open(path, "rb")  # noqa: SIM115 - open as long as the object lives

    def __iter__(self) -> Iterator[str]:
        """The paths of its pictures."""
        return iter(self._members)

    def __contains__(self, name: str) -> bool:
        return plain_path(name) in self._members

    def read(self, name: str) -> bytes:
        """A member's bytes; PictureError for too many, or fewer than its header says."""
        offset, size = self._members[plain_path(name)]
        check_bytes(size, name)
        data = os.pread(self._file.fileno(), size, offset)
        if len(data) < size:
            raise PictureError(f"{name}: the tar file ends within it; copy the file again.")
        return data


def plain_path(name: str) -> str:
    """A path without `./` and double slashes."""
    return str(PurePosixPath(name))


def _members(path: Path) -> Iterator[tarfile.TarInfo]:
    held = path.stat().st_size
    with open(path, "rb") as file, tarfile.open(fileobj=_Bounded(file, held), mode="r:") as tar:
        for member in tar:
            if member.size < 0:  # tarfile would read the same header again and again
                raise tarfile.ReadError(f"{member.name[:60]!r} has {member.size} bytes")
            yield member


class _Bounded:
    """A file; tarfile takes memory for as much as a header claims before it reads."""

    def __init__(self, file: BinaryIO, held: int):
        self._file, self._held = file, held
        self.seek, self.tell = file.seek, file.tell

    def read(self, count: int) -> bytes:
        if count > max(self._held, tarfile.RECORDSIZE):
            raise tarfile.ReadError(f"a header claims {count:,} bytes of the file's {self._held:,}")
        return self._file.read(count)
