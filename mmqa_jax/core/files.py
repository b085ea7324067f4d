"""Atomic writes, and JSON files whose mistakes are reported with their line."""

import codecs
import contextlib
import glob
import json
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath
from typing import IO, Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.paths import as_path, check_store, in_store, upload

# Marks of byte order that say that a text is not UTF-8; UTF-32's begins with UTF-16's.
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
ONE_A_LINE = "every line must hold one JSON object"  # remedy of a broken line
_HOST = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname())


def unfinished(path: Path, kind: str = "tmp", process: int | str | None = None) -> Path:
    """The hidden temporary name of `path`, in the same folder, with host and process.

    Hosts of one job share a file system, and their process ids may coincide.

    Args:
      path: file or folder.
      kind: the suffix.
      process: None for this one; `*` for a glob of all processes of this host.
    """
    return path.with_name(f".{path.name}.{_HOST}.{process or os.getpid()}.{kind}")


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike, mode: str = "w") -> Iterator[IO]:
    """Opens a temporary file beside `path` and renames it onto `path` on success.

    A reader sees the old file or the complete new one; on an error the old one stays. Of an object
    in a store the temporary file is on this host, and the object is put as a whole.
    """
    path = as_path(path)
    encoding = {} if "b" in mode else {"encoding": "utf-8"}
    if in_store(path):
        with tempfile.TemporaryDirectory(prefix="mmqa-") as folder:
            temporary = Path(folder) / "whole"
            with _named_errors(temporary, temporary), open(temporary, mode, **encoding) as file:
                yield file
            upload(temporary, path)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path)
    temporary = unfinished(path)
    try:
        with _named_errors(temporary, path):
            with open(temporary, mode, **encoding) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def settle(temporary: Path, path: Path, *, whole: bool) -> None:
    """Gives a closed file its name once the disk has it; one that is not whole is removed."""
    if not whole:
        temporary.unlink(missing_ok=True)
        return
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


@contextlib.contextmanager
def _named_errors(temporary: Path, path: Path) -> Iterator[None]:
    """Puts `path` into the errors of writing: Python names no file where a write fails."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise


def remove_leftovers(path: Path) -> None:
    """Removes the `unfinished` files or folders of `path` of this host's killed processes."""
    escaped = path.with_name(glob.escape(path.name))
    for temporary in path.parent.glob(unfinished(escaped, process="*").name):
        process = temporary.name.split(".")[-2]
        if process.isdigit() and not _is_alive(int(process)):
            with contextlib.suppress(OSError):  # another process removes it
                shutil.rmtree(temporary) if temporary.is_dir() else temporary.unlink()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


@contextlib.contextmanager
def no_empty_folders(folder: str | os.PathLike) -> Iterator[None]:
    """If the block fails, removes `folder` and its parents if they are new and empty."""
    if in_store(folder):  # which has no empty ones
        yield
        return
    folder = Path(folder).absolute()
    new = [place for place in (folder, *folder.parents) if not os.path.exists(place)]
    try:
        yield
    except BaseException:
        for place in new:
            with contextlib.suppress(OSError):  # not empty, or never made
                place.rmdir()
        raise


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Writes `value` as indented JSON, atomically."""
    with atomic_write(path) as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")


def write_jsonl(path: str | os.PathLike, rows: Iterable[Any]) -> None:
    """Writes one JSON value per line, atomically."""
    with atomic_write(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def check_within(name: str, file: Path) -> None:
    """Raises UserError for a path that a file names and that leads out of the file's folder."""
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise UserError(
            f"{file}: names the file {name!r}, which is not in its folder; fetch it again."
        )


def read_json(path: str | os.PathLike, *, unique_keys: bool = False) -> Any:
    """Reads a JSON file; UserError as of `parse_json`, with file and line."""
    return parse_json(read_text(path), str(path), line=1, unique_keys=unique_keys)


def read_jsonl(path: str | os.PathLike) -> Iterator[tuple[int, Any]]:
    """Yields (line number, value) of a JSON-lines file; blank lines are skipped."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            yield number, parse_json(line, f"{path}, line {number}", remedy=ONE_A_LINE)


def read_text(path: str | os.PathLike) -> str:
    """Reads a UTF-8 text file without a mark of byte order; raises UserError if that fails."""
    try:
        return decode_text(as_path(path).read_bytes(), path)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; check the path.") from error
    except IsADirectoryError as error:
        raise UserError(f"{path}: is a folder, a file was expected; check the path.") from error
    except OSError as error:  # such as no permission
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path.") from error


def decode_text(data: bytes, place: str | os.PathLike) -> str:
    """UTF-8 bytes as text, without a mark of byte order and with line ends of one character."""
    for mark, name in _MARKS.items():
        if data.startswith(mark):
            raise UserError(f"{place}: is {name} text, UTF-8 was expected; save the file as UTF-8.")
    if b"\0" in data[:4]:  # Windows' UTF-16 without a mark, or no text at all
        raise UserError(
            f"{place}: begins with zero bytes, as UTF-16 text or a binary file does, and UTF-8 was "
            "expected; save the file as UTF-8."
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{place}: not UTF-8 text (byte {error.start}); save the file as UTF-8."
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def check_text(value: Any, place: str) -> None:
    """Refuses JSON with half of a surrogate pair in a string, which cannot be written as UTF-8.

    An emoji cut in two leaves one. `place` begins the UserError's sentence.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise UserError(
            f"{place}: holds {half}, half of a character; write it whole or take it out."
        ) from error


def check_out(path: Path, *, folder: bool = False, flag: str = "--out") -> None:
    """UserError if a file (or folder) cannot be written: before hours of work, not after them.

    A file takes the place of what has its name, which a pipe or a device would not survive; of a
    symbolic link it is not plain which of the two is meant. A folder may be a link to one.

    `flag`: that named it; "": none did.
    """
    check_store(path)  # first: only here do the errors of a store's package become sentences
    if in_store(path):
        return
    place = f"{flag}={path}" if flag else str(path)
    if not folder and path.is_symlink():
        raise UserError(
            f"{place}: is a symbolic link to {path.readlink()}; name the file itself, or another."
        )
    if not folder and path.is_dir():
        raise UserError(f"{place}: is a folder, a file to write was expected; name a file.")
    if not folder and path.exists() and not path.is_file():
        raise UserError(
            f"{place}: is a device, pipe or socket, and files are written under another name "
            "first; name a file."
        )
    here = path.absolute()
    places = (here, *here.parents) if folder else here.parents
    parent = next(place for place in places if os.path.lexists(place))
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"{place}: {parent} is no folder to write to; name another path.")


# How much a file may say that it holds: the one bound of all readers of arrays.
#
# A header names lengths, shapes, strides and offsets, and a reader allocates or loops as it says.
# One that is damaged or made to harm names what the file cannot hold, so that a few bytes take a
# machine's memory or minutes of its time. Everything that a file claims is compared with its size
# first, and refused by name where it is more:
#
#   values as they are in the file     at most the bytes of the file
#   compressed values                  at most `COMPRESSION` times as many
#   all tensors of a file together     at most `SHARED` times as many, since several may be one

COMPRESSION = 1_100  # deflate makes at most 1,032 bytes of one
SHARED = 8


def check_claim(place: str, claimed: int, held: int, *, times: int = 1) -> None:
    """Raises UserError if a file says that it holds more than it can.

    Args:
      place: the file, and what in it, for the message.
      claimed: bytes that a part of it takes as its header says.
      held: bytes of the file.
      times: how much more than `held` may be claimed: 1, `COMPRESSION` or `SHARED`.
    """
    if claimed > held * times:
        raise UserError(
            f"{place}: claims {claimed:,} bytes, but the file has {held:,}; it is damaged or not "
            "what it seems, fetch it again."
        )


# JSON text as values: one parser, so that every reader refuses the same damage alike.


# Levels of lists and objects. Data of this field have fewer than ten; what walks or writes values
# in Python ends at about a thousand.
DEEPEST = 100
_TOO_DEEP = f"lists or objects nested more than {DEEPEST} deep"
_SHORTEN = "shorten it or fetch the file again"
REPAIR = "repair that line or fetch the file again"
_NUMBER = r"(?<![\w\".+-])-?\d{%d,}"
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|([\[{])|([\]}])', re.DOTALL)
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
# Escapes of a string in order: a pair, one half (group 1), any other.
_ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\(u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)


def parse_json(
    text: str | bytes,
    place: str,
    *,
    line: int | None = None,
    remedy: str = REPAIR,
    unique_keys: bool = False,
) -> Any:
    """The value of JSON text; a mark of byte order before it is dropped.

    NaN and Infinity are read, as Python and pandas write them; who needs a number that is finite
    checks it.

    Args:
      text: the whole text of one value; bytes are UTF-8.
      place: begins the sentence of an error: a file, a row of one, a server's reply.
      line: number of the line of the file `place` that `text` begins at; the error then names line
        and column. None: `place` says enough.
      remedy: ends the sentence about text that is no JSON.
      unique_keys: refuse a key that appears twice in an object; else the last one counts.
    """

    def refused(what: str, position: int, end: str = remedy) -> UserError:
        if line is None:
            return UserError(f"{place}: {what}; {end}.")
        number = line + text.count("\n", 0, position)
        column = position - text.rfind("\n", 0, position)
        return UserError(f"{place}, line {number}, column {column}: {what}; {end}.")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise UserError(f"{place}: key {twice!r} appears twice in one object; remove one.")
        return result

    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{place}: not UTF-8 text (byte {error.start}); {remedy}.") from error
    text = text.removeprefix("\ufeff")
    try:
        value = json.loads(text, object_pairs_hook=unique if unique_keys else None)
    except json.JSONDecodeError as error:
        raise refused(f"not valid JSON ({error.msg})", error.pos) from error
    except RecursionError as error:
        raise refused(_TOO_DEEP, _deep_position(text), _SHORTEN) from error
    except ValueError as error:  # an integer of too many digits
        digits = sys.get_int_max_str_digits()
        match = re.search(_NUMBER % (digits + 1), text)
        what = f"an integer of more than {digits:,} digits"
        raise refused(what, match.start() if match else 0, _SHORTEN) from error
    if text.count("[") + text.count("{") > DEEPEST and _is_deep(value):
        raise refused(_TOO_DEEP, _deep_position(text), _SHORTEN)
    if _HALF.search(text) and (half := next(filter(_first_group, _ESCAPE.finditer(text)), None)):
        end = "write it whole or take it out"
        raise refused(f"holds '\\{half[1].lower()}', half of a character", half.start(), end)
    return value


def _first_group(match: re.Match) -> str | None:
    return match[1]


def _is_deep(value: Any) -> bool:
    """Whether a parsed value has more than DEEPEST levels; level by level, without recursion."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return False
    return True


def _deep_position(text: str) -> int:
    """Returns the place of the first bracket that is nested deeper than DEEPEST."""
    depth = 0
    for match in _BRACKET.finditer(text):
        if match[1] or match[2]:
            depth += 1 if match[1] else -1
        if depth > DEEPEST:
            return match.start()
    return 0
