"""Records of ArrayRecord files in an object store, read by ranges of bytes, without a copy.

ArrayRecord's own reader opens files, and objects at gs:// alone. So the end of an object, which
says where its records lie, is fetched once, and a record when it is asked for; both are written at
their places into a sparse file, which that reader opens. It checks the hashes and decompresses.

The sparse files have no names, so that none outlives its process. They take $MMQA_STREAM_GIB (16)
of the disk at most: then the file that was not read from for the longest time goes.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import resource
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mmqa_jax.core.errors import UserError, import_optional
from mmqa_jax.core.host import cache_dir
from mmqa_jax.core.paths import read_ranges, scheme_of

MOST_GIB = "MMQA_STREAM_GIB"

_READ_AHEAD = 8 << 20  # bytes at most, of records that are asked for in order
# Of Riegeli's files (doc/riegeli_records_file_format.md of google/riegeli): a header begins each
# block, and interrupts chunks. ArrayRecord's last block points to the chunk with its index.
_BLOCK, _BLOCK_HEADER, _CHUNK_HEADER = 1 << 16, 24, 40
_MAGIC = 0x71930E704FDAE05E
_END = 2 * _BLOCK  # bytes that hold the index of most files


class RemoteShard(NamedTuple):
    """An ArrayRecord file in a store, its size in bytes and its number of records."""

    name: str
    size: int
    records: int


class RemoteRecords:
    """The records of several files in order, by number. Safe to share between threads."""

    def __init__(self, shards: Sequence[RemoteShard]):
        if shards:
            import_optional("zstandard", f"{shards[0].name}:", scheme_of(shards[0].name) or "gs")
        self._shards = shards
        self._firsts = np.cumsum([0, *(shard.records for shard in shards)])
        self._most_bytes = _most_bytes()
        self._most_files = _most_open_files()
        self._lock = threading.Lock()
        self._open: collections.OrderedDict[int, _Part] = collections.OrderedDict()

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, number: int) -> bytes:
        """A record; where the last ones of its file were read in order, more are fetched with it.

        Raises RunError where the store cannot be reached.
        """
        ((shard, place),) = self._places([number])
        part = self._opened([shard])[shard]
        if not part.is_there[place]:
            self._fetch([(part, place, part.end_of_read_ahead(place))])
        return part.read(place)

    def look_ahead(self, numbers: Iterable[int]) -> None:
        """Fetches records that are asked for soon, all at once; raises what reading them does."""
        places = self._places(sorted(set(numbers)))
        opened = self._opened({shard: None for shard, _ in places})
        spans: list[tuple[_Part, int, int]] = []
        for part, place in ((opened[shard], place) for shard, place in places):
            if part.is_there[place]:
                continue
            if spans and spans[-1][0] is part and spans[-1][2] == place:  # where the last one ends
                spans[-1] = (part, spans[-1][1], place + 1)
            else:
                spans.append((part, place, place + 1))
        self._fetch(spans)

    def _places(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """The file of every record, and its place there."""
        shards = np.searchsorted(self._firsts, numbers, side="right") - 1
        return list(zip(shards.tolist(), (numbers - self._firsts[shards]).tolist(), strict=True))

    def _opened(self, shards: Iterable[int]) -> dict[int, _Part]:
        """The sparse files of these shards, which are made where missing."""
        with self._lock:
            parts = {shard: self._open[shard] for shard in shards if shard in self._open}
            for shard in parts:
                self._open.move_to_end(shard)
        missing = [shard for shard in shards if shard not in parts]
        for shard, part in zip(missing, _open([self._shards[n] for n in missing]), strict=True):
            with self._lock:  # of two threads that opened it, the first one's is kept
                parts[shard] = self._open.setdefault(shard, part)
        return parts

    def _fetch(self, spans: Sequence[tuple[_Part, int, int]]) -> None:
        """Fetches records from a place to another of files; more than the bound is let go."""
        ranges = [part.range_of(place, end) for part, place, end in spans]
        for (part, place, end), data in zip(spans, read_ranges(ranges), strict=True):
            part.put(place, end, data)
            with self._lock:
                part.bytes += len(data)
        with self._lock:
            used = sum(part.bytes for part in self._open.values())
            while len(self._open) > 1 and (
                used > self._most_bytes or len(self._open) > self._most_files
            ):
                # Its file is closed once no thread reads from it.
                used -= self._open.popitem(last=False)[1].bytes


class _Part:
    """A sparse file that holds the fetched ranges of an object.

    Args:
      shard: the object.
      end: its last bytes, which hold the index.

    Attributes:
      is_there: bool[records], which ones were fetched.
      bytes: that were fetched.
    """

    def __init__(self, shard: RemoteShard, end: bytes):
        from array_record.python.array_record_module import ArrayRecordReader

        self._shard = shard
        with _damage_named(shard):
            self._starts = _record_starts(end, shard.size)
            if len(self._starts) != shard.records + 1:
                raise ValueError(f"{len(self._starts) - 1} records, {shard.records} were expected")
        self.is_there = self._starts[:-1] >= shard.size - len(end)
        self.bytes = len(end)
        self._next, self._ahead = 0, 1
        self._file = tempfile.TemporaryFile(dir=cache_dir() / "store", buffering=0)  # noqa: SIM115
        os.ftruncate(self._file.fileno(), shard.size)
        self._write(end, shard.size - len(end))
        options = "readahead_buffer_size:0,max_parallelism:0"  # it reads a record's bytes alone
        with _damage_named(shard):
            self._reader = ArrayRecordReader(f"/proc/self/fd/{self._file.fileno()}", options)

    def range_of(self, place: int, end: int) -> tuple[str, int, int]:
        """The object, and where in it the records from `place` to `end` begin and end."""
        return self._shard.name, int(self._starts[place]), int(self._starts[end])

    def end_of_read_ahead(self, place: int) -> int:
        """Behind the last record to fetch with the one at `place`: twice as many as before, if
        that is where the last ones ended."""
        self._ahead = 2 * self._ahead if place == self._next else 1
        most = np.searchsorted(self._starts, self._starts[place] + _READ_AHEAD, side="right") - 1
        self._next = int(max(place + 1, min(place + self._ahead, most)))
        return self._next

    def put(self, place: int, end: int, data: bytes) -> None:
        """Keeps the bytes of `range_of`."""
        self._write(data, int(self._starts[place]))
        self.is_there[place:end] = True

    def read(self, place: int) -> bytes:
        """A record that is there; UserError where it is damaged."""
        with _damage_named(self._shard):
            (record,) = self._reader.read([place])
        return record

    def _write(self, data: bytes, start: int) -> None:
        rest = memoryview(data)
        try:
            while rest:
                count = os.pwrite(self._file.fileno(), rest, start)
                rest, start = rest[count:], start + count
        except OSError as error:
            error.filename = str(cache_dir())
            raise


def _open(shards: Sequence[RemoteShard]) -> list[_Part]:
    """The objects as sparse files that hold their indexes alone."""
    (cache_dir() / "store").mkdir(parents=True, exist_ok=True)
    ends = read_ranges([(entry.name, max(0, entry.size - _END), entry.size) for entry in shards])
    longer = []  # the indexes of very many records
    for number, (shard, end) in enumerate(zip(shards, ends, strict=True)):
        with _damage_named(shard):
            start = _index_start(end, shard.size)
        if start < shard.size - len(end):
            longer.append((number, (shard.name, start, shard.size)))
    for (number, _), end in zip(longer, read_ranges([span for _, span in longer]), strict=True):
        ends[number] = end
    return [_Part(shard, end) for shard, end in zip(shards, ends, strict=True)]


def _index_start(end: bytes, size: int) -> int:
    """Returns where the index of a file of this size begins, by its last bytes."""
    tag, start, _, magic = _varints(_records(end, size, size - _BLOCK)[0])[:4].tolist()
    if tag != 8 or magic != _MAGIC or not 0 < start < size - _BLOCK:
        raise ValueError("it is no ArrayRecord file, or cut")
    return start


def _record_starts(end: bytes, size: int) -> np.ndarray:
    """int64[records + 1]: where the records of a file begin, and where the last one ends."""
    last = _index_start(end, size)
    values, lengths = _records(end, size, last)
    # The first record is about the index, the others are ArrayRecordFooter of its layout.proto:
    # each one's chunk, its decoded bytes and its records.
    fields = _varints(values[lengths[0] :]).reshape(-1, 6)
    starts = np.append(fields[:, 1], np.uint64(last)).astype(np.int64)
    if (fields[:, [0, 2, 4, 5]] != [8, 16, 24, 1]).any() or (np.diff(starts) <= 0).any():
        raise ValueError("its index does not name a record a chunk")
    return starts


def _records(end: bytes, size: int, start: int) -> tuple[bytes, list[int]]:
    """The records of a simple chunk at `start`, one behind the other, and their lengths."""
    parts, at = [], start
    while at < size:
        at += 0 if at % _BLOCK else _BLOCK_HEADER
        stop = at - at % _BLOCK + _BLOCK
        parts.append(end[at - size : stop - size or None])
        at = stop
    chunk = b"".join(parts)
    data = chunk[_CHUNK_HEADER : _CHUNK_HEADER + int.from_bytes(chunk[8:16], "little")]
    compression, (count, data) = data[:1], _first_varint(data[1:])
    lengths = _varints(_decompressed(compression, data[:count])).tolist()
    return _decompressed(compression, data[count:]), lengths


def _decompressed(compression: bytes, data: bytes) -> bytes:
    if compression == b"\0":
        return data
    if compression != b"z":  # what ArrayRecord writes unless it is told otherwise
        raise ValueError(f"unknown compression {compression!r}")
    import zstandard

    size, data = _first_varint(data)
    return zstandard.ZstdDecompressor().decompress(data, max_output_size=size)


def _first_varint(data: bytes) -> tuple[int, bytes]:
    """Splits the data after the number that they begin with."""
    length = next(n for n, byte in enumerate(data, 1) if byte < 128)
    return int(_varints(data[:length])[0]), data[length:]


def _varints(data: bytes) -> np.ndarray:
    """uint64: numbers of 7 bits a byte, the lowest first; the last byte of each is below 128."""
    octets = np.frombuffer(data, np.uint8)
    starts = np.flatnonzero(np.append(True, octets[:-1] < 128))
    place = np.arange(len(octets)) - np.repeat(starts, np.diff(starts, append=len(octets)))
    parts = (octets & 127).astype(np.uint64) << (7 * place).astype(np.uint64)
    return np.add.reduceat(parts, starts)


@contextlib.contextmanager
def _damage_named(shard: RemoteShard) -> Iterator[None]:
    """Turns any error of reading an object's bytes into a UserError; ArrayRecord, zstandard and
    NumPy have no common one."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{shard.name}: its records cannot be read ({reason}); copy the folder into the store "
            "again."
        ) from error


def _most_bytes() -> int:
    text = os.environ.get(MOST_GIB) or "16"
    try:
        most = float(text)
    except ValueError:
        most = -1.0
    if not 0 <= most < math.inf:
        raise UserError(f"{MOST_GIB}={text}: a number of GiB was expected; correct it.")
    return int(most * 2**30)


def _most_open_files() -> int:
    """A quarter of the files that the process may have open, which are up to 65,536 from now on:
    a part takes two."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    now = max(now, min(most, 1 << 16))
    resource.setrlimit(resource.RLIMIT_NOFILE, (now, most))
    return now // 4
