"""`mmqa status` of a demo and of rows; of training runs and jobs: training_status.py, jobs.py."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmqa_jax.core.chunks import PARTS
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.core.progress import duration
from mmqa_jax.core.workdir import Workdir, read_config
from mmqa_jax.evaluation.score_names import score_name
from mmqa_jax.runs.workdirs import finished_rows

# Stage of a demo -> its share of the time of a whole demo on a CPU.
STAGES = {
    **{"prepare": 0.02, "contrastive": 0.09, "embed": 0.09, "search": 0.02, "rerank": 0.11},
    **{"tune": 0.01, "refuse": 0.0, "select": 0.06, "answer": 0.51, "read": 0.09, "score": 0.0},
}


def seconds_left(records: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Seconds until a demo is complete, by what its stages so far took; None before the first.

    Args:
      records: of its complete stages (Workdir.stages).
    """
    done = sum(share for name, share in STAGES.items() if name in records)
    taken = sum(record["seconds"] for record in records.values())
    return taken * (sum(STAGES.values()) - done) / done if done else None


def demo_status(folder: Path, now: float | None = None) -> dict[str, Any]:
    """How far the demo in `folder` is.

    Args:
      now: seconds since the epoch.

    Returns:
      `stages` and `stages_done` (numbers), `stage` (that runs or is next; None: all are done),
      `seconds` (of those that are done), `seconds_left` (None: not known), `complete`, `last`
      (seconds since it was last heard of; None: never).
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
    """What is printed of a demo's status."""
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
    """What is printed of a row's status: of a finished one its first score besides."""
    name = f"{status['folder']}: row {status['row']}"
    if not status["complete"]:
        return f"{name}: started, none of its questions is finished; `mmqa run` goes on."
    first = [f"{score_name(name)} {value:.3f}" for name, value in status["scores"].items()][:1]
    count = status["questions"]
    known = f"complete, {count:,} questions" if isinstance(count, int) else "complete"
    return f"{name}: {', '.join([known, *first])}."


def rows_status(folder: Path) -> dict[str, Any]:
    """The finished rows below `folder`; UserError for a sweep that lacks them all."""
    rows = finished_rows(folder)
    if not rows:
        raise UserError(
            f"{folder}: holds a sweep without a finished cell; start `mmqa sweep` again."
        )
    return {"folder": str(folder), "complete": True, "complete_rows": list(rows)}


def rows_line(status: dict[str, Any]) -> str:
    """What is printed of a folder of rows."""
    rows = status["complete_rows"]
    return f"{status['folder']}: {len(rows)} complete rows: {', '.join(rows)}."
