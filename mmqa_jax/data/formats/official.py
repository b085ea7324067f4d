"""Finds a benchmark's official files, and defines the type that its reader returns.

A benchmark is a set of questions, most of them on a picture; few have sources to answer from. The
readers are in `benchmarks/`, a file each. Their files are JSON, or the hub's Parquet:
rows with columns of pictures {bytes, path}, or lists.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import gzip
import os
import threading
import zlib
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeVar

from mmqa_jax.core.errors import UserError, import_optional
from mmqa_jax.core.files import ONE_A_LINE, check_text, parse_json, read_json
from mmqa_jax.data.formats.tables import whole_number
from mmqa_jax.data.pictures.bounds import PictureError, check_bytes, check_unpacked
from mmqa_jax.data.schema import Question, Source

T = TypeVar("T")
Q = TypeVar("Q", Question, Source)

# Keys of Question.extra that several benchmarks have: a description of the picture, and the names
# of objects in it; {answer: weight}, where the ten answers are absent; whether the benchmark shows
# a picture with the question, which may be absent from the disk, and whether it has a hint (part of
# the question in LLaVA's conversations); whether it does not count in the direct-answer score, and
# why an answer is right.
CAPTION, TAGS = "caption", "tags"
SOFT_LABELS = "soft_labels"
HAS_PICTURE, HAS_HINT = "has_picture", "has_hint"
DIFFICULT, RATIONALES = "difficult_direct_answer", "rationales"
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LONGEST_LITERAL = 100_000  # characters of a list as text; MMMU's longest has 2,000
_LONGEST_LINE = 64 * 2**20  # bytes of a line when unpacked; MultimodalQA's longest has 60 KB


@dataclasses.dataclass(frozen=True)
class BenchmarkFiles:
    """A benchmark's official files as the schema's types."""

    # Of all splits that were found; `image` is set only where the picture can be read.
    questions: list[Question]
    # What was found, such as `{"val questions": 1145}`; printed in this order.
    counts: Mapping[str, int]
    published: Mapping[str, int]  # the published figures for some or all of `counts`
    files: list[Path]  # the files that were read
    # Optional file that was not found -> what is therefore absent.
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Encoded bytes of a picture of a question or source; None where there are none.
    read_picture: Callable[[str], bytes] | None = None
    inputs: str | None = None  # identifies the picture files, see records.write_records
    # What the questions may be answered from, if that is part of the benchmark.
    sources: Sequence[Source] = ()

    def origin(self) -> dict[str, object]:
        """The manifest's record of the files."""
        return {
            "files": [str(path) for path in self.files],
            "missing_files": dict(self.missing),
            "published_counts": {
                what: {"published": self.published[what], "found": count}
                for what, count in self.counts.items()
                if what in self.published
            },
            "other_counts": {k: n for k, n in self.counts.items() if k not in self.published},
        }


class Pictures(Protocol):
    """Picture files that are read by name."""

    def __call__(self, name: str) -> bytes:
        """Returns an encoded picture."""

    def signature(self, names: Iterable[str]) -> str:
        """Identifies the files of these names."""


class OfficialFiles:
    """Files below a folder by their official names; remembers which were read and which are absent.

    Args:
      path: the folder, or a single official file where the benchmark is read from one.
      suffixes: of such files.
    """

    def __init__(self, path: Path, suffixes: Sequence[str] = ()):
        # The single file that `path` names; None for a folder.
        self.alone = path if path.is_file() and path.suffix in suffixes else None
        self.folder = path if self.alone is None else path.parent  # where files are looked for
        if not self.folder.is_dir():
            problem = "is a file" if path.exists() else "no such folder"
            raise UserError(
                f"{path}: {problem}, a folder with the benchmark's official files was expected; "
                "check the path."
            )
        # The files that were read, in the order of the requests.
        self.read_files = [path] if self.alone else []
        self.missing: dict[str, str] = {}  # optional file name -> what is absent without it

    def check_questions(self, questions: Collection[Any], benchmark: str, files: str) -> None:
        """UserError if there are no questions; `files` are those to put into the folder."""
        if not questions:
            raise UserError(
                f"{self.alone or self.folder}: holds none of {benchmark}'s questions; put {files} "
                "there."
            )

    def content(
        self,
        questions: Iterable[Question],
        counts: Mapping[str, int],
        published: Mapping[str, int],
        pictures: Pictures,
        sources: Sequence[Source] = (),
        names: Collection[str] | None = None,
    ) -> BenchmarkFiles:
        """Returns what was read of these files; published counts come first, absent ones as 0.

        `names`: the pictures that there are; None: all that questions and sources name.
        """
        questions = list(questions)
        names = sorted(picture_names((*questions, *sources)) if names is None else names)
        return BenchmarkFiles(
            questions,
            {name: counts.get(name, 0) for name in published} | counts,
            published,
            files=self.read_files,
            missing=self.missing,
            read_picture=pictures if names else None,
            inputs=pictures.signature(names) if names else None,
            sources=sources,
        )

    def required(self, *names: str, remedy: str) -> Path:
        """The first of these files that exists, the official name first; UserError with `remedy` if
        there is none.
        """
        path = self._first(names)
        if path is None:
            raise UserError(f"{self.folder / names[0]}: no such file; {remedy}.")
        return path

    def optional(self, *names: str, without: str) -> Path | None:
        """The first of these files that exists, or None; `without` names the consequence."""
        path = self._first(names)
        if path is None:
            self.missing[names[0]] = without
        return path

    def _first(self, names: Iterable[str]) -> Path | None:
        for name in names:
            if (self.folder / name).is_file():
                self.read_files.append(self.folder / name)
                return self.folder / name
        return None


class PictureFolders:
    """Picture files by name in any of several folders below one, which may be absent.

    `.` is the folder itself.
    """

    def __init__(self, folder: Path, below: Iterable[str]):
        self._paths: dict[str, Path] = {}
        for place in (folder / name for name in below):
            if place.is_dir():
                with os.scandir(place) as entries:
                    for entry in filter(os.DirEntry.is_file, entries):
                        self._paths.setdefault(entry.name, Path(entry.path))

    def __contains__(self, name: str) -> bool:
        return name in self._paths

    def __call__(self, name: str) -> bytes:
        """Encoded bytes; PictureError where the file is not there, too large or unreadable."""
        if (path := self._paths.get(name)) is None:
            raise PictureError(f"{name}: no such file; fetch it again.")
        try:
            check_bytes(path.stat().st_size, str(path))
            return path.read_bytes()
        except OSError as error:
            raise PictureError(f"{path}: {error.strerror}; fetch it again.") from error

    def signature(self, names: Iterable[str]) -> str:
        """Identifies the files of these names in their present state."""
        facts = []
        for name in names:
            status = self._paths[name].stat()
            facts.append(f"{self._paths[name].resolve()} {status.st_size} {status.st_mtime_ns}")
        return "\n".join(facts)


def picture_names(items: Iterable[Question | Source]) -> set[str]:
    """The names of the pictures of questions or sources, without the further pictures."""
    return {item.image for item in items if item.image is not None}


def with_present_pictures(items: Iterable[Q], pictures: Container[str]) -> list[Q]:
    """Questions or sources without the names of pictures that `pictures` has not."""
    return [
        item
        if item.image is None or item.image in pictures
        else dataclasses.replace(item, image=None)
        for item in items
    ]


def counts_of(
    questions: Collection[Question],
    splits: Iterable[str],
    kinds: Mapping[str, Callable[[Question], Any]],
) -> dict[str, int]:
    """Counts questions by split, `val questions`, and those that a kind accepts, by its name."""
    by_split = Counter(question.split for question in questions)
    counts = {f"{split} questions": by_split[split] for split in splits}
    return counts | {name: sum(map(bool, map(kind, questions))) for name, kind in kinds.items()}


class Entry(dict[str, Any]):
    """An object of an official file; a value of another kind is refused by one sentence, which
    begins with its place, `where`.
    """

    def __init__(self, where: str, values: Any):
        if not isinstance(values, Mapping):
            raise UserError(f"{where}: an object was expected; fetch the file again.")
        super().__init__(values)
        self.where = where

    def error(self, problem: str) -> UserError:
        """Returns the refusal of the entry for a problem."""
        return UserError(f"{self.where}: {problem}; fetch the file again.")

    def wrong(self, key: str, expected: str) -> UserError:
        """The refusal of a value."""
        return self.error(f"{key} is {self.get(key)!r:.60}; {expected} was expected")

    def text(self, key: str, default: str | None = None, *, empty: bool = False) -> str:
        """A text; `default` stands for null and for one that is absent, `empty` lets one be
        empty.
        """
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or not (value or empty or default is not None):
            raise self.wrong(key, "text")
        return value

    def choice(self, key: str, allowed: Iterable[str]) -> str:
        """One of several texts."""
        if self.get(key) not in (allowed := tuple(allowed)):
            raise self.wrong(key, f"one of {', '.join(allowed)}")
        return self[key]

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts, which the hub's files may write as Python's literal; () if absent."""
        value = self.get(key)
        texts = [] if value is None or value == "" else value
        if isinstance(texts, str):
            try:
                texts = ast.literal_eval(texts) if len(texts) <= _LONGEST_LITERAL else None
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                texts = None
            check_text(texts, self.where)  # a literal may hold half of a character
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise self.wrong(key, "a list of texts")
        return tuple(texts)

    def number(self, key: str) -> int:
        """A whole number, in any of the forms that files have."""
        number = whole_number(self.get(key))
        if number is None:
            raise self.wrong(key, "a whole number")
        return number

    def entry(self, key: str) -> Entry:
        """An object within the object."""
        if not isinstance(self.get(key), Mapping):
            raise self.wrong(key, "an object")
        return Entry(self.where, self[key])

    def index(self, key: str, count: int) -> int | None:
        """The number from 0 of one of so many options; None if absent."""
        value = self.get(key)
        if value is not None and not (type(value) is int and 0 <= value < count):
            raise self.wrong(key, f"a number from 0 to {count - 1}" if count else "no number")
        return value

    def letter(self, key: str, count: int, hidden: Sequence[Any] = (None, "")) -> int | None:
        """The number of the option that a letter names; None for an answer that is hidden."""
        value = self.get(key)
        if value in hidden:
            return None
        if not isinstance(value, str) or value not in tuple(_LETTERS[:count]):
            raise self.wrong(key, f"a letter from A to {_LETTERS[count - 1]}")
        return _LETTERS.index(value)


def read_entries(entries: Iterable[Entry], read: Callable[[Entry], T], key: str) -> dict[str, T]:
    """Parses entries by `read`; returns them by id, the file's `key`. An id may be there once."""
    by_id: dict[str, T] = {}
    for entry in entries:
        parsed = read(entry)
        if by_id.setdefault(parsed.id, parsed) is not parsed:
            raise UserError(f"{entry.where}: {key} {parsed.id!r} is there twice; keep one of them.")
    return by_id


def json_entries(path: Path, key: str | None = None) -> Iterator[Entry]:
    """The objects of a JSON list, or of the list under `key`."""
    data = read_json(path)
    rows = data.get(key) if key is not None and isinstance(data, dict) else data
    if not isinstance(rows, list):
        expected = "a list" if key is None else f'an object with a list "{key}"'
        raise UserError(f"{path}: {expected} was expected; fetch the file again.")
    for number, row in enumerate(rows, start=1):
        yield Entry(f"{path}, entry {number}", row)


def line_entries(path: Path) -> Iterator[Entry]:
    """The object of each line of a .jsonl or .jsonl.gz, read one at a time."""
    number = 0
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            while line := file.readline(_LONGEST_LINE):
                number += 1
                where = f"{path}, line {number}"
                if len(line) == _LONGEST_LINE:
                    raise UserError(
                        f"{where}: is longer than {_LONGEST_LINE:,} bytes; fetch the file again."
                    )
                if line.strip():
                    yield Entry(where, parse_json(line, where, remedy=ONE_A_LINE))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(
            f"{path}: is damaged after line {number} ({error}); fetch it again."
        ) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the file.") from error


# Picture files of a benchmark, each looked for at several places below one folder.


class PictureFiles(PictureFolders):
    """The pictures that lie below a folder at one of their `places`, which are relative to it."""

    def __init__(self, folder: Path, places: Mapping[str, Sequence[str]]):
        super().__init__(folder, ())
        for name, paths in places.items():
            for path in map(PurePosixPath, paths):
                if path.is_absolute() or ".." in path.parts:
                    raise UserError(
                        f"{folder}: picture {name!r} is said to lie at {str(path)!r}, outside that "
                        "folder; fetch the benchmark's files again."
                    )
            # os.path.isfile says no of a name that is too long, where Path.is_file raises.
            file = next((folder / path for path in paths if os.path.isfile(folder / path)), None)
            if file is not None:
                self._paths[name] = file


# Split -> with what the names of its files on the hub begin.
HUB_NAMES = {"train": "train", "val": "validation", "test": "test"}
# Row groups of pictures kept in memory; the hub's hold about a hundred pictures each.
_GROUPS = 4


def parquet_rows(
    path: Path, needed: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (row number, {column: value}) of these columns; absent optional ones are left out."""
    file = _open(path)
    names = file.schema_arrow.names
    require_columns(path, needed)
    columns = [name for name in (*needed, *optional) if name in names]
    number = 0
    for group in range(file.num_row_groups):
        for row in _values(path, _read(path, file, group, columns)):
            yield number, row
            number += 1


def parquet_entries(
    paths: Iterable[Path], needed: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[Entry]:
    """The rows of several files, as `parquet_rows` reads them."""
    for path in paths:
        for number, row in parquet_rows(path, needed, optional):
            yield Entry(f"{path}, row {number}", row)


def hub_split(path: Path) -> str:
    """The split in the name of one of the hub's files; UserError where it says none."""
    matching = (s for s, name in HUB_NAMES.items() if path.name.startswith(f"{name}-"))
    if (split := next(matching, None)) is None:
        names = ", ".join(f"{name}-*" for name in HUB_NAMES.values())
        raise UserError(f"{path}: its name says no split; call it {names}.")
    return split


def hub_tables(folder: Path, name: str) -> list[Path]:
    """The hub's Parquet files of a split, `test-*.parquet`, in a folder or in `data/` below it."""
    pattern = f"{name}-*.parquet"
    return sorted(folder.glob(pattern)) or sorted(folder.glob(f"data/{pattern}"))


def parquet_files(folder: Path, *, remedy: str, below: bool = False) -> list[Path]:
    """The Parquet files in a folder, or also in the folders `below` it; UserError without any."""
    paths = sorted([*folder.glob("*.parquet"), *(folder.glob("*/*.parquet") if below else ())])
    if not paths:
        raise UserError(f"{folder}: holds no .parquet file; {remedy}.")
    return paths


def require_columns(path: Path, needed: Sequence[str]) -> None:
    """UserError where a Parquet file has not all of these columns."""
    names = parquet_columns(path)
    if missing := [name for name in needed if name not in names]:
        raise UserError(
            f"{path}: has no column {', '.join(missing)} (it has {', '.join(names)}); fetch the "
            "benchmark's own Parquet files."
        )


class ParquetPictures:
    """Encoded pictures of Parquet files by the id of their row.

    Args:
      paths: files with the columns `key` and `column`; files without the latter are passed over.
      key: the column of the ids. None: the ids are those of `row_name`, and rows whose picture is
        null have none.
      column: of the pictures, one in a row or a list of them.
      before: what stands before the ids of rows.
    """

    def __init__(
        self, paths: Iterable[Path], key: str | None, column: str = "image", before: str = ""
    ):
        self._rows: dict[str, tuple[int, int, int]] = {}  # id -> (file, row group, row in it)
        self._paths = [path for path in paths if column in _open(path).schema_arrow.names]
        self._column = column
        for place, path in enumerate(self._paths):
            file = _open(path)
            for group in range(file.num_row_groups):
                if key is None:
                    first = sum(file.metadata.row_group(n).num_rows for n in range(group))
                    counts = _count_pictures(path, file, group, column)
                    ids = {n: row_name(path, first + n) for n, count in enumerate(counts) if count}
                else:
                    require_columns(path, [key])
                    ids = dict(enumerate(_values(path, _read(path, file, group, [key]).column(0))))
                places = {f"{before}{name}": (place, group, row) for row, name in ids.items()}
                self._rows |= places
        self._lock = threading.Lock()  # row groups are read by one thread at a time
        self._group = functools.lru_cache(maxsize=_GROUPS)(self._read_group)

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def counts(self) -> dict[str, int]:
        """Id -> how many pictures its row has; reads none."""
        counts = {
            (place, group): _count_pictures(path, _open(path), group, self._column)
            for place, path in enumerate(self._paths)
            for group in range(_open(path).num_row_groups)
        }
        rows = self._rows.items()
        return {name: counts[place, group][row] for name, (place, group, row) in rows}

    def __call__(self, name: str, number: int | None = None) -> bytes:
        """Returns encoded bytes, of a list's `number`-th picture; PictureError where there are
        none.
        """
        place, group, row = self._rows[name]
        with self._lock:
            picture = self._group(place, group)[row]
        where = f"{self._paths[place]}, id {name}"
        data = _bytes_of(picture, number)
        if data is None or not data.is_valid:
            raise PictureError(f"{where}: holds no picture's bytes.")
        check_bytes(data.as_buffer().size, where)
        return data.as_buffer().to_pybytes()

    def signature(self, names: Iterable[str] = ()) -> str:
        """Identifies the files in their present state, whatever the names of pictures."""
        statuses = [(path.resolve(), path.stat()) for path in self._paths]
        return "\n".join(f"{path} {s.st_size} {s.st_mtime_ns}" for path, s in statuses)

    def _read_group(self, place: int, group: int) -> Any:
        """The pictures of a row group; equal ones are held once, but in lists."""
        path = self._paths[place]
        file = _open(path)
        held = [file.metadata.row_group(group).column(n) for n in range(len(file.schema))]
        held = [column for column in held if column.path_in_schema.split(".")[0] == self._column]
        check_unpacked(
            sum(column.total_compressed_size for column in held),
            sum(column.total_uncompressed_size for column in held),
            f"{path}, row group {group}",
        )
        leaves = {column.path_in_schema for column in held}
        once = sorted(leaves & {self._column, f"{self._column}.bytes"})
        return _read(path, _open(path, once), group, [self._column]).column(0)


class PictureColumns:
    """Encoded pictures of several columns, as `ID/COLUMN`, or `ID/COLUMN/NUMBER` of a list's.

    Args:
      paths, key: of ParquetPictures.
      columns: of single pictures; those of rows where they are null are left out.
      lists: columns of lists of pictures.
    """

    def __init__(
        self, paths: Sequence[Path], key: str, columns: Sequence[str], lists: Sequence[str] = ()
    ):
        names = (*columns, *lists)
        self._columns = {name: ParquetPictures(paths, key, name) for name in names}
        self._places: dict[str, tuple[str, str, int | None]] = {}
        for column, pictures in self._columns.items():
            for row, count in pictures.counts().items():
                for number in range(count):
                    listed = column in lists
                    name = f"{row}/{column}/{number}" if listed else f"{row}/{column}"
                    self._places[name] = column, row, number if listed else None

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def listed(self, row: str, column: str) -> list[str]:
        """The names of the pictures in a row's list."""
        names: list[str] = []
        while (name := f"{row}/{column}/{len(names)}") in self._places:
            names.append(name)
        return names

    def __call__(self, name: str) -> bytes:
        """Encoded bytes; PictureError where there are none."""
        column, row, number = self._places[name]
        return self._columns[column](row, number)

    def signature(self, names: Iterable[str] = ()) -> str:
        """Identifies the files in their present state, whatever the names of pictures."""
        return "\n".join(pictures.signature() for pictures in self._columns.values())


def row_name(path: Path, number: int) -> str:
    """The id of a row, counted from 0, in a file without a column of ids."""
    return f"{path.name}/{number}"


def _count_pictures(path: Path, file: Any, group: int, column: str) -> list[int]:
    """How many pictures each row of a group has in a column; reads no pictures for that."""
    import pyarrow

    leaves = [file.schema.column(n).path for n in range(len(file.schema))]
    column_leaves = [leaf for leaf in leaves if leaf.split(".")[0] == column]
    light = next((leaf for leaf in column_leaves if leaf.endswith(".path")), column)
    cells = _read(path, file, group, [light]).column(0)
    if pyarrow.types.is_list(cells.type) or pyarrow.types.is_large_list(cells.type):
        return [len(cell) if cell.is_valid else 0 for cell in cells]
    return [int(there) for there in cells.is_valid().to_pylist()]


def _bytes_of(picture: Any, number: int | None) -> Any:
    """The binary scalar in a cell of `image`, or in its list's; None where it has none."""
    import pyarrow

    if number is not None:
        picture = picture[number] if isinstance(picture, pyarrow.ListScalar) else None
    if isinstance(picture, pyarrow.StructScalar):
        picture = picture["bytes"] if picture.is_valid and "bytes" in picture else None
    if isinstance(picture, pyarrow.DictionaryScalar):
        picture = picture.value if picture.is_valid else None
    return (
        picture if isinstance(picture, pyarrow.BinaryScalar | pyarrow.LargeBinaryScalar) else None
    )


def parquet_columns(path: Path) -> list[str]:
    """The names of a Parquet file's columns."""
    return _open(path).schema_arrow.names


def _open(path: Path, dictionaries: Sequence[str] = ()) -> Any:
    parquet = import_optional("pyarrow.parquet", f"{path}: reading Parquet", "parquet")
    try:
        return parquet.ParquetFile(path, read_dictionary=list(dictionaries))
    except Exception as error:  # names of columns that are no UTF-8, beside Arrow's own errors
        raise _damaged(path, error) from error


def _read(path: Path, file: Any, group: int, columns: Sequence[str]) -> Any:
    try:
        table = file.read_row_group(group, columns=list(columns))
    except Exception as error:
        raise _damaged(path, error) from error
    if table.num_rows != file.metadata.row_group(group).num_rows:
        raise _damaged(path, ValueError(f"row group {group} has other rows than it says"))
    return table


def _values(path: Path, table: Any) -> list[Any]:
    """A table's rows or a column's values as Python's; text that is no UTF-8 is found here."""
    try:
        return table.to_pylist()
    except Exception as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> UserError:
    reason = " ".join(str(error).split()).rstrip(".")
    return UserError(
        f"{path}: cannot be read as Parquet ({reason:.150}); the file is cut off or of another "
        "format, fetch it again."
    )
