"""`mmqa sweep` over trainings: one run for each combination of values, in a workdir of its own.

The runs follow one another, and each resumes by itself, as of `mmqa train`. sweep.json names them;
the table, the report and `mmqa status` show what the runs' own folders hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
from ml_collections import ConfigDict

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write, no_empty_folders, write_json
from mmqa_jax.core.progress import announce
from mmqa_jax.evaluation.report import ReportData, write_report
from mmqa_jax.evaluation.tables import Cell, Table, to_markdown
from mmqa_jax.runs.sweep import Axis, Value, read_grid
from mmqa_jax.runs.training_report import overlaid_curves, training_report
from mmqa_jax.runs.training_status import is_training, read_swept, training_status
from mmqa_jax.runs.workdirs import SWEEP, kind_of
from mmqa_jax.tasks.registry import check_config
from mmqa_jax.tasks.run import run_training
from mmqa_jax.training.best_weights import read_best
from mmqa_jax.training.nonfinite import NotFinite
from mmqa_jax.weights.record import is_trained


@dataclasses.dataclass(frozen=True)
class SweptRun:
    """One training of a sweep.

    Attributes:
      values: by axis, in their order, as the config has them.
      folder: its name below the workdir.
    """

    values: Mapping[str, Value]
    folder: str
    config: ConfigDict


def read_trainings(config: str, overrides: Sequence[str], axes: Sequence[Axis]) -> list[SweptRun]:
    """The runs of all combinations, checked before any begins; see `read_grid`."""

    def read(config: ConfigDict) -> ConfigDict:
        check_config(config)
        return config

    return [SweptRun(*cell) for cell in read_grid(config, overrides, axes, read)]


def run_trainings(runs: Sequence[SweptRun], folder: Path) -> list[dict[str, Any]]:
    """Trains all runs below `folder`, or resumes them; returns the records of `read_records`.

    A run whose loss is not finite ends, and the next one begins; its record says so.

    Raises:
      SystemExit: as of `training.loop.train`.
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
        _write(folder, runs, failed)
        try:
            for number, run in enumerate(runs):
                announce(f"Run {number + 1} of {len(runs)}: {run.folder}")
                finished = is_trained(folder / run.folder, run.config.train.steps)
                try:
                    run_training(run.config, folder / run.folder)
                except NotFinite as error:
                    if jax.process_count() > 1:  # the other processes may be elsewhere
                        raise
                    failed[run.folder] = str(error)
                    announce(f"{run.folder}: {error}")
                finally:
                    _write(folder, runs, failed, ended=None if finished else run)
        except UserError:
            begun = any((folder / run.folder).exists() for run in runs)
            if not begun and jax.process_index() == 0:
                for file in files:
                    file.write_bytes(before[file]) if file in before else file.unlink()
            raise
    return read_records(folder)


def _write(
    folder: Path,
    runs: Sequence[SweptRun],
    failed: Mapping[str, str],
    ended: SweptRun | None = None,
) -> None:
    """sweep.json, sweep.md and report.html of the sweep, and report.html of the run that ended."""
    if jax.process_index() > 0:
        return
    cells = [
        {"values": dict(run.values), "workdir": run.folder}
        | ({"failed": failed[run.folder]} if run.folder in failed else {})
        for run in runs
    ]
    write_json(folder / SWEEP, {"task": runs[0].config.task, "cells": cells})
    if ended is not None and is_training(place := folder / ended.folder):
        write_report(place / "report.html", training_report(place))
    _, table = report_trainings(folder)
    with atomic_write(folder / "sweep.md") as file:
        file.write(to_markdown(table))


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Reads each run of the sweep in `folder`, the best by its validation metric first.

    Returns:
      `values`, `workdir`, `failed` as of `read_swept`; `step` (0: not begun), `complete`, `loss`
      and `goodput` as of `training_status`, `best` as of `read_best`.
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


def report_trainings(folder: Path) -> tuple[Path, Table]:
    """Writes report.html of a sweep over trainings; returns its path and the table."""
    task, records = read_swept(folder)[0], read_records(folder)
    table = trainings_table(f"Sweep of {task}", records)
    pages = {n: f"{record['workdir']}/report.html" for n, record in enumerate(records)}
    links = {n: f"./{quote(page)}" for n, page in pages.items() if (folder / page).is_file()}
    missing = sum(not record["complete"] for record in records)
    best = records[0]["best"]
    data = ReportData(
        title=f"Sweep of {task} over {', '.join(records[0]['values'])}",
        description="Each run is a training; its first column leads to its report.",
        notice=f"{missing} of {len(records)} runs are not finished." if missing else "",
        headline={f"best {best['metric']}": best["value"]} if best else {},
        line_plots=overlaid_curves({_name(run): folder / run["workdir"] for run in records}),
        tables=[dataclasses.replace(table, links=links)],
    )
    write_report(folder / "report.html", data)
    return folder / "report.html", table


def _name(record: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in record["values"].items())


def trainings_table(title: str, records: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each run: its values, last loss, best validation with its step, step, goodput."""
    metrics = dict.fromkeys(record["best"]["metric"] for record in records if record["best"])
    rows: list[list[Cell]] = []
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
    return Table(title, columns, rows, " ".join(failed))
