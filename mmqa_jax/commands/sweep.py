"""`mmqa sweep`: one row, or one training, at several values of its config's keys."""

import argparse
from pathlib import Path
from typing import Any

from mmqa_jax.commands import flags
from mmqa_jax.core.errors import RunError, UserError

SUMMARY = "run one row, or train one model, at several values of its config's keys; table and plot."
EXAMPLE = (
    "mmqa sweep --config=configs/okvqa/tables.py:smollm2_mavl --over options.shots=0,1,4,8 "
    "--over options.candidates=0,1,3,5 --workdir=runs/sweep"
)

_CHUNK = 512


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.description += (
        "\n\nEvery cell is a row of its own in WORKDIR/KEY=VALUE_..., which `mmqa compare`, `mmqa\n"
        "report` and `mmqa tables` take; all share the opened models and WORKDIR/journals, so\n"
        "that a prompt of several cells is asked once. They run one after the other; started\n"
        "again the sweep continues, and finished cells and answers are kept.\n"
        "Written besides: sweep.json, sweep.md (the table) and report.html (table and plot),\n"
        "anew after every cell.\n\n"
        "With the config of a training (it has a key `task`) every combination is a run of\n"
        "`mmqa train` in WORKDIR/KEY=VALUE_..., one after the other: started again the sweep\n"
        "resumes the run that was stopped and leaves finished ones alone. The table has each\n"
        "run's best validation, loss, step and goodput, and report.html the curves of all runs."
    )
    flags.add_config(parser)
    parser.add_argument(
        "--over",
        action="append",
        required=True,
        metavar="KEY=VALUE,...",
        help="a key of the config and its values; given several times, all combinations are run, "
        "and the first key is the plot's axis",
    )
    flags.add(parser, "workdir")
    parser.add_argument("--split", help="train, val or test (the row's own)")
    flags.add(parser, "limit")
    parser.add_argument(
        "--chunk",
        type=int,
        default=_CHUNK,
        metavar="C",
        help=f"questions of a chunk, the most that a kill can lose ({_CHUNK})",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs all cells and prints their table."""
    from mmqa_jax.core.config import load_config
    from mmqa_jax.core.hosts import distributed

    is_training = "task" in load_config(arguments.config, arguments.overrides, adds=True)
    distributed.start(join=is_training)
    from mmqa_jax.evaluation.tables import show
    from mmqa_jax.runs import sweep

    if is_training:
        for flag, default in {"split": None, "limit": None, "chunk": _CHUNK}.items():
            if getattr(arguments, flag) != default:
                raise UserError(
                    f"--{flag}: is of a sweep over rows, and {arguments.config} describes a "
                    "training; leave it out."
                )
    axes, folder = sweep.parse_axes(arguments.over), Path(arguments.workdir)
    cells = sweep.read_cells(arguments.config, arguments.overrides, axes, arguments.split)
    if is_training:
        finished = sweep.run_trainings(cells, folder)
        table = sweep.trainings_table("Sweep", finished)
    else:
        finished = sweep.run_sweep(cells, folder, limit=arguments.limit, chunk=arguments.chunk)
        table = sweep.sweep_table(f"{cells[0].run.dataset}, {cells[0].run.row}", finished)
    show(table)
    print(f"Report: {folder / 'report.html'}")
    if failed := [record for record in finished if "failed" in record]:
        raise RunError(
            f"{len(failed)} of {len(finished)} runs ended early, the first of them "
            f"{failed[0]['workdir']}: {failed[0]['failed']}"
        )
    return {"cells": finished}
