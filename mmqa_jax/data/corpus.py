"""The corpus: its sources, and the questions on them; of several corpora one, by weights.

`mmqa prepare` once (prepare.py), `open_corpus` ever after: texts are held in memory, encoded
pictures are read from ArrayRecord on demand. The sources of a corpus of Wikipedia's size stay on
disk (disk_sources.py), and are read when they are asked for.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np

from mmqa_jax.core.errors import UserError, check_several
from mmqa_jax.data.articles import Articles
from mmqa_jax.data.disk_sources import DiskSources, RowsById, SelectedRows, SourceSelection
from mmqa_jax.data.formats.chats import MESSAGES
from mmqa_jax.data.formats.official import CAPTION
from mmqa_jax.data.pictures.decode import read_picture_file, verify
from mmqa_jax.data.records import corpus_records
from mmqa_jax.data.schema import Material, Modality, Question, Source, united

GoldContext = Literal["pictures", "sources"]


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
            corpus_records.materials_of(self.manifest) if materials is None else materials
        )
        self.asked_by = ""  # fingerprint of the corpus whose questions these are, if it is another
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
        """Whether the sources stay on disk, so that reading all of them fills no memory."""
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
            selection, (), self.read_picture, row=row, image_rows=images, materials=self.materials
        )

    def with_questions(
        self,
        questions: Iterable[Question],
        read_picture: Callable[[str], bytes | None] | None = None,
        materials: Iterable[Material] = (),
    ) -> Corpus:
        """Returns a corpus of the same sources, not copied, with other questions.

        Their `materials` come beside this corpus's own; `read_picture` is this corpus's own by
        default.
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
    """Encoded pictures that lie as files in a folder, by their names below it; None for none."""

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
    manifest = corpus_records.read_manifest(data_dir)
    if "stored" in manifest:
        return _open_streamed(Path(data_dir), manifest)
    folder = Path(data_dir) / manifest["records"]
    pictures = corpus_records.RecordPictures(folder)
    return Corpus(
        corpus_records.read_sources(folder), (), pictures, manifest["fingerprint"], manifest
    )


def open_corpus(data_dir: str | os.PathLike, sources_dir: str | os.PathLike = "") -> Corpus:
    """Opens what `mmqa prepare` wrote; UserError where it is missing or incomplete.

    `sources_dir`: another prepared corpus, such as Wikipedia's, whose sources take the place of its
    own; the fingerprint is that of these sources, too. "": its own.
    """
    if sources_dir:
        asked, known = open_corpus(data_dir), open_sources(sources_dir)
        pictures = _PicturesOfBoth(asked, known)
        joined = known.with_questions(asked.questions(), pictures, asked.materials)
        joined.asked_by = asked.fingerprint
        return joined
    manifest = corpus_records.read_manifest(data_dir)
    if "stored" in manifest:
        return _open_streamed(Path(data_dir), manifest)
    folder = Path(data_dir) / manifest["records"]
    return Corpus(
        corpus_records.read_sources(folder),
        corpus_records.read_questions(folder, manifest["splits"]),
        corpus_records.RecordPictures(folder),
        manifest["fingerprint"],
        manifest,
    )


def _open_streamed(data_dir: Path, manifest: Mapping[str, Any]) -> Corpus:
    """A corpus of records/streamed_records.py."""
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


# The questions of a split, even samples, and parts by the hash of an id.


T = TypeVar("T")


def split_questions(corpus: Corpus, data: Path, split: str) -> list[Question]:
    """The questions of a split; UserError, which names `data`, where there are none."""
    questions = corpus.questions(split)
    if not questions:
        known = sorted({question.split for question in corpus.questions()})
        remedy = f"choose one of {', '.join(known)}"
        if not known:
            remedy = "the corpus has no questions at all, prepare it with some"
        raise UserError(f"--split={split}: {data} has no such questions; {remedy}.")
    return questions


def evenly(items: Sequence[T], count: int) -> list[T]:
    """`count` of the items, evenly spaced; all for 0 or where there are fewer."""
    if not 0 < count < len(items):
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def fold_of(name: str, folds: int) -> int:
    """The part, 0 to folds - 1, to which a question's id is dealt by its hash."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % folds


def trains_on(data: Any, question: Question) -> bool:
    """Whether a run with the section `data` (tasks.vqa.FoldedData) trains on a question."""
    if question.split in data.more_splits:
        return True
    return question.split == data.split and fold_of(question.id, data.folds) == data.fold


# A corpus from Python lists: texts, and if there are any their titles, pictures and ids.


PictureOf = str | os.PathLike | bytes  # a file, or what is in it


def corpus_of_lists(
    texts: Sequence[str],
    titles: Sequence[str | None] | None = None,
    pictures: Sequence[PictureOf | None] | None = None,
    ids: Sequence[str] | None = None,
) -> Corpus:
    """The corpus whose sources are the texts.

    Args:
      texts: the snippet of every source; of one with a picture its caption, which may be empty.
      titles: by source; "" or None: it has none.
      pictures: by source, a file or its encoded bytes; None: the source is a text. Files are read
        again when their picture is used.
      ids: by source; None: "0", "1" and so on, their places in `texts`.

    Raises:
      TypeError: one text in place of a list, or a value of another type.
    """
    texts = _list(texts, "texts")
    titles, pictures, ids = (
        None if values is None else _list(values, name, len(texts))
        for name, values in (("titles", titles), ("pictures", pictures), ("ids", ids))
    )
    if not texts:
        raise UserError("open_corpus: there are no texts; give at least one.")
    sources: dict[str, Source] = {}
    encoded: dict[str, PictureOf] = {}
    digest = hashlib.sha256()
    for row, text in enumerate(texts):
        picture = None if pictures is None else pictures[row]
        title = "" if titles is None else _text(titles[row] or "", f"titles[{row}]")
        name = str(row) if ids is None else _text(ids[row], f"ids[{row}]")
        text = _text(text, f"texts[{row}]")
        if picture is None and not text.strip():
            raise UserError(
                f"open_corpus: texts[{row}] is empty; leave it out, or give its picture."
            )
        if not name.strip() or name in sources:
            there = "is empty" if not name.strip() else f"is {name!r}, as another one is"
            raise UserError(f"open_corpus: ids[{row}] {there}; give each source its own id.")
        image = None
        if picture is not None:
            image = f"pictures[{row}]"
            encoded[image] = picture
            data = _read(picture, image)
            verify(data, f"open_corpus: {image}")
            digest.update(hashlib.sha256(data).digest())
        modality = "text" if picture is None else "image"
        sources[name] = Source(name, modality, text, title, image)
        digest.update(json.dumps([name, text, title, image]).encode())

    def read_picture(image: str) -> bytes | None:
        return _read(encoded[image], image) if image in encoded else None

    return Corpus(sources.values(), (), read_picture, digest.hexdigest())


def _list(values: Iterable[Any], name: str, length: int | None = None) -> list[Any]:
    check_several(values, f"open_corpus: {name}", name)
    if isinstance(values, Mapping | Set):  # whose order, or keys, would be taken
        raise TypeError(
            f"open_corpus: {name} are a {type(values).__name__}, a list was expected; list them, "
            "and give the ids as `ids`."
        )
    listed = list(values)
    if length is not None and len(listed) != length:
        raise UserError(
            f"open_corpus: {length:,} texts but {len(listed):,} {name}; give one for each text, "
            "None where there is none."
        )
    return listed


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"open_corpus: {place} is {value!r:.60}, a text was expected; give a str.")
    return value


def _read(picture: PictureOf, place: str) -> bytes:
    """The encoded picture."""
    if isinstance(picture, bytes):
        return picture
    if isinstance(picture, str | os.PathLike):
        return read_picture_file(picture)
    raise TypeError(
        f"open_corpus: {place} is {type(picture).__name__}; give a file's path, or its bytes."
    )


def with_gold_sources(corpus: Corpus, context: GoldContext) -> Corpus:
    """The corpus with its gold sources brought by the questions, as VQA's bring a picture.

    A question's picture is then its first gold picture, and its caption what its gold sources say,
    in their order. So the systems of picture questions (PICa, Prophet, MAVL, RMR) run on WebQA and
    Atlas. A question on snippets alone has no picture.

    `context`: the caption is that of the gold `pictures`, or the text of all gold `sources`.
    """
    if not any(question.positives for question in corpus.questions()):
        raise UserError(
            f"config key data.context={context}: no question of this corpus names a gold source; "
            "leave it out."
        )

    def brought(question: Question) -> Question:
        gold = [corpus.sources[row] for row in corpus.positive_rows(question)]
        pictures = [source for source in gold if source.modality == "image"]
        caption = " ".join(map(_sentence, gold if context == "sources" else pictures))
        return dataclasses.replace(
            question,
            image=pictures[0].image if pictures else None,
            extra={**question.extra, CAPTION: caption},
        )

    return corpus.with_questions([brought(question) for question in corpus.questions()])


def _sentence(source: Source) -> str:
    text = " ".join(source.text.split())
    return text if text.endswith((".", "!", "?")) else f"{text}."


# Several prepared corpora as one, whose shares in training are given by weights.


_ENDS = ":"  # of the number of its corpus, with which an id or a picture's name begins


def open_mixture(places: Sequence[str | os.PathLike]) -> Corpus:
    """Opens prepared corpora as one. The ids of sources and questions, and the names of pictures,
    begin with the number of their corpus.
    """
    corpora = [open_corpus(place) for place in places]
    for place, corpus in zip(places, corpora, strict=True):
        if corpus.on_disk:
            raise UserError(
                f"config key data.mixture: the sources of {place} stay on disk, and have no "
                "questions; leave it out."
            )
    sources, questions = [], []
    for number, corpus in enumerate(corpora):
        prefix = f"{number}{_ENDS}"
        for source in corpus.sources:
            image = None if source.image is None else prefix + source.image
            sources.append(dataclasses.replace(source, id=prefix + source.id, image=image))
        questions += [_renamed(question, prefix) for question in corpus.questions()]

    names = json.dumps([corpus.fingerprint for corpus in corpora])
    return Corpus(
        sources,
        questions,
        _Pictures(corpora),
        hashlib.sha256(names.encode()).hexdigest(),
        materials=united(*(corpus.materials for corpus in corpora)),
    )


def member_of(question: Question) -> int:
    """The number of the corpus in the mixture that a question is of."""
    return int(question.id.partition(_ENDS)[0])


class _Pictures:
    """Encoded pictures of all corpora by name."""

    def __init__(self, corpora: Sequence[Corpus]):
        self._corpora = corpora

    def __call__(self, name: str) -> bytes | None:
        number, _, name_in_corpus = name.partition(_ENDS)
        return self._corpora[int(number)].read_picture(name_in_corpus)

    def look_ahead(self, names: Collection[str]) -> None:
        parts = [name.partition(_ENDS) for name in names]
        for number, corpus in enumerate(self._corpora):
            corpus.look_ahead([part[2] for part in parts if part[0] == str(number)])


def _renamed(question: Question, prefix: str) -> Question:
    extra = dict(question.extra)
    if MESSAGES in extra:
        extra[MESSAGES] = [_renamed_message(message, prefix) for message in extra[MESSAGES]]
    return dataclasses.replace(
        question,
        id=prefix + question.id,
        image=None if question.image is None else prefix + question.image,
        more_images=tuple(prefix + name for name in question.more_images),
        positives=tuple(prefix + name for name in question.positives),
        negatives=tuple(prefix + name for name in question.negatives),
        extra=extra,
    )


def _renamed_message(message: dict, prefix: str) -> dict:
    if not isinstance(message["content"], list):
        return message
    parts = [
        {**part, "image": prefix + part["image"]} if part["type"] == "image" else part
        for part in message["content"]
    ]
    return {**message, "content": parts}
