"""`mmqa run`: one row of a paper's table, end to end."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmqa_jax.commands import flags
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.paths import as_path

if TYPE_CHECKING:
    from mmqa_jax.runs.reports.row import RowRun

SUMMARY = "run one row of a paper's table end to end; continues where it was interrupted."
EXAMPLE = "mmqa run --config=configs/webqa/tables.py:clip20_vlp --workdir=runs/tables/clip20_vlp"
STORE_OUTPUTS = ("workdir",)
STORE_CONFIG = True


_CHUNK = 512


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.description += (
        "\n\n`mmqa tables` lists the rows. To use other parts: --config.parts.reader.model=RUN; "
        "other\ndata: --config.data.dir=DIR. Written to --workdir: retrieval/*.jsonl,\n"
        "predictions.jsonl, per_question.jsonl, scores.json, report.html. All models use all\n"
        "devices of the process, in sizes that are chosen, printed and named in scores.json;\n"
        "--config.parts.llm.mesh.* and --config.parts.llm.engine.* set a language model's."
    )
    flags.add_config(parser)
    parser.add_argument("--workdir", help="everything is written here")
    parser.add_argument(
        "--keys", action="store_true", help="only list the row's config keys and their values"
    )
    parser.add_argument("--split", help="train, val or test (the row's own: val)")
    flags.add(parser, "limit")
    flags.add_shard(parser, "questions", _CHUNK)
    flags.add(parser, "download")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the row and prints its scores."""
    if arguments.workdir is None and not arguments.keys:
        raise UserError("mmqa run: --workdir is missing; name the folder that it writes to.")
    shard = flags.start(arguments)
    from mmqa_jax.core.config import load_config
    from mmqa_jax.runs.row import read_row
    from mmqa_jax.runs.run import run_row
    from mmqa_jax.weights.hub import download_model

    config = load_config(arguments.config, arguments.overrides, adds=True)
    row = read_row(config, split=arguments.split)
    if arguments.keys:
        keys = row.keys()
        for key, value in keys.items():
            print(f"--config.{key}={value}")
        return {"row": row.row, "keys": keys}
    if arguments.download:
        for name in row.on_hub() or [row.llm]:
            part = "parts.llm.model" if name == row.llm else "parts"
            download_model(name, f"config key {part}")
    folder = as_path(arguments.workdir)
    result = run_row(
        row,
        folder,
        limit=arguments.limit,
        shard=shard,
        chunk=arguments.chunk,
        engine=flags.engine(arguments),
    )
    if result is None:
        return {"row": row.row, "waiting_for_other_shards": True}
    return show_results(result, folder)


def show_results(result: RowRun, folder: Path) -> dict[str, Any]:
    """Prints what a row's run came to; returns scores.json."""
    from mmqa_jax.evaluation.scoring import losses_tables
    from mmqa_jax.evaluation.tables import show
    from mmqa_jax.runs.reports.row import row_title
    from mmqa_jax.runs.traces import counts_table

    for note in result.scores["notes"]:
        print(note, file=sys.stderr)
    tables = result.evaluation.tables(row_title(result.scores)) + losses_tables(result.scores)
    for table in [*tables, *counts_table(result.scores.get("prompts", {}))]:
        show(table)
    print(f"Report: {folder / 'report.html'}")
    return dict(result.scores)
