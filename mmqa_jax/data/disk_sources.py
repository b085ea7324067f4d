"""Keeps sources on disk: as many as Wikipedia has, none of them in memory.

    <folder>/00000.arrow, ...    65,536 sources each (Arrow's IPC files), in record batches of 256
    <folder>/batches.npy         of every batch the first 16 bytes of its SHA-256
    <folder>/id_hashes.npy       64-bit hashes of all ids, ascending
    <folder>/id_rows.npy         the row of each
    <folder>/image_rows.npy      rows of the pictures, ascending
    <folder>/SHA256SUMS          of all these files

The columns are the texts id, title, text, image ("": a snippet) and extra (a JSON object, or "").
Single sources are read through a map of their file, which is the system's page cache. A batch is
compared with its checksum when it is first read. An id is found by its hash, and then compared
with the one that is stored, so that two ids of one hash are told apart.

Held in memory of a million sources: 66 kB of checksums and 4 bytes for every picture; beside them
at most 64 mapped files and 64 batches.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import hashlib
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from mmqa_jax.core.checkpoints.checksums import SUMS, check_sums, write_sums
from mmqa_jax.core.errors import UserError, import_optional
from mmqa_jax.core.files import settle
from mmqa_jax.data.schema import Source

COLUMNS = ("id", "title", "text", "image", "extra")
SHARD_ROWS = 65_536  # the most that a kill loses
BATCH_ROWS = 256
_DIGEST = 16  # bytes of a batch's checksum
_OPEN_FILES, _OPEN_BATCHES = 64, 64
_SORTED_AT_ONCE = 1 << 21  # ids; 24 bytes each
_REMEDY = "run `mmqa prepare` again with --overwrite"
_CHECKED = ("batches.npy", "image_rows.npy")
_INDEX = ("id_hashes.npy", "id_rows.npy")


class SourceRow(NamedTuple):
    """A source as its columns."""

    id: str
    title: str
    text: str
    image: str = ""
    extra: str = ""


def arrow() -> ModuleType:
    """pyarrow; UserError where it is not installed."""
    import_optional("pyarrow.ipc", "sources on disk: reading them", "wikipedia")
    return import_optional("pyarrow", "sources on disk: reading them", "wikipedia")


def shard_name(number: int) -> str:
    """The file of a shard."""
    return f"{number:05d}.arrow"


class DiskSources(Sequence[Source]):
    """The sources of a folder, read when they are asked for; safe to share between threads.

    A copy sent to another process opens the files anew. `image_rows` is uint32[pictures],
    ascending.
    """

    def __init__(self, folder: str | os.PathLike, rows: int):
        arrow()
        self.folder, self._rows = Path(folder), rows
        if not (self.folder / SUMS).is_file():
            raise UserError(f"{self.folder}: has no {SUMS}; {_REMEDY}.")
        check_sums(self.folder, _CHECKED, remedy=_REMEDY)
        self._digests = np.load(self.folder / _CHECKED[0])
        self.image_rows = np.load(self.folder / _CHECKED[1])
        if len(self._digests) != -(-rows // BATCH_ROWS):
            raise UserError(
                f"{self.folder}: does not hold the {rows:,} sources of its manifest; {_REMEDY}."
            )
        self._start()

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row):
        if isinstance(row, slice):
            return [self[number] for number in range(*row.indices(self._rows))]
        batch, place = self._place(row)
        return _source(*(batch[column][place].as_py() for column in range(len(COLUMNS))))

    def __iter__(self) -> Iterator[Source]:
        return self.from_row(0)

    def from_row(self, row: int) -> Iterator[Source]:
        """All sources from a row on, in order, a batch at a time."""
        for number, columns in self._in_order(row // BATCH_ROWS):
            first = max(row - number * BATCH_ROWS, 0)
            yield from map(_source, *(column.to_pylist()[first:] for column in columns))

    def id_of(self, row: int) -> str:
        """The id of the source in a row."""
        batch, place = self._place(row)
        return batch[0][place].as_py()

    def ids_from(self, row: int) -> Iterator[list[str]]:
        """The ids of all sources from a batch's first row on, a batch at a time."""
        for _, columns in self._in_order(row // BATCH_ROWS):
            yield columns[0].to_pylist()

    def _place(self, row: int) -> tuple[Any, int]:
        if not -self._rows <= row < self._rows:
            raise IndexError(f"row {row} of {self._rows} sources")
        number, place = divmod(int(row) % self._rows, BATCH_ROWS)
        return self._batch(number), place

    def _batch(self, number: int) -> list[Any]:
        """The columns of a batch, mapped."""
        with self._lock:
            if number in self._batches:
                self._batches.move_to_end(number)
                return self._batches[number]
            shard, place = divmod(number, SHARD_ROWS // BATCH_ROWS)
            with self._damage_named(shard):
                columns = self._file(shard).get_batch(place).columns
            self._check(number, columns)
            self._batches[number] = columns
            if len(self._batches) > _OPEN_BATCHES:
                self._batches.popitem(last=False)
            return columns

    def _in_order(self, first: int) -> Iterator[tuple[int, list[Any]]]:
        """Number and columns of all batches from the `first` on.

        They are read and not mapped: who reads all of them would have them all in its memory map.
        """
        pyarrow = arrow()
        in_shard = SHARD_ROWS // BATCH_ROWS
        for start in range(first // in_shard * in_shard, len(self._digests), in_shard):
            shard = start // in_shard
            with contextlib.ExitStack() as closing:
                with self._damage_named(shard):
                    path = self.folder / shard_name(shard)
                    file = closing.enter_context(pyarrow.OSFile(str(path), "rb"))
                    reader = pyarrow.ipc.open_file(file)
                for number in range(max(first, start), min(start + in_shard, len(self._digests))):
                    with self._damage_named(shard):
                        columns = reader.get_batch(number - start).columns
                    self._check(number, columns)
                    yield number, columns

    @contextlib.contextmanager
    def _damage_named(self, shard: int) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, KeyError, IndexError) as error:  # pyarrow's are of these
            reason = " ".join(str(error).split())[:120]
            path = self.folder / shard_name(shard)
            raise UserError(f"{path}: is damaged ({reason}); {_REMEDY}.") from error

    def _check(self, number: int, columns: Sequence[Any]) -> None:
        """Raises UserError if a batch differs from the written one when it is first read."""
        if not self._checked[number] and not self._is_whole(number, columns):
            shard, place = divmod(number, SHARD_ROWS // BATCH_ROWS)
            path = self.folder / shard_name(shard)
            raise UserError(f"{path}: is damaged (its batch {place} is another); {_REMEDY}.")
        self._checked[number] = True

    def _is_whole(self, number: int, columns: Sequence[Any]) -> bool:
        rows = min(BATCH_ROWS, self._rows - number * BATCH_ROWS)
        if [len(column) for column in columns] != [rows] * len(COLUMNS):
            return False
        return batch_digest(columns) == self._digests[number].tobytes()

    def _file(self, shard: int) -> Any:
        """The reader of a shard's file."""
        if shard not in self._files:
            pyarrow = arrow()
            mapped = pyarrow.memory_map(str(self.folder / shard_name(shard)))
            self._files[shard] = pyarrow.ipc.open_file(mapped)
            if len(self._files) > _OPEN_FILES:
                self._files.popitem(last=False)
        self._files.move_to_end(shard)
        return self._files[shard]

    def _start(self) -> None:
        self._lock = threading.RLock()
        self._files: collections.OrderedDict[int, Any] = collections.OrderedDict()
        self._batches: collections.OrderedDict[int, list[Any]] = collections.OrderedDict()
        self._checked = np.zeros(len(self._digests), bool)

    def __getstate__(self) -> dict[str, Any]:
        per_process = ("_lock", "_files", "_batches", "_checked")
        return {name: value for name, value in self.__dict__.items() if name not in per_process}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()


class RowsById(Mapping[str, int]):
    """The row of every id of DiskSources, by binary search in the index on disk."""

    def __init__(self, sources: DiskSources):
        self._sources = sources
        self._index: tuple[np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self._sources)

    def __iter__(self) -> Iterator[str]:
        for ids in self._sources.ids_from(0):
            yield from ids

    def __getitem__(self, name: str) -> int:
        hashes, rows = self._opened()
        wanted = np.uint64(_hash(name)) if isinstance(name, str) else None
        place = len(hashes) if wanted is None else int(np.searchsorted(hashes, wanted))
        while place < len(hashes) and hashes[place] == wanted:
            if self._sources.id_of(int(rows[place])) == name:
                return int(rows[place])
            place += 1
        raise KeyError(name)

    def _opened(self) -> tuple[np.ndarray, np.ndarray]:
        """Hashes and rows, mapped; their checksums are compared at the first use."""
        if self._index is None:
            folder = self._sources.folder
            check_sums(folder, _INDEX, remedy=_REMEDY)
            hashes, rows = (np.load(folder / name, mmap_mode="r") for name in _INDEX)
            self._index = hashes, rows
        return self._index

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_index": None}


class SourceSelection(Sequence[Source]):
    """Some rows of `sources`, ascending, as sources of their own, numbered from 0; none is
    copied.
    """

    def __init__(self, sources: Sequence[Source], rows: np.ndarray):
        self._sources, self._rows = sources, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row):
        if isinstance(row, slice):
            return [self._sources[int(source_row)] for source_row in self._rows[row]]
        return self._sources[int(self._rows[row])]


class SelectedRows(Mapping[str, int]):
    """The row of every id in a SourceSelection of `rows`; `row` is that of all sources."""

    def __init__(self, selection: SourceSelection, rows: np.ndarray, row: Mapping[str, int]):
        self._selection, self._rows, self._row = selection, rows, row

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[str]:
        return (source.id for source in self._selection)

    def __getitem__(self, name: str) -> int:
        row = self._row[name]
        place = bisect.bisect_left(self._rows, row)
        if place == len(self._rows) or self._rows[place] != row:
            raise KeyError(name)
        return place


class ShardFile:
    """One file of sources; the context manager keeps it if the block ends without an error."""

    def __init__(self, path: Path):
        pyarrow = arrow()
        self._path, self._temporary = path, path.with_name(f".{path.name}.tmp")
        self._schema = pyarrow.schema([(name, pyarrow.string()) for name in COLUMNS])
        self._file = pyarrow.OSFile(str(self._temporary), "wb")
        self._writer = pyarrow.ipc.new_file(self._file, self._schema)
        self.digests: list[bytes] = []  # of its batches
        self.images: list[int] = []  # rows of its pictures, from the file's first row
        self._rows = 0

    def write(self, rows: Sequence[SourceRow]) -> None:
        """Writes a batch: BATCH_ROWS sources, fewer only as the last one."""
        pyarrow = arrow()
        columns = [pyarrow.array(values, pyarrow.string()) for values in zip(*rows, strict=True)]
        self._writer.write(pyarrow.record_batch(columns, schema=self._schema))
        self.digests.append(batch_digest(columns))
        self.images += [self._rows + place for place, row in enumerate(rows) if row[3]]
        self._rows += len(rows)

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._writer.close()
        self._file.close()
        settle(self._temporary, self._path, whole=kind is None)


def batch_digest(columns: Sequence[Any]) -> bytes:
    """The checksum of a batch's columns: of offsets and texts, as Arrow's layout has them."""
    digest = hashlib.sha256()
    for column in columns:
        offsets = memoryview(column.buffers()[1])[: 4 * (len(column) + 1)]
        end = int.from_bytes(offsets[-4:], "little")
        digest.update(offsets)
        if end:
            digest.update(memoryview(column.buffers()[2])[:end])
    return digest.digest()[:_DIGEST]


def finish_sources(
    folder: Path,
    digests: bytes,
    image_rows: np.ndarray,
    rows: int,
    known: Mapping[str, str],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> str:
    """Writes what lies beside the shards of a folder, the index of ids among it.

    The ids are sorted in parts of two million, so that memory stays bounded.

    Args:
      digests: of all batches, in order.
      image_rows: of all pictures, ascending.
      known: the SHA-256 of the shards, by name.
      progress: called with (ids done, ids).

    Returns:
      The fingerprint of the sources: of all ids, texts and names of pictures, in order.
    """
    (folder / SUMS).unlink(missing_ok=True)
    whole = np.frombuffer(digests, np.uint8).reshape(-1, _DIGEST)
    np.save(folder / "batches.npy", whole)
    np.save(folder / "image_rows.npy", image_rows.astype(np.uint32))
    write_sums(folder, _CHECKED)
    sources = DiskSources(folder, rows)
    _write_index(sources, progress)
    write_sums(folder, [*_CHECKED, *_INDEX], known=known)
    return hashlib.sha256(digests).hexdigest()


def _write_index(sources: DiskSources, progress: Callable[[int, int], None]) -> None:
    """Hashes and rows of all ids, ascending by hash."""
    folder, rows = sources.folder, len(sources)
    unsorted = np.lib.format.open_memmap(folder / ".unsorted.npy", "w+", np.uint64, (rows,))
    start = 0
    for ids in sources.ids_from(0):
        unsorted[start : start + len(ids)] = [_hash(name) for name in ids]
        start += len(ids)
        progress(start, rows)
    parts = max(1, -(-rows // _SORTED_AT_ONCE))
    bounds = [part * (1 << 64) // parts for part in range(parts + 1)]
    hashes = np.lib.format.open_memmap(folder / _INDEX[0], "w+", np.uint64, (rows,))
    placed = np.lib.format.open_memmap(folder / _INDEX[1], "w+", np.uint32, (rows,))
    start = 0
    for low, high in itertools.pairwise(bounds):
        chosen = _between(unsorted, low, high)
        hashes_of_block = unsorted[chosen]
        order = np.argsort(hashes_of_block, kind="stable")
        hashes_of_block, chosen = hashes_of_block[order], chosen[order]
        _check_unique(sources, hashes_of_block, chosen)
        (
            hashes[start : start + len(hashes_of_block)],
            placed[start : start + len(hashes_of_block)],
        ) = hashes_of_block, chosen
        start += len(hashes_of_block)
    for array in (hashes, placed):
        array.flush()
    (folder / ".unsorted.npy").unlink()


def _between(hashes: np.ndarray, low: int, high: int) -> np.ndarray:
    """Places of the hashes in [low, high)."""
    ranges = []
    for start in range(0, len(hashes), _SORTED_AT_ONCE):
        block = hashes[start : start + _SORTED_AT_ONCE]
        inside = (block >= np.uint64(low)) & (block <= np.uint64(high - 1))
        ranges.append((np.flatnonzero(inside) + start).astype(np.uint32))
    return np.concatenate(ranges)


def _check_unique(sources: DiskSources, hashes: np.ndarray, rows: np.ndarray) -> None:
    """UserError where sources of one hash have one id, too."""
    for place in np.flatnonzero(hashes[1:] == hashes[:-1]).tolist():
        same = rows[hashes == hashes[place]].tolist()
        first: dict[str, int] = {}
        for row in same:
            name = sources.id_of(row)
            if name in first:
                raise UserError(
                    f"source id {name!r} appears twice, as source {first[name] + 1:,} and "
                    f"{row + 1:,}; rename one."
                )
            first[name] = row


def _source(name: str, title: str, text: str, image: str, extra: str) -> Source:
    more = json.loads(extra) if extra else {}
    return Source(name, "image" if image else "text", text, title, image or None, more)


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
