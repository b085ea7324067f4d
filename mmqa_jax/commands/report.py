"""`mmqa report`: report.html of a finished demo, or of a training run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

SUMMARY = "write report.html from the workdir of a demo or of a training run."
EXAMPLE = "mmqa report --workdir=workdir-demo"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.add_argument(
        "--workdir",
        default="workdir-demo",
        help="of a finished demo, or of a training run, finished or not: its curves and validation",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Writes the report."""
    from mmqa_jax.runs.demo import write_demo_report
    from mmqa_jax.runs.training_report import METRICS, write_training_report

    folder = Path(arguments.workdir)
    is_training = (folder / METRICS).exists()
    return write_training_report(folder) if is_training else write_demo_report(folder)
