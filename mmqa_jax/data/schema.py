"""The types that all rooms share: Material, Source, Question, Prediction.

Every reader turns its benchmark's files into these; everything after the readers
(batches, retrieval, systems, evaluation) knows only these.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

Modality = Literal["text", "image"]
SPLITS = ("train", "val", "test")
NOT_FOUND = "Not found in the sources."  # the answer to a question that no source answers
ANSWERABLE = "answerable"  # key of Question.extra: false of a question that no source answers

# WebQA's seven question categories: `text` for snippet questions, the others for pictures.
WEBQA_CATEGORIES = ("YesNo", "choose", "color", "shape", "number", "Others", "text")


@dataclasses.dataclass(frozen=True, slots=True)
class Material:
    """The source of texts or pictures, credited on every page that shows them.

    Attributes:
      name: of the data set or work.
      authors: or the publication; "": the name says it.
      license: or terms of use; "": none is stated.
    """

    name: str
    authors: str = ""
    license: str = ""

    def __str__(self) -> str:
        """Formats the line that credits it."""
        credit = f"{self.name} ({self.authors})" if self.authors else self.name
        return f"{credit}, {self.license}." if self.license else credit


def united(*materials: Iterable[Material]) -> tuple[Material, ...]:
    """The materials of several corpora, each line of credits once."""
    by_line: dict[str, Material] = {}
    for material in itertools.chain(*materials):
        by_line.setdefault(str(material), material)
    return tuple(by_line.values())


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """One knowledge source: a snippet, or a picture with its caption.

    Attributes:
      id: unique in its corpus; WebQA's image ids are kept as decimal strings.
      modality: `text` (snippet) or `image` (picture with caption).
      text: the snippet, or the picture's caption.
      title: title of the page it comes from.
      image: path of the picture, relative to the corpus; None for snippets.
      extra: unknown keys of the input file, kept and ignored.
    """

    id: str
    modality: Modality
    text: str
    title: str = ""
    image: str | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """One question and its reference answers.

    Attributes:
      id: unique in its dataset (WebQA: the Guid).
      split: `train`, `val` or `test`.
      question: its text.
      image: path of a picture that belongs to the question, or None.
      more_images: paths of further ones, in the order of their numbers: `<image 2>` in the text is
        the first of these. Prompts that place pictures show them, all else sees `image` alone. One
        that could not be decoded is still named, so that the numbers hold.
      answers: reference answers, full sentences in WebQA; the first is the main one.
      keywords: the answer's keywords, scored by WebQA accuracy ("" where hidden).
      category: benchmark category (WEBQA_CATEGORIES for WebQA).
      positives: ids of the gold sources.
      negatives: ids of the hard negatives; positives and negatives are the restricted setting.
      choices, answer_index: multiple choice, where the benchmark has it.
      rationale: explanation of the answer, where the benchmark has it.
      extra: unknown keys of the input file, kept and ignored.
    """

    id: str
    split: str
    question: str
    image: str | None = None
    answers: tuple[str, ...] = ()
    keywords: str = ""
    category: str = ""
    positives: tuple[str, ...] = ()
    negatives: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    answer_index: int | None = None
    rationale: str = ""
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    more_images: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """A system's response to one question: an answer in words and the sources it cites.

    Attributes:
      question_id: the Question's id.
      answer: the best answer ("" for retrieval-only systems).
      sources: ids of the cited sources, best first.
      source_scores: one score per cited source (probability or similarity).
      beams: all answers of the beam with their log-probabilities, best first.
      choice: index of the chosen option among Question.choices; None: none was chosen.
      read: ids of all sources that the answer was made from, best first, cited or not.
      trace: how a prompted system came to its answer (prompts, shots, raw output), a line of
        trace.jsonl; empty for others.
    """

    question_id: str
    answer: str = ""
    sources: tuple[str, ...] = ()
    source_scores: tuple[float, ...] = ()
    beams: tuple[tuple[str, float], ...] = ()
    choice: int | None = None
    read: tuple[str, ...] = ()
    trace: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Ranking:
    """Sources ranked for one question, best first (a row of retrieval/*.jsonl)."""

    question_id: str
    sources: tuple[str, ...]
    scores: tuple[float, ...]


# "Not found in 1998, the wreck was seen in 2004" is an answer.
_NOT_FOUND_SAID = re.compile(
    r"\W*not found[*_]*(?P<where>\s+(?:in|by|from|within|among|on)\s+(?:\w+\s+){0,4}?(?:sources?|"
    r"these|them|passages?|documents?|texts?|context|pages?|articles?|information|files?|data))?"
    r"\s*(?:$|[^\w\s])",
    re.IGNORECASE,
)


def is_answerable(question: Question) -> bool:
    """Whether the corpus may answer a question: it does not say that it cannot."""
    return question.extra.get(ANSWERABLE, True) is not False


def says_not_found(text: str, *, cited: bool = False) -> bool:
    """Whether an answer says, in the words of NOT_FOUND, that no source answers the question.

    `cited`: it cites a source: `Not Found [1]` is then an answer, unless it speaks of the sources.
    """
    refusal = _NOT_FOUND_SAID.match(text)
    return refusal is not None and (bool(refusal["where"]) or not cited)


def category_modality(category: str) -> Modality | None:
    """The modality of the sources that a WebQA category asks for; None for another category."""
    if category not in WEBQA_CATEGORIES:
        return None
    return "text" if category == "text" else "image"


def source_text(source: Source) -> str:
    """The text by which a source is retrieved: its title, then the snippet or caption."""
    return f"{source.title} {source.text}".strip()


# predictions.jsonl: one Prediction a line; evaluation/scores.py reads it.


def prediction_row(prediction: Prediction) -> dict[str, Any]:
    """A line of predictions.jsonl: all but the trace, which has a file of its own."""
    row = dataclasses.asdict(prediction)
    del row["trace"]
    return row


def prediction_of(row: Mapping[str, Any]) -> Prediction:
    """The prediction of `prediction_row`'s line, with its trace if there is one."""
    names = {field.name for field in dataclasses.fields(Prediction)}
    known = {name: value for name, value in row.items() if name in names}
    return Prediction(**{n: v if n == "trace" else _tuples(v) for n, v in known.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
