"""`mmqa sweep`: one row at several values of its config's keys, such as MAVL's figures 7 and 8.

Every cell of the grid is a row in a folder of its own, resumable as any, over one corpus, the same
opened models and one response cache, so that a prompt of several cells is asked once; they run one
after the other. sweep.json, sweep.md and report.html show the cells that are finished.
"""

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax

from mmqa_jax.core.config import config_fingerprint, flatten, load_config
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write, no_empty_folders, read_json, write_json
from mmqa_jax.core.progress import announce
from mmqa_jax.evaluation import tables
from mmqa_jax.evaluation.report import LinePlot, ReportData, write_report
from mmqa_jax.runs.part import OpenedParts
from mmqa_jax.runs.reports.training import overlaid_curves, training_report
from mmqa_jax.runs.row import Row, read_row
from mmqa_jax.runs.run import CHUNK, run_row
from mmqa_jax.runs.status import SWEEP, is_training, kind_of, read_swept, training_status
from mmqa_jax.tasks.registry import check_config
from mmqa_jax.tasks.run import run_training
from mmqa_jax.training.best_weights import read_best
from mmqa_jax.training.options import NotFinite
from mmqa_jax.weights.record import is_trained

Value = str | int | float | bool | None


@dataclasses.dataclass(frozen=True)
class Axis:
    """A key of the config and the values that it takes, as they were given."""

    key: str
    values: tuple[str, ...]

    @property
    def name(self) -> str:
        """The key without its section."""
        return self.key.rpartition(".")[2]


@dataclasses.dataclass(frozen=True)
class SweepCell:
    """One combination of the grid's values (by axis, in their order), run in a folder of its own
    below the workdir; `run` is the row, or the config of the training.
    """

    values: Mapping[str, Value]
    folder: str
    run: Any


def parse_axes(texts: Sequence[str]) -> list[Axis]:
    """`KEY=V1,V2,...`, each key once; a value that is named twice counts once."""
    axes: dict[str, Axis] = {}
    for text in texts:
        key, _, listed = text.partition("=")
        values = tuple(dict.fromkeys(value.strip() for value in listed.split(",")))
        if not key or not all(values):
            raise UserError(
                f"--over={text}: KEY=VALUE,VALUE,... was expected, such as options.shots=0,1,4,8."
            )
        if key in axes:
            raise UserError(f"--over={text}: {key} has an --over already; name all values in one.")
        axes[key] = Axis(key, values)
    return list(axes.values())


def read_cells(
    config: str, overrides: Sequence[str], axes: Sequence[Axis], split: str | None = None
) -> list[SweepCell]:
    """The rows, or the trainings, of all combinations, the first axis slowest.

    All are checked before any runs. A config with a key `task` describes a training; `split` takes
    the place of the rows' own.
    """
    known = flatten(load_config(config, overrides, adds=True).to_dict())
    for axis in axes:
        if isinstance(known.get(axis.key), list | tuple):
            raise UserError(
                f"--over={axis.key}: holds a list, whose items commas separate; sweep over a key "
                "with one value, or set this one with --config."
            )
    names = _names(axes)
    cells: dict[str, SweepCell] = {}
    configs: dict[str, str] = {}  # fingerprint -> folder
    for values in itertools.product(*(axis.values for axis in axes)):
        chosen = {axis.key: value for axis, value in zip(axes, values, strict=True)}
        changes = [*overrides, *(f"{key}={value}" for key, value in chosen.items())]
        try:
            changed = load_config(config, changes, adds=True)
            run: Any = changed
            if "task" in changed:
                check_config(changed)
            else:
                run = read_row(changed, split=split)
        except UserError as error:
            listed = " ".join(f"{key}={value}" for key, value in chosen.items())
            raise UserError(f"--over, cell {listed}: {error}") from error
        known = flatten(changed.to_dict())
        folder = "_".join(f"{names[key]}={value}" for key, value in chosen.items())
        folder = re.sub(r"[^\w.=+-]+", "-", folder)
        if folder in cells:
            raise UserError(
                f"--over: two cells would share the folder {folder}; leave one to another sweep."
            )
        same = configs.setdefault(config_fingerprint(changed), folder)
        if same != folder:
            raise UserError(
                f"--over: {same} and {folder} are the same run, for their values are equal; name "
                "one of them."
            )
        cells[folder] = SweepCell({names[key]: known[key] for key in chosen}, folder, run)
    return list(cells.values())


def _names(axes: Sequence[Axis]) -> dict[str, str]:
    """Key -> what tables call it: its last part where no other key ends so."""
    short = [axis.name for axis in axes]
    return {axis.key: axis.name if short.count(axis.name) == 1 else axis.key for axis in axes}


def run_sweep(
    cells: Sequence[SweepCell], folder: Path, *, limit: int | None = None, chunk: int = CHUNK
) -> list[dict[str, Any]]:
    """Runs all cells below `folder`, or continues them there; returns what sweep.json holds.

    `limit` and `chunk`: see `run_row`.
    """
    for cell in cells:  # before hours go by
        cell.run.check_inputs()
    records: list[dict[str, Any]] = []
    with _opened(cells, folder) as opened_of:
        for number, cell in enumerate(cells, start=1):
            announce(f"Cell {number} of {len(cells)}: {cell.folder}")
            opened = opened_of(cell.run)
            result = run_row(
                cell.run, folder / cell.folder, limit=limit, opened=opened, chunk=chunk
            )
            assert result is not None, "this process computes all chunks"
            records.append(_record(cell, result.scores))
            about = {"row": cell.run.row, "dataset": cell.run.dataset, "of": len(cells)}
            _save(folder, {**about, "cells": records})
    return records


@contextlib.contextmanager
def _opened(cells: Sequence[SweepCell], folder: Path) -> Iterator[Any]:
    """Opens the parts that rows share, once for each folder of data, and closes them at the end."""
    opened: dict[tuple[str, str], OpenedParts] = {}

    def of(row: Row) -> OpenedParts | None:
        if row.data.context:  # its questions are read in another way than a corpus has them
            return None
        home = row.data.dir, row.data.sources
        if home not in opened:
            opened[home] = OpenedParts(row.open_corpus(), folder / "journals", keep_open=True)
        return opened[home]

    try:
        yield of
    finally:
        for parts in opened.values():
            parts.end()


def _record(cell: SweepCell, scores: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a cell's record in sweep.json."""
    agents = scores.get("agents") or {}
    return {
        "values": dict(cell.values),
        "workdir": cell.folder,
        **{key: scores.get(key) for key in ("questions", "limit", "split", "scores", "intervals")},
        "agents": {role: counts["accuracy"] for role, counts in agents.items()},
        "llm": tables.llm_use(scores),
    }


def _save(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes sweep.json, sweep.md and report.html of the finished cells."""
    write_json(folder / SWEEP, content)
    _, table = report_sweep(folder)
    with atomic_write(folder / "sweep.md") as file:
        file.write(tables.to_markdown(table))


def report_sweep(folder: Path) -> tuple[Path, tables.Table]:
    """Writes report.html of a sweep's finished cells; returns its path and the table."""
    content = read_json(folder / SWEEP)
    of_trainings = isinstance(content, Mapping) and "task" in content
    data = _trainings_report(folder) if of_trainings else _rows_report(folder, content)
    write_report(folder / "report.html", data)
    return folder / "report.html", data.tables[0]


def _rows_report(folder: Path, content: Any) -> ReportData:
    """The report of a sweep over rows."""
    try:
        name, cells = f"{content['dataset']}, {content['row']}", content["cells"]
        missing = content["of"] - len(cells)
        return ReportData(
            title=f"{name}: sweep over {', '.join(cells[0]['values'])}",
            description="Each cell is a row; its first column leads to its report.",
            notice=f"{missing} of {content['of']} cells are not finished." if missing else "",
            line_plots=sweep_plots(cells),
            tables=[sweep_table(name, cells)],
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder / SWEEP}: is damaged; start `mmqa sweep` again, which keeps finished cells."
        ) from error


def sweep_table(title: str, cells: Sequence[Mapping[str, Any]]) -> tables.Table:
    """A line per cell: values, scores with intervals, agents alone, what the model was asked."""
    names = list(cells[0]["values"])
    scorers = list(dict.fromkeys(name for cell in cells for name in cell["scores"]))
    roles = list(dict.fromkeys(role for cell in cells for role in cell["agents"]))
    used, counts = tables.llm_columns([cell["llm"] for cell in cells])
    rows: list[list[tables.Cell]] = []
    for cell, asked in zip(cells, counts, strict=True):
        values = [str(value) for value in cell["values"].values()]
        scores = [tables.score_cell(cell, scorer) for scorer in scorers]
        alone = [cell["agents"].get(role) for role in roles]
        rows.append([*values, cell["questions"], *scores, *alone, *asked])
    columns = (*names, "n", *scorers, *(f"{role} alone" for role in roles), *used)
    links = {i: f"./{quote(cell['workdir'])}/report.html" for i, cell in enumerate(cells)}
    note = "95% intervals, bootstrap over questions. mmqa compare tests the differences of cells."
    return tables.Table(title, columns, rows, note, links)


def sweep_plots(cells: Sequence[Mapping[str, Any]]) -> list[LinePlot]:
    """The first score over the values of the first axis, a line per value of the others.

    Of a single axis with agents also the accuracy of each alone (MAVL, figure 7). None where the
    first axis has other values than numbers, or fewer than two, or nothing is scored.
    """
    scorer = next(iter(cells[0]["scores"]), "")
    first, *others = cells[0]["values"]
    xs = {cell["values"][first] for cell in cells}
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in xs)
    if not scorer or len(xs) < 2 or not numbers:
        return []
    lines: dict[str, list[tuple[float, float]]] = {}
    for cell in sorted(cells, key=lambda cell: cell["values"][first]):
        x, score = float(cell["values"][first]), cell["scores"].get(scorer)
        name = ", ".join(f"{cell['values'][other]} {other}" for other in others)
        if score is not None:
            lines.setdefault(name or "all", []).append((x, score))
        for role, accuracy in () if others else cell["agents"].items():
            if accuracy is not None:
                lines.setdefault(f"{role} alone", []).append((x, accuracy))
    return [LinePlot(tables.for_people(scorer), first, lines)]


# `mmqa sweep` over trainings: one run for each combination of values, in a workdir of its own.
#
# The runs follow one another, and each resumes by itself, as of `mmqa train`. sweep.json names
# them; the table, the report and `mmqa status` show what the runs' own folders hold.


def run_trainings(runs: Sequence[SweepCell], folder: Path) -> list[dict[str, Any]]:
    """Trains all runs below `folder`, or resumes them; returns the records of `read_records`.

    A run whose loss is not finite ends, and the next one begins; its record says so. SystemExit as
    of `training.loop.train`.
    """
    if folder.exists() and (kind := kind_of(folder)) not in ("", "trainings"):
        raise UserError(
            f"--workdir={folder}: holds another kind of run ({kind}), and a sweep over trainings "
            "needs a folder of its own; name another --workdir."
        )
    files = [folder / name for name in (SWEEP, "sweep.md", "report.html")]
    before = {file: file.read_bytes() for file in files if file.is_file()}
    failed: dict[str, str] = {}
    with no_empty_folders(folder):
        _write_trainings(folder, runs, failed)
        try:
            for number, run in enumerate(runs):
                announce(f"Run {number + 1} of {len(runs)}: {run.folder}")
                finished = is_trained(folder / run.folder, run.run.train.steps)
                try:
                    run_training(run.run, folder / run.folder)
                except NotFinite as error:
                    if jax.process_count() > 1:  # the other processes may be elsewhere
                        raise
                    failed[run.folder] = str(error)
                    announce(f"{run.folder}: {error}")
                finally:
                    _write_trainings(folder, runs, failed, ended=None if finished else run)
        except UserError:
            begun = any((folder / run.folder).exists() for run in runs)
            if not begun and jax.process_index() == 0:
                for file in files:
                    file.write_bytes(before[file]) if file in before else file.unlink()
            raise
    return read_records(folder)


def _write_trainings(
    folder: Path,
    runs: Sequence[SweepCell],
    failed: Mapping[str, str],
    ended: SweepCell | None = None,
) -> None:
    """sweep.json, sweep.md and report.html of the sweep, and report.html of the run that ended."""
    if jax.process_index() > 0:
        return
    cells = [
        {"values": dict(run.values), "workdir": run.folder}
        | ({"failed": failed[run.folder]} if run.folder in failed else {})
        for run in runs
    ]
    if ended is not None and is_training(place := folder / ended.folder):
        write_report(place / "report.html", training_report(place))
    _save(folder, {"task": runs[0].run.task, "cells": cells})


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Reads each run of the sweep in `folder`, the best by its validation metric first: what
    `read_swept` has of it; `step` (0: not begun), `complete`, `loss` and `goodput` as of
    `training_status`, `best` as of `read_best`.
    """
    records = []
    for run in read_swept(folder)[1]:
        place = folder / run["workdir"]
        status = training_status(place) if is_training(place) else {"step": 0, "complete": False}
        known = {name: status.get(name) for name in ("step", "complete", "loss", "goodput")}
        records.append({**run, **known, "best": read_best(place)})
    scored = [record for record in records if record["best"]]
    rest = [record for record in records if not record["best"]]
    return sorted(scored, key=lambda record: -record["best"]["value"]) + rest


def _trainings_report(folder: Path) -> ReportData:
    """The report of a sweep over trainings."""
    task, records = read_swept(folder)[0], read_records(folder)
    table = trainings_table(f"Sweep of {task}", records)
    pages = {n: f"{record['workdir']}/report.html" for n, record in enumerate(records)}
    links = {n: f"./{quote(page)}" for n, page in pages.items() if (folder / page).is_file()}
    missing = sum(not record["complete"] for record in records)
    best = records[0]["best"]
    return ReportData(
        title=f"Sweep of {task} over {', '.join(records[0]['values'])}",
        description="Each run is a training; its first column leads to its report.",
        notice=f"{missing} of {len(records)} runs are not finished." if missing else "",
        headline={f"best {best['metric']}": best["value"]} if best else {},
        line_plots=overlaid_curves({_name(run): folder / run["workdir"] for run in records}),
        tables=[dataclasses.replace(table, links=links)],
    )


def _name(record: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in record["values"].items())


def trainings_table(title: str, records: Sequence[Mapping[str, Any]]) -> tables.Table:
    """A line for each run: its values, last loss, best validation with its step, step, goodput."""
    metrics = dict.fromkeys(record["best"]["metric"] for record in records if record["best"])
    rows: list[list[tables.Cell]] = []
    for record in records:
        best, measured = record["best"] or {}, record["goodput"]
        of_metrics = [best["value"] if best.get("metric") == name else None for name in metrics]
        rows.append(
            [
                *(str(value) for value in record["values"].values()),
                *of_metrics,
                *([best.get("step")] if metrics else []),
                record["loss"],
                record["step"],
                None if measured is None else round(100 * measured["share"]),
            ]
        )
    at = ["best at step"] if metrics else []
    named = [f"best {name}" for name in metrics]
    columns = [*records[0]["values"], *named, *at, "last loss", "step", "goodput %"]
    failed = [
        f"{record['workdir']}: {record['failed']}" for record in records if "failed" in record
    ]
    return tables.Table(title, columns, rows, " ".join(failed))
