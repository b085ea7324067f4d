"""Bring your own documents: the corpus interchange folder.

    sources.jsonl      id, modality (text | image), text (snippet or caption), image, title
    questions.jsonl    optional: id, split, question, image, more_images, answers, keywords,
                       category, positives, negatives, choices, answer_index, rationale,
                       answerable (false: no source answers it)
    images.tar         optional: the pictures, instead of files beside the two
    ATTRIBUTION.txt    optional: credits and licenses, a paragraph for each material

A question that is itself a passage of the corpus may name it as `from_source`; that source is
then never a hit.
`image` is a path relative to the folder, or a member of images.tar. Unknown keys are kept in
`extra`. An image source with `"image": null` has lost its picture.

A folder may come from anyone: nothing outside it is read, neither by `../` nor by a symbolic link
that leads out of it. Pictures that lie elsewhere are copied into it.
"""

from __future__ import annotations

import dataclasses
import os
import string
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_jsonl
from mmqa_jax.data.pictures.bounds import check_bytes
from mmqa_jax.data.pictures.decode import PictureTar, plain_path
from mmqa_jax.data.records.corpus_records import NOTICE, materials_beside
from mmqa_jax.data.schema import ANSWERABLE, SPLITS, Material, Question, Source

TAR = "images.tar"


@dataclasses.dataclass(frozen=True)
class Interchange:
    """A validated folder: its rows, a reader of encoded pictures by path, and credits."""

    sources: list[Source]
    questions: list[Question]
    read_picture: Callable[[str], bytes]
    materials: tuple[Material, ...]


def read_interchange(folder: str | os.PathLike) -> Interchange:
    """Reads and validates an interchange folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; it must hold sources.jsonl.")
    for name in ("sources.jsonl", "questions.jsonl", TAR, NOTICE):
        if problem := _link_problem(folder, name):
            raise UserError(f"{folder / name} {problem}.")
    pictures = InterchangePictures(folder)
    path = folder / "sources.jsonl"
    sources = _unique(path, lambda row: _source(row, pictures))
    if not sources:
        raise UserError(f"{path}: the corpus is empty; write one source per line.")
    path = folder / "questions.jsonl"
    questions = (
        _unique(path, lambda row: _question(row, pictures, sources)) if path.exists() else {}
    )
    rows = list(sources.values()), list(questions.values())
    return Interchange(*rows, pictures, materials_beside(folder))


class _Row:
    """One JSON object of a file; its keys are popped one by one and their types checked."""

    def __init__(self, path: Path, line: int, value: Any):
        self.where = f"{path}, line {line}"
        if not isinstance(value, dict):
            raise UserError(f"{self.where}: not a JSON object; write one object per line.")
        self.rest = dict(value)

    def fail(self, message: str) -> UserError:
        return UserError(f"{self.where}: {message}")

    def string(self, key: str, *, required: bool = False) -> str:
        value = self.rest.pop(key, None)
        if value is None and not required:
            return ""
        if not isinstance(value, str) or (required and not value.strip()):
            quoted = "missing" if value is None else repr(value)[:60]
            raise self.fail(f"`{key}` is {quoted}; expected a string{' with text' * required}.")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        value = self.rest.pop(key, None)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(f"`{key}` is {repr(value)[:60]}; expected a list of strings.")
        return tuple(value)

    def choice(self, key: str, allowed: Iterable[str], default: str = "") -> str:
        value = self.rest.pop(key, None) or default
        if value not in allowed:
            raise self.fail(f"`{key}` is {value!r}; expected {' or '.join(allowed)}.")
        return value

    def picture(self, pictures: InterchangePictures) -> str | None:
        name = self.string("image") or None
        if name is not None and (problem := pictures.problem(name)):
            raise self.fail(f"`image` {name!r} {problem}.")
        return name

    def pictures(self, pictures: InterchangePictures) -> tuple[str, ...]:
        names = self.strings("more_images")
        for name in names:
            if problem := pictures.problem(name):
                raise self.fail(f"`more_images` {name!r} {problem}.")
        return names


def _source(row: _Row, pictures: InterchangePictures) -> Source:
    modality = row.choice("modality", ("text", "image"))
    if modality == "image" and "image" not in row.rest:
        raise row.fail("`image` is missing; a source of modality image needs a picture's path.")
    if modality == "text" and row.rest.get("image") is not None:
        raise row.fail("a source of modality text has an `image`; set its modality to image.")
    return Source(
        id=row.string("id", required=True),
        modality=modality,
        text=row.string("text", required=modality == "text"),
        title=row.string("title"),
        image=row.picture(pictures),
        extra=row.rest,
    )


def _question(row: _Row, pictures: InterchangePictures, sources: Mapping[str, Source]) -> Question:
    positives = tuple(dict.fromkeys(row.strings("positives")))
    negatives = tuple(dict.fromkeys(row.strings("negatives")))
    for name in (*positives, *negatives):
        if name not in sources:
            raise row.fail(f"source {name!r} is not in sources.jsonl; add it or remove it here.")
    if both := set(positives) & set(negatives):
        raise row.fail(f"source {min(both)!r} is both positive and negative; remove one.")
    choices = row.strings("choices")
    if len(choices) > len(string.ascii_uppercase):  # which prompts and scorers name them by
        raise row.fail(f"`choices` are {len(choices)}; 26 at most were expected, A to Z.")
    index = row.rest.pop("answer_index", None)
    if index is not None and not (type(index) is int and 0 <= index < len(choices)):
        raise row.fail(
            f"`answer_index` is {index!r}; expected a number from 0 to {len(choices) - 1}."
            if choices
            else "`answer_index` needs `choices`; add the choices."
        )
    answerable = row.rest.get(ANSWERABLE)
    if answerable not in (None, True, False) or type(answerable) is int:
        raise row.fail(f"`{ANSWERABLE}` is {answerable!r:.60}; expected true or false.")
    if answerable is False and positives:
        raise row.fail(f"`{ANSWERABLE}` is false, but there are `positives`; remove one of them.")
    return Question(
        id=row.string("id", required=True),
        split=row.choice("split", SPLITS, default="test"),
        question=row.string("question", required=True),
        image=row.picture(pictures),
        answers=row.strings("answers"),
        keywords=row.string("keywords"),
        category=row.string("category"),
        positives=positives,
        negatives=negatives,
        choices=choices,
        answer_index=index,
        rationale=row.string("rationale"),
        more_images=row.pictures(pictures),
        extra=row.rest,
    )


def _unique(path: Path, parse: Callable[[_Row], Any]) -> dict[str, Any]:
    """id -> parsed row; a repeated id is an error that names both lines."""
    parsed: dict[str, Any] = {}
    lines: dict[str, str] = {}
    for line, value in read_jsonl(path):
        row = _Row(path, line, value)
        made = parse(row)
        if made.id in parsed:
            raise row.fail(f"id {made.id!r} is already used in {lines[made.id]}; rename one.")
        parsed[made.id], lines[made.id] = made, row.where
    return parsed


def _link_problem(folder: Path, name: str) -> str | None:
    """The error in a symbolic link of the folder, or None."""
    try:
        target = (folder / name).resolve()
    except RuntimeError:  # of pathlib, where links lead to one another
        return "is a symbolic link that leads to itself; put the file itself in its place"
    if not target.is_relative_to(folder.resolve()):
        return "is a symbolic link that leads out of the folder; copy into it what the link names"
    return None


class InterchangePictures:
    """Pictures of a folder by relative path: a file, or a member of its images.tar."""

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        path = folder / TAR
        self._tar = PictureTar(path) if path.exists() else None

    def problem(self, name: str) -> str | None:
        """The error in a picture's path, or None."""
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            return "is outside the folder; give a path relative to it"
        if self._tar is not None and name in self._tar:
            return None
        if self._tar is not None and plain_path(name) in self._tar.others:
            return f"is a link or a sparse file in {TAR}; write it with `tar chf`, without -S"
        try:
            if problem := _link_problem(self.folder, name):
                return problem
            if (self.folder / name).is_file():
                return None
        except (OSError, ValueError) as error:  # a name too long for a file, or with a NUL
            return f"is no file's name ({getattr(error, 'strerror', None) or error}); correct it"
        if other := self._in_another_form(name):
            return (
                f"is there in another Unicode form ({other.encode('unicode_escape').decode()}), as "
                "macOS and its archives write accents; rename the file, or write the path as it is"
            )
        where = f"in {self.folder}" + (f" or in its {TAR}" if self._tar else "")
        return f"is not a file {where}; add the picture or correct the path"

    def _in_another_form(self, name: str) -> str | None:
        """A picture whose path looks the same and has other code points: NFC and NFD."""
        wanted = unicodedata.normalize("NFC", plain_path(name))
        in_folder = self.folder.rglob("*") if not wanted.isascii() else ()
        there = (str(path.relative_to(self.folder)) for path in in_folder if path.is_file())
        others = (path for path in (*(self._tar or ()), *there) if path != name)
        return next((path for path in others if unicodedata.normalize("NFC", path) == wanted), None)

    def __call__(self, name: str) -> bytes:
        """Encoded bytes of a picture whose path has no problem; PictureError for too many."""
        if self._tar is not None and name in self._tar:
            return self._tar.read(name)
        path = self.folder / name
        check_bytes(path.stat().st_size, name)
        return path.read_bytes()
