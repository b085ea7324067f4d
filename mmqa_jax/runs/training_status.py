"""`mmqa status` of a training run: how far it is, what its wall time went into; and of a sweep.

Neither this nor what it imports imports JAX: `status` answers at once.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.core.metrics import read_metrics
from mmqa_jax.core.progress import duration
from mmqa_jax.core.workdir import read_config, steps_in
from mmqa_jax.data.table_files import real_number, whole_number
from mmqa_jax.runs.workdirs import SWEEP
from mmqa_jax.training.attempts import FILE, goodput, read_attempts
from mmqa_jax.weights.record import is_trained


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


def read_swept(folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """The task of a sweep over trainings, and of each run what sweep.json has of it.

    That is `values` (by key of the config), `workdir` (below `folder`), and of a run that ended
    since its loss was not finite `failed`, the sentence about it.
    """
    content = read_json(folder / SWEEP)
    runs = content.get("cells")
    sound = isinstance(content["task"], str) and isinstance(runs, list) and bool(runs)
    for run in runs if sound else ():
        sound = sound and isinstance(run, dict) and isinstance(run.get("values"), dict)
        sound = sound and isinstance(run.get("workdir"), str)
    if not sound:
        raise UserError(
            f"{folder / SWEEP}: is damaged; start `mmqa sweep` again, which keeps finished runs."
        )
    return content["task"], runs


def sweep_status(folder: Path) -> dict[str, Any]:
    """How far a sweep over trainings is: `training_status` of each run, None of one not begun."""
    task, runs = read_swept(folder)
    known = []
    for run in runs:
        place = folder / run["workdir"]
        known.append({**run, "status": training_status(place) if is_training(place) else None})
    done = sum(bool(run["status"] and run["status"]["complete"]) for run in known)
    return {
        "folder": str(folder),
        "task": task,
        "complete": done == len(known),
        "runs_complete": done,
        "cells": known,
    }


def sweep_lines(status: dict[str, Any]) -> list[str]:
    """What is printed of a sweep's status: a line for all runs, and those of runs under way."""
    done, count = status["runs_complete"], len(status["cells"])
    rest = "" if status["complete"] else "; `mmqa sweep` goes on where it stopped"
    lines = [
        f"{status['folder']}: sweep of {status['task']}: {done} of {count} runs are complete{rest}."
    ]
    for run in status["cells"]:
        if run["status"] is not None and not run["status"]["complete"]:
            lines += status_lines(run["status"])
        if "failed" in run:
            lines.append(f"{run['workdir']}: {run['failed']}")
    return lines
