"""The report: one self-contained HTML file with tables, curves, plots and examples.

The caller fills in a ReportData; nothing here depends on a dataset or a system. All text is
escaped, pictures become data URIs, and plots inline SVG. A content security policy lets the page
load nothing and run nothing but its own two scripts, so that a text that were not escaped would
still do nothing.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write, read_jsonl
from mmqa_jax.core.paths import as_path
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.images import PictureError, shown
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.data.table_files import real_number
from mmqa_jax.evaluation.plots import Points, curves_plot, recall_plot
from mmqa_jax.evaluation.significance import Interval
from mmqa_jax.evaluation.tables import Table, format_bounds, format_cell

# Shown at up to 150 px; twice that for high-density screens.
_PICTURE_PIXELS = 300
_THUMBNAIL_PIXELS = 180  # of thousands of questions
_SCRIPTS = ("examples.js.jinja", "traces.js.jinja")


@dataclasses.dataclass(frozen=True)
class ExampleSource:
    """One source of an example.

    Attributes:
      text: the snippet, or the picture's caption.
      picture: encoded picture bytes (PNG, JPEG, ...), None for a snippet.
      rank: in the ranking, from 1; None for a gold source that was not retrieved.
      score: the retriever's or reranker's score.
      cited: whether the answer cites it.
      gold: whether it is a gold source.
    """

    id: str
    text: str
    title: str = ""
    picture: bytes | None = None
    rank: int | None = None
    score: float | None = None
    cited: bool = False
    gold: bool = False


@dataclasses.dataclass(frozen=True)
class ExampleAnswer:
    """The answer of one setting (`full`, `oracle`, ...), with its scores on this question."""

    setting: str
    answer: str
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Example:
    """One question with its sources, its answers and the references."""

    question: str
    category: str
    answers: Sequence[ExampleAnswer]
    references: Sequence[str]
    keywords: str = ""
    sources: Sequence[ExampleSource] = ()
    picture: bytes | None = None
    id: str = ""


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
class Trace:
    """How a prompted system came to one answer; the page shows any number of them.

    Attributes:
      score: by the scorer that ReportData.trace_scorer names; None: the question is not scored.
      rows: (name, text) shown at once: references, answer, raw outputs.
      details: (name, text) shown on request: prompts, shots.
      picture: encoded bytes of the question's picture.
      tree: steps of agents, shown as a tree.
    """

    question: str
    category: str
    score: float | None
    rows: Sequence[tuple[str, str]]
    details: Sequence[tuple[str, str]] = ()
    picture: bytes | None = None
    tree: Sequence[TraceNode] = ()


@dataclasses.dataclass(frozen=True)
class ReportData:
    """Everything a report shows; empty fields are left out.

    Attributes:
      title: heading, e.g. "WebQA: cited answers from pictures and prose".
      description: of the dataset and the run.
      notice: a caveat shown prominently (e.g. that the scores are not WebQA's).
      attribution: one line per material used, with its license.
      facts: about the run, name -> value (date, device, version, commit, command).
      headline: the few most important numbers, name -> value, shown large.
      tables: result tables, in order.
      curves: task -> metric -> [(step, value)].
      best_steps: task -> the step of its best validation, which its curves mark.
      recall: retriever -> k -> recall@k.
      stages: (name, seconds) of the stages, in order.
      examples: questions with sources and answers.
      traces: prompted answers, filtered and paged in the browser.
      trace_scorer: the score that tells right ones from wrong ones.
    """

    title: str
    description: str = ""
    notice: str = ""
    attribution: Sequence[str] = ()
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    headline: Mapping[str, float] = dataclasses.field(default_factory=dict)
    tables: Sequence[Table] = ()
    curves: Mapping[str, Mapping[str, Points]] = dataclasses.field(default_factory=dict)
    best_steps: Mapping[str, float] = dataclasses.field(default_factory=dict)
    recall: Mapping[str, Mapping[int, float]] = dataclasses.field(default_factory=dict)
    stages: Sequence[tuple[str, float]] = ()
    examples: Sequence[Example] = ()
    traces: Sequence[Trace] = ()
    trace_scorer: str = ""


def write_report(path: str | os.PathLike, data: ReportData) -> None:
    """Writes the report as one HTML file, whole or not at all."""
    html = render_report(data)
    with atomic_write(path) as file:
        file.write(html)


def render_report(data: ReportData) -> str:
    """The report as one HTML page that needs no other file and no network."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mmqa_jax.evaluation"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        cell=format_cell, bounds=format_bounds, picture=_picture_uri, minutes=_minutes
    )
    environment.tests["interval"] = lambda cell: isinstance(cell, Interval)
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
        categories=list(dict.fromkeys(example.category for example in data.examples)),
        longest_stage=max((seconds for _, seconds in data.stages), default=0.0),
        total_seconds=sum(seconds for _, seconds in data.stages),
        traces_json=_traces_json(data.traces),
    )


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


def _traces_json(traces: Sequence[Trace]) -> str:
    """JSON for a script element: `<` is escaped, so that no text can end the element.

    Prompts repeat each other's shots: every line of a long text is kept once, in `lines`, and the
    text is the list of its lines' numbers. Thousands of questions stay a few megabytes.
    """
    numbers: dict[str, int] = {}

    def lines(text: str) -> list[int]:
        return [numbers.setdefault(line, len(numbers)) for line in text.split("\n")]

    def node(one: TraceNode) -> dict[str, Any]:
        return {
            "text": one.text,
            "score": one.score,
            "long": lines(one.long) if one.long else [],
            "children": [node(child) for child in one.children],
        }

    rows = [
        {
            "question": trace.question,
            "category": trace.category,
            "score": trace.score,
            "rows": trace.rows,
            "details": [(name, lines(text)) for name, text in trace.details],
            "picture": _picture_uri(trace.picture, _THUMBNAIL_PIXELS) if trace.picture else "",
            "tree": [node(one) for one in trace.tree],
        }
        for trace in traces
    ]
    data = {"traces": rows, "lines": list(numbers)}
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _picture_uri(picture: bytes, pixels: int = _PICTURE_PIXELS) -> str:
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


# Example questions of a report, with their sources.

_SHOWN = 6  # sources per ranking


def evenly_by_category(questions: Sequence[Question], count: int) -> list[int]:
    """Indices of about `count` questions: the first few of each category, equally many."""
    groups: dict[str, list[int]] = {}
    for i, question in enumerate(questions):
        groups.setdefault(question.category, []).append(i)
    per_category = -(-count // max(len(groups), 1))
    return [i for category in sorted(groups) for i in groups[category][:per_category]]


def example(
    corpus: Corpus,
    question: Question,
    answers: Mapping[str, tuple[Prediction, Mapping[str, float]]],
    ranking: Ranking,
    cited: Sequence[str],
) -> Example:
    """One question of a report.

    Args:
      answers: setting -> its prediction and that prediction's scores.
      ranking: the sources to show, best first; missing gold sources are added.
      cited: ids of the sources that the shown answer cites.
    """
    top = list(zip(ranking.sources[:_SHOWN], ranking.scores[:_SHOWN], strict=True))
    sources = [
        _source(corpus, question, name, rank, score, name in cited)
        for rank, (name, score) in enumerate(top, start=1)
    ]
    listed = {name for name, _ in top}
    ranks = {name: rank for rank, name in enumerate(ranking.sources, start=1)}
    sources += [
        _source(corpus, question, name, ranks.get(name), None, name in cited)
        for name in question.positives
        if name not in listed
    ]
    return Example(
        question=question.question,
        category=question.category,
        answers=[
            ExampleAnswer(setting, prediction.answer, scores)
            for setting, (prediction, scores) in answers.items()
        ],
        references=question.answers,
        keywords=question.keywords,
        sources=sources,
        picture=corpus.question_picture(question),
        id=question.id,
    )


def _source(
    corpus: Corpus,
    question: Question,
    name: str,
    rank: int | None,
    score: float | None,
    cited: bool,
) -> ExampleSource:
    row = corpus.row[name]
    source = corpus.sources[row]
    return ExampleSource(
        id=name,
        text=source.text,
        title=source.title,
        picture=corpus.picture(row),
        rank=rank,
        score=score,
        cited=cited,
        gold=name in question.positives,
    )
