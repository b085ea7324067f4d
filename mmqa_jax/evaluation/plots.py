"""Line plots as inline SVG that follows the page's colors (light or dark)."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]

# Legible on white and on near-black.
_COLORS = ("#3b82f6", "#f97316", "#10b981", "#a855f7", "#ef4444", "#0891b2", "#ca8a04", "#ec4899")
# Axes and text are drawn in this color, which is then replaced by the page's text color.
_INK = "#010203"
_COLUMNS = 3


def recall_plot(recall: Mapping[str, Mapping[int, float]]) -> str:
    """recall@k against k (logarithmic), one line per retriever, as an `<svg>` element."""
    figure = _figure(7.2, 3.6)
    axes = figure.add_subplot()
    for index, (name, values) in enumerate(recall.items()):
        points = sorted(values.items())
        (line,) = axes.plot(*_columns(points), marker="o", markersize=4, linewidth=1.8)
        line.set(
            color=_COLORS[index % len(_COLORS)], label=_plain(name), gid=f"recall-line-{index}"
        )
    ks = sorted({k for values in recall.values() for k in values})
    axes.set_xscale("log")
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.minorticks_off()
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("k (sources retrieved)")
    axes.set_ylabel("recall@k")
    _style(axes)
    axes.legend(frameon=False, labelcolor=_INK, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _svg(figure, "recall")


def curves_plot(task: str, curves: Mapping[str, Points], best_step: float | None = None) -> str:
    """Training curves of one task, one panel per metric, as an `<svg>` element.

    Long curves are drawn thin, with a running mean on top; a dashed line marks `best_step`.
    """
    rows = math.ceil(len(curves) / _COLUMNS)
    columns = min(len(curves), _COLUMNS)
    figure = _figure(3.4 * columns, 2.3 * rows)
    slug = re.sub(r"\W+", "-", task)
    for index, (name, points) in enumerate(curves.items()):
        axes = figure.add_subplot(rows, columns, index + 1)
        color = _COLORS[index % len(_COLORS)]
        x, y = _columns(points)
        smooth = _running_mean(y) if len(y) >= 80 else y
        if smooth is not y:
            axes.plot(x, y, color=color, linewidth=0.6, alpha=0.35)
        marker = "o" if len(x) < 10 else None
        (line,) = axes.plot(x, smooth, color=color, linewidth=1.6, marker=marker, markersize=3)
        line.set_gid(f"curve-{slug}-{index}")
        if best_step is not None:
            mark = axes.axvline(best_step, color=_INK, linewidth=0.8, linestyle="--", alpha=0.6)
            mark.set_gid(f"best-{slug}-{index}")
        axes.set_title(_plain(name), fontsize=9, color=_INK, loc="left")
        axes.set_xlabel("step")
        axes.locator_params(axis="x", integer=True)
        _style(axes)
    return _svg(figure, slug)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _columns(points: Points) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _running_mean(values: list[float]) -> np.ndarray:
    """Mean over a centered window of a twentieth of the curve, shorter at the ends."""
    window = np.ones(2 * (len(values) // 40) + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def _style(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_INK)
    axes.tick_params(colors=_INK, labelsize=8)
    axes.grid(True, color=_INK, alpha=0.12, linewidth=0.6)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=_INK, fontsize=8)


def _svg(figure: Figure, salt: str) -> str:
    """The figure as one `<svg>` element: scalable, transparent, deterministic."""
    import matplotlib

    buffer = io.StringIO()
    # The salt makes the ids of the plots on one page distinct.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _for_page(buffer.getvalue())


def _for_page(svg: str) -> str:
    """Removes whatever would affect, or clash with, the page around a matplotlib SVG."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # would style the whole page
    svg = svg.replace("<svg ", '<svg role="img" style="stroke-linejoin: round" ', 1)
    # Generated ids ("axes_1") repeat from plot to plot.
    svg = re.sub(r' id="[a-z2.]+_\d+"', "", svg)
    # The page's fonts, not those of the machine that drew the plot.
    svg = re.sub(r"font-family: [^;\"]*; ?", "", svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    return svg.replace(_INK, "currentColor").strip()


def _plain(name: str) -> str:
    """Keeps matplotlib from reading a name as math or as a hidden label."""
    return name.replace("$", r"\$").lstrip("_")
