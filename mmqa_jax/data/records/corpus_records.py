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

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mmqa_jax
from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.files import atomic_write, read_json, read_text, write_json
from mmqa_jax.core.local_copies import IN_STORE
from mmqa_jax.data.pictures.decode import BrokenPictures
from mmqa_jax.data.records import picture_records
from mmqa_jax.data.records.remote_records import RemoteRecords, RemoteShard
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
