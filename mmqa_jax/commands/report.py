"""`mmqa report`: rewrites the report.html of a finished demo."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

SUMMARY = "write report.html from a demo's workdir."
EXAMPLE = "mmqa report --workdir=workdir-demo"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.add_argument("--workdir", default="workdir-demo", help="a finished demo's workdir")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Writes the report."""
    from mmqa_jax.systems.demo import write_demo_report

    return write_demo_report(Path(arguments.workdir))
