"""`mmqa train`: one training run."""

import argparse
from typing import Any

from mmqa_jax.commands import flags
from mmqa_jax.core.paths import as_path

SUMMARY = "train one model; continues where an interrupted run stopped."
EXAMPLE = (
    "mmqa train --config=configs/atlas/rerank.py --config.data.dir=data/atlas --workdir=runs/rerank"
)
STORE_OUTPUTS = ("workdir",)
STORE_CONFIG = True


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    flags.add_config(parser)
    parser.add_argument(
        "--workdir",
        required=True,
        help="checkpoints, metrics and weights go here, and the weights of the best step in its "
        "folder best, if the config validates",
    )
    parser.add_argument(
        "--only_start",
        action="store_true",
        help="take no steps: create a workdir with the weights named by config.init, for other "
        "verbs",
    )
    parser.add_argument(
        "--skip_damaged",
        action="store_true",
        help="set a checkpoint whose files are damaged aside (as STEP.damaged) and go on from the "
        "one before it, instead of stopping with the file's name",
    )
    parser.add_argument(
        "--stretch_schedule",
        action="store_true",
        help="go on with another train.steps although the learning rates of the steps that were "
        "taken would have been others (a constant schedule needs no flag)",
    )
    parser.add_argument(
        "--profile",
        metavar="START:END",
        help="write a trace of these steps, both included, to WORKDIR/profile, for xprof or "
        "TensorBoard",
    )
    parser.add_argument(
        "--wandb",
        metavar="PROJECT",
        help="log the rows of metrics.jsonl to Weights & Biases too (extra `wandb`; "
        "WANDB_MODE=offline needs no network)",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains, or resumes."""
    from mmqa_jax.core.hosts import distributed

    distributed.start()
    from mmqa_jax.core.config import load_config
    from mmqa_jax.tasks.run import run_training

    config = load_config(arguments.config, arguments.overrides, adds=True)
    return run_training(
        config,
        as_path(arguments.workdir),
        only_start=arguments.only_start,
        profile=arguments.profile,
        wandb=arguments.wandb,
        skip_damaged=arguments.skip_damaged,
        stretch_schedule=arguments.stretch_schedule,
    )
