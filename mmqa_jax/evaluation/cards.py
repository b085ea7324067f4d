"""The questions of a report, each a card: what was asked, answered, cited, and how it came about.

The page gets them as JSON and builds the cards that are looked at (templates/cards.js.jinja), so
that thousands of questions can be searched. Long texts and sources are kept once.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.images import PictureError, shown
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.evaluation.score_names import score_name

MOST_CARDS = 5_000
RIGHT = 0.999  # from this score on an answer is right; some scorers average thirds
_MOST_PICTURES = 300  # of sources; more would make a page that no browser likes
_SHOWN = 6  # sources of a ranking
# Shown at up to 150 px; twice that for high-density screens.
_PICTURE_PIXELS = 300
_THUMBNAIL_PIXELS = 180  # where there are many questions


@dataclasses.dataclass(frozen=True)
class CardSource:
    """One source of a question.

    Attributes:
      text: the snippet, or the picture's caption.
      picture: encoded bytes (PNG, JPEG, ...); None for a snippet, and where `left_out`.
      left_out: whether it is a picture that the page does without, since it has enough of them.
      rank: in the ranking, from 1; None: it is not there, or there is none.
      score: the retriever's or reranker's.
      cited: numbers of the card's answers that cite it.
      gold: whether it is a gold source.
    """

    id: str
    text: str
    title: str = ""
    picture: bytes | None = None
    left_out: bool = False
    rank: int | None = None
    score: float | None = None
    cited: Sequence[int] = ()
    gold: bool = False


@dataclasses.dataclass(frozen=True)
class CardAnswer:
    """A system's answer.

    Attributes:
      system: a row's setting, or a run's short name.
      score: by the scorer that tells right from wrong; None: the question is not scored.
      scores: all scores, identifier -> value.
    """

    system: str
    answer: str
    score: float | None = None
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TraceNode:
    """One step of how an answer came about.

    Attributes:
      text: one line.
      score: of an answer, which colors it; None: the step has none.
      long: text shown on request.
    """

    text: str
    score: float | None = None
    long: str = ""
    children: Sequence[TraceNode] = ()


@dataclasses.dataclass(frozen=True)
class Card:
    """One question.

    Attributes:
      answers: the first one's score is the card's; of compared runs one each, in their order.
      rows: (name, text) shown at once: references, choices, raw outputs.
      details: (name, text) shown on request: prompts, shots.
      picture: encoded bytes of the question's picture.
      tree: steps of agents, shown as a tree.
    """

    question: str
    answers: Sequence[CardAnswer]
    category: str = ""
    rows: Sequence[tuple[str, str]] = ()
    sources: Sequence[CardSource] = ()
    picture: bytes | None = None
    details: Sequence[tuple[str, str]] = ()
    tree: Sequence[TraceNode] = ()
    id: str = ""


@dataclasses.dataclass(frozen=True)
class CardFilter:
    """A button above the cards.

    Attributes:
      wanted: of each answer the verdicts that pass: `right`, `partly`, `wrong`; () is any.
      order: of two answers: 1 where the first has the higher score, -1 the second.
    """

    label: str
    wanted: Sequence[Sequence[str]] = ()
    order: int = 0


VERDICTS = (
    CardFilter("all"),
    CardFilter("right", [["right"]]),
    CardFilter("partly right", [["partly"]]),
    CardFilter("wrong", [["wrong"]]),
)


def verdict(score: float | None) -> str:
    """`right`, `partly` or `wrong`; "" of a question that is not scored."""
    if score is None:
        return ""
    return "right" if score >= RIGHT else "partly" if score > 0 else "wrong"


def passes(card: Card, one: CardFilter) -> bool:
    """Whether a filter shows a card."""
    scores = [answer.score for answer in card.answers]
    if one.order:
        first, second = scores[:2]
        return None not in (first, second) and (first - second) * one.order > 0
    pairs = zip(scores, one.wanted, strict=False)
    return all(not wanted or verdict(score) in wanted for score, wanted in pairs)


def best_first(
    scores: Sequence[float | None], with_picture: Sequence[bool], categories: Sequence[str]
) -> list[int]:
    """The order in which cards show best what a system does.

    Right answers that cite a picture, then other right ones, partly right ones, wrong ones; within
    each the categories in turn, so that the first cards are not all of one kind.

    Args:
      scores, with_picture, categories: of every question.

    Returns:
      Indices of all questions.
    """
    tiers: dict[tuple[int, bool], dict[str, list[int]]] = {}
    ranks = {"right": 0, "partly": 1, "": 2, "wrong": 2}
    for i, (score, picture, category) in enumerate(
        zip(scores, with_picture, categories, strict=True)
    ):
        tier = tiers.setdefault((ranks[verdict(score)], not picture), {})
        tier.setdefault(category, []).append(i)
    return [i for key in sorted(tiers) for i in _in_turn(tiers[key])]


def _in_turn(groups: Mapping[str, Sequence[int]]) -> Iterator[int]:
    for place in range(max(map(len, groups.values()))):
        for name in sorted(groups):
            if place < len(groups[name]):
                yield groups[name][place]


def evenly_by_category(questions: Sequence[Question], count: int) -> list[int]:
    """Indices of about `count` questions: the first few of each category, equally many."""
    groups: dict[str, list[int]] = {}
    for i, question in enumerate(questions):
        groups.setdefault(question.category, []).append(i)
    per_category = -(-count // max(len(groups), 1))
    return [i for category in sorted(groups) for i in groups[category][:per_category]]


def cites_picture(corpus: Corpus, cited: Sequence[str]) -> bool:
    """Whether one of the cited sources is a picture."""
    return any(
        corpus.sources[corpus.row[name]].modality == "image" for name in cited if name in corpus.row
    )


class SourcesOfCards:
    """Makes the sources of cards, in the order of the page; counts the pictures on it."""

    def __init__(self, corpus: Corpus):
        self._corpus = corpus
        self._pictures: dict[str, bytes | None] = {}

    def of(
        self,
        question: Question,
        ranking: Ranking | None,
        cited: Sequence[Sequence[str]],
        read: Sequence[str] = (),
    ) -> list[CardSource]:
        """The cited sources, then gold ones that are not, then others.

        Args:
          ranking: best first; only its first sources are shown. None: there is none.
          cited: of every answer the ids that it cites.
          read: ids of others that the answer was made from.
        """
        ranking = ranking or Ranking(question.id, (), ())
        ranks = {name: rank for rank, name in enumerate(ranking.sources, start=1)}
        scores = dict(zip(ranking.sources, ranking.scores, strict=True))
        named = [name for names in cited for name in names]
        listed = dict.fromkeys((*named, *question.positives, *read, *ranking.sources[:_SHOWN]))
        return [
            self._source(
                name,
                rank=ranks.get(name),
                score=scores.get(name),
                cited=[number for number, names in enumerate(cited) if name in names],
                gold=name in question.positives,
            )
            for name in listed
        ]

    def _source(self, name: str, **place: Any) -> CardSource:
        if name not in self._corpus.row:
            return CardSource(name, name, **place)
        row = self._corpus.row[name]
        source = self._corpus.sources[row]
        is_picture = source.modality == "image"
        if is_picture and name not in self._pictures and len(self._pictures) < _MOST_PICTURES:
            self._pictures[name] = self._corpus.picture(row)
        return CardSource(
            name,
            source.text,
            source.title,
            self._pictures.get(name),
            left_out=is_picture and name not in self._pictures,
            **place,
        )


def cards_json(cards: Sequence[Card], filters: Sequence[CardFilter]) -> str:
    """JSON for a script element: `<` is escaped, so that no text can end the element.

    Prompts repeat each other's shots: every line of a long text is kept once, in `lines`, and the
    text is the list of its lines' numbers. Sources and pictures are kept once too.
    """
    lines: dict[str, int] = {}
    sources: dict[str, int] = {}
    kept: list[list[Any]] = []
    pictures: dict[bytes, int] = {}
    uris: list[str] = []
    pixels = _PICTURE_PIXELS if len(cards) <= _MOST_PICTURES else _THUMBNAIL_PIXELS

    def numbers(text: str) -> list[int]:
        return [lines.setdefault(line, len(lines)) for line in text.split("\n")]

    def picture(encoded: bytes | None, size: int) -> int | None:
        """The picture's number; None: there is none."""
        if encoded is None:
            return None
        if encoded not in pictures:
            pictures[encoded] = len(uris)
            uris.append(picture_uri(encoded, size))
        return pictures[encoded]

    def source(one: CardSource) -> int:
        if one.id not in sources:
            sources[one.id] = len(kept)
            title = "" if one.title == one.text else one.title
            number = picture(one.picture, _PICTURE_PIXELS)
            kept.append([one.id, title, one.text, number, one.left_out])
        return sources[one.id]

    def node(one: TraceNode) -> dict[str, Any]:
        return {
            "text": one.text,
            "score": one.score,
            "long": numbers(one.long) if one.long else [],
            "children": [node(child) for child in one.children],
        }

    rows = [
        {
            "id": card.id,
            "question": card.question,
            "category": card.category,
            "picture": picture(card.picture, pixels),
            "answers": [
                {
                    "system": one.system,
                    "answer": one.answer,
                    "score": one.score,
                    "verdict": verdict(one.score),
                    "scores": [
                        [score_name(name), name, round(value, 4)]
                        for name, value in one.scores.items()
                    ],
                }
                for one in card.answers
            ],
            "rows": card.rows,
            "sources": [
                {
                    "source": source(one),
                    "rank": one.rank,
                    "score": None if one.score is None else f"{one.score:.3f}",
                    "cited": list(one.cited),
                    "gold": one.gold,
                }
                for one in card.sources
            ],
            "details": [(name, numbers(text)) for name, text in card.details],
            "tree": [node(one) for one in card.tree],
        }
        for card in cards
    ]
    data = {
        "cards": rows,
        "sources": kept,
        "pictures": uris,
        "lines": list(lines),
        "compared": any(len(one.wanted) > 1 for one in filters),
        "filters": [
            {
                "label": one.label,
                "wanted": one.wanted,
                "order": one.order,
                "count": sum(passes(card, one) for card in cards),
            }
            for one in filters
        ],
    }
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def picture_uri(picture: bytes, pixels: int = _PICTURE_PIXELS) -> str:
    """A downscaled data URI; "" if the bytes are not a picture."""
    try:
        image = shown(picture, pixels)
    except PictureError:
        return ""
    jpeg = picture[:3] == b"\xff\xd8\xff"
    buffer = io.BytesIO()
    if jpeg or (image.mode == "RGB" and image.getcolors(4096) is None):
        kind = "jpeg"
        image.convert("RGB").save(buffer, "JPEG", quality=85)
    else:  # few colors or transparency: drawings, flags
        kind = "png"
        image.convert("RGBA").save(buffer, "PNG", optimize=True)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
