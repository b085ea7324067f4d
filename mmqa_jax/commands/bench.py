"""`mmqa bench`: speed and memory against a peer on the same inputs."""

from __future__ import annotations

import argparse
from typing import Any

from mmqa_jax.bench import SIZES, available, describe
from mmqa_jax.commands import flags

SUMMARY = "measure speed or memory against a peer on the same inputs."
EXAMPLE = "mmqa bench models --only=clip_image,bert --json"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.description += f"\n\nbenches:\n{describe()}"
    parser.add_argument("name", choices=available(), metavar="NAME", help="one of the above")
    flags.add_only(parser, "ROW", "the rows to measure (all)")
    parser.add_argument("--rounds", type=int, help="timing repetitions (the bench's default)")
    parser.add_argument(
        "--size",
        choices=SIZES,
        help="full: published sizes, which need a large machine (the bench's default)",
    )
    parser.add_argument(
        "--data", metavar="DIR", help="input: a prepared corpus (generated pictures and texts)"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures and prints the table."""
    from mmqa_jax.bench import Options, run_bench, show

    options = Options(arguments.rounds, tuple(arguments.only), arguments.size, arguments.data)
    result = run_bench(arguments.name, options)
    show(result)
    return result
