"""`mmqa tables`: the papers' tables, published figures beside measured ones."""

from __future__ import annotations

import argparse
from typing import Any

from mmqa_jax.commands import flags

SUMMARY = "list the rows of the papers' tables: published and measured figures, commands, needs."
EXAMPLE = "mmqa tables webqa --workdir=runs/tables"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.add_argument(
        "paper",
        nargs="?",
        choices=("webqa", "pica", "rmr", "mavl", "llava", "atlas", "openstax"),
        help="a paper, or atlas or openstax, whose rows are ours (all)",
    )
    parser.add_argument(
        "--workdir", help="folder with the rows' workdirs (WORKDIR/ROW), for the measured figures"
    )
    parser.add_argument("--markdown", action="store_true", help="tables as markdown, to paste")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Lists the rows."""
    from mmqa_jax.evaluation.tables import show
    from mmqa_jax.runs.tables import PAPERS, commands_table, list_rows, rows_tables

    rows = []
    for paper in [arguments.paper] if arguments.paper else PAPERS:
        listed = list_rows(paper, flags.optional_path(arguments.workdir))
        for table in (*rows_tables(paper, listed), commands_table(paper, listed)):
            show(table, markdown=arguments.markdown)
        rows += listed
    return {"rows": rows}
