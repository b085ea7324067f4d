"""Line plots as inline SVG: the page's colors and fonts, values that can be read by hovering.

Every line carries its points (`data-points`), which templates/page.js.jinja reads where the pointer
is, or the arrow keys lead. Text is escaped; the element needs nothing outside of itself.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape

import numpy as np

from mmqa_jax.evaluation.score_names import for_people

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
