"""Checksums: neither file systems nor the formats of arrays notice a bit that changed on a disk.

A folder's are in SHA256SUMS, which `sha256sum -c` reads too. Whoever writes a folder writes them
last, before the folder gets its name; whoever opens it checks them first. A JSON object has its own
as its last key. What has none is older than they are, and is opened unchecked.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write, read_json, write_json
from mmqa_jax.core.paths import as_path, in_store, listing

SUMS = "SHA256SUMS"
_HEAD = "# {count} files"  # so that a cut file is noticed; sha256sum takes it for a comment
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
_THREADS = 8  # hashlib lets go of the interpreter's lock
_KEY = "sha256"


def digest(file: str | os.PathLike) -> str:
    """SHA-256 of a file or an object, in hex; it is read in small pieces."""
    with as_path(file).open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def write_sums(
    folder: str | os.PathLike,
    names: Iterable[str] | None = None,
    *,
    coming: Mapping[str, bytes] | None = None,
    known: Mapping[str, str] | None = None,
) -> None:
    """Writes SHA256SUMS, whole or not at all; an older one is replaced.

    Args:
      folder: in the file system or a store.
      names: of the files, relative to the folder; None: all that are in it and below.
      coming: contents of files that are written after this one, by name.
      known: digests of files that need not be read again, by name.
    """
    folder = as_path(folder)
    names = files_below(folder) if names is None else list(names)
    sums = dict(zip(names, _in_parallel(lambda name: digest(folder / name), names), strict=True))
    sums |= {name: hashlib.sha256(content).hexdigest() for name, content in (coming or {}).items()}
    sums |= known or {}
    with atomic_write(folder / SUMS) as file:
        file.write(_HEAD.format(count=len(sums)) + "\n")
        file.writelines(f"{sums[name]}  {name}\n" for name in sorted(sums))


def read_sums(folder: str | os.PathLike) -> dict[str, str] | None:
    """The digests by file name; None without SHA256SUMS.

    Raises:
      ValueError: SHA256SUMS itself is damaged.
    """
    try:
        head, *lines = (as_path(folder) / SUMS).read_bytes().decode().split("\n")
    except FileNotFoundError:
        return None
    matches = [_LINE.fullmatch(line) for line in lines[:-1]]  # the last one ends too
    sums = {match[2]: match[1] for match in matches if match}
    if head != _HEAD.format(count=len(sums)) or len(sums) != len(matches) or lines[-1:] != [""]:
        raise ValueError(f"{SUMS} is not what was written")
    return sums


def find_damage(
    folder: str | os.PathLike,
    names: Collection[str] | None = None,
    *,
    part: tuple[int, int] = (0, 1),
) -> str | None:
    """Finds damage in the files that SHA256SUMS lists: `NAME is damaged`, or None.

    Args:
      names: of the files to check, those of them that are listed; None: all.
      part: (i, n): only every n-th file, from the i-th on; n processes share the work so.
    """
    folder = as_path(folder)
    try:
        sums = read_sums(folder)
    except (ValueError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not what was written"
        return f"{SUMS} is damaged ({reason})"
    wanted = [name for name in sorted(sums or {}) if names is None or name in names]
    wanted = wanted[part[0] :: part[1]]
    problems = _in_parallel(lambda name: _damage(folder / name, sums[name]), wanted)
    checked = zip(wanted, problems, strict=True)
    return next((f"{name} {problem}" for name, problem in checked if problem is not None), None)


def check_sums(
    folder: str | os.PathLike, names: Collection[str] | None = None, *, remedy: str
) -> None:
    """Refuses a folder whose files differ from the written ones.

    Args:
      names: as of `find_damage`.
      remedy: what to do then, which ends the sentence.
    """
    if (problem := find_damage(folder, names)) is not None:
        raise UserError(f"{folder}: {problem}; {remedy}.")


def files_below(folder: str | os.PathLike) -> list[str]:
    """The files of a folder and below, relative to it, without SHA256SUMS itself."""
    folder = as_path(folder)
    if in_store(folder):
        names = list(listing(os.fspath(folder)))
    else:
        names = [
            path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
        ]
    return sorted(name for name in names if name != SUMS)


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON object with a checksum of its other keys, whole or not at all."""
    write_json(path, {**value, _KEY: _of_value(value)})


def read_sealed(path: Path, remedy: str) -> dict[str, Any]:
    """A JSON object, without the checksum."""
    try:
        value = read_json(path)
    except UserError as error:
        if not path.is_file():
            raise
        raise UserError(f"{path}: is damaged; {remedy}.") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: is damaged; {remedy}.")
    expected = value.pop(_KEY, None)
    if expected is not None and expected != _of_value(value):
        raise UserError(f"{path}: is damaged (its SHA-256 is another); {remedy}.")
    return value


def _damage(file: Path, expected: str) -> str | None:
    try:
        actual = digest(file)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return None if actual == expected else f"is damaged (its SHA-256 is not that of {SUMS})"


def _in_parallel(work: Callable[[str], Any], names: Sequence[str]) -> list[Any]:
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(work, names))


def _of_value(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
