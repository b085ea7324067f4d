"""One store of finished work: a result under the hash of all that it depends on, and its key.

    FOLDER/job.json        what the results depend on, for people and for who continues the work
    FOLDER/00003.jsonl     a chunk of one result, alone in its file
    FOLDER/1764...-HOST-PROCESS-....jsonl       the other chunks of one writer

Results are committed in chunks. A chunk is a line of JSON, the head, then the results: a line of
JSON each, or an array as NumPy writes it. The head says what the results depend on (a hash), their
keys, lengths and checksums, and ends in a checksum of its own. A chunk that is alone is written
whole or not at all; the others are appended to a file that only their writer writes, whose end is
dropped where a kill cut it. In an object store every chunk is an object.

So any number of processes on any hosts may write into one folder at once, each reads what the
others have committed, and to merge is to read. No lock is needed for that.
"""

import hashlib
import io
import json
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Self

import numpy as np

from mmqa_jax.core.checkpoints.checksums import read_sealed, write_sealed
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write
from mmqa_jax.core.paths import as_path, in_store, listing, remove_tree

HEAD = "job.json"
_SUFFIX = ".jsonl"
_BEGIN = b'{"results": '
_SEAL = re.compile(rb'(.*), "sha256": "([0-9a-f]{64})"\}\n', re.DOTALL)
_ARRAY = b"\x93NUMPY"
_OTHER_SUM = "its SHA-256 is another"
_AGAIN = "remove it, and its work is done again"
_HEAD_AGAIN = "delete it, and the next start of the job writes it again and keeps whole parts"


class Damaged(ValueError):
    """The content differs from what was written."""


class Chunk(NamedTuple):
    """The head of a chunk."""

    job: str  # hash of what its results depend on
    notes: dict[str, Any]  # what was said about it when it was committed
    keys: tuple[str, ...]  # of its results


class _Place(NamedTuple):
    """The place of a result and its checksum."""

    file: str
    start: int
    length: int
    sha256: str


class Store:
    """Results by key, in a folder or below a name in an object store.

    The folder is made by the first `add`. An index of the keys is kept in memory; results are read
    when they are asked for.

    Args:
      folder: of this store alone.
      what: all that the results depend on besides their keys, as JSON values by name.
      others: what becomes of results of another `what`: they are refused, or they are not seen
        and the first `add` removes them.
      damage: what becomes of a damaged result when it is read: it is refused, or it is missing and
        counted.
      remedy: ends the sentence about a damaged file, given its name.
      sync: whether `add` waits until the disk has the results. Without it they survive the end
        of the process, but not that of the machine.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        what: Mapping[str, Any],
        *,
        others: Literal["refuse", "discard"] = "discard",
        damage: Literal["refuse", "drop"] = "refuse",
        remedy: str | Callable[[str], str] = _AGAIN,
        sync: bool = True,
    ):
        self.folder, self.what = as_path(folder), dict(what)
        self.damaged = 0  # how many damaged places were met and dropped
        self._job = digest_of(what)
        self._others, self._damage, self._sync = others, damage, sync
        self._remedy = remedy if callable(remedy) else lambda name: remedy
        self._index: dict[str, _Place] = {}
        self._read_to: dict[str, int] = {}  # file -> bytes of it that were read
        self._foreign: set[str] = set()  # files of another `what`
        self._reading: tuple[str, IO[bytes]] | None = None
        self._writing: int | None = None
        self._written = 0  # bytes of this process's file, or its number of objects
        self._name = ""
        self.refresh()

    def __contains__(self, key: str) -> bool:
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._index))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, key: str) -> Any:
        """A result; KeyError if it is missing, or damaged and to be dropped."""
        try:
            return self._read(key)
        except (Damaged, FileNotFoundError):  # or another process has written the file again
            self._forget(self._index.pop(key).file)
            self.refresh()
        file = self._index[key].file
        try:
            return self._read(key)
        except Damaged as error:
            del self._index[key]
            self._refuse(file, str(error))
            raise KeyError(key) from error

    def get(self, key: str) -> Any:
        """A result; None if it is missing."""
        try:
            return self[key]
        except KeyError:
            return None

    def is_whole(self, key: str) -> bool:
        """Whether a result is there in its full length; its content is not read."""
        try:
            return bool(self._place(key))
        except KeyError:
            return False
        except Damaged as error:
            self._refuse(self._index.pop(key).file, str(error))
            return False

    def file_of(self, key: str) -> Path:
        """The file that holds a result; KeyError if it is missing."""
        return self.folder / self._index[key].file

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Returns the keys that have no result, in order."""
        return [key for key in keys if key not in self._index]

    def check(self, keys: Iterable[str] | None = None) -> None:
        """Reads the results of these keys, or all, so that damage is found before the work."""
        for key in list(self._index) if keys is None else keys:
            self.get(key)

    def add(
        self,
        values: Mapping[str, Any],
        *,
        alone: bool = False,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        """Commits a chunk: all of its results, or none. A later result of a key counts.

        Args:
          values: JSON values or NumPy arrays.
          alone: a file of its own, which the first key names, such as 00003. Processes that compute
            the same results write the same file, and whether it is there is seen by its name; the
            other keys are known once the first one was read.
          notes: what to say about the chunk (`chunks_of`).

        Raises:
          ValueError: a value that cannot be written.
        """
        if not values:
            return
        content, index = _chunk_bytes(self._job, values, notes or {})
        self._make_folder()
        if alone or in_store(self.folder):
            name = next(iter(values)) if alone else self._next_object()
            if alone and not _is_alone(f"{name}{_SUFFIX}"):
                raise ValueError(f"{name} names no file")
            file, start = f"{name}{_SUFFIX}", 0
            with atomic_write(self.folder / file, "wb") as opened:
                opened.write(content)
            self._forget(file)
        else:
            file, start = self._append(content)
        head = len(content) - sum(length for _, length, _ in index.values())
        for key, (at, length, sha256) in index.items():
            self._index[key] = _Place(file, start + head + at, length, sha256)
        self._read_to[file] = start + len(content)

    def refresh(self) -> None:
        """Takes in what this and other processes have committed since, and what they removed."""
        sizes = _files(self.folder)
        for file, read in list(self._read_to.items()):
            if sizes.get(file, -1) < read:
                self._forget(file)
        for file in sorted(sizes):
            if sizes[file] <= self._read_to.get(file, 0) or file in self._foreign:
                continue
            if _is_alone(file):  # is read when it is asked for
                self._forget(file)
                self._index[file.removesuffix(_SUFFIX)] = _Place(file, 0, 0, "")
                self._read_to[file] = sizes[file]
            else:
                self._scan(file)

    def close(self) -> None:
        """Closes its files; the store can be read and added to afterwards."""
        self._close_reading()
        if self._writing is not None:
            os.close(self._writing)
            self._writing = None

    def remove(self) -> None:
        """Removes the folder with all that is in it, if there is one."""
        self.close()
        if self.folder.exists():
            remove_tree(self.folder)
        self._forget_all()

    def _forget_all(self) -> None:
        for held in (self._index, self._read_to, self._foreign):
            held.clear()
        self._name, self._written = "", 0

    def _make_folder(self) -> None:
        for file in self._foreign:
            (self.folder / file).unlink(missing_ok=True)
        if self._foreign or not (self.folder / HEAD).exists():
            write_head(self.folder, self.what)
        self._foreign.clear()

    def _next_object(self) -> str:
        self._written += 1
        return f"{self._writer()}-{self._written:06d}"

    def _writer(self) -> str:
        """Returns a name that no other writer has; names of later writers sort later."""
        if not self._name:
            host = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname())
            more = f"{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
            self._name = f"{time.time_ns():019d}-{more}"
        return self._name

    def _append(self, content: bytes) -> tuple[str, int]:
        """Appends to this writer's file; its name, and where the content begins."""
        file = f"{self._writer()}{_SUFFIX}"
        try:
            if self._writing is None:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
                self._writing = os.open(self.folder / file, flags, 0o666)
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(self._writing, rest) :]
            if self._sync:
                os.fsync(self._writing)
        except BaseException as error:
            if isinstance(error, OSError):
                error.filename = str(self.folder / file)
            # What is half written ends the file: the next chunk begins another one.
            self.close()
            self._name, self._written = "", 0
            raise
        start = self._written
        self._written += len(content)
        return file, start

    def _place(self, key: str) -> _Place:
        """Returns a result's place; Damaged if its file's head or length is not as written."""
        place = self._index[key]
        if not place.length:
            del self._read_to[place.file]
            self._scan(place.file)
            place = self._index[key]
            if not place.length:
                raise Damaged("its result is missing")
        return place

    def _read(self, key: str) -> Any:
        place = self._place(key)
        if self._reading is None or self._reading[0] != place.file:
            self._close_reading()
            self._reading = place.file, (self.folder / place.file).open("rb")
        opened = self._reading[1]
        opened.seek(place.start)
        return _value(opened.read(place.length), place.sha256)

    def _scan(self, file: str) -> None:
        """Reads the heads of a file's chunks from where it was read to before."""
        alone = _is_alone(file)
        whole = alone or in_store(self.folder)
        with (self.folder / file).open("rb") as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(self._read_to.get(file, 0))
            within_damage = False
            while opened.tell() < size:
                line = opened.readline()
                try:
                    head = _head(line)
                    if alone and opened.tell() + head["size"] != size:
                        raise Damaged(_OTHER_SUM)
                    if opened.tell() + head["size"] > size:
                        if not whole:
                            return  # it is being written, or a kill cut it
                        raise Damaged("its end is missing")
                except Damaged as error:
                    if not whole and not line.endswith(b"\n"):
                        return
                    if not within_damage:
                        if alone:
                            raise
                        self._refuse(file, str(error))
                    within_damage = True  # until the next head
                    self._read_to[file] = opened.tell()
                    continue
                within_damage = False
                at = opened.tell()
                keys = [key for key, _, _ in head["results"]]
                is_named = not alone or keys[:1] == [file.removesuffix(_SUFFIX)]
                if head["job"] != self._job or not is_named:
                    if self._others == "refuse":
                        self._refuse(
                            file, "", problem="is a part of another run, or of another chunk"
                        )
                    self._foreign.add(file)
                    self._index.pop(file.removesuffix(_SUFFIX), None)
                    return
                for key, length, sha256 in head["results"]:
                    self._index[key] = _Place(file, at, length, sha256)
                    at += length
                opened.seek(at)
                self._read_to[file] = at

    def _refuse(self, file: str, why: str, problem: str = "is damaged") -> None:
        """UserError about a file; or damage is counted, if it is to be dropped."""
        if self._damage == "drop" and why:
            self.damaged += 1
            return
        more = f" ({why})" if why else ""
        raise UserError(f"{self.folder / file}: {problem}{more}; {self._remedy(file)}.")

    def _forget(self, file: str) -> None:
        """Drops the index entries of a file."""
        self._foreign.discard(file)
        if self._read_to.pop(file, 0):
            self._index = {key: entry for key, entry in self._index.items() if entry.file != file}
            self._close_reading()
        if self._name and file == f"{self._name}{_SUFFIX}":  # removed: more would be lost there
            self.close()
            self._name, self._written = "", 0

    def _close_reading(self) -> None:
        if self._reading is not None:
            self._reading[1].close()
            self._reading = None


def digest_of(what: Mapping[str, Any]) -> str:
    """The hash of what results depend on: hex digits."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def write_head(folder: Path, what: Mapping[str, Any], **more: Any) -> None:
    """Writes job.json, whole or not at all; no result depends on what `more` says about the job."""
    write_sealed(folder / HEAD, {"job": what, **more})


def read_head(folder: Path) -> dict[str, Any]:
    """job.json: `job`, and what else was said about it."""
    check_file(folder / HEAD)
    return read_sealed(folder / HEAD, _HEAD_AGAIN)


def chunk_files(folder: Path) -> list[Path]:
    """The files of chunks in a folder, in order."""
    return [folder / file for file in sorted(_files(folder))]


def chunks_of(file: Path) -> Iterator[Chunk]:
    """The heads of the chunks of a file, without a look at their results."""
    with file.open("rb") as opened:
        while line := opened.readline():
            try:
                head = _head(line)
            except Damaged as error:
                if not _is_alone(file.name) and not line.endswith(b"\n"):
                    break
                raise UserError(f"{file}: is damaged ({error}); {_AGAIN}.") from error
            keys = tuple(key for key, _, _ in head["results"])
            yield Chunk(head["job"], head["notes"], keys)
            opened.seek(head["size"], os.SEEK_CUR)


def check_no_older(path: Path) -> None:
    """Refuses a file in which an older version of this package kept finished work."""
    if path.is_file():
        raise UserError(
            f"{path}: holds finished work of an older version; finish it with that version, or "
            "delete the file, and its work is done again."
        )


def check_no_link(path: Path) -> None:
    """Refuses a symbolic link in place of a file of a job, which would lead out of its folder."""
    if not in_store(path) and path.is_symlink():
        raise UserError(
            f"{path}: is a symbolic link, which a job's folder never holds; put the file itself "
            "there."
        )


def check_file(path: Path) -> None:
    """Refuses links and pipes in a job's folder, at which a reader would wait forever."""
    check_no_link(path)
    if not in_store(path) and path.exists() and not path.is_file():
        raise UserError(f"{path}: is no file; delete it, and the job writes it again.")


def check_bytes(data: bytes, sha256: str) -> None:
    """Damaged, if bytes do not have this SHA-256 (the first of its hex digits)."""
    if hashlib.sha256(data).hexdigest()[: len(sha256)] != sha256:
        raise Damaged(_OTHER_SUM)


def _files(folder: Path) -> dict[str, int]:
    """The files of chunks in a folder, and their sizes in bytes."""
    if in_store(folder):
        sizes = {name: size for name, (size, _) in listing(os.fspath(folder)).items()}
        return {name: size for name, size in sizes.items() if _is_name(name)}
    try:
        with os.scandir(folder) as entries:
            named = [entry for entry in entries if _is_name(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    sizes = {}
    for entry in named:
        if entry.is_symlink() or not entry.is_file():
            check_file(folder / entry.name)
        try:
            sizes[entry.name] = entry.stat().st_size
        except FileNotFoundError:  # removed by another process
            continue
    return sizes


def _is_name(name: str) -> bool:
    return name.endswith(_SUFFIX) and name[:1].isdigit() and "/" not in name


def _is_alone(file: str) -> bool:
    """Whether a file holds one chunk, whose first key is its name."""
    return file.removesuffix(_SUFFIX).isdecimal()


def _chunk_bytes(
    job: str, values: Mapping[str, Any], notes: Mapping[str, Any]
) -> tuple[bytes, dict[str, tuple[int, int, str]]]:
    """A chunk, and of each result where it begins behind the head, its length and checksum."""
    results, index, at = [], {}, 0
    for key, value in values.items():
        data = _value_bytes(value)
        index[key] = (at, len(data), hashlib.sha256(data).hexdigest()[:16])
        at += len(data)
        results.append(data)
    head = {
        "results": [[key, length, sha256] for key, (_, length, sha256) in index.items()],
        "size": at,
        "job": job,
        "notes": notes,
    }
    line = json.dumps(head, ensure_ascii=False).encode()
    sealed = line[:-1] + f', "sha256": "{hashlib.sha256(line).hexdigest()}"}}\n'.encode()
    return b"".join([sealed, *results]), index


def _head(line: bytes) -> dict[str, Any]:
    """The head of a chunk; Damaged if the line is none."""
    match = _SEAL.fullmatch(line)
    if not line.startswith(_BEGIN) or match is None:
        raise Damaged("a line is not what was written")
    data = match[1] + b"}"
    check_bytes(data, match[2].decode())
    try:
        head = json.loads(data)
        lengths = [length for _, length, _ in head["results"]]
        if min(lengths) < 0 or head["size"] != sum(lengths) or not isinstance(head["job"], str):
            raise ValueError
        if not isinstance(head["notes"], dict):
            raise ValueError
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Damaged("a line is not what was written") from error
    return head


def _value_bytes(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        content = io.BytesIO()
        np.lib.format.write_array(content, value, allow_pickle=False)
        return content.getvalue() + b"\n"
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def _value(data: bytes, sha256: str) -> Any:
    check_bytes(data, sha256)
    try:
        if data.startswith(_ARRAY):
            return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        return json.loads(data)
    except (ValueError, RecursionError, MemoryError) as error:
        raise Damaged("a result cannot be read") from error
