"""`mmqa evaluate`: predictions or rankings of any format against references of any format."""

import argparse
from typing import Any

from mmqa_jax.benchmarks import NAMES
from mmqa_jax.commands import flags

SUMMARY = "score predictions or rankings against references."
EXAMPLE = "mmqa evaluate atlas --references=data/atlas --predictions=runs/predictions.jsonl --json"
STORE_INPUTS = ("references", "sources", "predictions", "against", "bem")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.add_argument(
        "dataset", choices=("atlas", "webqa", *NAMES, "corpus"), help="the benchmark"
    )
    parser.add_argument(
        "--references",
        help="folder written by `mmqa prepare`, a benchmark's official files, WebQA's official "
        "output TSV (default: the predictions, if they are such a TSV or MMBench's table), or for "
        "rankings qrels of TREC, whose name has `qrels` in it",
    )
    parser.add_argument(
        "--predictions",
        required=True,
        help="predictions.jsonl, the benchmark's own formats, or a rankings file: .jsonl, or a run "
        "of TREC, .trec",
    )
    parser.add_argument(
        "--split",
        help="train, val or test (test; for vqav2, aokvqa and mmbench val, whose answers are "
        "public; mmbench's dev is val)",
    )
    parser.add_argument(
        "--only_given",
        action="store_true",
        help="score only the questions in the file (otherwise missing ones count 0)",
    )
    parser.add_argument(
        "--lemmatizer",
        choices=("none", "spacy"),
        help="spacy: the official scorer, the default for webqa if installed (`lemma` extra)",
    )
    parser.add_argument(
        "--bem",
        default="",
        metavar="DIR|NAME",
        help="evqa: BEM in transformers' layout (kortukov/answer-equivalence-bem), which judges "
        "answers that match no alternative",
    )
    parser.add_argument(
        "--bart",
        metavar="DIR",
        help="folder of bart-large-cnn with BARTScore's bart.pth, for fluency: webqa_fl/official, "
        "or webqa_fl/bart-large-cnn without that file",
    )
    flags.add(parser, "sources")
    parser.add_argument(
        "--submission",
        metavar="FILE",
        help="also write the predictions in the format of the benchmark's leaderboard",
    )
    parser.add_argument(
        "--against",
        metavar="FILE",
        help="another system's predictions: differences, paired by question, with p-values",
    )
    flags.add(parser, "markdown")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Scores predictions (answers and cited sources) or rankings; prints the tables."""
    from mmqa_jax.runs.verbs.evaluate import EvaluateOptions, evaluate

    arguments = flags.fetched(arguments, STORE_INPUTS)
    return evaluate(flags.fill(EvaluateOptions, arguments))
