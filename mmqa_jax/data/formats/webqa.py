"""WebQA's official files: WebQA_*.json, imgs.tsv with imgs.lineidx, and the submission file.

Format: https://github.com/WebQnA/WebQA (README, demo/Take_a_look_WebQA.ipynb).
"""

import binascii
import contextlib
import hashlib
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pybase64

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.data import schema
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.formats.official import Entry
from mmqa_jax.data.formats.tables import CutLine, IndexedTsv, whole_number
from mmqa_jax.data.pictures.bounds import PictureError, check_bytes

PathLike = str | os.PathLike

# Of the paper, G.6; a folder's own notice takes its place.
MATERIALS = (
    schema.Material(
        "WebQA",
        "Chang et al., CVPR 2022",
        "texts and pictures belong to the websites that they are from, such as Wikimedia's",
    ),
)

# imgs.tsv has one row per picture: row = image_id % IMAGE_ROWS.
IMAGE_ROWS = 10_000_000
# Counts of the full release (README; demo notebook: counts by category, distinct facts).
PUBLISHED_COUNTS = {
    "train questions": 36_766,
    "val questions": 4_966,
    "val image questions": 2_511,
    "val text questions": 2_455,
    "test questions": 7_540,
    "test image questions": 3_464,
    "test text questions": 4_076,
    "YesNo questions": 8_255,
    "choose questions": 5_201,
    "color questions": 2_058,
    "shape questions": 627,
    "number questions": 2_318,
    "Others questions": 6_470,
    "text questions": 24_343,
    "pictures": 389_750,
    "snippets": 544_489,
}
# Key of Question.extra: {source id: the snippet_id under which this question lists it}, where
# they differ.
OWN_SNIPPET_IDS = "snippet_ids"

_POSITIVE = ("img_posFacts", "txt_posFacts")
_NEGATIVE = ("img_negFacts", "txt_negFacts")
_MERGED = ("img_Facts", "txt_Facts")  # the test file's candidates, gold and negative together
_IMAGE_ID = re.compile("0|[1-9][0-9]{0,18}")
_FACT_LISTS = (*_POSITIVE, *_NEGATIVE, *_MERGED)
_READ_KEYS = {"Q", "A", "Keywords_A", "Qcate", "split", "Guid", *_FACT_LISTS}


# Keywords that mean "not published".
_HIDDEN = frozenset({"", "TBD"})


class Release:
    """Sources and questions gathered from official json files.

    Sources are the distinct snippets (one per fact string; its id is the first snippet_id seen)
    and the pictures (id: the image_id in decimal), in order of appearance. Questions refer to
    them by these ids.
    """

    def __init__(self) -> None:
        self.questions: list[schema.Question] = []
        # How many listings of a fact use another snippet_id than its source's.
        self.repeated_snippets = 0
        # How many facts have an id that already belongs to another fact.
        self.reused_snippet_ids = 0
        self._sources: dict[str, schema.Source] = {}
        self._guids: dict[str, PathLike] = {}
        self._by_fact: dict[str, str] = {}  # fact -> source id

    @property
    def sources(self) -> list[schema.Source]:
        return list(self._sources.values())

    def add_file(self, path: PathLike, *, facts_only: bool = False) -> None:
        """Reads one json file; with `facts_only` only its facts, not its questions."""
        data = read_json(path, unique_keys=True)
        if not isinstance(data, dict):
            raise UserError(f"{path}: one object of Guid -> question data was expected; fetch it.")
        for guid, values in data.items():
            datum = Entry(f"{path}, Guid {guid}", values)
            listed = {key: self._add_facts(datum, key) for key in _FACT_LISTS}
            if facts_only:
                continue
            if guid in self._guids:
                raise UserError(
                    f"{datum.where}: the same Guid is in {self._guids[guid]}; remove one of them."
                )
            self._guids[guid] = path
            self.questions.append(_question(guid, datum, listed))

    def _add_facts(self, datum: Entry, key: str) -> list[tuple[str, str]]:
        """(source id, id in the file) of every fact of a list; [] where the list is missing."""
        facts = datum.get(key)
        if facts is None:
            return []
        if not isinstance(facts, list):
            raise datum.wrong(key, "a list of objects")
        add = self._add_picture if key.startswith("img") else self._add_snippet
        return [add(Entry(f"{datum.where}, {key}[{n}]", fact)) for n, fact in enumerate(facts)]

    def _add_picture(self, fact: Entry) -> tuple[str, str]:
        name = str(fact.number("image_id"))
        if name not in self._sources:
            self._sources[name] = schema.Source(
                id=name,
                modality="image",
                text=fact.text("caption", ""),
                title=fact.text("title", ""),
                image=f"images/{name}",
                extra=_rest(fact, {"image_id", "caption", "title"}),
            )
        return name, name

    def _add_snippet(self, fact: Entry) -> tuple[str, str]:
        snippet, text = fact.text("snippet_id"), fact.text("fact")
        name = self._by_fact.get(text)
        if name is None:
            # An id that another fact already has gets a number, so that no fact is lost.
            numbered = (f"{snippet}#{n}" for n in itertools.count(2))
            name = next(n for n in itertools.chain([snippet], numbered) if n not in self._sources)
            self.reused_snippet_ids += name != snippet
            self._by_fact[text] = name
            self._sources[name] = schema.Source(
                id=name,
                modality="text",
                text=text,
                title=fact.text("title", ""),
                extra=_rest(fact, {"snippet_id", "fact", "title"}),
            )
        elif name != snippet:
            self.repeated_snippets += 1
        return name, snippet


def read_release(files: Sequence[PathLike], facts_only: Sequence[PathLike] = ()) -> Release:
    """Reads official json files (train_val, test) together, so that they share their sources.

    `facts_only` files have the same format but only their sources are read (distractors).
    Missing A, Keywords_A, Qcate and fact lists are allowed, as in the hidden test file; its
    merged candidate lists count as negatives. Unknown keys go to `extra`. A question with no
    sources at all is kept.
    """
    release = Release()
    for path in files:
        release.add_file(path)
    for path in facts_only:
        release.add_file(path, facts_only=True)
    if not release.sources:
        names = ", ".join(str(path) for path in (*files, *facts_only))
        raise UserError(f"{names}: list no facts, so the corpus is empty; check the files.")
    return release


def compared_counts(release: Release) -> dict[str, dict[str, int]]:
    """A release's counts beside PUBLISHED_COUNTS: name -> `published` and `found`.

    They differ for a subset, which is fine, and for a truncated download, which is not.
    """
    counts: Counter[str] = Counter()
    for question in release.questions:
        kind = "text" if question.category == "text" else "image"
        counts[f"{question.split} questions"] += 1
        counts[f"{question.split} {kind} questions"] += 1
        counts[f"{question.category} questions"] += 1
    for source in release.sources:
        counts["pictures" if source.modality == "image" else "snippets"] += 1
    return {
        name: {"published": count, "found": counts[name]}
        for name, count in PUBLISHED_COUNTS.items()
    }


class ImagesTsv:
    """Pictures of imgs.tsv, located through imgs.lineidx and read one at a time.

    A line is `image_id TAB base64 of a JPEG or PNG`; the lineidx holds every line's byte offset.
    Reads are positional, so threads may share it.

    Args:
      path: imgs.tsv.
      lineidx: default: beside it, with the suffix .lineidx.
    """

    def __init__(self, path: PathLike, lineidx: PathLike | None = None):
        self._tsv = IndexedTsv(path, lineidx)

    def __len__(self) -> int:
        return len(self._tsv)

    @property
    def signature(self) -> str:
        """Identifies these two files in their present state."""
        status = self._tsv.path.stat()
        index = hashlib.sha256(self._tsv.lineidx.read_bytes()).hexdigest()
        return f"{self._tsv.path.resolve()} {status.st_size} {status.st_mtime_ns} {index}"

    def check_ends(self, names: Iterable[str]) -> None:
        """Reads the first and the last of the pictures, to detect a truncated file at once."""
        rows = [_row(name) for name in names]
        for row in (min(rows), max(rows)) if rows else ():
            with contextlib.suppress(PictureError):
                self.read(row)

    def read_named(self, name: str) -> bytes:
        """The picture of a Source.image that Release made."""
        return self.read(_row(name))

    def read(self, row: int) -> bytes:
        """Encoded picture of a row; PictureError for a line that is cut off or too long, or broken
        base64.
        """
        where = f"{self._tsv.path}, row {row}"
        check_bytes(self._tsv.length(row) * 3 // 4, where)
        try:
            number, *rest = self._tsv.columns(row)
        except CutLine as error:
            raise PictureError(str(error)) from error
        name = number.decode("ascii", "replace")
        image_id = whole_number(name)
        if image_id is None or image_id % IMAGE_ROWS != row:
            raise UserError(
                f"{where}: holds {name[:20]!r} and not that row's line; TSV and lineidx do not "
                "belong together, fetch them again."
            )
        encoded = b"".join(rest)
        try:
            # Ten times as fast as the standard library, which takes an eighth of the decoding time.
            data = pybase64.b64decode(encoded, validate=True)
        except binascii.Error as error:
            raise PictureError(f"{where}: broken base64 ({error}); fetch it again.") from error
        if not data:
            raise PictureError(f"{where}: holds no picture; fetch it again.")
        return data


def submission_rows(predictions: Iterable[schema.Prediction], corpus: Corpus) -> dict[str, Any]:
    """Builds a leaderboard file's rows: {Guid: {"sources": [image_id | snippet_id], "answer"}}.

    A snippet that the question lists is written with the id it has there: the server knows no
    other. WebQA's pictures have numbers; another corpus's ids are written as they are.
    """
    questions = {question.id: question for question in corpus.questions()}
    rows = {}
    for prediction in predictions:
        question = questions.get(prediction.question_id)
        own_ids = question.extra.get(OWN_SNIPPET_IDS, {}) if question else {}
        sources: list[int | str] = []
        for name in prediction.sources:
            if name not in corpus.row:
                raise UserError(
                    f"prediction for {prediction.question_id}: cites {name!r}, which is not in "
                    "the corpus; predict on the corpus that the submission is for."
                )
            is_image = corpus.sources[corpus.row[name]].modality == "image"
            numbered = is_image and _IMAGE_ID.fullmatch(name) is not None
            sources.append(int(name) if numbered else own_ids.get(name, name))
        rows[prediction.question_id] = {"sources": sources, "answer": prediction.answer}
    return rows


def write_submission(
    predictions: Iterable[schema.Prediction], corpus: Corpus, path: PathLike
) -> None:
    """Writes a leaderboard file, see `submission_rows`."""
    write_json(path, submission_rows(predictions, corpus))


def parse_submission(
    data: Any, path: PathLike, corpus: Corpus | None = None
) -> list[schema.Prediction]:
    """Predictions of a leaderboard file's JSON; `path` is for error messages.

    With `corpus` its snippet ids become the corpus's source ids. Ids that neither the corpus nor
    the question knows are kept as they are. Guids may be missing.
    """
    if not isinstance(data, dict):
        raise UserError(f"{path}: one object of Guid -> prediction was expected; correct it.")
    canonical: dict[str, dict[str, str]] = {}
    for question in corpus.questions() if corpus is not None else ():
        snippet_ids = question.extra.get(OWN_SNIPPET_IDS, {})
        canonical[question.id] = {snippet: source for source, snippet in snippet_ids.items()}
    predictions = []
    for guid, row in data.items():
        where = f"{path}, Guid {guid}"
        if not isinstance(row, dict) or not isinstance(row.get("answer"), str):
            raise UserError(
                f'{where}: {{"sources": [...], "answer": "..."}} was expected; correct it.'
            )
        sources = row.get("sources")
        if not isinstance(sources, list) or not all(
            isinstance(name, int | str) and not isinstance(name, bool) for name in sources
        ):
            raise UserError(
                f"{where}: sources must be a list of image_id and snippet_id; correct it."
            )
        names = [canonical.get(guid, {}).get(str(name), str(name)) for name in sources]
        predictions.append(schema.Prediction(guid, row["answer"], tuple(names)))
    return predictions


def _question(guid: str, datum: Entry, listed: dict[str, list[tuple[str, str]]]) -> schema.Question:
    if datum.get("Guid", guid) != guid:
        raise datum.error(f"its Guid field is {datum['Guid']!r}, and must be equal")
    category, split = datum.text("Qcate", ""), datum.choice("split", schema.SPLITS)
    if category not in ("", *schema.WEBQA_CATEGORIES):
        raise datum.wrong("Qcate", f"one of {', '.join(schema.WEBQA_CATEGORIES)}")
    answers = datum.get("A")
    answers = [answers] if isinstance(answers, str) else answers or []
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise datum.wrong("A", "a list of texts")
    positives = dict.fromkeys(name for key in _POSITIVE for name, _ in listed[key])
    others = dict.fromkeys(name for key in (*_NEGATIVE, *_MERGED) for name, _ in listed[key])
    extra = _rest(datum, _READ_KEYS)
    # The first listing wins: positives come first.
    own_ids = dict(reversed([pair for key in _FACT_LISTS for pair in listed[key]]))
    if own_ids := {name: snippet for name, snippet in own_ids.items() if name != snippet}:
        extra[OWN_SNIPPET_IDS] = own_ids
    return schema.Question(
        id=guid,
        split=split,
        question=datum.text("Q"),
        answers=tuple(answers),
        keywords=datum.text("Keywords_A", ""),
        category=category,
        positives=tuple(positives),
        negatives=tuple(name for name in others if name not in positives),
        extra=extra,
    )


def _row(name: str) -> int:
    """Row of imgs.tsv of a Source.image that Release made."""
    return int(name.rpartition("/")[2]) % IMAGE_ROWS


def _rest(fields: dict[str, Any], read: set[str]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in read}


def has_keywords(question: schema.Question) -> bool:
    """Whether a question's keywords are published."""
    return question.keywords not in _HIDDEN
