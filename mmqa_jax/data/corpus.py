"""The corpus in memory.

`mmqa prepare` once (prepare.py), `open_corpus` ever after: texts are held in memory, encoded
pictures are read from ArrayRecord on demand.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.data import records
from mmqa_jax.data.articles import Articles
from mmqa_jax.data.schema import Modality, Question, Source

_ASKED = "question:"  # before the names of pictures of questions of another folder


class Corpus:
    """Sources and the questions on them.

    Args:
      sources: all sources; a source's index in this list is its row.
      questions: of all splits.
      read_picture: encoded bytes of a picture by its name (`Source.image`).
      fingerprint: hash of texts, pictures and questions.
      manifest: what `mmqa prepare` stored (counts, attribution, broken pictures, ...).

    Attributes:
      asked_by: fingerprint of the corpus whose questions these are, if it is another (`asked`).

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
    ):
        self.sources = list(sources)
        self.row: dict[str, int] = {source.id: row for row, source in enumerate(self.sources)}
        if len(self.row) < len(self.sources):  # results would name one for the other
            row = next(n for n, source in enumerate(self.sources) if self.row[source.id] != n)
            raise UserError(
                f"corpus: source id {self.sources[row].id!r} is there twice; give each its own id."
            )
        self.fingerprint = fingerprint
        self.manifest = dict(manifest or {})
        self.asked_by = ""
        self._questions = list(questions)
        self._read_picture = read_picture

    def __len__(self) -> int:
        return len(self.sources)

    @functools.cached_property
    def articles(self) -> Articles:
        """The articles that the sources are of."""
        return Articles(self.sources)

    def asked(self, other: Corpus) -> Corpus:
        """These sources with the questions of another corpus, and those questions' pictures.

        The fingerprint stays that of these sources, which an index over them names.
        """
        joined, own = copy.copy(self), self.read_picture

        def read(name: str) -> bytes | None:
            if name.startswith(_ASKED):
                return other.read_picture(name.removeprefix(_ASKED))
            return own(name)

        joined._read_picture = read
        joined.asked_by = other.fingerprint
        joined._questions = [
            question
            if question.image is None
            else dataclasses.replace(question, image=_ASKED + question.image)
            for question in other.questions()
        ]
        return joined

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

    def modality_rows(self, modality: Modality) -> list[int]:
        """Rows of all sources of one modality, in order."""
        return [row for row, source in enumerate(self.sources) if source.modality == modality]

    def _row_of(self, name: str, question: Question) -> int:
        try:
            return self.row[name]
        except KeyError as error:
            raise UserError(
                f"question {question.id}: its source {name!r} is not in the corpus; prepare the "
                "corpus and its questions together."
            ) from error


def open_sources(data_dir: str | os.PathLike) -> Corpus:
    """The corpus without its questions, which take as long to read as its sources."""
    manifest = records.read_manifest(data_dir)
    folder = Path(data_dir) / manifest["records"]
    pictures = records.RecordPictures(folder)
    return Corpus(records.read_sources(folder), (), pictures, manifest["fingerprint"], manifest)


def open_corpus(data_dir: str | os.PathLike, sources: str | os.PathLike = "") -> Corpus:
    """Opens what `mmqa prepare` wrote; UserError where it is missing or incomplete.

    Args:
      sources: another such folder, whose sources the questions are asked of; "": their own.
    """
    if sources:
        return open_sources(sources).asked(open_corpus(data_dir))
    manifest = records.read_manifest(data_dir)
    folder = Path(data_dir) / manifest["records"]
    return Corpus(
        records.read_sources(folder),
        records.read_questions(folder, manifest["splits"]),
        records.RecordPictures(folder),
        manifest["fingerprint"],
        manifest,
    )
