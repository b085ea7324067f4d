"""Lists a folder that a stranger may have made: its files, and nothing outside it.

Symbolic links are not followed, so that no loop is walked and no link leads out; pipes, devices and
sockets are not opened. What is left out is counted and named.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections import Counter
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from mmqa_jax.data.documents.document import DocumentError
from mmqa_jax.data.pictures.bounds import MOST_BYTES

_TRIES = 3  # readings of a file that another program writes to


@dataclasses.dataclass(frozen=True)
class FoundFile:
    """A file of the folder.

    Attributes:
      name: its path relative to the folder, with `/`.
      size: in bytes.
      modified: time in nanoseconds.
    """

    name: str
    size: int
    modified: int


@dataclasses.dataclass
class Listing:
    """The files in a folder and below it.

    Attributes:
      files: those with one of the wanted endings, by name.
      bad: file or folder -> why it is left out.
      other_endings: ending -> files that have it and are left out.
      hidden: files and folders whose names begin with `.` or `~$`, which are left out.
    """

    files: list[FoundFile] = dataclasses.field(default_factory=list)
    bad: dict[str, str] = dataclasses.field(default_factory=dict)
    other_endings: Counter[str] = dataclasses.field(default_factory=Counter)
    hidden: int = 0


def list_folder(folder: Path, endings: Collection[str], leave_out: Path | None = None) -> Listing:
    """Looks through a folder and all folders in it.

    Args:
      endings: of the files that are wanted, in lower case, such as `.pdf`.
      leave_out: a folder below it that is not looked into.
    """
    listing = Listing()
    apart = None if leave_out is None else os.path.realpath(leave_out)
    waiting = [folder.resolve()]
    root = waiting[0]
    while waiting:
        here = waiting.pop()
        try:
            with os.scandir(here) as entries:
                by_name = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            listing.bad[_relative(here, root) or "."] = f"cannot be read ({error.strerror})"
            continue
        for entry in by_name:
            if entry.name.startswith((".", "~$")):
                listing.hidden += 1
            elif entry.is_dir(follow_symlinks=False):
                if entry.path != apart:
                    waiting.append(Path(entry.path))
            else:
                _add(listing, entry, _relative(Path(entry.path), root), endings)
    listing.files.sort(key=lambda file: file.name)
    return listing


def _relative(path: Path, root: Path) -> str:
    """The path relative to the folder; bytes that are no UTF-8 are written as escapes."""
    name = path.relative_to(root).as_posix() if path != root else ""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _add(listing: Listing, entry: os.DirEntry, name: str, endings: Collection[str]) -> None:
    if entry.is_symlink():
        listing.bad[name] = "a symbolic link, which is not followed; copy the file into the folder"
        return
    ending = PurePosixPath(name).suffix.lower()
    if ending not in endings:
        listing.other_endings[ending] += 1
        return
    if not entry.name.isprintable():  # also where it is no UTF-8
        listing.bad[name] = "its name is no plain text; rename it"
        return
    try:
        about = entry.stat(follow_symlinks=False)
    except OSError as error:
        listing.bad[name] = f"cannot be read ({error.strerror})"
        return
    if not stat.S_ISREG(about.st_mode):
        listing.bad[name] = "a pipe, device or socket, not a file"
    else:
        listing.files.append(FoundFile(name, about.st_size, about.st_mtime_ns))


def read_file(folder: Path, name: str) -> bytes:
    """The bytes of a file of the folder, all of one moment.

    Raises:
      DocumentError: it is gone, has become a link, may not be read, is empty or too large, or is
        written to each time it is read.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        with open(os.open(folder / name, flags), "rb") as file:
            for _ in range(_TRIES):
                about = os.fstat(file.fileno())
                if not stat.S_ISREG(about.st_mode):
                    raise DocumentError("no longer a file")
                if about.st_size > MOST_BYTES:
                    raise DocumentError(
                        f"{about.st_size:,} bytes, more than the {MOST_BYTES:,} of a file; split it"
                    )
                file.seek(0)
                data = file.read(MOST_BYTES + 1)
                after = os.fstat(file.fileno())
                if (after.st_mtime_ns, len(data)) == (about.st_mtime_ns, about.st_size):
                    break
            else:
                raise DocumentError("it changes while it is read; try again when it is written")
    except OSError as error:
        raise DocumentError(f"cannot be read ({error.strerror})") from error
    if not data:
        raise DocumentError("empty")
    return data
