"""`mmqa compare`: runs side by side, with significance tests of their differences."""

import argparse
from pathlib import Path
from typing import Any

from mmqa_jax.commands import flags
from mmqa_jax.core.files import check_out

SUMMARY = "compare runs question by question: intervals, paired bootstrap, McNemar, Holm."
EXAMPLE = "mmqa compare runs/tables/vlp runs/tables/clip20_vlp --report=compare.html"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.add_argument(
        "workdirs", nargs="+", metavar="WORKDIR", help="finished runs of `mmqa run`"
    )
    parser.add_argument("--metric", help="a scorer of scores.json (the first that all runs have)")
    parser.add_argument(
        "--against_first",
        action="store_true",
        help="compare the other runs with the first, instead of every pair",
    )
    parser.add_argument(
        "--pairs",
        action="store_true",
        help="compare the second run with the first, the fourth with the third, and so on; the "
        "pairs may be of several data sets",
    )
    parser.add_argument(
        "--shared",
        action="store_true",
        help="compare on the questions that all runs were scored on",
    )
    parser.add_argument(
        "--report", metavar="FILE.html", help="a page with the runs' answers side by side"
    )
    flags.add(parser, "markdown")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compares the runs and prints the tables."""
    from mmqa_jax.core.errors import UserError
    from mmqa_jax.evaluation.compare import compare_pairs, compare_runs, compare_tables, read_run
    from mmqa_jax.evaluation.tables import show

    if arguments.pairs and (arguments.report or arguments.against_first):
        raise UserError("--pairs: takes neither --report nor --against_first; leave them out.")
    if arguments.report:
        from mmqa_jax.runs.reports.row import check_number, write_comparison

        check_number(len(arguments.workdirs))
        check_out(Path(arguments.report), flag="--report")
    runs = [read_run(Path(folder)) for folder in arguments.workdirs]
    metric, shared = arguments.metric, arguments.shared
    if arguments.pairs:
        compared = compare_pairs(runs, metric, shared=shared)
    else:
        first = arguments.against_first
        compared = compare_runs(runs, metric, against_first=first, shared=shared)
    if arguments.report:
        write_comparison(Path(arguments.report), runs, compared)
        compared["report"] = arguments.report
    for table in compare_tables(compared):
        show(table, markdown=arguments.markdown)
    if arguments.report:
        print(f"Report: {arguments.report}")
    return compared
