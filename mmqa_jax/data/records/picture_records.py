"""Pictures to ArrayRecord: shards written in parallel, resumable after a kill.

    <folder>/pictures/       the TFDS dataset: shards, and its metadata once all are complete
    <folder>/shards/         what each complete shard holds (core.store)
    <folder>/inputs.json     identifies the inputs; shards of other inputs are not reused

A shard is written under a temporary name, renamed, then recorded, so that a killed process loses
only the shards that it was writing. The order of the pictures alone decides which shard they are
in, hence an interrupted and an uninterrupted run write the same files, byte for byte.

Threads suffice: reading, checksums, decoding and ArrayRecord's compression release Python's lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from mmqa_jax.core.checkpoints.checksums import digest
from mmqa_jax.core.chunks import locked_folder
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, settle, write_json
from mmqa_jax.core.locks import alone
from mmqa_jax.core.paths import modified
from mmqa_jax.core.store import Store
from mmqa_jax.data.pictures.decode import BrokenPictures, PictureError, verify

_SPLIT = "corpus"
_INPUTS = "inputs.json"


class Written(NamedTuple):
    """The pictures of a dataset, in order."""

    names: list[str]
    digests: list[bytes]  # sha256 of each
    broken: BrokenPictures


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def unfinished_folder(
    folder: Path, inputs: str | None, finished: Callable[[], bool] | None = None
) -> Iterator[bool]:
    """The folder of a resumable write; one process at a time, or several that share it.

    If the block of a single process fails, the folder is kept if it has a complete shard, and
    removed otherwise.

    Args:
      inputs: identifies the inputs of this write; files of an attempt with other inputs are
        removed. None: files of any earlier attempt are.
      finished: given where several processes share the write: whether one of them has ended it.
        They remove nothing.

    Yields:
      Whether another process has ended it meanwhile.
    """
    shared = finished is not None
    with locked_folder(folder, shared=shared):
        if shared:
            with alone(folder / ".claim"):
                complete = finished()
                if not complete:
                    _claim(folder, inputs)
            yield complete
            return
        if inputs is None or recorded_inputs(folder) != inputs:
            for old in folder.iterdir():
                if old.name != ".lock":
                    shutil.rmtree(old) if old.is_dir() else old.unlink()
            write_json(folder / _INPUTS, inputs)
        try:
            yield False
        except BaseException:
            if inputs is None or not any((folder / "shards").glob("[!.]*")):
                shutil.rmtree(folder)
            raise


def _claim(folder: Path, inputs: str | None) -> None:
    """Claims the folder for a shared write; UserError if another write has it."""
    recorded = recorded_inputs(folder)
    if recorded is None and not any(folder.glob("[!.]*")):
        write_json(folder / _INPUTS, inputs)
    elif recorded != inputs:
        raise UserError(
            f"{folder}: holds other files than those of this job, which several processes share; "
            "delete the folder, or name another one."
        )


def recorded_inputs(folder: Path) -> str | None:
    """Reads what identifies the inputs of an unfinished write; None if there is no such write."""
    recorded = folder / _INPUTS
    return read_json(recorded) if recorded.exists() else None


class ShardNotes:
    """The contents of the complete shards of an `unfinished_folder`.

    A shard without a note, or with a damaged one, is written again; so are those of older versions.
    """

    def __init__(self, folder: Path):
        inputs = read_json(folder / _INPUTS)
        self._store = Store(folder / "shards", {"inputs": inputs}, damage="drop")
        self._lock = threading.Lock()

    def write(self, number: int, shard: Path, note: Mapping[str, Any]) -> dict[str, Any]:
        """Records that a shard's file is complete; returns the note, with the file's checksum."""
        note = {**note, "shard_sha256": digest(shard)}
        with self._lock:
            self._store.add({f"{number:05d}": note}, alone=True)
        return note

    def read(self, number: int, shard: Path) -> dict[str, Any] | None:
        """The note of a complete shard; None where it or the file is missing or damaged."""
        with self._lock:
            self._store.refresh()  # other processes may write shards, too
            note = self._store.get(f"{number:05d}")
        is_whole = note is not None and shard.exists() and note["shard_sha256"] == digest(shard)
        return note if is_whole else None

    def written(self, number: int) -> float | None:
        """When a shard was complete (seconds since the epoch), or None; its file is not read."""
        key = f"{number:05d}"
        return modified(self._store.file_of(key)) if key in self._store else None


def finish_folder(folder: Path) -> None:
    """Removes the files that only resuming needs."""
    shutil.rmtree(folder / "shards", ignore_errors=True)
    for name in (_INPUTS, ".lock"):
        (folder / name).unlink(missing_ok=True)


class PictureWriter:
    """Writes the dataset `pictures` of a folder (see unfinished_folder).

    Args:
      folder: holds pictures/ and shards/, which are made where missing.
      files: of the dataset, in folder/pictures.
      read: encoded bytes of a picture by its name; PictureError for a broken one.
      broken: counts the broken ones, those of an earlier attempt included.
      advance: called with the number of pictures done, from one thread at a time.
      workers: threads; None: one per processor.
    """

    def __init__(
        self,
        folder: Path,
        files: DatasetFiles,
        read: Callable[[str], bytes],
        *,
        broken: BrokenPictures,
        advance: Callable[[int], None],
        workers: int | None = None,
    ):
        self._notes, self._files = ShardNotes(folder), files
        self._read, self._broken = read, broken
        self._workers = workers or processors()
        self._advance = advance
        self._lock = threading.Lock()
        self._failed = threading.Event()

    def write(self, names: Sequence[str], shard: int) -> Written:
        """Writes the pictures `names`, `shard` per file; RunError where too many are broken."""
        parts = [names[start : start + shard] for start in range(0, len(names), shard)]
        files = self._files
        notes = [self._notes.read(n, files.path(_SPLIT, n)) for n in range(len(parts))]
        for note in notes:
            for name, reason in note["broken"].items() if note else ():
                self._broken.add(name, reason)
        self._advance(sum(len(part) for part, note in zip(parts, notes, strict=True) if note))
        missing = [number for number, note in enumerate(notes) if note is None]
        with ThreadPoolExecutor(self._workers) as pool:
            futures = [pool.submit(self._write_shard, n, parts[n]) for n in missing]
            try:
                for number, future in zip(missing, futures, strict=True):
                    notes[number] = future.result()
            except BaseException:
                self._failed.set()
                pool.shutdown(wait=True, cancel_futures=True)
                # The error itself, not that of a thread that stopped because of it.
                errors = [f.exception() for f in futures if not f.cancelled()]
                for error in errors:
                    if error is not None and not isinstance(error, _Stopped):
                        raise error from None
                raise
        return self._finish(notes)

    def _write_shard(self, number: int, names: Sequence[str]) -> dict[str, Any]:
        written, digests, broken = [], [], {}
        try:
            with self._files.open_shard(_SPLIT, number) as shard:
                for name in names:
                    if self._failed.is_set():
                        raise _Stopped
                    try:
                        data = self._read(name)
                        verify(data, name)
                    except PictureError as error:
                        broken[name] = str(error)
                        with self._lock:
                            self._broken.add(name, str(error))
                    else:
                        shard.add(name, data)
                        written.append(name)
                        digests.append(hashlib.sha256(data).hexdigest())
                    with self._lock:
                        self._advance(1)
        except BaseException:
            self._failed.set()
            raise
        note = {"names": written, "pictures_sha256": digests, "broken": broken}
        note["bytes"] = shard.size.bytes
        self._notes.write(number, self._files.path(_SPLIT, number), note)
        return note

    def _finish(self, notes: Sequence[dict[str, Any]]) -> Written:
        for old in self._files.folder.glob(".*.tmp"):  # of an attempt that was killed
            old.unlink()
        sizes = [ShardSize(len(note["names"]), note["bytes"]) for note in notes]
        self._files.finish({_SPLIT: sizes})
        ordered = BrokenPictures(0, self._broken.limit, self._broken.remedy)
        for note in notes:
            for name, reason in note["broken"].items():
                ordered.add(name, reason)
        return Written(
            [name for note in notes for name in note["names"]],
            [bytes.fromhex(digest) for note in notes for digest in note["pictures_sha256"]],
            ordered,
        )


class _Stopped(Exception):
    """Another thread has failed."""


def inputs_signature(names: Sequence[str], *facts: Any) -> str:
    """Hash that identifies the inputs of a write: the pictures' names and `facts` (JSON)."""
    digest = hashlib.sha256(json.dumps(facts).encode())
    for name in names:
        digest.update(name.encode() + b"\0")
    return digest.hexdigest()


# A TFDS dataset written shard by shard, in any order, with the same bytes every time.
#
# tfds.core.SequentialWriter writes the same files, but only in order and with the fields of an
# example in an order that changes from process to process.


_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_INDEX}"
_FORMAT = "array_record"


class ShardSize(NamedTuple):
    """TFDS's record of a shard's size."""

    records: int
    bytes: int


class DatasetFiles:
    """The ArrayRecord files of one dataset, and their metadata.

    Args:
      folder: of these files; made where missing.
      column: name of the column beside `id`.
      text: whether that column is text; otherwise it is bytes.
      module: below mmqa_jax, named as the builder in the metadata; the name of the first version,
        for the files stay equal.
    """

    def __init__(self, folder: Path, column: str, *, text: bool, module: str):
        import numpy as np
        import tensorflow_datasets as tfds
        from tensorflow_datasets.core.example_serializer import ExampleSerializer

        folder.mkdir(exist_ok=True)
        self.folder, self.column = folder, column
        feature = tfds.features.Text()
        if not text:
            feature = tfds.features.Tensor(shape=(), dtype=np.object_)
        self._features = tfds.features.FeaturesDict({"id": tfds.features.Text(), column: feature})
        identity = tfds.core.dataset_info.DatasetIdentity(
            name=folder.name,
            version="1.0.0",
            data_dir=str(folder),
            module_name=f"mmqa_jax.{module}",
        )
        self._info = tfds.core.DatasetInfo(builder=identity, features=self._features)
        self._serializer = ExampleSerializer(self._features.get_serialized_info())

    def path(self, split: str, shard: int) -> Path:
        """File of a shard."""
        return Path(self._template(split).sharded_filepath(shard_index=shard, num_shards=None))

    def open_shard(self, split: str, shard: int) -> ShardWriter:
        """A new shard, under a temporary name until it is complete."""
        return ShardWriter(self, self.path(split, shard))

    def serialize(self, name: str, value: str | bytes) -> bytes:
        """A record: the example with these columns."""
        example = self._features.encode_example({"id": name, self.column: value})
        return self._serializer.get_tf_example(example).SerializeToString(deterministic=True)

    def finish(self, shards: Mapping[str, Sequence[ShardSize]]) -> None:
        """Writes the metadata: the sizes of every split's shards, in order."""
        from tensorflow_datasets.core import splits

        self._info.set_file_format(_FORMAT)
        infos = [
            splits.SplitInfo(
                name=split,
                shard_lengths=[size.records for size in sizes],
                num_bytes=sum(size.bytes for size in sizes),
                filename_template=self._template(split),
            )
            for split, sizes in shards.items()
        ]
        self._info.set_splits(splits.SplitDict(infos))
        self._info.write_to_directory(self.folder)

    def _template(self, split: str) -> Any:
        from tensorflow_datasets.core import naming

        return naming.ShardedFileTemplate(
            dataset_name=self.folder.name,
            data_dir=str(self.folder),
            split=split,
            filetype_suffix=_FORMAT,
            template=_TEMPLATE,
        )


class ShardWriter:
    """One file; the context manager keeps it if the block ends without an error."""

    def __init__(self, files: DatasetFiles, path: Path):
        from array_record.python.array_record_module import ArrayRecordWriter

        self._files, self._path = files, path
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._writer = ArrayRecordWriter(str(self._temporary), "group_size:1")  # as TFDS does
        self._records = self._bytes = 0

    def add(self, name: str, value: str | bytes) -> None:
        """Writes one example."""
        record = self._files.serialize(name, value)
        self._writer.write(record)
        self._records += 1
        self._bytes += len(record)

    @property
    def size(self) -> ShardSize:
        """Size of what has been written."""
        return ShardSize(self._records, self._bytes)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._writer.close()
        settle(self._temporary, self._path, whole=kind is None)
