"""`mmqa status` of a training run: how far it is, and what its wall time went into.

Neither this nor what it imports imports JAX: `status` answers at once.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.metrics import read_metrics
from mmqa_jax.core.progress import duration
from mmqa_jax.core.workdir import read_config, steps_in
from mmqa_jax.data.table_files import real_number, whole_number
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
