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
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write, read_jsonl
from mmqa_jax.core.paths import as_path
from mmqa_jax.data.schema import Material
from mmqa_jax.data.table_files import real_number
from mmqa_jax.evaluation.cards import VERDICTS, Card, CardFilter, cards_json
from mmqa_jax.evaluation.plots import Points, curves_plot, line_style, lines_plot, recall_plot
from mmqa_jax.evaluation.score_names import for_people
from mmqa_jax.evaluation.significance import Interval
from mmqa_jax.evaluation.tables import Cell, Table, format_bounds, format_cell

if TYPE_CHECKING:
    import jinja2

_SCRIPTS = ("cards.js.jinja", "page.js.jinja")


@dataclasses.dataclass(frozen=True)
class Bar:
    """A system's score as a bar: `value` in 0..1, and the page that its name leads to."""

    name: str
    value: float | Interval
    link: str = ""


@dataclasses.dataclass(frozen=True)
class LinePlot:
    """Lines over the values of one setting: name -> points (x, y); see plots.lines_plot."""

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
