"""Benchmarks as the hub's Parquet files: rows with columns of pictures {bytes, path}, or lists."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError, import_optional
from mmqa_jax.data.formats.official import Entry
from mmqa_jax.data.pictures.bounds import PictureError, check_bytes, check_unpacked

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
