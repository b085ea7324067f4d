"""`mmqa tables`: the papers' tables, published figures beside measured ones."""

import argparse
from typing import Any

from mmqa_jax.commands import flags

# Of runs/tables.py: PAPERS and datasets(), which this list does without loading.
NAMES = (
    *("webqa", "pica", "rmr", "mavl", "llava", "mmcot", "echosight", "atlas", "openstax"),
    *("okvqa", "aokvqa", "scienceqa", "mmbench", "seedbench", "multimodalqa", "infoseek", "evqa"),
    *("mbeir", "vidore", "mmmu", "mragbench", "mathvista", "bright"),
    *("dynvqa", "mmsearch", "fvqa", "livevqa", "mmeb", "mmlongbench", "citevqa"),
)
SUMMARY = "list the papers' tables, published and measured, commands, needs, and the best systems."
EXAMPLE = "mmqa tables webqa --workdir=runs/tables"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.add_argument(
        "name",
        nargs="?",
        metavar="PAPER_OR_DATASET",
        choices=NAMES,
        help=f"a paper or a data set: {', '.join(NAMES)} (all)",
    )
    parser.add_argument(
        "--workdir",
        help="folder with the rows' workdirs (WORKDIR/ROW), or a demo's, for the measured figures "
        "(runs/tables and workdir-demo)",
    )
    flags.add(parser, "markdown")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Lists the rows."""
    from mmqa_jax.evaluation.tables import show
    from mmqa_jax.runs.tables import board_tables, commands_table, list_rows, paper_tables

    rows = list_rows(arguments.name, flags.optional_path(arguments.workdir))
    for paper in dict.fromkeys(figure["paper"] for figure in rows):
        figures = [figure for figure in rows if figure["paper"] == paper]
        for table in (*paper_tables(figures), commands_table(figures)):
            show(table, markdown=arguments.markdown)
    for table in board_tables(rows):
        show(table, markdown=arguments.markdown)
    return {"rows": rows}
