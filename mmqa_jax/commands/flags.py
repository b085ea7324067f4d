"""Flags that several verbs share."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmqa_jax.core.errors import UserError

# The question-answering benchmarks whose official files `prepare` and `evaluate` read.
BENCHMARKS = ("vqav2", "okvqa", "aokvqa", "scienceqa", "mmbench", "seedbench")


def add_config(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """`--config=FILE[:MODE]`; cli.py handles `--config.KEY=VALUE`."""
    parser.add_argument(
        "--config",
        default=default,
        required=default is None,
        metavar="FILE[:MODE]",
        help="experiment file; :runlocal is a run of a few seconds; "
        "--config.KEY=VALUE overrides one value",
    )


def add_data(parser: argparse.ArgumentParser) -> None:
    """`--data`."""
    parser.add_argument("--data", required=True, help="folder written by `mmqa prepare`")


def add_split(parser: argparse.ArgumentParser) -> None:
    """`--split`."""
    parser.add_argument("--split", default="test", help="train, val or test (test)")


def add_select(parser: argparse.ArgumentParser) -> None:
    """`--select`."""
    parser.add_argument(
        "--select",
        choices=("best", "above"),
        default="best",
        help="best: always the best source, and the second from the threshold on (WebQA's full "
        "scale, 6.2); above: all above it, possibly none (WebQA's restricted setting)",
    )


def check_top_k(top_k: int) -> None:
    """UserError for a --top_k below 1."""
    if top_k < 1:
        raise UserError(f"--top_k={top_k}: at least 1 was expected; give a larger number.")


def add_download(parser: argparse.ArgumentParser) -> None:
    """`--download`."""
    parser.add_argument(
        "--download",
        action="store_true",
        help="first fetch what the Hugging Face cache lacks of ORG/NAME (token: HF_TOKEN)",
    )


def optional_path(text: str | None) -> Path | None:
    """The path given by an optional flag."""
    return Path(text) if text else None
