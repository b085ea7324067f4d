"""Rows of others' data sets as a corpus: Hugging Face's Parquet files and saved `datasets`, and
WebDataset's tar shards.

`--columns` says which column is what: of a question `question`, `answers`, `choices`,
`answer_index`, `rationale`; of a conversation `messages` (chats.py; its parts {"type": "image"} are
the row's pictures in order) and `tools`; of a source `text`, a snippet or a picture's caption,
which is the gold source of a question in the same row; of all of them `id` and `image`, one picture
or a list.

Pictures stay encoded, and are read one at a time when the records are written. A sample of
WebDataset is the members of one path up to its first dot: the keys of .json, and texts and
pictures by their endings, are its columns. Nothing is unpacked.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol

from mmqa_jax.core.errors import UserError, import_optional
from mmqa_jax.core.files import decode_text, parse_json
from mmqa_jax.core.typed import nearest
from mmqa_jax.data.formats.chats import MESSAGES, TOOLS, conversation
from mmqa_jax.data.formats.official import ParquetPictures, parquet_rows, row_name
from mmqa_jax.data.pictures.bounds import PictureError, check_bytes
from mmqa_jax.data.pictures.decode import PictureTar
from mmqa_jax.data.schema import Question, Source

ROLES = (
    *("question", "answers", "choices", "answer_index", "rationale"),
    *(MESSAGES, TOOLS, "text", "id", "image"),
)
_SPLITS = {"train": "train", "val": "val", "validation": "val", "dev": "val", "test": "test"}
_PICTURES = ("jpg", "jpeg", "png", "webp")
_NAMED = 20  # rows that were left out, with their reasons


class Row(NamedTuple):
    """A row before it is read."""

    name: str
    where: str
    split: str
    values: Mapping[str, Any]  # of the columns that are no pictures
    pictures: int  # how many it has; their names are `NAME/0`, `NAME/1`, ..


class RowFiles(Protocol):
    """The rows of a data set."""

    def rows(self) -> Iterator[Row | str]:
        """Rows in order, or why one is left out."""

    def read(self, name: str, number: int) -> bytes:
        """An encoded picture of a row; PictureError where there is none."""


@dataclasses.dataclass(frozen=True)
class RowCorpus:
    """The questions and sources that were read."""

    sources: list[Source]
    questions: list[Question]
    files: RowFiles
    left_out: int  # rows that hold no question, conversation or source
    reasons: list[str]  # of the first of them

    def read_picture(self, name: str) -> bytes:
        """Encoded bytes of a picture by its name."""
        row, _, number = name.rpartition("/")
        return self.files.read(row, int(number))


def parse_columns(text: str) -> dict[str, str]:
    """`question=q,image=img` -> {role: column}; UserError for another form or an unknown role."""
    pairs = [pair.partition("=") for pair in text.split(",")]
    for role, sign, column in pairs:
        if role not in ROLES or not sign or not column:
            raise UserError(
                f"--columns={text}: {role!r:.60} is no ROLE=COLUMN; {nearest(role, ROLES)}"
            )
    columns = {role: column for role, _, column in pairs}
    if len(columns) < len(pairs) or not columns.keys() & {"question", MESSAGES, "text"}:
        raise UserError(
            f"--columns={text}: each role once was expected, question, {MESSAGES} or text among "
            "them; change it."
        )
    return columns


def read_rows(kind: str, raw: Path, columns: Mapping[str, str]) -> RowCorpus:
    """Reads all rows but their pictures; `kind` is `hf` or `webdataset`, `columns` of
    parse_columns.
    """
    files: RowFiles
    if kind == "webdataset":
        files = _Shards(raw, columns)
    elif any((raw / name).is_file() for name in ("dataset_dict.json", "state.json")):
        files = _Saved(raw, columns)
    else:
        files = _Tables(raw, columns)
    sources, questions, left_out, reasons = [], [], 0, []
    for row in files.rows():
        try:
            if isinstance(row, str):
                raise UserError(row)
            question, source = _read(row, columns)
        except UserError as error:
            left_out += 1
            if len(reasons) < _NAMED:
                reasons.append(str(error))
            continue
        questions += [] if question is None else [question]
        sources += [] if source is None else [source]
    if not questions and not sources:
        first = f"; the first one left out: {reasons[0]}" if reasons else ""
        raise UserError(f"{raw}: has no row that can be used{first}; check --columns.")
    return RowCorpus(sources, questions, files, left_out, reasons)


def _read(row: Row, columns: Mapping[str, str]) -> tuple[Question | None, Source | None]:
    values = {role: row.values.get(column) for role, column in columns.items() if role != "image"}
    name = row.name if values.get("id") is None else str(values["id"])
    names = tuple(f"{row.name}/{number}" for number in range(row.pictures))
    image = names[0] if names else None
    source = question = None
    if "text" in columns:
        if not isinstance(values["text"], str) or not (values["text"].strip() or names):
            raise UserError(
                f"{row.where}: `text` is {_shown(values['text'])}; a text was expected."
            )
        modality = "image" if names else "text"
        source = Source(name, modality, values["text"], image=image)
    if MESSAGES in columns:
        chat = conversation(_with_pictures(values, names, row.where), row.where)
        question = chat.as_question(name, row.split)
    elif "question" in columns:
        asked = values["question"]
        if not isinstance(asked, str) or not asked.strip():
            raise UserError(f"{row.where}: `question` is {_shown(asked)}; a text was expected.")
        choices = values.get("choices")
        choices = _texts(
            choices.get("text") if isinstance(choices, Mapping) else choices, row.where
        )
        question = Question(
            name,
            row.split,
            asked,
            None if source is not None else image,
            answers=_texts(values.get("answers"), row.where),
            positives=() if source is None else (name,),
            choices=choices,
            answer_index=_index(values.get("answer_index"), choices, row.where),
            rationale="".join(_texts(values.get("rationale"), row.where)),
            more_images=() if source is not None else names[1:],
        )
    return question, source


def _with_pictures(values: Mapping[str, Any], names: Sequence[str], where: str) -> dict[str, Any]:
    """A conversation whose parts {"type": "image"} name the row's pictures; Parquet's nulls, which
    stand for keys that a message has not, are left out."""
    messages, tools = (
        parse_json(item, where) if isinstance(item, str) else item
        for item in (values[MESSAGES], values.get(TOOLS))
    )
    left = iter(names)

    def filled(value: Any) -> Any:
        if isinstance(value, Mapping):
            made = {key: filled(item) for key, item in value.items() if item is not None}
            if made.get("type") != "image":
                return made
            name = next(left, None)
            if name is None:
                raise UserError(f"{where}: `{MESSAGES}` show more pictures than the row has.")
            return {"type": "image", "image": name}
        return [filled(item) for item in value] if isinstance(value, list) else value

    made = {MESSAGES: filled(messages), TOOLS: filled(tools)}
    if (unused := next(left, None)) is not None:
        raise UserError(f"{where}: no part of `{MESSAGES}` shows the picture {unused}.")
    return made


def _texts(value: Any, where: str) -> tuple[str, ...]:
    """A text, a list of texts, or null."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, str | int | float) for item in values):
        raise UserError(f"{where}: holds {_shown(value)}; a text or a list of texts was expected.")
    return tuple(map(str, values))


def _index(value: Any, choices: Sequence[str], where: str) -> int | None:
    """A number from 0, a letter from A, or one of the choices."""
    if isinstance(value, str):
        letter = ord(value) - ord("A") if len(value) == 1 else -1
        place = choices.index(value) if value in choices else letter
        value = int(value) if value.isdecimal() and value not in choices else place
    if value is not None and not (type(value) is int and 0 <= value < len(choices)):
        raise UserError(f"{where}: `answer_index` is {_shown(value)} of {len(choices)} choices.")
    return value


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)[:60]


def _split_of(path: Path, root: Path) -> str:
    """The split that a file, or a folder above it, begins with; where there is none, train."""
    parts = [re.match(r"[A-Za-z]*", part)[0].lower() for part in path.relative_to(root).parts]
    known = [_SPLITS[part] for part in parts if part in _SPLITS]
    return known[-1] if known else "train"


def _files(raw: Path, ending: str, what: str) -> list[Path]:
    """The files of a folder, in order, whose names are unique."""
    paths = sorted(raw.rglob(f"*.{ending}"))
    if not paths:
        raise UserError(f"{raw}: holds no {what} (*.{ending}); check the path.")
    names: dict[str, Path] = {}
    for path in paths:
        other = names.setdefault(path.name, path)
        if other != path:
            raise UserError(f"{path}: {other} has the same name; name the folder of one of them.")
    return paths


class _Tables:
    """Parquet files, read one row group at a time."""

    def __init__(self, raw: Path, columns: Mapping[str, str]):
        self._raw, self._paths = raw, _files(raw, "parquet", "Parquet files or saved data set")
        self._columns = [column for role, column in columns.items() if role != "image"]
        self._pictures = None
        if "image" in columns:
            self._pictures = ParquetPictures(self._paths, None, columns["image"])
        self._counts = self._pictures.counts() if self._pictures is not None else {}

    def rows(self) -> Iterator[Row | str]:
        """See RowFiles."""
        for path in self._paths:
            split = _split_of(path, self._raw)
            for number, values in parquet_rows(path, self._columns):
                name = row_name(path, number)
                yield Row(name, f"{path}, row {number}", split, values, self._counts.get(name, 0))

    def read(self, name: str, number: int) -> bytes:
        """See RowFiles."""
        assert self._pictures is not None  # of rows with pictures alone
        try:
            return self._pictures(name, number)
        except PictureError:
            if number:
                raise
        return self._pictures(name)  # a single picture, no list


class _Saved:
    """Opens what `datasets.Dataset.save_to_disk` wrote; its files are mapped into memory."""

    def __init__(self, raw: Path, columns: Mapping[str, str]):
        datasets = import_optional("datasets", f"{raw}: reading saved data sets", "hf")
        try:
            opened = datasets.load_from_disk(str(raw))
        except Exception as error:  # the library raises all kinds for broken files
            reason = " ".join(str(error).split())
            raise UserError(
                f"{raw}: datasets cannot open it ({reason:.150}); save it again."
            ) from error
        parts = {"train": opened} if isinstance(opened, datasets.Dataset) else dict(opened)
        if unknown := sorted(parts.keys() - _SPLITS.keys()):
            raise UserError(
                f"{raw}: its splits {', '.join(unknown)} are none of {', '.join(_SPLITS)}; rename "
                "them, or save it without them."
            )
        self._parts = parts
        self._raw, self._texts, self._pictures = raw, {}, {}
        texts = [column for role, column in columns.items() if role != "image"]
        for name, part in self._parts.items():
            if missing := set(columns.values()) - set(part.column_names):
                raise UserError(
                    f"{raw}, split {name}: has no column {', '.join(sorted(missing))} (it has "
                    f"{', '.join(part.column_names)}); change --columns."
                )
            self._texts[name] = part.select_columns(texts)
            if "image" in columns:
                self._pictures[name] = part.select_columns([columns["image"]]).with_format("arrow")

    def rows(self) -> Iterator[Row | str]:
        """See RowFiles."""
        for name, part in self._texts.items():
            for number, values in enumerate(part):
                count = len(self._cell(name, number)) if name in self._pictures else 0
                where = f"{self._raw}, split {name}, row {number}"
                yield Row(f"{name}/{number}", where, _SPLITS[name], values, count)

    def read(self, name: str, number: int) -> bytes:
        """See RowFiles."""
        split, _, row = name.partition("/")
        picture = self._cell(split, int(row))[number]
        data = picture.get("bytes") if isinstance(picture, Mapping) else picture
        if data is None or not data.is_valid:
            raise PictureError(f"{self._raw}, {name}: holds no picture's bytes.")
        check_bytes(data.as_buffer().size, f"{self._raw}, {name}")
        return data.as_buffer().to_pybytes()

    def _cell(self, split: str, row: int) -> list[Any]:
        """The pictures of a row as Arrow's values, no bytes copied."""
        import pyarrow

        value = self._pictures[split][row].column(0)[0]
        if not value.is_valid:
            return []
        return list(value) if isinstance(value, pyarrow.ListScalar) else [value]


class _Shards:
    """WebDataset's tar files; a sample is held at a time."""

    def __init__(self, raw: Path, columns: Mapping[str, str]):
        ending = columns.get("image", "")
        self._endings = _PICTURES if ending in _PICTURES else (ending,)
        self._raw, self._paths = raw, _files(raw, "tar", "tar shards")
        self._tars = {path.name: PictureTar(path) for path in self._paths}
        self._members: dict[str, str] = {}  # the picture of a sample

    def rows(self) -> Iterator[Row | str]:
        """See RowFiles."""
        for path in self._paths:
            tar, split = self._tars[path.name], _split_of(path, self._raw)
            for other in sorted(tar.others):
                yield f"{path}: {other!r:.80} is a link or a sparse file."
            samples: dict[str, dict[str, str]] = {}
            for member in tar:
                place = PurePosixPath(member)
                if place.is_absolute() or ".." in place.parts:
                    yield f"{path}: {member!r:.80} leads out of the folder."
                    continue
                key, _, ending = place.name.partition(".")
                samples.setdefault(str(place.parent / key), {})[ending.lower()] = member
            for key, members in samples.items():
                where, name = f"{path}, sample {key!r:.80}", f"{path.name}/{key}"
                picture_members = [members[ending] for ending in self._endings if ending in members]
                if picture_members:
                    self._members[name] = picture_members[0]
                try:
                    yield Row(
                        name, where, split, _values(tar, members, where), len(picture_members[:1])
                    )
                except UserError as error:
                    yield str(error)

    def read(self, name: str, number: int) -> bytes:
        """See RowFiles."""
        return self._tars[name.partition("/")[0]].read(self._members[name])


def _values(tar: PictureTar, members: Mapping[str, str], where: str) -> dict[str, Any]:
    """The texts of a sample by their endings, and the keys of its .json."""
    values: dict[str, Any] = {}
    for ending, member in members.items():
        if ending.endswith("json"):
            content = parse_json(decode_text(tar.read(member), where), where)
            values |= content if isinstance(content, dict) else {ending: content}
        elif ending in ("txt", "text", "cls", "caption"):
            values[ending] = decode_text(tar.read(member), where).strip()
    return values
