"""The corpus in memory, and the two ways to prepare one: WebQA's files, or your documents.

`prepare` once, `open_corpus` ever after: texts are held in memory, encoded pictures are read
from ArrayRecord when asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.data import interchange, records
from mmqa_jax.data.datasets import webqa
from mmqa_jax.data.schema import Modality, Question, Source

Progress = Callable[[int, int], None]


class Corpus:
    """Sources and the questions asked of them.

    Args:
      sources: all sources; a source's place in this list is its row.
      questions: of all splits.
      read_picture: encoded bytes of a picture by its name (`Source.image`).
      fingerprint: hash of texts, pictures and questions.
      manifest: what `mmqa prepare` stored (counts, attribution, broken pictures, ...).
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
        self.fingerprint = fingerprint
        self.manifest = dict(manifest or {})
        self._questions = list(questions)
        self._read_picture = read_picture

    def __len__(self) -> int:
        return len(self.sources)

    def questions(self, split: str | None = None) -> list[Question]:
        """Questions of a split, or all of them; [] where the split has none."""
        return [q for q in self._questions if split is None or q.split == split]

    def picture(self, row: int) -> bytes | None:
        """Encoded picture of the source in `row`; None for a snippet or a broken picture."""
        return self.read_picture(self.sources[row].image)

    def question_picture(self, question: Question) -> bytes | None:
        """Encoded picture that belongs to a question, None where it has none."""
        return self.read_picture(question.image)

    def read_picture(self, name: str | None) -> bytes | None:
        """Encoded picture by its name (`Source.image` or `Question.image`)."""
        if name is None or self._read_picture is None:
            return None
        return self._read_picture(name)

    def candidates(self, question: Question) -> list[int]:
        """Rows of the restricted setting: the question's positives, then its negatives.

        Empty for a question that lists no sources. The order tells which are gold: a system
        that breaks ties by order must sort them first.
        """
        return [self._row_of(name, question) for name in question.positives + question.negatives]

    def positive_rows(self, question: Question) -> list[int]:
        """Rows of the gold sources; empty where they are hidden."""
        return [self._row_of(name, question) for name in question.positives]

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


class _NamedPictures:
    """Encoded pictures of a records folder by name; can be sent to worker processes."""

    def __init__(self, folder: Path):
        self._numbers = records.read_picture_numbers(folder)
        self._pictures = records.RecordPictures(folder)

    def __call__(self, name: str) -> bytes | None:
        number = self._numbers.get(name)
        return None if number is None else self._pictures(number)


def open_corpus(data_dir: str | os.PathLike) -> Corpus:
    """Opens what `mmqa prepare` wrote; UserError where it is missing or incomplete."""
    manifest = records.read_manifest(data_dir)
    folder = Path(data_dir) / manifest["records"]
    return Corpus(
        records.read_sources(folder),
        records.read_questions(folder, manifest["splits"]),
        _NamedPictures(folder),
        manifest["fingerprint"],
        manifest,
    )


def prepare_webqa_format(
    train_val_json: str | os.PathLike,
    test_json: str | os.PathLike | None,
    imgs_tsv: str | os.PathLike | None,
    lineidx: str | os.PathLike | None,
    out: str | os.PathLike,
    *,
    corpus_json: str | os.PathLike | None = None,
    name: str = "webqa",
    attribution: str = "",
    max_broken_pictures: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Official WebQA files to ArrayRecord below `out`; returns the manifest.

    Goes on where an attempt on the same files was interrupted, with the same result. The
    manifest's `origin` says what else was found: repeated and reused snippet ids, rows of
    imgs.tsv, and for `webqa` the counts beside the published ones.

    Args:
      train_val_json, test_json: WebQA_train_val.json, WebQA_test.json.
      imgs_tsv, lineidx: imgs.tsv and imgs.lineidx; None where no fact has a picture.
      out: folder to write; see `records.write_records`, as for the other arguments.
      corpus_json: a third file of the same shape whose facts are added to the corpus as
        sources that no question lists; its questions are not read.
    """
    questions_from = [path for path in (train_val_json, test_json) if path is not None]
    release = webqa.read_release(questions_from, [corpus_json] if corpus_json else [])
    # By id: the files' order, gold before negatives, would tell in every tie.
    sources = sorted(release.sources, key=lambda source: source.id)
    files = [*questions_from, corpus_json, imgs_tsv, lineidx]
    origin: dict[str, Any] = {
        "files": [str(path) for path in files if path is not None],
        "repeated_snippets": release.repeated_snippets,
        "reused_snippet_ids": release.reused_snippet_ids,
    }
    if name == "webqa":
        origin["published_counts"] = webqa.compared_counts(release)
    pictures = None
    if imgs_tsv is not None:
        pictures = webqa.ImagesTsv(imgs_tsv, lineidx)
        pictures.check_ends(source.image for source in sources if source.image is not None)
        origin["picture_rows"] = len(pictures)
    return records.write_records(
        out,
        sources,
        release.questions,
        pictures.read_named if pictures is not None else None,
        name=name,
        attribution=attribution,
        origin=origin,
        max_broken_pictures=max_broken_pictures,
        overwrite=overwrite,
        progress=progress,
        inputs=pictures.signature if pictures is not None else None,
    )


def prepare_interchange(
    folder: str | os.PathLike,
    out: str | os.PathLike,
    *,
    attribution: str = "",
    max_broken_pictures: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """A corpus interchange folder (design.md 3) to ArrayRecord; returns the manifest."""
    found = interchange.read_interchange(folder)
    return records.write_records(
        out,
        found.sources,
        found.questions,
        found.read_picture,
        name=Path(folder).resolve().name,
        attribution=attribution,
        origin={"folder": str(folder)},
        max_broken_pictures=max_broken_pictures,
        overwrite=overwrite,
        progress=progress,
    )
