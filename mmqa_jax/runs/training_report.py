"""`mmqa report` and `mmqa status` of a training run: its curves, validation and progress."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict
from rich.console import Console

from mmqa_jax.core.checkpoint import steps_in
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.metrics import read_metrics
from mmqa_jax.core.progress import duration
from mmqa_jax.core.workdir import read_config
from mmqa_jax.data.table_files import real_number, whole_number
from mmqa_jax.evaluation.plots import Points
from mmqa_jax.evaluation.report import ReportData, read_curves, write_report
from mmqa_jax.evaluation.tables import Table, show
from mmqa_jax.runs.row_report import run_facts
from mmqa_jax.tasks.reading import known_tasks
from mmqa_jax.tasks.run import is_trained
from mmqa_jax.training.attempts import FILE, Goodput, goodput, read_attempts
from mmqa_jax.training.best_weights import read_best

METRICS = "metrics.jsonl"
_VALIDATION = "eval/"


def run_curves(folder: Path) -> dict[str, Points]:
    """Loss, accuracy and validation of the run in `folder`: name -> [(step, value)]."""
    return {
        name: points
        for name, points in read_curves(folder / METRICS).items()
        if name in ("loss", "accuracy") or name.startswith(_VALIDATION)
    }


def write_training_report(folder: Path) -> dict[str, Any]:
    """Prints the validation of a finished or running training run and writes its report.html.

    Raises:
      UserError: `folder` has no config.json of a training run.
    """
    config = read_config(folder)
    if "task" not in config:
        raise UserError(
            f"{folder}: holds no training run (config key task is {config.get('task')!r}); name "
            "the workdir of `mmqa train` or of `mmqa demo`."
        )
    curves, best, product = run_curves(folder), read_best(folder), _product(config.task)
    title = f"Training of the {product}"
    tables = [_validation_table(curves)] if any(_VALIDATION in name for name in curves) else []
    headline = {} if best is None else {f"best {best['metric']}": best["value"]}
    measured = goodput(read_attempts(folder))
    times = [] if measured is None else [_time_table(measured)]
    facts = run_facts(folder)
    if best is not None:
        facts = {"best step": f"{best['step']} (weights: {best['weights']})", **facts}
    for table in (*tables, *times):
        show(table)
    where = f" of {config.data.dir}" if config.data.dir else ""
    data = ReportData(
        title=title,
        description=f"{config.train.steps:,} steps on split {config.data.split}{where}.",
        headline=headline,
        tables=tables,
        curves={product: curves},
        best_steps={} if best is None else {product: best["step"]},
        run_tables=times,
        facts=facts,
    )
    write_report(folder / "report.html", data)
    Console(stderr=True).print(f"Report: {folder / 'report.html'}", soft_wrap=True)
    return {"task": config.task, "report": str(folder / "report.html"), "best": best}


def _product(task: str) -> str:
    """What a task trains, in words; of a task that a config file defines its name."""
    kind = known_tasks().get(task)
    return task if kind is None else kind.product


def _time_table(measured: Goodput) -> Table:
    """What the wall time of all attempts went into."""
    rows = [
        [name, round(seconds, 1), seconds / measured.wall_seconds]
        for name, seconds in measured.seconds.items()
    ]
    return Table(
        "Wall time",
        ["what", "seconds", "share"],
        rows,
        note=f"Goodput: {measured.text()}. training/README.md says what the rows are.",
    )


def _validation_table(curves: dict[str, Points]) -> Table:
    """One row per evaluation, one column per value."""
    values = {
        name.removeprefix(_VALIDATION): dict(points)
        for name, points in curves.items()
        if name.startswith(_VALIDATION)
    }
    steps = sorted({step for points in values.values() for step in points})
    rows = [[int(step), *(points.get(step) for points in values.values())] for step in steps]
    return Table("Validation", ["step", *values], rows)


# `mmqa status` of a training run: how far it is, and what its wall time went into.


def is_training(folder: Path) -> bool:
    """Whether `folder` is the workdir of a training run that has started."""
    return (folder / FILE).is_file()


def training_status(folder: Path, now: float | None = None) -> dict[str, Any]:
    """How far the training run in `folder` is.

    Args:
      now: seconds since the epoch.

    Returns:
      `step` (the last that is known of), `steps`, `complete`, `saved` (steps of the checkpoints),
      `rate` (steps per second) and `seconds_left` (None: not known), `last` (seconds since the run
      was last heard of), `loss` (of the last log row), `goodput` (training.attempts.Goodput; None:
      no time has passed).

    Raises:
      UserError: the folder's config is missing or damaged.
    """
    now = time.time() if now is None else now
    config = read_config(folder)
    train = config.get("train")
    steps = whole_number(train.get("steps")) if isinstance(train, ConfigDict) else None
    if not steps:
        raise UserError(f"{folder / 'config.json'}: is not a training run's; copy the run again.")
    attempts, logged = read_attempts(folder), read_metrics(folder)
    trained = [row for row in logged if real_number(row.get("loss"), finite=False) is not None]
    latest = trained[-1] if trained else {}
    step = max(latest.get("step", 0), attempts[-1]["step"] if attempts else 0)
    complete = is_trained(folder, steps)
    rate = real_number(latest.get("steps_per_second"))
    left = max(steps - step, 0) / rate if rate and rate > 0 else None
    times = [real_number(row.get("time")) for row in (*attempts[-1:], *logged[-1:])]
    written = (folder / FILE).stat().st_mtime if times == [None] * len(times) else None
    measured = goodput(attempts)
    return {
        "folder": str(folder),
        "task": config.get("task"),
        "step": step,
        "steps": steps,
        "complete": complete,
        "saved": steps_in(folder / "checkpoints"),
        "rate": rate,
        "seconds_left": 0.0 if complete else left,
        "last": now - max(time for time in (written, *times) if time is not None),
        "loss": latest.get("loss"),
        "goodput": None if measured is None else measured.as_json(),
        "goodput_text": "" if measured is None else measured.text(),
    }


def status_lines(status: dict[str, Any]) -> list[str]:
    """What is printed of a status."""
    name = f"{status['folder']}: {status['task']}"
    if status["complete"]:
        lines = [f"{name}: complete, {status['steps']:,} steps."]
    else:
        share = 100 * status["step"] // status["steps"]
        parts = [f"step {status['step']:,} of {status['steps']:,} ({share}%)"]
        if status["rate"]:
            parts.append(f"{status['rate']:.3g} steps/s")
        if status["seconds_left"] is not None:
            parts.append(f"about {duration(status['seconds_left'])} left")
        if status["loss"] is not None:
            parts.append(f"loss {status['loss']:.4g}")
        parts.append(f"last heard of {duration(max(status['last'], 0))} ago")
        saved = f"step {status['saved'][-1]:,}" if status["saved"] else "none"
        lines = [f"{name}: {', '.join(parts)}; last checkpoint: {saved}."]
    if status["goodput_text"]:
        lines.append(f"goodput: {status['goodput_text']}.")
    return lines
