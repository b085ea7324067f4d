"""Shows a workdir's content and progress: a demo, rows, a training, a sweep; jobs.py has jobs.

Neither this nor what it imports imports JAX: `mmqa status` answers at once.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ml_collections import ConfigDict

from mmqa_jax.core.chunks import PARTS
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.core.locks import LOCK, holder
from mmqa_jax.core.metrics import METRICS, read_metrics
from mmqa_jax.core.paths import in_store
from mmqa_jax.core.progress import duration
from mmqa_jax.core.workdir import Workdir, read_config, steps_in
from mmqa_jax.data.formats.tables import real_number, whole_number
from mmqa_jax.evaluation.tables import score_name
from mmqa_jax.training.attempts import FILE, goodput, read_attempts
from mmqa_jax.weights.record import is_trained


def workdir_status(folder: Path) -> tuple[dict[str, Any], list[str]] | None:
    """How far what a workdir holds is, and the lines that say it; None: jobs.py may know more.

    The key `writer` names the process that works on what is not complete; "": none does.
    """
    known = _status_of(folder)
    if known is None or known[0]["complete"]:
        return known
    status, lines = known
    return {**status, "writer": holder(folder / LOCK)}, [*lines, *writer_lines(folder)]


def writer_lines(folder: Path) -> list[str]:
    """The sentence about the process that works on a folder; none where that is not known."""
    writer = holder(folder / LOCK)
    return [] if writer is None else [f"{writer or 'no process'} is at work on it."]


def _status_of(folder: Path) -> tuple[dict[str, Any], list[str]] | None:
    if is_training(folder):
        status = training_status(folder)
        return status, status_lines(status)
    kind = "" if in_store(folder) else kind_of(folder)  # of a store's places trainings alone
    if kind == "trainings":
        status = sweep_status(folder)
        return status, sweep_lines(status)
    if kind == "demo":
        status = demo_status(folder)
        return status, [demo_line(status)]
    if kind == "row":
        row = row_status(folder)
        return None if row is None else (row, [row_line(row)])
    if kind not in ("rows", "sweep"):
        return None
    rows = list(finished_rows(folder))
    if not rows:
        raise UserError(
            f"{folder}: holds a sweep without a finished cell; start `mmqa sweep` again."
        )
    status = {"folder": str(folder), "complete": True, "complete_rows": rows}
    return status, [f"{folder}: {len(rows)} complete rows: {', '.join(rows)}."]


# Stage of a demo -> its share of the time of a whole demo on a CPU.
STAGES = {
    **{"prepare": 0.02, "contrastive": 0.09, "embed": 0.09, "search": 0.02, "rerank": 0.11},
    **{"tune": 0.01, "refuse": 0.0, "select": 0.06, "answer": 0.51, "read": 0.09, "score": 0.0},
}


def seconds_left(records: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Seconds until a demo is complete, by what its complete stages took; None before the first."""
    done = sum(share for name, share in STAGES.items() if name in records)
    taken = sum(record["seconds"] for record in records.values())
    return taken * (sum(STAGES.values()) - done) / done if done else None


def demo_status(folder: Path, now: float | None = None) -> dict[str, Any]:
    """How far the demo in `folder` is, `now` (seconds since the epoch).

    `stages` and `stages_done` are numbers, `stage` runs or is next (None: all are done), `seconds`
    are those of the finished ones, `seconds_left` may be None (not known), `last` is how many
    seconds ago the demo was last heard of (None: never).
    """
    now = time.time() if now is None else now
    records = Workdir(folder).stages()
    stage = next((name for name in STAGES if name not in records), None)
    running = folder / "stages" / f".{stage}.running.json"
    elapsed, times = 0.0, [record["finished"] for record in records.values()]
    if stage is not None and running.exists():
        elapsed = float(read_json(running).get("seconds", 0.0))
        times.append(running.stat().st_mtime)
    left = 0.0 if stage is None else seconds_left(records)
    return {
        "folder": str(folder),
        "complete": stage is None,
        "stages": len(STAGES),
        "stages_done": sum(name in records for name in STAGES),
        "stage": stage,
        "seconds": sum(record["seconds"] for record in records.values()),
        "seconds_left": None if left is None else max(left - elapsed, 0.0),
        "last": max(now - max(times), 0.0) if times else None,
    }


def demo_line(status: dict[str, Any]) -> str:
    """Formats a demo's status."""
    name = f"{status['folder']}: demo"
    if status["complete"]:
        taken = duration(status["seconds"])
        return f"{name}: complete, {status['stages']} stages in {taken}; its report: report.html."
    parts = [
        f"{status['stages_done']} of {status['stages']} stages are done, now {status['stage']}"
    ]
    if status["seconds_left"] is not None:
        parts.append(f"about {duration(status['seconds_left'])} left")
    if status["last"] is not None:
        parts.append(f"last heard of {duration(status['last'])} ago")
    return f"{name}: {', '.join(parts)}; `mmqa demo` goes on where it stopped."


def row_status(folder: Path) -> dict[str, Any] | None:
    """A row of `mmqa run` that is finished, or has finished none of its chunks of questions yet.

    None: some chunks are finished, and runs/jobs.py knows more.
    """
    known = {"folder": str(folder), "row": read_config(folder).get("row")}
    file = folder / "scores.json"
    scores = read_json(file) if file.is_file() else None
    if isinstance(scores, dict) and "scores" in scores:
        finished = {"questions": scores.get("questions"), "scores": scores["scores"]}
        return {**known, "complete": True, **finished}
    return None if (folder / PARTS).is_dir() else {**known, "complete": False}


def row_line(status: dict[str, Any]) -> str:
    """Formats a row's status, with the first score of a finished one."""
    name = f"{status['folder']}: row {status['row']}"
    if not status["complete"]:
        return f"{name}: started, none of its questions is finished; `mmqa run` goes on."
    first = [f"{score_name(name)} {value:.3f}" for name, value in status["scores"].items()][:1]
    count = status["questions"]
    known = f"complete, {count:,} questions" if isinstance(count, int) else "complete"
    return f"{name}: {', '.join([known, *first])}."


# What a workdir holds, as far as `mmqa report` and `mmqa status` have to know.


Kind = Literal["training", "row", "demo", "sweep", "trainings", "rows", ""]
SWEEP = "sweep.json"  # of `mmqa sweep`, in its workdir
_DEPTH = 3  # how deep rows lie in a folder of several: DATASET/ROW, or a demo's rows/ROW


def kind_of(folder: Path) -> Kind:
    """Returns the kind of a workdir; "" if it is unknown.

    `sweep` is one over rows, `trainings` one over trainings, and `rows` a folder with finished rows
    below it.
    """
    if (folder / FILE).is_file() or (folder / METRICS).is_file():
        return "training"
    if (folder / "config.json").is_file():
        config = read_config(folder)
        if "row" in config:
            return "row"
        return "demo" if "contrastive" in config and "evaluate" in config else ""
    if (folder / SWEEP).is_file():
        content = read_json(folder / SWEEP)
        return "trainings" if isinstance(content, Mapping) and "task" in content else "sweep"
    return "rows" if finished_rows(folder) else ""


def finished_rows(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Path of a finished row below `folder`, relative to it -> its scores.json."""
    rows = {}
    for depth in range(1, _DEPTH + 1):
        for file in sorted(folder.glob("/".join(["*"] * depth) + "/scores.json")):
            scores = read_json(file)
            if isinstance(scores, Mapping) and {"row", "dataset", "scores"} <= scores.keys():
                rows[file.parent.relative_to(folder).as_posix()] = scores
    return rows


# `mmqa status` of a training run: how far it is, what its wall time went into; and of a sweep.


def is_training(folder: Path) -> bool:
    """Whether `folder` is the workdir of a training run that has started."""
    return (folder / FILE).is_file()


def training_status(folder: Path, now: float | None = None) -> dict[str, Any]:
    """How far the training run in `folder` is, `now` (seconds since the epoch).

    `step` is the last that is known of, `saved` are the steps of the checkpoints, `rate` (steps per
    second) and `seconds_left` may be None (not known), `last` is how many seconds ago the run was
    last heard of, `loss` stands in the last log row, and `goodput` is None where no time has
    passed.
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
    """Formats a status."""
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
    """Reads the task of a sweep over trainings, and sweep.json's record of each run.

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
    """Formats a sweep's status: a line for all runs, and one for each run under way."""
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
