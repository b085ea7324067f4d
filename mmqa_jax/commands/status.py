"""`mmqa status`: how far a training run, a row, a demo or a job that shards compute is."""

import argparse
from typing import Any

from mmqa_jax.core.paths import as_path, check_store

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
    """Prints the status of a training run, or a line per shard of a job and one for all."""
    from mmqa_jax.runs.status import workdir_status, writer_lines

    path = as_path(arguments.path)
    check_store(path)
    if (known := workdir_status(path)) is not None:
        status, lines = known
        print("\n".join(lines))
        return status
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
    if not status["complete"]:
        print("\n".join(writer_lines(path)))
    return status


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
