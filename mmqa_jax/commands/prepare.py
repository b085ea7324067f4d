"""`mmqa prepare`: official files to ArrayRecord."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mmqa_jax.commands import flags

SUMMARY = "turn a benchmark's official files into ArrayRecord."
EXAMPLE = "mmqa prepare atlas --out=data/atlas"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.add_argument(
        "dataset",
        choices=("atlas", "webqa", *flags.BENCHMARKS, "corpus"),
        help="atlas is built from installed packages; corpus reads your own documents",
    )
    parser.add_argument("--raw", help="folder with the official files, or with your documents")
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the corpus in --out (atlas: prepare it again from the files in its raw "
        "folder)",
    )
    parser.add_argument(
        "--max_broken_pictures",
        type=int,
        help="how many pictures may be broken and left out (1 in 100, at least 10)",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Prepares the corpus."""
    from mmqa_jax.runs.prepare import prepare

    return prepare(
        arguments.dataset,
        flags.optional_path(arguments.raw),
        Path(arguments.out),
        overwrite=arguments.overwrite,
        max_broken_pictures=arguments.max_broken_pictures,
    )
