"""`mmqa candidates`: answer candidates and answer-aware examples, Prophet's stage 1 in use."""

import argparse
from pathlib import Path
from typing import Any

from mmqa_jax.commands import flags

SUMMARY = "answer candidates and answer-aware examples of a trained VQA model."
EXAMPLE = (
    "mmqa candidates --data=data/okvqa --model runs/mcan_0 runs/mcan_1 --examples_split=test "
    "--out=runs/candidates"
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    flags.add(parser, "data", "split")
    parser.add_argument(
        "--model",
        required=True,
        nargs="+",
        help="workdir of a VQA run, or several of them that were trained on different folds: each "
        "serves the questions that it was not trained on; or a folder of `mmqa convert`",
    )
    parser.add_argument(
        "--config",
        metavar="FILE[:MODE]",
        help="of a converted checkpoint: the config of its training, whose answers.file, tokenizer "
        "and features.root are read (--config.answers.file=FILE)",
    )
    parser.add_argument(
        "--examples_split",
        default="train",
        help="examples are the questions of this split that the model was trained on (train)",
    )
    flags.add_devices(parser, "questions")
    parser.add_argument(
        "--out", required=True, help="folder for candidates.json and answer_aware_examples.json"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Writes both files, and prints how good the candidates are."""
    from mmqa_jax.core.config import load_config
    from mmqa_jax.core.errors import UserError
    from mmqa_jax.runs.verbs.candidates import write_stage

    if arguments.overrides and not arguments.config:
        raise UserError(
            f"--config.{arguments.overrides[0]}: changes a config, but there is none; give "
            "--config=FILE, or leave it out: a run has its own."
        )
    config = load_config(arguments.config, arguments.overrides) if arguments.config else None
    return write_stage(
        Path(arguments.data),
        [Path(model) for model in arguments.model],
        Path(arguments.out),
        split=arguments.split,
        examples_split=arguments.examples_split,
        config=config,
        options=flags.serving_options(arguments),
    )
