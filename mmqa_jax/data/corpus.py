"""The corpus: its sources, and the questions on them.

`mmqa prepare` once (prepare.py), `open_corpus` ever after: texts are held in memory, encoded
pictures are read from ArrayRecord on demand. The sources of a corpus of Wikipedia's size stay on
disk (disk_sources.py), and are read when they are asked for.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.data import records
from mmqa_jax.data.articles import Articles
from mmqa_jax.data.disk_sources import DiskSources, RowsById, SelectedRows, SourceSelection
from mmqa_jax.data.images import read_picture_file
from mmqa_jax.data.schema import Material, Modality, Question, Source, united


@runtime_checkable
class LooksAhead(Protocol):
    """A reader of pictures by name that is told which ones are read soon."""

    def look_ahead(self, names: Collection[str]) -> None:
        """Fetches pictures that will be asked for."""


class Corpus:
    """Sources and the questions on them.

    Args:
      sources: all sources; a source's index in this list is its row.
      questions: of all splits.
      read_picture: encoded bytes of a picture by its name (`Source.image`).
      fingerprint: hash of texts, pictures and questions.
      manifest: what `mmqa prepare` stored (counts, materials, broken pictures, ...).
      row: the row of every id, of sources that are not to be held in memory.
      image_rows: rows of the pictures, ascending, of such sources.
      materials: what sources and questions are made of; None: those that the manifest names.

    Attributes:
      asked_by: fingerprint of the corpus whose questions these are, if it is another.

    Raises:
      UserError: two sources with one id.
    """

    def __init__(
        self,
        sources: Iterable[Source],
        questions: Iterable[Question] = (),
        read_picture: Callable[[str], bytes | None] | None = None,
        fingerprint: str = "",
        manifest: Mapping[str, Any] | None = None,
        *,
        row: Mapping[str, int] | None = None,
        image_rows: np.ndarray | None = None,
        materials: Iterable[Material] | None = None,
    ):
        self.sources: Sequence[Source] = list(sources) if row is None else sources
        self.row = row
        self.image_rows = image_rows
        if row is None:
            self._index()
        self.fingerprint = fingerprint
        self.manifest = dict(manifest or {})
        self.materials = united(
            records.materials_of(self.manifest) if materials is None else materials
        )
        self.asked_by = ""
        self._questions = list(questions)
        self._read_picture = read_picture

    def _index(self) -> None:
        self.row = {source.id: row for row, source in enumerate(self.sources)}
        if len(self.row) < len(self.sources):  # results would name one for the other
            row = next(n for n, source in enumerate(self.sources) if self.row[source.id] != n)
            raise UserError(
                f"corpus: source id {self.sources[row].id!r} is there twice; give each its own id."
            )

    def __len__(self) -> int:
        return len(self.sources)

    @functools.cached_property
    def articles(self) -> Articles:
        """The articles that the sources are of."""
        return Articles(self.sources, self.row)

    @property
    def on_disk(self) -> bool:
        """Whether the sources stay on disk: who reads all of them holds none."""
        return not isinstance(self.sources, list)

    @property
    def ids(self) -> Sequence[str]:
        """The id of every row, read when it is asked for."""
        return _SourceIds(self.sources)

    def questions(self, split: str | None = None) -> list[Question]:
        """Questions of a split, or all of them; [] where the split has none."""
        return [q for q in self._questions if split is None or q.split == split]

    def picture(self, row: int) -> bytes | None:
        """Encoded picture of the source in `row`; None for a snippet or a broken picture."""
        return self.read_picture(self.sources[row].image)

    def question_picture(self, question: Question) -> bytes | None:
        """Encoded picture of a question, None where it has none."""
        return self.read_picture(question.image)

    def read_picture(self, name: str | None) -> bytes | None:
        """Encoded picture by its name (`Source.image` or `Question.image`)."""
        if name is None or self._read_picture is None:
            return None
        return self._read_picture(name)

    def look_ahead(self, names: Collection[str | None]) -> None:
        """Called with the names of pictures before they are read: from a store, all at once."""
        if isinstance(self._read_picture, LooksAhead):
            self._read_picture.look_ahead([name for name in names if name is not None])

    def candidates(self, question: Question) -> list[int]:
        """Rows of the restricted setting: the question's positives, then its negatives.

        Empty for a question that lists no sources. The order reveals which are gold: a system
        that breaks ties by order must sort them first.
        """
        return self.positive_rows(question) + self.negative_rows(question)

    def positive_rows(self, question: Question) -> list[int]:
        """Rows of the gold sources; empty where they are hidden."""
        return [self._row_of(name, question) for name in question.positives]

    def negative_rows(self, question: Question) -> list[int]:
        """Rows of the hard negatives; empty where the question lists none."""
        return [self._row_of(name, question) for name in question.negatives]

    def image_mask(self) -> np.ndarray:
        """bool[sources]: which are pictures; no text is read."""
        mask = np.zeros(len(self), bool)
        if self.image_rows is None:
            mask[:] = [source.modality == "image" for source in self.sources]
        else:
            mask[self.image_rows] = True
        return mask

    def picture_count(self) -> int:
        """How many sources have a picture."""
        if self.image_rows is None:
            return sum(source.image is not None for source in self.sources)
        return len(self.image_rows)

    def modality_rows(self, modality: Modality) -> Sequence[int]:
        """Rows of all sources of one modality, in order."""
        if self.image_rows is None:
            return [row for row, source in enumerate(self.sources) if source.modality == modality]
        return np.flatnonzero(self.image_mask() == (modality == "image"))

    def of_rows(self, rows: Sequence[int]) -> Corpus:
        """The sources of these rows, ascending, as a corpus of their own without questions."""
        if not self.on_disk:
            sources = [self.sources[row] for row in rows]
            return Corpus(sources, read_picture=self.read_picture, materials=self.materials)
        if len(rows) == len(self):
            return self
        chosen = np.asarray(rows)
        selection = SourceSelection(self.sources, chosen)
        row = SelectedRows(selection, chosen, self.row)
        images = np.flatnonzero(self.image_mask()[chosen])
        return Corpus(
            selection,
            (),
            self.read_picture,
            row=row,
            image_rows=images,
            materials=self.materials,
        )

    def with_questions(
        self,
        questions: Iterable[Question],
        read_picture: Callable[[str], bytes | None] | None = None,
        materials: Iterable[Material] = (),
    ) -> Corpus:
        """The same sources, not copied, with other questions.

        Args:
          read_picture: as of the class; None: this corpus's own.
          materials: of the questions, beside this corpus's own.
        """
        other = copy.copy(self)
        other._questions = list(questions)
        other.materials = united(materials, self.materials)
        if read_picture is not None:
            other._read_picture = read_picture
        return other

    def _row_of(self, name: str, question: Question) -> int:
        try:
            return self.row[name]
        except KeyError as error:
            raise UserError(
                f"question {question.id}: its source {name!r} is not in the corpus; prepare the "
                "corpus and its questions together."
            ) from error


class _SourceIds(Sequence[str]):
    """The ids of sources."""

    def __init__(self, sources: Sequence[Source]):
        self._sources = sources

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, row):
        if isinstance(row, slice):
            return [source.id for source in self._sources[row]]
        return self._sources[row].id

    def __iter__(self) -> Iterator[str]:
        return (source.id for source in self._sources)


class _PicturesOfBoth:
    """Encoded pictures of the questions of one corpus and of the sources of another."""

    def __init__(self, asked: Corpus, known: Corpus):
        self._asked, self._known = asked, known
        self._of_questions = {question.image for question in asked.questions()}

    def __call__(self, name: str) -> bytes | None:
        home = self._asked if name in self._of_questions else self._known
        return home.read_picture(name)

    def look_ahead(self, names: Collection[str]) -> None:
        self._asked.look_ahead([name for name in names if name in self._of_questions])
        self._known.look_ahead([name for name in names if name not in self._of_questions])


class FolderPictures:
    """Encoded pictures that lie as files in a folder, by their names below it; None for none.

    Raises:
      UserError: the folder is not there any more.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        if not folder.is_dir():
            raise UserError(
                f"{folder}: the corpus's pictures lie there, and it is gone; put it back."
            )

    def __call__(self, name: str) -> bytes | None:
        path = self._folder / name
        return read_picture_file(path) if path.is_file() else None


def open_sources(data_dir: str | os.PathLike) -> Corpus:
    """The corpus without its questions, which take as long to read as its sources."""
    manifest = records.read_manifest(data_dir)
    if "stored" in manifest:
        return _open_streamed(Path(data_dir), manifest)
    folder = Path(data_dir) / manifest["records"]
    pictures = records.RecordPictures(folder)
    return Corpus(records.read_sources(folder), (), pictures, manifest["fingerprint"], manifest)


def open_corpus(data_dir: str | os.PathLike, sources_dir: str | os.PathLike = "") -> Corpus:
    """Opens what `mmqa prepare` wrote; UserError where it is missing or incomplete.

    Args:
      sources_dir: another prepared corpus, such as Wikipedia's, whose sources take the place of its
        own; the fingerprint is that of these sources, too. "": its own.
    """
    if sources_dir:
        asked, known = open_corpus(data_dir), open_sources(sources_dir)
        pictures = _PicturesOfBoth(asked, known)
        joined = known.with_questions(asked.questions(), pictures, asked.materials)
        joined.asked_by = asked.fingerprint
        return joined
    manifest = records.read_manifest(data_dir)
    if "stored" in manifest:
        return _open_streamed(Path(data_dir), manifest)
    folder = Path(data_dir) / manifest["records"]
    return Corpus(
        records.read_sources(folder),
        records.read_questions(folder, manifest["splits"]),
        records.RecordPictures(folder),
        manifest["fingerprint"],
        manifest,
    )


def _open_streamed(data_dir: Path, manifest: Mapping[str, Any]) -> Corpus:
    """A corpus of streamed_records.py."""
    sources = DiskSources(data_dir / manifest["records"], manifest["counts"]["sources"])
    pictures = FolderPictures(Path(manifest["pictures"])) if manifest["pictures"] else None
    return Corpus(
        sources,
        (),
        pictures,
        manifest["fingerprint"],
        manifest,
        row=RowsById(sources),
        image_rows=sources.image_rows,
    )
