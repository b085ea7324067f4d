"""The report: one self-contained HTML file with questions, scores, curves and plots.

The caller fills in a ReportData; nothing here depends on a dataset or a system. All text is
escaped, pictures become data URIs, and plots inline SVG. A content security policy lets the page
load nothing and run nothing but its own two scripts, so that a text that were not escaped would
still do nothing.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write, read_jsonl
from mmqa_jax.core.paths import as_path
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.documents.document import shown_place
from mmqa_jax.data.formats.tables import real_number
from mmqa_jax.data.pictures.bounds import PictureError
from mmqa_jax.data.pictures.decode import decoded
from mmqa_jax.data.schema import Material, Prediction, Question, Ranking
from mmqa_jax.evaluation.significance import Interval
from mmqa_jax.evaluation.tables import (
    Cell,
    Table,
    for_people,
    format_bounds,
    format_cell,
    score_name,
)

if TYPE_CHECKING:
    import jinja2


# The questions of a report, each a card: what was asked, answered, cited, and how it came about.
#
# The page gets them as JSON and builds the cards that are looked at (templates/cards.js.jinja),
# so that thousands of questions can be searched. Long texts and sources are kept once.


MOST_CARDS = 5_000  # with sources and traces
_BRIEF_CHARACTERS = 16_000_000  # of the other questions: a hundred thousand short ones
_BRIEF_TEXT = 300  # characters of a question, an answer, a reference
RIGHT = 0.999  # from this score on an answer is right; some scorers average thirds
_MOST_PICTURES = 300  # of sources; more would make a page that no browser likes
_SHOWN = 6  # sources of a ranking
# Shown at up to 150 px; twice that for high-density screens.
_PICTURE_PIXELS = 300
_THUMBNAIL_PIXELS = 180  # where there are many questions


@dataclasses.dataclass(frozen=True)
class CardSource:
    """One source of a question."""

    id: str
    text: str  # the snippet, or the picture's caption
    title: str = ""
    # Encoded bytes (PNG, JPEG, ...); None for a snippet, and where `left_out`.
    picture: bytes | None = None
    # Whether it is a picture that the page does without, since it has enough of them.
    left_out: bool = False
    rank: int | None = None  # in the ranking, from 1; None: it is not there, or there is none
    score: float | None = None  # the retriever's or reranker's
    cited: Sequence[int] = ()  # numbers of the card's answers that cite it
    gold: bool = False  # whether it is a gold source


@dataclasses.dataclass(frozen=True)
class CardAnswer:
    """A system's answer, with all its scores by identifier.

    `score` is that which tells right from wrong; None: the question is not scored.
    """

    system: str
    answer: str
    score: float | None = None
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TraceNode:
    """One step of how an answer came about: a line, and a long text that is shown on request.

    The score of an answer colors it; None: the step has none.
    """

    text: str
    score: float | None = None
    long: str = ""
    children: Sequence[TraceNode] = ()


@dataclasses.dataclass(frozen=True)
class Card:
    """One question."""

    question: str
    # The first one's score is the card's; of compared runs one each, in their order.
    answers: Sequence[CardAnswer]
    category: str = ""
    # (name, text) shown at once: references, choices, raw outputs.
    rows: Sequence[tuple[str, str]] = ()
    sources: Sequence[CardSource] = ()
    picture: bytes | None = None  # encoded bytes of the question's picture
    details: Sequence[tuple[str, str]] = ()  # (name, text) shown on request: prompts, shots
    tree: Sequence[TraceNode] = ()  # steps of agents, shown as a tree
    id: str = ""
    # Whether it stands after all others, and nothing but question, answers and `rows` is shown.
    is_brief: bool = False


@dataclasses.dataclass(frozen=True)
class CardFilter:
    """A button above the cards."""

    label: str
    # Of each answer the verdicts that pass: `right`, `partly`, `wrong`; () is any.
    wanted: Sequence[Sequence[str]] = ()
    order: int = 0  # of two answers: 1 where the first has the higher score, -1 the second


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


def passes(card: Card, button: CardFilter) -> bool:
    """Whether a filter shows a card."""
    scores = [answer.score for answer in card.answers]
    if button.order:
        first, second = scores[:2]
        return None not in (first, second) and (first - second) * button.order > 0
    pairs = zip(scores, button.wanted, strict=False)
    return all(not wanted or verdict(score) in wanted for score, wanted in pairs)


def best_first(
    scores: Sequence[float | None], with_picture: Sequence[bool], categories: Sequence[str]
) -> list[int]:
    """The order in which cards show best what a system does.

    Right answers that cite a picture, then other right ones, partly right ones, wrong ones; within
    each the categories in turn, so that the first cards are not all of one kind.

    `scores`, `with_picture`, `categories`: of every question.

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
    for place in range(max(map(len, groups.values()), default=0)):
        for name in sorted(groups):
            if place < len(groups[name]):
                yield groups[name][place]


def in_turn(kinds: Sequence[Any], count: int) -> list[int]:
    """Indices of `count` questions, or of all: the kinds in turn, so that all of a rare kind are
    among them."""
    groups: dict[Any, list[int]] = {}
    for i, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(i)
    return list(itertools.islice(_in_turn(groups), count))


def brief_card(
    question: Question, answers: Sequence[CardAnswer], rows: Iterable[tuple[str, str]]
) -> Card:
    """The card of a question beyond MOST_CARDS, without sources and traces; long texts are cut."""
    return Card(
        _cut(question.question),
        [CardAnswer(reply.system, _cut(reply.answer), reply.score) for reply in answers],
        question.category,
        [(name, _cut(text)) for name, text in rows],
        id=question.id,
        is_brief=True,
    )


def that_fit(cards: Iterable[Card]) -> list[Card]:
    """The first brief cards, as many as a page can hold beside the others."""
    cards = list(cards)
    sizes = itertools.accumulate(len(json.dumps(_brief(card))) for card in cards)
    return cards[: sum(size <= _BRIEF_CHARACTERS for size in sizes)]


def how_many(cards: Sequence[Card], count: int) -> str:
    """Returns the note of a page that shows fewer or shorter cards than `count` questions."""
    brief = sum(card.is_brief for card in cards)
    if len(cards) == count and not brief:
        return ""
    text = f" {len(cards) - brief:,} of them have their sources here, {brief:,} follow in brief"
    if left_out := count - len(cards):
        text += f", {left_out:,} are left out: see per_question.jsonl"
    return f"{text}."


def _cut(text: str) -> str:
    return text if len(text) <= _BRIEF_TEXT else f"{text[:_BRIEF_TEXT]}…"


def _brief(card: Card) -> list[Any]:
    """Shortens a card to its id, question, category, answers with scores, and rows."""
    answers = [
        [reply.system, reply.answer, None if reply.score is None else round(reply.score, 4)]
        for reply in card.answers
    ]
    return [card.id, card.question, card.category, answers, card.rows]


class CardMaker:
    """Makes the cards of a page, in their order; counts the pictures on it."""

    def __init__(self, corpus: Corpus):
        self._corpus = corpus
        self._pictures: dict[str, bytes | None] = {}

    def best_first(
        self,
        questions: Sequence[Question],
        predictions: Sequence[Prediction],
        scores: Sequence[float | None],
        picked: Sequence[int],
    ) -> list[int]:
        """The indices `picked` in the order of the function `best_first`."""
        corpus = self._corpus

        def cites_picture(cited: Sequence[str]) -> bool:
            rows = [corpus.row[name] for name in cited if name in corpus.row]
            return any(corpus.sources[row].modality == "image" for row in rows)

        order = best_first(
            [scores[i] for i in picked],
            [cites_picture(predictions[i].sources) for i in picked],
            [questions[i].category for i in picked],
        )
        return [picked[place] for place in order]

    def card(
        self,
        question: Question,
        answers: Sequence[CardAnswer],
        ranking: Ranking | None,
        cited: Sequence[Sequence[str]],
        read: Sequence[str] = (),
        **more: Any,
    ) -> Card:
        """The card of a question: the cited sources, then gold ones that are not, then others.

        Args:
          ranking: best first; only its first sources are shown. None: there is none.
          cited: of every answer the ids that it cites.
          read: ids of others that the answer was made from.
          more: other fields of the card.
        """
        ranking = ranking or Ranking(question.id, (), ())
        ranks = {name: rank for rank, name in enumerate(ranking.sources, start=1)}
        scores = dict(zip(ranking.sources, ranking.scores, strict=True))
        named = [name for names in cited for name in names]
        listed = dict.fromkeys((*named, *question.positives, *read, *ranking.sources[:_SHOWN]))
        sources = [
            self._source(
                name,
                rank=ranks.get(name),
                score=scores.get(name),
                cited=[number for number, names in enumerate(cited) if name in names],
                gold=name in question.positives,
            )
            for name in listed
        ]
        about = {"id": question.id, "category": question.category, "sources": sources}
        return Card(question.question, answers, **about, **more)

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
            " · ".join(filter(None, (source.title, shown_place(source.extra)))),
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
    sources: dict[str, tuple[int, list[Any]]] = {}
    pictures: dict[bytes, tuple[int, str]] = {}
    pixels = _PICTURE_PIXELS if len(cards) <= _MOST_PICTURES else _THUMBNAIL_PIXELS

    def numbers(text: str) -> list[int]:
        return [lines.setdefault(line, len(lines)) for line in text.split("\n")]

    def picture(encoded: bytes | None, size: int) -> int | None:
        """Returns the number of a picture; None where there is none."""
        if encoded is None:
            return None
        if encoded not in pictures:
            pictures[encoded] = len(pictures), picture_uri(encoded, size)
        return pictures[encoded][0]

    def source(place: CardSource) -> dict[str, Any]:
        if place.id not in sources:
            title = "" if place.title == place.text else place.title
            image = picture(place.picture, _PICTURE_PIXELS)
            about = [place.id, title, place.text, image, place.left_out]
            sources[place.id] = len(sources), about
        return {
            "source": sources[place.id][0],
            "rank": place.rank,
            "score": None if place.score is None else f"{place.score:.3f}",
            "cited": list(place.cited),
            "gold": place.gold,
        }

    def answer(reply: CardAnswer) -> dict[str, Any]:
        listed = reply.scores.items()
        scores = [[score_name(name), name, round(value, 4)] for name, value in listed]
        return {**vars(reply), "verdict": verdict(reply.score), "scores": scores}

    def node(step: TraceNode) -> dict[str, Any]:
        long = numbers(step.long) if step.long else []
        return {**vars(step), "long": long, "children": list(map(node, step.children))}

    rows = [
        {
            **vars(card),
            "picture": picture(card.picture, pixels),
            "answers": list(map(answer, card.answers)),
            "sources": list(map(source, card.sources)),
            "details": [(name, numbers(text)) for name, text in card.details],
            "tree": list(map(node, card.tree)),
        }
        for card in cards
        if not card.is_brief
    ]
    data = {
        "cards": rows,
        "brief": [_brief(card) for card in cards if card.is_brief],
        "sources": [about for _, about in sources.values()],
        "pictures": [uri for _, uri in pictures.values()],
        "lines": list(lines),
        "compared": any(len(button.wanted) > 1 for button in filters),
        "filters": [
            {**vars(button), "count": sum(passes(card, button) for card in cards)}
            for button in filters
        ],
    }
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def picture_uri(picture: bytes, pixels: int = _PICTURE_PIXELS) -> str:
    """A downscaled data URI; "" if the bytes are not a picture."""
    try:
        image = decoded(picture, pixels)
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


# Line plots as inline SVG.


Points = Sequence[tuple[float, float]]

COLORS, DASHES = 8, 3  # the page's style sheet has so many (--line-0 ..., d1 ...)
_MOST_POINTS = 400  # of a drawn curve; a screen shows no more
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 34  # margins
_PANEL = (340, 210)  # the size of a training's curve, in the units of the SVG's view box


@dataclasses.dataclass(frozen=True)
class LinePlot:
    """Lines over the values of one setting."""

    title: str
    x_label: str
    # Name -> points (x, y), in order of x; one without points keeps its color.
    lines: Mapping[str, Points]
    log: bool = False  # whether the axis of x is logarithmic; then all x are above 0
    # Whether x are the steps of trainings: ticks are round numbers, and a long curve is drawn thin,
    # with a running mean on top.
    steps: bool = False
    shares: bool = False  # whether the axis of y is 0 to 1

    def svg(
        self,
        slug: str = "",
        size: tuple[int, int] = (420, 260),
        first: int = 0,
        mark: float | None = None,
    ) -> str:
        """The plot as an `<svg>` element that needs nothing outside of itself.

        Each line carries its points (`data-points`), which templates/page.js.jinja shows where the
        pointer is, or the arrow keys lead. Text is escaped.

        Args:
          slug: begins the ids of its lines; "": the title does.
          size: width and height in the units of the view box.
          first: the number of the first line, which gives its color.
          mark: the x of an upright dashed line.
        """
        of_x = math.log if self.log else float
        xs = sorted({x for points in self.lines.values() for x, _ in points})
        x_low, x_high = _span([of_x(x) for x in (*xs, *([] if mark is None else [mark]))])
        x_ticks = _ticks(*_span(xs), whole=True) if self.steps else xs
        y_low, y_high = _span([y for points in self.lines.values() for _, y in points], margin=0.06)
        y_ticks = _ticks(y_low, y_high)
        if self.shares:
            y_low, y_high, y_ticks = 0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]
        width, height = size

        def place(point: tuple[float, float]) -> tuple[float, float]:
            right = (of_x(point[0]) - x_low) / ((x_high - x_low) or 1)
            up = (point[1] - y_low) / ((y_high - y_low) or 1)
            left = _LEFT + right * (width - _LEFT - _RIGHT)
            return round(left, 2), round(height - _BOTTOM - up * (height - _TOP - _BOTTOM), 2)

        def path(points: Points) -> str:
            places = " L ".join(f"{x} {y}" for x, y in map(place, points))
            return f'<path d="M {places}"/>'

        grid = []
        for y in y_ticks:
            _, at = place((xs[0], y))
            grid.append(f'<path d="M{_LEFT} {at}H{width - _RIGHT}"/>')
            grid.append(f'<text x="{_LEFT - 6}" y="{at + 4}" text-anchor="end">{_tick(y)}</text>')
        for x in x_ticks:
            at, _ = place((x, y_low))
            text = f'<text x="{at}" y="{height - _BOTTOM + 15}" text-anchor="middle">'
            grid.append(f"{text}{_tick(x)}</text>")
        label, middle = escape(self.x_label), (_LEFT + width - _RIGHT) / 2
        grid.append(f'<text x="{middle}" y="{height - 3}" text-anchor="middle">{label}</text>')
        drawn = []
        slug = escape(slug or f"line-{_slug(self.title)}")
        for number, (name, points) in enumerate(self.lines.items(), first):
            if not points:
                continue
            long = self.steps and len(points) >= 80
            plotted = _thinned(points) if self.steps else points
            dots = (
                ""
                if self.steps and len(points) >= 10
                else "".join(f'<circle cx="{x}" cy="{y}" r="3"/>' for x, y in map(place, plotted))
            )
            data = escape(json.dumps([[*point, *place(point)] for point in plotted]))
            style = f"line {line_style(number)}"
            drawn.append(
                f'<g id="{slug}-{number}" class="{style}{" thin" if long else ""}" '
                f'data-label="{escape(curve_name(name))}" data-points="{data}">'
                f"{path(plotted)}{dots}</g>"
            )
            if long:
                mean = _running_mean([y for _, y in points]).tolist()
                trend = _thinned([(x, y) for (x, _), y in zip(points, mean, strict=True)])
                drawn.append(f'<g class="{style}">{path(trend)}</g>')
            if mark is not None:
                upright = path([(mark, y_low), (mark, y_high)])
                drawn.append(f'<g id="{slug}-{number}-best" class="mark">{upright}</g>')
        about = f'viewBox="0 0 {width} {height}" data-x="{label.partition(" ")[0]}"'
        return (
            f'<svg class="chart wide" role="img" tabindex="0" {about} '
            f'aria-label="{escape(self.title)}"><g class="grid">{"".join(grid)}</g>'
            f'{"".join(drawn)}<path class="cursor" d=""/></svg>'
        )


def recall_plot(recall: Mapping[str, Mapping[int, float]]) -> str:
    """recall@k against k, one line per retriever, as an `<svg>` element."""
    lines = {name: sorted(values.items()) for name, values in recall.items()}
    title, label = "recall@k against k", "k (sources retrieved)"
    return LinePlot(title, label, lines, log=True, shares=True).svg("recall-line")


def curves_plot(task: str, curves: Mapping[str, Points], best_step: float | None = None) -> str:
    """Training curves of one task, an `<svg>` element each in a `<figure>`, best_step marked."""
    figures = []
    for number, (name, points) in enumerate(curves.items()):
        plot = LinePlot(curve_name(name), "step", {name: points}, steps=True)
        drawn = plot.svg(f"curve-{_slug(task)}", _PANEL, number, best_step)
        figures.append(f"<figure><figcaption>{escape(plot.title)}</figcaption>{drawn}</figure>")
    return "".join(figures)


def line_style(number: int) -> str:
    """The style sheet's classes of a line: its color, and its dashes where colors recur."""
    dashes = number // COLORS % DASHES
    return f"c{number % COLORS}{f' d{dashes}' if dashes else ''}"


def curve_name(name: str) -> str:
    """Returns the title of a metric of metrics.jsonl: its score's name after `validation`."""
    before, _, after = name.partition("eval/")
    return f"validation: {for_people(after)}" if after and not before else for_people(name)


def _slug(text: str) -> str:
    return re.sub(r"\W+", "-", text)


def _span(values: Sequence[float], margin: float = 0.0) -> tuple[float, float]:
    """Returns least and greatest value, moved apart by `margin` of their distance at each end."""
    low, high = min(values), max(values)
    wider = margin * ((high - low) or abs(high) or 1.0)
    return low - wider, high + wider


def _ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """About four round numbers between `low` and `high`."""
    rough = (high - low) / 4
    if rough <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    if whole:
        step = max(1.0, step)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _tick(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:.6g}"


def _thinned(points: Points) -> Points:
    """Returns at most about _MOST_POINTS of the points, the last one among them."""
    step = -(-len(points) // _MOST_POINTS)
    return points if step <= 1 else [*points[:-1:step], points[-1]]


def _running_mean(values: Sequence[float]) -> np.ndarray:
    """Mean over a centered window of a twentieth of the curve, shorter at the ends."""
    window = np.ones(2 * (len(values) // 40) + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


# The page.

_SCRIPTS = ("cards.js.jinja", "page.js.jinja")


@dataclasses.dataclass(frozen=True)
class Bar:
    """A system's score as a bar: `value` in 0..1, and the page that its name leads to."""

    name: str
    value: float | Interval
    link: str = ""


@dataclasses.dataclass(frozen=True)
class ReportData:
    """Everything a report shows, in its order; empty fields are left out."""

    title: str  # heading, e.g. "WebQA: cited answers from pictures and prose".
    description: str = ""  # of the dataset and the run
    notice: str = ""  # a caveat (e.g. that the scores are not WebQA's).
    # The few most important numbers, name or score -> value, shown large.
    headline: Mapping[str, float] = dataclasses.field(default_factory=dict)
    cards: Sequence[Card] = ()  # questions with answers and sources, the best first
    filters: Sequence[CardFilter] = VERDICTS  # the buttons above the cards
    card_note: str = ""  # how to read the cards, e.g. what counts as right.
    # Score -> the systems' bars.
    bars: Mapping[str, Sequence[Bar]] = dataclasses.field(default_factory=dict)
    # Of a sweep or a corpus, above the tables; those over steps below them.
    line_plots: Sequence[LinePlot] = ()
    tables: Sequence[Table] = ()  # result tables, in order
    # Retriever -> k -> recall@k.
    recall: Mapping[str, Mapping[int, float]] = dataclasses.field(default_factory=dict)
    # Task -> metric -> [(step, value)].
    curves: Mapping[str, Mapping[str, Points]] = dataclasses.field(default_factory=dict)
    # Task -> the step of its best validation, which its curves mark.
    best_steps: Mapping[str, float] = dataclasses.field(default_factory=dict)
    stages: Sequence[tuple[str, float]] = ()  # (name, seconds) of the stages, in order
    run_tables: Sequence[Table] = ()  # of the run itself, as its wall time
    # About the run, name -> value (date, device, version, commit, command).
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    materials: Sequence[Material] = ()  # what the page shows was taken from; a line each


def write_report(path: str | os.PathLike, data: ReportData) -> None:
    """Writes the report as one HTML file, whole or not at all."""
    html = render_report(data)
    with atomic_write(path) as file:
        file.write(html)


def render_report(data: ReportData) -> str:
    """The report as one HTML page that needs no other file and no network."""
    environment = _environment()
    # Plain files without any expression: their text is known before a page's data is.
    scripts = {name: environment.get_template(name).render() for name in _SCRIPTS}
    curves = {
        task: {n: p for n, p in metrics.items() if p} for task, metrics in data.curves.items()
    }
    recall = {name: values for name, values in data.recall.items() if values}
    return environment.get_template("report.html.jinja").render(
        data=data,
        policy=_policy(scripts.values()),
        scripts=scripts,
        curve_plots={
            task: curves_plot(task, metrics, data.best_steps.get(task))
            for task, metrics in curves.items()
            if metrics
        },
        recall_plot=recall_plot(recall) if recall else "",
        recall_names=list(recall),
        line_plots=[(plot, plot.svg()) for plot in data.line_plots],
        longest_stage=max((seconds for _, seconds in data.stages), default=0.0),
        total_seconds=sum(seconds for _, seconds in data.stages),
        cards_json=cards_json(data.cards, data.filters),
    )


@functools.cache
def _environment() -> jinja2.Environment:
    """The templates, compiled once: rows of a table have a report each."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mmqa_jax.evaluation"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        bounds=format_bounds,
        cell=format_cell,
        line_style=line_style,
        minutes=_minutes,
        people=for_people,
        percent=lambda share: f"{100 * _plain(share):.2f}",
        plain=_plain,
    )
    environment.tests["interval"] = lambda cell: isinstance(cell, Interval)
    return environment


def _policy(scripts: Iterable[str]) -> str:
    """The page's content security policy: these scripts alone; styles in attributes too (plots)."""
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in scripts)
    allowed = " ".join(f"'sha256-{value.decode()}'" for value in hashes)
    return (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed}; "
        "base-uri 'none'; form-action 'none'"
    )


def read_curves(path: str | os.PathLike) -> dict[str, list[tuple[float, float]]]:
    """Reads a metrics.jsonl: metric -> [(step, value)], in order of step.

    A step written twice (a resumed run) keeps its last value; values that are not finite
    numbers are skipped. A missing file gives no curves.
    Raises UserError naming a line that is not an object with a number "step".
    """
    if not as_path(path).exists():
        return {}
    values: dict[str, dict[float, float]] = {}
    for number, row in read_jsonl(path):
        if not isinstance(row, dict) or real_number(row.get("step")) is None:
            raise UserError(
                f'{path}, line {number}: expected an object with a number "step"; remove that line.'
            )
        for name, value in row.items():
            if name != "step" and real_number(value) is not None:
                values.setdefault(name, {})[row["step"]] = float(value)
    return {name: sorted(points.items()) for name, points in values.items()}


def _minutes(seconds: float) -> str:
    """`8.3 s`, `2 min 05 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds + 0.5) // 60} min {int(seconds + 0.5) % 60:02d} s"


def _plain(cell: Cell) -> float | str:
    """The number that a table is sorted by; "" for none."""
    if isinstance(cell, Interval):
        return cell.mean
    return "" if cell is None else cell
