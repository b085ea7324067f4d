"""The report of a folder of rows: which scores best, with a link to each row's own report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mmqa_jax.data.records import materials_of
from mmqa_jax.data.schema import united
from mmqa_jax.evaluation.report import Bar, ReportData, write_report
from mmqa_jax.evaluation.significance import Interval
from mmqa_jax.evaluation.tables import Cell, Table, llm_columns, llm_use
from mmqa_jax.runs.workdirs import finished_rows

_MOST_COLUMNS = 8
_OF_SOURCES = ("source_f1", "recall@", "mrr", "modality_")  # rows that answer nothing


def report_rows(folder: Path) -> tuple[Path, list[Table]]:
    """Writes `folder`/report.html of all finished rows below it; returns its path and tables."""
    rows = finished_rows(folder)
    groups: dict[tuple[str, str, str], dict[str, Mapping[str, Any]]] = {}
    for name, scores in rows.items():
        scorer = next(iter(scores["scores"]), "")
        key = (str(scores["dataset"]), str(scores.get("split")), scorer)
        groups.setdefault(key, {})[name] = scores
    tables, bars = [], {}
    answers_first = sorted(groups.items(), key=lambda one: one[0][2].startswith(_OF_SOURCES))
    for (dataset, split, scorer), own in answers_first:
        if not scorer:
            continue
        names = sorted(own, key=lambda name: -own[name]["scores"][scorer])
        title = f"{dataset}, {split}: {scorer}"
        if len(names) > 1:
            bars[title] = [Bar(one, _value(own[one], scorer), _link(folder, one)) for one in names]
        tables.append(_table(folder, title, {name: own[name] for name in names}))
    data = ReportData(
        title=f"{'/'.join(folder.resolve().parts[-2:])}: {len(rows)} rows",
        description="The best first; a row's name leads to its report.",
        bars=bars,
        tables=tables,
        materials=united(*map(materials_of, rows.values())),
    )
    write_report(folder / "report.html", data)
    return folder / "report.html", tables


def _table(folder: Path, title: str, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """A line per row, a column per score."""
    scorers = list(dict.fromkeys(name for scores in rows.values() for name in scores["scores"]))
    scorers = scorers[:_MOST_COLUMNS]
    used, counts = llm_columns([llm_use(scores) for scores in rows.values()])
    lines: list[list[Cell]] = [
        [name, scores.get("n"), *(_value(scores, one) for one in scorers), *asked]
        for (name, scores), asked in zip(rows.items(), counts, strict=True)
    ]
    links = {i: link for i, name in enumerate(rows) if (link := _link(folder, name))}
    note = "95% intervals, bootstrap over questions. mmqa compare tests the differences of rows."
    return Table(title, ("row", "n", *scorers, *used), lines, note, links)


def _value(scores: Mapping[str, Any], scorer: str) -> float | Interval | None:
    value = scores["scores"].get(scorer)
    bounds = scores.get("intervals", {}).get(scorer)
    return Interval(value, *bounds) if value is not None and bounds else value


def _link(folder: Path, name: str) -> str:
    """The row's report, seen from the folder's; "" where it has none."""
    return f"./{quote(name)}/report.html" if (folder / name / "report.html").is_file() else ""
