"""A corpus on disk: ArrayRecord files written and read through TFDS, without TensorFlow.

    <data_dir>/corpus.json          manifest: counts, fingerprint, materials, broken pictures
    <data_dir>/records-<hash>/      what the manifest points to
        sources/ questions/ pictures/       three TFDS datasets

Texts and pictures are stored apart, so that opening a corpus reads only its texts. A row of
`sources` or `questions` is one JSON column: TFDS decodes it five times as fast as a column per
field (measured on 12,000 questions: 0.36 s against 1.9 s). Pictures are encoded bytes, because
tfds.features.Image needs TensorFlow.

Written shard by shard (tfds_files.py). A GeneratorBasedBuilder that keeps the order
(disable_shuffling) holds a whole dataset in memory, 51 GB of pictures for WebQA.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import platform
import re
import resource
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import mmqa_jax
from mmqa_jax.core.errors import RunError, UserError, import_optional
from mmqa_jax.core.files import atomic_write, read_json, read_text, write_json
from mmqa_jax.core.host import cache_dir
from mmqa_jax.core.local_copies import IN_STORE
from mmqa_jax.core.paths import read_ranges, scheme_of
from mmqa_jax.data.pictures.decode import BrokenPictures
from mmqa_jax.data.records import picture_records
from mmqa_jax.data.schema import SPLITS, Material, Question, Source, united

MANIFEST = "corpus.json"
NOTICE = "ATTRIBUTION.txt"  # beside the files of a corpus: its credits, a paragraph a material
UNFINISHED = ".records-incomplete"
ARROW = "arrow"  # `stored` of a manifest whose sources stay on disk (streamed_records.py)
_MODULE = "data.records"  # by which the files name their builder, which TFDS records
FORMAT = 1  # of the files below <data_dir>; raised when they change

# Examples in one shard file: some tens of MB of text, more than a hundred MB of web pictures.
TEXT_SHARD, PICTURE_SHARD = 50_000, 1_024
READ_BATCH = 16_384


def write_records(
    out: str | os.PathLike,
    sources: Sequence[Source],
    questions: Sequence[Question],
    read_picture: Callable[[str], bytes] | None = None,
    *,
    name: str,
    materials: Iterable[Material] = (),
    origin: Mapping[str, Any] | None = None,
    max_broken_pictures: int | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
    inputs: str | None = None,
    workers: int | None = None,
    sourceless: bool = False,
) -> dict[str, Any]:
    """Writes a corpus below `out`, whole or not at all, and returns its manifest.

    An older corpus there stays as it is until the new manifest is renamed into place. Pictures are
    read and written by several threads; those that an interrupted attempt had written are reused,
    see `inputs`. Pictures that do not decode are named in the manifest, and their sources kept
    with image=None.

    Args:
      out: folder to make; may hold other files.
      sources: the corpus; ids must be unique.
      questions: on the corpus; splits of SPLITS.
      read_picture: encoded bytes of a `Source.image` or `Question.image`; it raises
        PictureError for a broken one.
      name: the corpus's name, as `mmqa prepare` calls it.
      materials: what the corpus is made of, for credits.
      origin: anything worth keeping about the input files.
      max_broken_pictures: see BrokenPictures; above it RunError.
      overwrite: replace the corpus that is in `out`, otherwise a UserError.
      progress: called with (done, total) as pictures and rows are written.
      inputs: identifies the files behind `read_picture`; an interrupted attempt with the same
        inputs and pictures is continued. None: every attempt starts over.
      workers: threads; None: one per processor.
      sourceless: whether there may be no sources at all, as in a benchmark of questions alone.

    Raises:
      RunError: too many broken pictures.
    """
    out = Path(out)
    if not sources and not (sourceless and questions):
        raise UserError(f"{name}: the corpus is empty; it needs at least one source.")
    if not overwrite:
        refuse_corpus(out)
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file, a folder to write to was expected; name another.")
    temporary = out / UNFINISHED
    writer = _CorpusWriter(temporary, sources, questions, progress)
    signature = None
    if inputs is not None:
        signature = picture_records.inputs_signature(writer.names, FORMAT, PICTURE_SHARD, inputs)
    with picture_records.unfinished_folder(temporary, signature):
        facts = writer.write(read_picture, max_broken_pictures, workers)
        picture_records.finish_folder(temporary)
    return publish(out, temporary, name, materials, {**facts, "origin": dict(origin or {})})


def publish(
    out: Path,
    temporary: Path,
    name: str,
    materials: Iterable[Material],
    facts: Mapping[str, Any],
    versions: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Gives a finished folder of records its name, and writes the manifest that points to it.

    Args:
      out: of the corpus; what an older one had there is removed.
      temporary: the finished folder.
      facts: of the manifest, the fingerprint among them.
      versions: of further packages that wrote it.
    """
    records = _free_name(out / f"records-{facts['fingerprint'][:12]}")
    os.replace(temporary, records)
    manifest = {
        "format": FORMAT,
        "name": name,
        "records": records.name,
        "materials": list(map(dataclasses.asdict, materials)),
        **facts,
        "versions": {**_versions(), **(versions or {})},
    }
    write_json(out / MANIFEST, manifest)
    for old in out.glob("records-*"):
        if old != records:
            shutil.rmtree(old)
    return manifest


def holds_corpus(folder: str | os.PathLike) -> bool:
    """Whether a folder holds a prepared corpus, damaged or not."""
    return (Path(folder) / MANIFEST).exists()


def refuse_corpus(out: str | os.PathLike) -> None:
    """UserError if a prepared corpus is in `out`."""
    if holds_corpus(out):
        raise UserError(
            f"{out}: already holds a prepared corpus; name another folder or give --overwrite."
        )


def read_manifest(data_dir: str | os.PathLike) -> dict[str, Any]:
    """Reads and checks a prepared corpus's manifest; UserError where it is missing."""
    data_dir = Path(data_dir)
    path = data_dir / MANIFEST
    advice = f"make it with `mmqa prepare DATASET --out={data_dir}`"
    if not data_dir.is_dir():
        raise UserError(f"{data_dir}: no such folder, a prepared corpus was expected; {advice}.")
    if not path.is_file():
        raise UserError(
            f"{data_dir}: holds no {MANIFEST}, so it is not a finished corpus; {advice}."
        )
    manifest = read_json(path)
    types = {"format": int, "records": str, "splits": dict, "fingerprint": str}
    valid = isinstance(manifest, dict) and all(
        isinstance(manifest.get(key), kind) for key, kind in types.items()
    )
    try:
        materials_of(manifest if valid else {})
    except (TypeError, AttributeError):
        valid = False
    if not valid or manifest["format"] != FORMAT or manifest.get("stored", ARROW) != ARROW:
        raise UserError(f"{path}: not a manifest of format {FORMAT}; {advice}.")
    dataset = "sources" if manifest.get("modalities", True) else "questions"
    within = "" if "stored" in manifest else dataset
    if not (data_dir / manifest["records"] / within).is_dir():
        raise UserError(f"{path}: its records are incomplete; {advice} again.")
    return manifest


def materials_of(manifest: Mapping[str, Any]) -> tuple[Material, ...]:
    """The materials of a manifest; an older one has one text, whose paragraphs are taken."""
    if "materials" in manifest:
        return united(Material(**fields) for fields in manifest["materials"])
    return materials_in(manifest.get("attribution", ""))


def write_notice(folder: Path, materials: Iterable[Material]) -> None:
    """Writes the notice that `materials_beside` reads, for files that leave the project."""
    if lines := list(map(str, materials)):
        with atomic_write(folder / NOTICE) as file:
            file.write("\n\n".join(lines) + "\n")


def materials_beside(folder: Path) -> tuple[Material, ...]:
    """The materials that a folder's notice names; none where there is no notice."""
    notice = folder / NOTICE
    return materials_in(read_text(notice)) if notice.exists() else ()


def materials_in(notice: str) -> tuple[Material, ...]:
    """The materials of a notice, one a paragraph."""
    paragraphs = re.split(r"\n\s*\n", notice.strip())
    return united(Material(" ".join(paragraph.split())) for paragraph in paragraphs if paragraph)


def read_sources(records: Path) -> list[Source]:
    """All sources of a records folder, in corpus order; [] where the corpus has none."""
    if not (records / "sources").is_dir():
        return []
    return [Source(**row) for row in _read_rows(records / "sources", "corpus")]


def read_questions(records: Path, splits: Iterable[str]) -> list[Question]:
    """All questions of these splits, split by split, in the order of their files."""
    tuples = ("answers", "positives", "negatives", "choices", "more_images")
    questions = []
    for split in splits:
        for row in _read_rows(records / "questions", split):
            row.update({key: tuple(row[key]) for key in tuples if key in row})
            questions.append(Question(**row))
    return questions


class RecordPictures:
    """Encoded pictures of a records folder by name, read one at a time; None for unknown names.

    Opens its files at the first read, so that it can be sent to worker processes.
    """

    def __init__(self, records: Path):
        self._folder = records / "pictures"
        path = records / "pictures.json"
        names = read_json(path)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError(f"{path}: a list of names was expected; run `mmqa prepare` again.")
        self._numbers = {name: number for number, name in enumerate(names)}
        self._source: Any = None

    def __call__(self, name: str) -> bytes | None:
        number = self._numbers.get(name)
        if number is None:
            return None
        with _damage_named(self._folder, "corpus"):
            return column_of(self._opened()[number], "picture")

    def look_ahead(self, names: Iterable[str]) -> None:
        """Fetches pictures that are asked for soon, where they are in a store."""
        with _damage_named(self._folder, "corpus"):
            source = self._opened() if self._numbers else None
            if isinstance(source, RemoteRecords):
                source.look_ahead(self._numbers[name] for name in names if name in self._numbers)

    def _opened(self) -> Any:
        if self._source is None:
            self._source = open_records(self._folder, "corpus")
        return self._source

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_source": None}


class _CorpusWriter:
    """Writes the three datasets and collects the manifest's facts; `names` are all pictures,
    once.
    """

    def __init__(
        self,
        folder: Path,
        sources: Sequence[Source],
        questions: Sequence[Question],
        progress: Callable[[int, int], None] | None,
    ):
        _require_unique(sources, "source")
        _require_unique(questions, "question")
        self.folder, self.sources, self.questions = folder, sources, questions
        self.splits = _by_split(questions)
        self.progress = progress or (lambda done, total: None)
        rows = (*sources, *questions)
        more = (name for question in questions for name in question.more_images)
        picture_names = itertools.chain((row.image for row in rows if row.image is not None), more)
        self.names = list(dict.fromkeys(picture_names))
        self.done, self.reported, self.total = 0, 0, len(self.names) + len(rows)
        self.hash = hashlib.sha256()

    def write(
        self,
        read_picture: Callable[[str], bytes] | None,
        max_broken: int | None,
        workers: int | None,
    ) -> dict[str, Any]:
        """Writes everything; returns the manifest's facts."""
        broken = self._write_pictures(read_picture, max_broken, workers)
        lost = set(broken.names)
        if self.sources:
            self._write_rows("sources", {"corpus": self.sources}, lost)
        if self.splits:
            self._write_rows("questions", self.splits, lost)
        return {
            "fingerprint": self.hash.hexdigest(),
            "counts": {
                "sources": len(self.sources),
                "questions": len(self.questions),
                "pictures": len(self.names) - broken.count,
                "broken_pictures": broken.count,
                "questions_without_sources": sum(
                    not (q.positives or q.negatives) for q in self.questions
                ),
            },
            "modalities": dict(Counter(source.modality for source in self.sources)),
            "splits": {split: len(rows) for split, rows in self.splits.items()},
            "categories": dict(Counter(question.category for question in self.questions)),
            "broken_pictures": broken.reasons,
        }

    def _write_pictures(
        self,
        read_picture: Callable[[str], bytes] | None,
        max_broken: int | None,
        workers: int | None,
    ) -> BrokenPictures:
        broken = BrokenPictures(len(self.names), max_broken)
        written: list[str] = []
        if self.names:
            if read_picture is None:
                raise UserError(
                    f"{len(self.names)} sources or questions have a picture but no picture files "
                    "were given; name them (imgs.tsv and imgs.lineidx, or images)."
                )
            writer = picture_records.PictureWriter(
                self.folder,
                picture_records.DatasetFiles(
                    self.folder / "pictures", "picture", text=False, module=_MODULE
                ),
                read_picture,
                broken=broken,
                advance=self._advance,
                workers=workers,
            )
            written, digests, broken = writer.write(self.names, PICTURE_SHARD)
            for name, digest in zip(written, digests, strict=True):
                self.hash.update(name.encode() + digest)
        write_json(self.folder / "pictures.json", written)
        return broken

    def _write_rows(
        self, dataset: str, splits: Mapping[str, Sequence[Source | Question]], lost: set[str]
    ) -> None:
        shutil.rmtree(self.folder / dataset, ignore_errors=True)  # of an interrupted attempt
        files = picture_records.DatasetFiles(
            self.folder / dataset, "row", text=True, module=_MODULE
        )
        sizes: dict[str, list[picture_records.ShardSize]] = {}
        for split, rows in splits.items():
            sizes[split] = []
            for start in range(0, len(rows), TEXT_SHARD):
                with files.open_shard(split, len(sizes[split])) as shard:
                    for row in rows[start : start + TEXT_SHARD]:
                        if row.image in lost:
                            row = dataclasses.replace(row, image=None)
                        text = json.dumps(_fields(row), ensure_ascii=False)
                        self.hash.update(text.encode())
                        shard.add(row.id, text)
                        self._advance(1)
                sizes[split].append(shard.size)
        files.finish(sizes)

    def _advance(self, n: int) -> None:
        self.done += n
        if self.done - self.reported >= 256 or self.done == self.total:
            self.reported = self.done
            self.progress(self.done, self.total)


def _read_rows(dataset: Path, split: str) -> Iterable[dict[str, Any]]:
    with _damage_named(dataset, split):
        source = open_records(dataset, split)
        starts = range(0, len(source), READ_BATCH)
    for start in starts:
        with _damage_named(dataset, split):
            keys = range(start, min(start + READ_BATCH, len(source)))
            rows = [json.loads(column_of(record, "row")) for record in source.__getitems__(keys)]
        yield from rows


def column_of(record: bytes, name: str) -> bytes:
    """A column of a record, in a third to a half of the time that TFDS needs for any record."""
    from tensorflow_datasets.proto import tf_example_pb2

    (value,) = tf_example_pb2.Example.FromString(record).features.feature[name].bytes_list.value
    return value


def open_records(dataset: Path, split: str) -> Any:
    """A split of a TFDS dataset: by number, its examples as their records' bytes.

    RemoteRecords where its files were left in a store (core.local_copies).
    """
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(dataset)
    if (dataset / IN_STORE).exists():
        places, info = read_json(dataset / IN_STORE), builder.info.splits[split]
        files = zip(info.filenames, info.shard_lengths, strict=True)
        return RemoteRecords([RemoteShard(*places[file], records) for file, records in files])
    return builder.as_data_source(
        split=split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES
    )


@contextlib.contextmanager
def _damage_named(dataset: Path, split: str) -> Iterator[None]:
    """Turns any error of reading damaged records into a UserError; files open at first read.

    TFDS and ArrayRecord have no common error.
    """
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{dataset}: its {split} records cannot be read ({reason}); run `mmqa prepare` again."
        ) from error


def _fields(row: Source | Question) -> dict[str, Any]:
    """The dataclass as a dict, without fields that have their default."""
    values = {}
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        if value not in (field.default, ()) and not (field.name == "extra" and not value):
            values[field.name] = dict(value) if field.name == "extra" else value
    return values


def _require_unique(rows: Sequence[Source | Question], kind: str) -> None:
    repeated = [name for name, count in Counter(row.id for row in rows).items() if count > 1]
    if repeated:
        raise UserError(f"{kind} id {repeated[0]!r} appears twice; rename one.")


def _by_split(questions: Sequence[Question]) -> dict[str, list[Question]]:
    splits: dict[str, list[Question]] = {split: [] for split in SPLITS}
    for question in questions:
        if question.split not in splits:
            raise UserError(
                f"question {question.id}: split is {question.split!r}; expected one of "
                f"{', '.join(SPLITS)}."
            )
        splits[question.split].append(question)
    return {split: rows for split, rows in splits.items() if rows}


def _free_name(path: Path) -> Path:
    """`path`, or the first of `path`-2, `path`-3, ... that does not exist."""
    names = itertools.chain(
        [path], (path.with_name(f"{path.name}-{n}") for n in itertools.count(2))
    )
    return next(name for name in names if not name.exists())


def _versions() -> dict[str, str]:
    packages = ("tensorflow-datasets", "array-record", "pillow")
    return {
        "mmqa-jax": mmqa_jax.__version__,
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
    }


# Records of ArrayRecord files in an object store, read by ranges of bytes, without a copy.


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
    """

    def __init__(self, shard: RemoteShard, end: bytes):
        from array_record.python.array_record_module import ArrayRecordReader

        self._shard = shard
        with _object_damage_named(shard):
            self._starts = _record_starts(end, shard.size)
            if len(self._starts) != shard.records + 1:
                raise ValueError(f"{len(self._starts) - 1} records, {shard.records} were expected")
        # Bool[records], which ones were fetched.
        self.is_there = self._starts[:-1] >= shard.size - len(end)
        self.bytes = len(end)  # that were fetched
        self._next, self._ahead = 0, 1
        self._file = tempfile.TemporaryFile(dir=cache_dir() / "store", buffering=0)  # noqa: SIM115
        os.ftruncate(self._file.fileno(), shard.size)
        self._write(end, shard.size - len(end))
        options = "readahead_buffer_size:0,max_parallelism:0"  # it reads a record's bytes alone
        with _object_damage_named(shard):
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
        with _object_damage_named(self._shard):
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
        with _object_damage_named(shard):
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
def _object_damage_named(shard: RemoteShard) -> Iterator[None]:
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
