"""`mmqa index`: a nearest-neighbor index over embeddings."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

SUMMARY = "build a nearest-neighbor index over embeddings."
EXAMPLE = "mmqa index --embeddings=runs/index --kind=auto"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.add_argument("--embeddings", required=True, help="folder written by `mmqa embed`")
    parser.add_argument(
        "--kind",
        choices=("auto", "scann", "exact"),
        default="auto",
        help="auto: ScaNN where it is available, exact otherwise",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Builds the index."""
    from mmqa_jax.systems.indexing import index

    return index(Path(arguments.embeddings), arguments.kind)
