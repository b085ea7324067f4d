"""`mmqa judge`: which solved examples help a language model to answer."""

import argparse
from pathlib import Path
from typing import Any

from mmqa_jax.commands import flags

SUMMARY = (
    "let a language model judge which solved examples help it to answer, to train their retriever."
)
EXAMPLE = (
    "mmqa judge --config=configs/scienceqa/rmr_retriever.py:judge "
    "--config.data.dir=data/scienceqa --workdir=runs/example-scores"
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    flags.add_config(parser)
    parser.add_argument(
        "--workdir",
        required=True,
        help="example_scores.jsonl goes here, and the answers so far, from which an interrupted "
        "run continues",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Judges the candidates of all questions."""
    from mmqa_jax.core.config import load_config
    from mmqa_jax.runs.verbs.judging import run_judging

    config = load_config(arguments.config, arguments.overrides)
    return run_judging(config, Path(arguments.workdir))
