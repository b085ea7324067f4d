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
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write, read_jsonl
from mmqa_jax.core.paths import as_path
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.formats.tables import real_number
from mmqa_jax.data.pictures.bounds import PictureError
from mmqa_jax.data.pictures.decode import shown
from mmqa_jax.data.schema import Material, Question, Ranking
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


# Line plots as inline SVG: the page's colors and fonts, values that can be read by hovering.
#
# Every line carries its points (`data-points`), which templates/page.js.jinja reads where the
# pointer is, or the arrow keys lead. Text is escaped; the element needs nothing outside of
# itself.


Points = Sequence[tuple[float, float]]

COLORS, DASHES = 8, 3  # the page's style sheet has so many (--line-0 ..., d1 ...)
_MOST_POINTS = 400  # of a drawn curve; a screen shows no more
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 34  # margins


def recall_plot(recall: Mapping[str, Mapping[int, float]]) -> str:
    """recall@k against k (logarithmic), one line per retriever, as an `<svg>` element."""
    lines = {name: sorted(values.items()) for name, values in recall.items()}
    ks = sorted({k for values in recall.values() for k in values})
    axes = _Axes(
        (420, 260),
        x=(math.log(ks[0]), math.log(ks[-1])),
        y=(0.0, 1.0),
        of_x=math.log,
        x_ticks=ks,
        y_ticks=[0, 0.2, 0.4, 0.6, 0.8, 1.0],
        x_label="k (sources retrieved)",
    )
    drawn = [
        axes.line(points, f"recall-line-{number}", name, number, dots=True)
        for number, (name, points) in enumerate(lines.items())
    ]
    return axes.svg("recall@k against k", drawn)


def lines_plot(
    title: str, x_label: str, lines: Mapping[str, Points], *, log: bool = False, steps: bool = False
) -> str:
    """Lines over the same few values of x, a dot each, as an `<svg>` element.

    Args:
      lines: name -> points (x, y), in order of x; one without points keeps its color.
      log: the axis of x is logarithmic; all x are above 0.
      steps: x are the steps of trainings, and the lines are drawn as in `curves_plot`.
    """
    xs = sorted({x for points in lines.values() for x, _ in points})
    ys = [y for points in lines.values() for _, y in points]
    axes = _Axes(
        (420, 260),
        x=_span(list(map(math.log, xs)) if log else xs),
        y=_span(ys, margin=0.06),
        of_x=math.log if log else float,
        x_ticks=_ticks(*_span(xs), whole=True) if steps else xs,
        y_ticks=_ticks(*_span(ys, margin=0.06)),
        x_label=x_label,
    )
    slug = re.sub(r"\W+", "-", title)
    drawn = []
    for number, (name, points) in enumerate(lines.items()):
        place = f"line-{slug}-{number}"
        if steps and points:
            drawn += _curve(axes, points, place, name, number)
        elif points:
            drawn.append(axes.line(points, place, name, number, dots=True))
    return axes.svg(title, drawn)


def curves_plot(task: str, curves: Mapping[str, Points], best_step: float | None = None) -> str:
    """Training curves of one task, an `<svg>` element each in a `<figure>`, best_step marked.

    Long curves are drawn thin, with a running mean on top.
    """
    slug = re.sub(r"\W+", "-", task)
    return "".join(
        _panel(name, points, slug, number, best_step)
        for number, (name, points) in enumerate(curves.items())
    )


def _panel(name: str, points: Points, slug: str, number: int, best_step: float | None) -> str:
    (x, y) = map(list, zip(*points, strict=True))
    axes = _Axes(
        (340, 210),
        x=_span(x if best_step is None else [*x, best_step]),
        y=_span(y, margin=0.06),
        x_ticks=_ticks(*_span(x), whole=True),
        y_ticks=_ticks(*_span(y, margin=0.06)),
        x_label="step",
    )
    lines = _curve(axes, points, f"curve-{slug}-{number}", name, number)
    if best_step is not None:
        lines.append(axes.mark(best_step, f"best-{slug}-{number}"))
    title = escape(curve_name(name))
    return f"<figure><figcaption>{title}</figcaption>{axes.svg(curve_name(name), lines)}</figure>"


def _curve(axes: _Axes, points: Points, name: str, label: str, number: int) -> list[str]:
    """A training curve: a long one thin, with its running mean on top."""
    long = len(points) >= 80
    lines = [axes.line(_thinned(points), name, label, number, thin=long, dots=len(points) < 10)]
    if long:
        x, y = zip(*points, strict=True)
        mean = list(zip(x, _running_mean(y).tolist(), strict=True))
        lines.append(axes.trend(_thinned(mean), number))
    return lines


def line_style(number: int) -> str:
    """The style sheet's classes of a line: its color, and its dashes where colors recur."""
    dashes = number // COLORS % DASHES
    return f"c{number % COLORS}{f' d{dashes}' if dashes else ''}"


def curve_name(name: str) -> str:
    """What a metric of metrics.jsonl is called: its score's name, `validation` before it."""
    before, _, after = name.partition("eval/")
    return f"validation: {for_people(after)}" if after and not before else for_people(name)


class _Axes:
    """Grid, ticks and the place of every point.

    Args:
      size: width and height in the units of the SVG's view box.
      x, y: spans, of x after `of_x`.
      x_label: below the axis.
    """

    def __init__(
        self,
        size: tuple[int, int],
        *,
        x: tuple[float, float],
        y: tuple[float, float],
        x_ticks: Sequence[float],
        y_ticks: Sequence[float],
        x_label: str,
        of_x: Callable[[float], float] = float,
    ):
        self._size, self._x, self._y, self._of_x = size, x, y, of_x
        self._x_ticks, self._y_ticks, self._x_label = x_ticks, y_ticks, x_label

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Where a point is drawn."""
        width, height = self._size
        right = (self._of_x(x) - self._x[0]) / ((self._x[1] - self._x[0]) or 1)
        up = (y - self._y[0]) / ((self._y[1] - self._y[0]) or 1)
        left = _LEFT + right * (width - _LEFT - _RIGHT)
        return round(left, 2), round(height - _BOTTOM - up * (height - _TOP - _BOTTOM), 2)

    def line(
        self,
        points: Points,
        name: str,
        label: str,
        color: int,
        *,
        thin: bool = False,
        dots: bool = False,
    ) -> str:
        """A line whose points can be read; `name` is its id."""
        places = [self.place(*point) for point in points]
        data = [[x, y, *place] for (x, y), place in zip(points, places, strict=True)]
        marks = "".join(f'<circle cx="{x}" cy="{y}" r="3"/>' for x, y in places) if dots else ""
        return (
            f'<g id="{escape(name)}" class="line {line_style(color)}{" thin" if thin else ""}" '
            f'data-label="{escape(curve_name(label))}" data-points="{escape(json.dumps(data))}">'
            f'<path d="{_path(places)}"/>{marks}</g>'
        )

    def trend(self, points: Points, color: int) -> str:
        """A line that cannot be read, above one that can."""
        places = [self.place(*point) for point in points]
        return f'<g class="line {line_style(color)}"><path d="{_path(places)}"/></g>'

    def mark(self, x: float, name: str) -> str:
        """An upright dashed line at `x`."""
        bottom, top = self.place(x, self._y[0]), self.place(x, self._y[1])
        path = _path([bottom, top])
        return f'<g id="{escape(name)}" class="mark"><path d="{path}"/></g>'

    def svg(self, title: str, lines: Sequence[str]) -> str:
        """The whole element."""
        width, height = self._size
        grid = []
        for y in self._y_ticks:
            _, at = self.place(self._first_x(), y)
            grid.append(f'<path d="M{_LEFT} {at}H{width - _RIGHT}"/>')
            grid.append(f'<text x="{_LEFT - 6}" y="{at + 4}" text-anchor="end">{_tick(y)}</text>')
        for x in self._x_ticks:
            at, _ = self.place(x, self._y[0])
            text = f'<text x="{at}" y="{height - _BOTTOM + 15}" text-anchor="middle">'
            grid.append(f"{text}{_tick(x)}</text>")
        label = escape(self._x_label)
        middle = (_LEFT + width - _RIGHT) / 2
        grid.append(f'<text x="{middle}" y="{height - 3}" text-anchor="middle">{label}</text>')
        about = f'viewBox="0 0 {width} {height}" data-x="{label.partition(" ")[0]}"'
        return (
            f'<svg class="chart wide" role="img" tabindex="0" {about} aria-label="{escape(title)}">'
            f'<g class="grid">{"".join(grid)}</g>{"".join(lines)}'
            '<path class="cursor" d=""/></svg>'
        )

    def _first_x(self) -> float:
        return self._x_ticks[0] if self._x_ticks else 1.0


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M " + " L ".join(f"{x} {y}" for x, y in places)


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
class LinePlot:
    """Lines over the values of one setting: name -> points (x, y); see lines_plot."""

    title: str
    x_label: str
    lines: Mapping[str, Points]
    log: bool = False
    steps: bool = False


@dataclasses.dataclass(frozen=True)
class ReportData:
    """Everything a report shows, in its order; empty fields are left out.

    Attributes:
      title: heading, e.g. "WebQA: cited answers from pictures and prose".
      description: of the dataset and the run.
      notice: a caveat (e.g. that the scores are not WebQA's).
      headline: the few most important numbers, name or score -> value, shown large.
      cards: questions with answers and sources, the best first.
      filters: the buttons above the cards.
      card_note: how to read the cards, e.g. what counts as right.
      bars: score -> the systems' bars.
      line_plots: of a sweep or a corpus, above the tables; those over steps below them.
      tables: result tables, in order.
      recall: retriever -> k -> recall@k.
      curves: task -> metric -> [(step, value)].
      best_steps: task -> the step of its best validation, which its curves mark.
      stages: (name, seconds) of the stages, in order.
      run_tables: of the run itself, as its wall time.
      facts: about the run, name -> value (date, device, version, commit, command).
      materials: what the page shows was taken from; a line each.
    """

    title: str
    description: str = ""
    notice: str = ""
    headline: Mapping[str, float] = dataclasses.field(default_factory=dict)
    cards: Sequence[Card] = ()
    filters: Sequence[CardFilter] = VERDICTS
    card_note: str = ""
    bars: Mapping[str, Sequence[Bar]] = dataclasses.field(default_factory=dict)
    line_plots: Sequence[LinePlot] = ()
    tables: Sequence[Table] = ()
    recall: Mapping[str, Mapping[int, float]] = dataclasses.field(default_factory=dict)
    curves: Mapping[str, Mapping[str, Points]] = dataclasses.field(default_factory=dict)
    best_steps: Mapping[str, float] = dataclasses.field(default_factory=dict)
    stages: Sequence[tuple[str, float]] = ()
    run_tables: Sequence[Table] = ()
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    materials: Sequence[Material] = ()


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
        line_plots=[
            (plot, lines_plot(plot.title, plot.x_label, plot.lines, log=plot.log, steps=plot.steps))
            for plot in data.line_plots
        ],
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


def read_curves(
    path: str | os.PathLike, metrics: Sequence[str] | None = None
) -> dict[str, list[tuple[float, float]]]:
    """Reads a metrics.jsonl: metric -> [(step, value)], in order of step.

    A step written twice (a resumed run) keeps its last value; values that are not finite
    numbers are skipped. `metrics` limits the result to those. A missing file gives no curves.
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
            wanted = name != "step" and (metrics is None or name in metrics)
            if wanted and real_number(value) is not None:
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
