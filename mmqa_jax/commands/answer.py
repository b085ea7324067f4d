"""`mmqa answer`: answers from gold sources, given sources, or none."""

import argparse
import dataclasses
from typing import Any

from mmqa_jax.commands import flags

SUMMARY = "answer every question from given sources, with beam search."
EXAMPLE = (
    "mmqa answer --data=data/atlas --model=runs/answer --sources=oracle "
    "--out=runs/predictions.jsonl"
)
STORE_INPUTS = ("data", "model", "sources")
STORE_OUTPUTS = ("out",)


_CHUNK = 512


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    flags.add(parser, "data", "split")
    parser.add_argument(
        "--model", required=True, help="workdir of an answer training run, or its folder best"
    )
    parser.add_argument(
        "--sources",
        default="oracle",
        help="`oracle` (the gold sources, if published), `none`, or a file of `mmqa rerank`",
    )
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.2,
        help="probability that a source needs to be cited (0.2); `mmqa rerank` sweeps it",
    )
    flags.add(parser, "select")
    flags.add_devices(parser, "questions")
    flags.add_shard(parser, "questions", _CHUNK)
    parser.add_argument("--out", required=True, help="predictions.jsonl to write")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Answers the questions of a split."""
    shard = flags.start(arguments)
    arguments = flags.fetched(arguments, STORE_INPUTS)
    from mmqa_jax.runs.verbs import one_stage

    files = dataclasses.replace(flags.stage_files(arguments, shard), sources="")
    chosen = arguments.sources, arguments.threshold, arguments.select
    return one_stage.answer(files, arguments.model, *chosen)
