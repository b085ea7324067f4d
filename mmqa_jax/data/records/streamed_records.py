"""A corpus that is written while its file is read: sources on disk (disk_sources.py), no questions.

    <data_dir>/corpus.json          the manifest, whose `stored` is "arrow"
    <data_dir>/records-<hash>/      the sources

Killed at any point, the next call goes on behind the last shard that was finished, and writes the
same bytes as one that was not interrupted: the order of the file alone decides which shard a source
is in. Beside a shard lies what was counted until its end.
"""

import dataclasses
import importlib.metadata
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.progress import Progress
from mmqa_jax.data import disk_sources
from mmqa_jax.data.records import corpus_records, picture_records
from mmqa_jax.data.schema import Material
from mmqa_jax.data.wikipedia.streams import InputFile, Item, Stream

_LAYOUT = 1  # of the files; raised when they change
_NAMED = 20  # broken items that the manifest names
_MOST_BROKEN, _ANYWAY = 0.01, 10  # share of broken items, and how many may be at any share
_MEGABYTE = 1 << 20


@dataclasses.dataclass
class _Count:
    """The counts at the end of a shard."""

    items: int = 0  # read whole
    within: int = 0  # sources of the next item that are written already
    articles: int = 0  # items with sources
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)  # other items, by reason
    # What is wrong with those that are, the first ones.
    broken: list[str] = dataclasses.field(default_factory=list)

    def add(self, item: Item) -> None:
        """Counts an item that has been read whole."""
        self.items, self.within = self.items + 1, 0
        if item.sources:
            self.articles += 1
            return
        reason = "broken" if item.broken else item.left_out
        self.left_out[reason] = self.left_out.get(reason, 0) + 1
        if item.broken:
            self.broken = [*self.broken, item.broken][:_NAMED]
            self._check()

    def _check(self) -> None:
        broken = self.left_out["broken"]
        if broken > max(_ANYWAY, _MOST_BROKEN * self.items):
            raise RunError(
                f"{broken:,} of {self.items:,} lines are broken, the first: {self.broken[0]}; "
                "fetch the file again, or prepare it as what it is."
            )


def write_streamed(
    out: str | os.PathLike,
    stream: Stream,
    *,
    name: str,
    materials: Iterable[Material],
    overwrite: bool = False,
) -> dict[str, Any]:
    """Writes the corpus of a stream below `out`, whole or not at all, and returns its manifest.

    Args:
      out: folder to make; an older corpus there stays until the new one is whole.
      stream: the published file.
      name: of the corpus.
      materials: what the file is made of, for credits.
      overwrite: replace the corpus that is in `out`, otherwise a UserError.

    Raises:
      RunError: more than 1 in 100 lines are broken.
    """
    out = Path(out)
    disk_sources.arrow()
    if not overwrite:
        corpus_records.refuse_corpus(out)
    opened = InputFile(stream.file)
    temporary = out / corpus_records.UNFINISHED
    signature = picture_records.inputs_signature(
        [], _LAYOUT, name, opened.path.name, opened.size, os.stat(opened.path).st_mtime_ns,
        dataclasses.asdict(stream.options), str(stream.pictures),
    )  # fmt: skip
    with picture_records.unfinished_folder(temporary, signature):
        writer = _Writer(temporary, picture_records.ShardNotes(temporary))
        with Progress("Preparing", None, "MB") as progress:
            writer.write(stream, opened, progress)
        opened.close()
        facts = writer.finish()
        picture_records.finish_folder(temporary)
    origin = {
        "file": str(opened.path),
        "items": writer.count.items,
        "articles": writer.count.articles,
        "left_out_items": writer.count.left_out,
        "broken": writer.count.broken,
        **dataclasses.asdict(stream.options),
    }
    pictures = None if stream.pictures is None else str(stream.pictures.resolve())
    versions = {"pyarrow": importlib.metadata.version("pyarrow")}
    more = {"stored": corpus_records.ARROW, "pictures": pictures, "origin": origin}
    return corpus_records.publish(out, temporary, name, materials, {**facts, **more}, versions)


class _Shard(NamedTuple):
    """A finished shard, as far as it stays in memory."""

    sha256: str
    digests: bytes  # of its batches
    images: np.ndarray  # uint32, rows of its pictures, from its first one

    @classmethod
    def of(cls, note: Mapping[str, Any]) -> Self:
        """Reads it from its note."""
        images = np.array(note["images"], np.uint32)
        return cls(note["shard_sha256"], bytes.fromhex(note["digests"]), images)


class _Writer:
    """Writes the shards of a folder that are missing."""

    def __init__(self, folder: Path, notes: picture_records.ShardNotes):
        self._folder, self._notes = folder, notes
        self._shards: list[_Shard] = []
        self._rows, self._ended = 0, False
        self.count = _Count()
        for number in itertools.count():
            note = notes.read(number, folder / disk_sources.shard_name(number))
            if note is None:
                break
            self._take(note)
            self.count = _Count(**note["count"])
        self._earlier = self._rows

    def write(self, stream: Stream, opened: InputFile, progress: Progress) -> None:
        """Reads the stream to its end."""
        rows = iter(()) if self._ended else self._sources(stream, opened)
        while batch := list(itertools.islice(rows, disk_sources.BATCH_ROWS)):
            path = self._folder / disk_sources.shard_name(len(self._shards))
            written = 0
            with disk_sources.ShardFile(path) as shard:
                while batch:
                    shard.write(batch)
                    written += len(batch)
                    self._show(progress, opened, self._rows + written)
                    full = written == disk_sources.SHARD_ROWS
                    batch = [] if full else list(itertools.islice(rows, disk_sources.BATCH_ROWS))
            note = {
                "sources": written,
                "digests": b"".join(shard.digests).hex(),
                "images": shard.images,
                "count": dataclasses.asdict(self.count),
                "ended": written < disk_sources.SHARD_ROWS,
            }
            self._take(self._notes.write(len(self._shards), path, note))
        for left in self._folder.glob(".*.tmp"):  # of an attempt that was killed
            left.unlink()
        if not self._rows:
            first = f"; the first broken one: {self.count.broken[0]}" if self.count.broken else ""
            raise UserError(f"{opened.path}: has no {stream.what}{first}; check the file.")

    def finish(self) -> dict[str, Any]:
        """Writes what lies beside the shards; returns the manifest's facts."""
        digests = b"".join(shard.digests for shard in self._shards)
        images = np.concatenate(
            [n * disk_sources.SHARD_ROWS + shard.images for n, shard in enumerate(self._shards)]
        )
        known = {disk_sources.shard_name(n): shard.sha256 for n, shard in enumerate(self._shards)}
        with Progress("Indexing ids", self._rows, "ids") as progress:
            fingerprint = disk_sources.finish_sources(
                self._folder, digests, images, self._rows, known, progress.reach
            )
        modalities = {"text": self._rows - len(images), "image": len(images)}
        return {
            "fingerprint": fingerprint,
            "counts": {
                "sources": self._rows,
                "questions": 0,
                "pictures": len(images),
                "broken_pictures": 0,
                "questions_without_sources": 0,
            },
            "modalities": {name: count for name, count in modalities.items() if count},
            "splits": {},
            "categories": {},
            "broken_pictures": {},
        }

    def _take(self, note: Mapping[str, Any]) -> None:
        """Counts a finished shard."""
        self._shards.append(_Shard.of(note))
        self._rows += note["sources"]
        self._ended = note["ended"]

    def _sources(self, stream: Stream, opened: InputFile) -> Iterator[disk_sources.SourceRow]:
        """Yields all unwritten sources; the counts are those at the last one taken."""
        count = self.count
        for item in stream.items(opened, count.items):
            for row in item.sources[count.within :]:
                count.within += 1
                yield row
            count.add(item)

    def _show(self, progress: Progress, opened: InputFile, rows: int) -> None:
        progress.reach(opened.done() // _MEGABYTE, -(-opened.size // _MEGABYTE))
        rate = (rows - self._earlier) / max(progress.active_seconds(), 1e-3)
        progress.advance(0, passages=f"{rows:,} ({rate:,.0f}/s)")
