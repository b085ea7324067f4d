"""`mmqa demo`: the whole pipeline on Atlas."""

import argparse
from pathlib import Path
from typing import Any

from mmqa_jax.commands import flags

SUMMARY = "run the whole pipeline on Atlas, from data to cited answers and a report."
EXAMPLE = "mmqa demo --workdir=workdir-demo --json"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.add_argument("--workdir", default="workdir-demo", help="everything is written here")
    flags.add_config(parser, default="configs/atlas/demo.py")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the demo, or continues it."""
    from mmqa_jax.core.config import load_config

    # A mistake in it is told before JAX is imported.
    config = load_config(arguments.config, arguments.overrides)
    from mmqa_jax.core.hosts import distributed

    distributed.start()
    from mmqa_jax.runs.demo import run_demo

    return run_demo(config, Path(arguments.workdir))
