"""`mmqa report`: report.html of any workdir."""

import argparse
from pathlib import Path
from typing import Any

SUMMARY = "write report.html of a demo, a training run, a row, a sweep, or a folder of rows."
EXAMPLE = "mmqa report --workdir=workdir-demo"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.add_argument(
        "--workdir",
        default="workdir-demo",
        help="of a finished demo, of a training run, finished or not, of a finished row of "
        "`mmqa run`, of a sweep, or a folder of several rows' workdirs (workdir-demo)",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Writes the report of what the workdir holds."""
    from mmqa_jax.runs.status import kind_of

    folder = Path(arguments.workdir)
    kind = kind_of(folder)
    if kind == "training":
        from mmqa_jax.runs.reports.training import write_training_report

        return write_training_report(folder)
    if kind not in ("row", "rows", "sweep", "trainings"):
        from mmqa_jax.runs.demo import write_demo_report

        return write_demo_report(folder)
    from mmqa_jax.evaluation.tables import show
    from mmqa_jax.runs.reports.row import report_row, report_rows
    from mmqa_jax.runs.sweep import report_sweep

    if kind in ("sweep", "trainings"):
        path, *tables = report_sweep(folder)
    else:
        path, tables = report_row(folder) if kind == "row" else report_rows(folder)
    for table in tables:
        show(table)
    print(f"Report: {path}")
    return {"report": str(path)}
