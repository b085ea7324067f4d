"""`mmqa status`: how far a training run, a row, a demo or a job that shards compute is."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mmqa_jax.core.paths import as_path, check_store, in_store

SUMMARY = "show how far a training run, a row, a demo or a job in parts is, and the time left."
EXAMPLE = "mmqa status runs/retrieval/dense.jsonl"
STORE_OUTPUTS = ("path",)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.add_argument(
        "path",
        help="the --workdir of `mmqa train`, `run`, `sweep` or `demo`, or the --out of a job",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Prints what is known of a training run, or a line per shard of a job and one for all."""
    from mmqa_jax.runs.status import is_training, status_lines, training_status

    path = as_path(arguments.path)
    check_store(path)
    if is_training(path):
        training = training_status(path)
        print("\n".join(status_lines(training)))
        return training
    if (known := _of_workdir(path)) is not None:
        return known
    from mmqa_jax.core.chunks import named
    from mmqa_jax.core.progress import duration
    from mmqa_jax.evaluation.tables import Table, show
    from mmqa_jax.runs.jobs import find_job, job_status

    place = find_job(path)
    status = job_status(place)
    rows = [
        [
            shard["shard"],
            f"{shard['parts_done']}/{shard['parts']}",
            f"{shard['items_done']:,}/{shard['items']:,}",
            None if shard["rate"] is None else f"{shard['rate']:.3g}",
            None if shard["last"] is None else f"{duration(max(shard['last'], 0))} ago",
            shard["host"] or None,
        ]
        for shard in status["shards"]
    ]
    columns = ["shard", "parts", "items", "items/s", "last part", "host"]
    if rows:
        show(Table(status["folder"], columns, rows))
    last_step = (
        "start its command again, which finishes the records"
        if place.parts == "records"
        else "`mmqa merge` puts the parts together"
    )
    print(_sentence(status, named(status["missing"]), duration, last_step))
    return status


def _of_workdir(path: Path) -> dict[str, Any] | None:
    """Prints how far a demo, a finished row or a folder of rows is; None: it is none of these."""
    if in_store(path):  # where none of these lies
        return None
    from mmqa_jax.runs.status import kind_of

    kind = kind_of(path)
    if kind == "trainings":
        from mmqa_jax.runs.status import sweep_lines, sweep_status

        sweep = sweep_status(path)
        print("\n".join(sweep_lines(sweep)))
        return sweep
    if kind not in ("demo", "row", "rows", "sweep"):
        return None
    from mmqa_jax.runs import status as found

    if kind == "demo":
        demo = found.demo_status(path)
        print(found.demo_line(demo))
        return demo
    if kind in ("rows", "sweep"):
        rows = found.rows_status(path)
        print(found.rows_line(rows))
        return rows
    row = found.row_status(path)
    if row is not None:
        print(found.row_line(row))
    return row


def _sentence(status: dict[str, Any], missing: str, duration: Any, last_step: str) -> str:
    if status["complete"]:
        return f"{status['folder']}: complete."
    done = f"{status['items_done']:,} of {status['items']:,} items are done"
    if not status["missing"]:
        return f"{done}; {last_step}."
    left = status["seconds_left"]
    rate = "" if status["rate"] is None else f", {status['rate']:.3g} items/s"
    time = "" if left is None else f", about {duration(left)} left with all shards at work"
    return f"{done}{rate}{time}; missing parts: {missing}."
