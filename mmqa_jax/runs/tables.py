"""The papers' tables: every row with its published figures and, once run, the measured ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mmqa_jax.core.config import find_config, load_module
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.evaluation.significance import Interval
from mmqa_jax.evaluation.tables import Cell, Table, llm_columns, llm_use
from mmqa_jax.prompting.http_client import URL
from mmqa_jax.runs.parts import LLMSpec
from mmqa_jax.runs.row import Row, read_row

# Paper -> the folders of configs/ whose tables.py has rows of it.
PAPERS = {
    "webqa": ("webqa",),
    "pica": ("okvqa", "aokvqa"),
    "rmr": ("scienceqa", "aokvqa", "mmbench", "seedbench", "openstax"),
    "mavl": ("okvqa", "aokvqa"),
    "llava": ("scienceqa", "mmbench", "seedbench"),
    "atlas": ("atlas",),
    "openstax": ("openstax",),
}


_WIDEST = 9  # columns of figures that a terminal of 120 characters holds


def list_rows(paper: str, workdir: Path | None = None) -> list[dict[str, Any]]:
    """Every published figure of a paper's tables: the rows of `mmqa tables --json`.

    Args:
      paper: of PAPERS.
      workdir: folder of rows' workdirs (WORKDIR/ROW), or one row's own.

    Returns:
      One dict per figure: paper, table, row, column, published, tolerance, scorer, command, needs,
      measured, interval (95%) and n (where scores.json has them), llm (calls and prompt tokens per
      question), limit, sample (if not the row's own `data.questions`) and status: `pass` or `fail`
      (of all questions of the row), `not run`, `needs` (inputs are missing), `cited only`,
      `missing` (not implemented yet), or, of a row of ours without a published figure, `measured`.
    """
    return [figure for dataset in PAPERS[paper] for figure in _rows_of(paper, dataset, workdir)]


def _rows_of(paper: str, dataset: str, workdir: Path | None) -> list[dict[str, Any]]:
    """The figures of one paper in configs/DATASET/tables.py."""
    tables = load_module(find_config(f"configs/{dataset}/tables.py"))
    listed = []
    for name, content in tables.ROWS.items():
        if content.get("paper", dataset) != paper:
            continue
        row = read_row(tables.get_config(name))
        measured = None if workdir is None else _scores(workdir, dataset, name, row.dataset)
        needs = [f"{path}: {how}" for path, how in row.missing_inputs().items()]
        needs += _missing_server(row)
        command = (
            f"mmqa run --config=configs/{dataset}/tables.py:{name} "
            f"--workdir=runs/tables/{dataset}/{name}"
        )
        for cell in row.published or _ours(dataset, name, measured):
            listed.append(_figure(paper, name, dict(cell), command, needs, measured, row))
    for status, rows in (("missing", tables.MISSING), ("cited only", tables.CITED)):
        for name, cells in rows.items():
            for cell in cells:
                if cell.get("paper", tables.PAPER) == paper:
                    figure = _figure(paper, name, dict(cell), "", [], None, None)
                    listed.append({**figure, "status": status})
    return listed


def _missing_server(row: Row) -> list[str]:
    """The server that a row's language model is on, unless the environment names one."""
    llm = row.parts.get("llm")
    if not isinstance(llm, LLMSpec) or llm.backend != "openai" or os.environ.get(URL):
        return []
    return [f"{URL}: the address of a server with OpenAI's API that serves {llm.model}"]


def _ours(dataset: str, name: str, scores: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """A figure per score of a row that no paper has; without a run one that says so."""
    scorers = list(scores["scores"]) if scores else [""]
    return [
        {
            "table": f"ours, {dataset}",
            "row": name,
            "column": scorer,
            "published": None,
            "tolerance": None,
            "scorer": scorer,
            "group": "",
        }
        for scorer in scorers
    ]


def rows_tables(paper: str, listed: list[dict[str, Any]]) -> list[Table]:
    """The result of `list_rows` as tables.

    The papers' figures, a line per row; below them what has been measured of these rows, and of
    our own.
    """
    published = [figure for figure in listed if figure["published"] is not None]
    numbers = sorted(dict.fromkeys(figure["table"] for figure in published), key=_numbered)
    tables = [
        table
        for number in numbers
        for table in _published(paper, [one for one in published if one["table"] == number])
    ]
    measured = [figure for figure in listed if figure["measured"] is not None]
    for title in dict.fromkeys(_group(figure) for figure in measured):
        figures = [figure for figure in measured if _group(figure) == title]
        tables.append(_measured_table(f"{paper}, {title}", figures))
    return tables


def _numbered(table: str) -> int:
    """A table's number; tables and figures with a name of their own come behind the numbered."""
    return int(table) if table.isdigit() else sys.maxsize


def _published(paper: str, figures: list[dict[str, Any]]) -> Iterator[Table]:
    """One table of a paper, in pieces of at most _WIDEST columns."""
    number = figures[0]["table"]
    name = f"{paper}, table {number}" if number.isdigit() else f"{paper}, {number}"
    columns = list(dict.fromkeys(figure["column"] for figure in figures))
    for start in range(0, len(columns), _WIDEST):
        shown = columns[start : start + _WIDEST]
        rows: dict[tuple[str, str], dict[str, float]] = {}
        for figure in figures:
            run = figure["config_row"] if figure["command"] else f"({figure['status']})"
            if figure["column"] in shown:
                own = rows.setdefault((figure["row"], run), {})
                own[figure["column"]] = figure["published"]
        part = f" ({start // _WIDEST + 1})" if len(columns) > _WIDEST else ""
        yield Table(
            f"{name}, published{part}",
            ("row", "config row", *(column.replace("_", " ") for column in shown)),
            [[*names, *map(values.get, shown)] for names, values in rows.items()],
        )


def _group(figure: Mapping[str, Any]) -> str:
    """`measured`, or `ours, DATASET`."""
    return "measured" if figure["published"] is not None else figure["table"]


def _measured_table(title: str, figures: list[dict[str, Any]]) -> Table:
    """A line per measured figure; of the papers' with the published one and whether it is met."""
    ours = figures[0]["published"] is None
    used, counts = llm_columns([one["llm"] for one in figures])
    rows: list[list[Cell]] = []
    for one, asked in zip(figures, counts, strict=True):
        value: Cell = one["measured"]
        if one["interval"]:
            value = Interval(one["measured"], *one["interval"])
        note = f"first {one['limit']} only" if one["limit"] else ""
        if one["sample"]:
            note = f"{one['sample']:,} questions only"
        if not ours:
            note = one["status"] + (f" ({note})" if note else "")
        published = () if ours else (one["published"],)
        rows.append([one["config_row"], one["column"], *published, value, one["n"], *asked, note])
    between = () if ours else ("published",)
    columns = ("config row", "score", *between, "measured [95% interval]", "n", *used, "status")
    return Table(title, columns, rows)


def commands_table(paper: str, listed: list[dict[str, Any]]) -> Table:
    """The config of every row that can be run, and the inputs that it still needs."""
    rows: dict[str, list[Cell]] = {}
    for figure in listed:
        if figure["command"]:
            _, _, config = figure["command"].partition(" --config=")
            needs = "; ".join(need.partition(":")[0] for need in figure["needs"])
            rows[figure["command"]] = [config.partition(" ")[0], needs or "–"]
    note = (
        "Run one with: mmqa run --config=CONFIG --workdir=runs/tables/DATASET/ROW. What is missing "
        "and where it comes from: mmqa tables --json, key needs."
    )
    return Table(f"{paper}, rows to run", ("config", "still needs"), list(rows.values()), note)


def _figure(
    paper: str,
    name: str,
    cell: Mapping[str, Any],
    command: str,
    needs: list[str],
    scores: Mapping[str, Any] | None,
    row: Row | None,
) -> dict[str, Any]:
    measured = None if scores is None else _measured(scores, cell["scorer"], cell["group"])
    status = "needs" if needs else "not run"
    needs_bart = cell["scorer"].startswith("webqa_fl") and row and not row.scoring.bart
    if measured is None and needs_bart:
        needs = [*needs, "--config.scoring.bart: bart-large-cnn with BARTScore's bart.pth"]
        status = "needs"
    limit = None if scores is None else scores.get("limit")
    # How many questions a run took of those that its row does, by `data.questions`.
    sample = None if scores is None else scores.get("sample") or None
    if row is not None and sample == row.data.questions:
        sample = None
    whole = limit is None and sample is None
    if measured is not None and cell["published"] is None:
        status = "measured"
    elif measured is not None and whole and scores["split"] == row.data.split:
        within = abs(measured - cell["published"]) <= cell["tolerance"]
        status = "pass" if within else "fail"
    return {
        "paper": paper,
        "table": cell["table"],
        "row": cell["row"],
        "column": cell["column"],
        "published": cell["published"],
        "tolerance": cell["tolerance"],
        "scorer": cell["scorer"],
        "config_row": name,
        "command": command,
        "needs": needs,
        "measured": measured,
        **_certainty({} if measured is None else scores, cell["scorer"], cell["group"]),
        "llm": {} if scores is None else llm_use(scores),
        "limit": limit,
        "sample": sample,
        "status": status,
    }


def _measured(scores: Mapping[str, Any], scorer: str, group: str) -> float | None:
    """The mean of a scorer over all questions, a category or a modality; None: not scored."""
    if not group:
        return scores["scores"].get(scorer)
    for key in ("by_category", "by_modality"):
        found = scores.get(key, {}).get(group, {}).get(scorer)
        if found is not None:
            return found
    return None


def _certainty(scores: Mapping[str, Any], scorer: str, group: str) -> dict[str, Any]:
    """The 95% interval of a score over all questions, and over how many questions a score is."""
    if group:
        return {"interval": None, "n": scores.get("n_by_category", {}).get(group)}
    interval = scores.get("intervals", {}).get(scorer)
    return {"interval": interval, "n": scores.get("n_by_scorer", {}).get(scorer)}


def _scores(workdir: Path, folder: str, row: str, dataset: str) -> Mapping[str, Any] | None:
    """scores.json of a row: in WORKDIR/FOLDER/ROW, in WORKDIR/ROW or in `workdir` itself."""
    if not workdir.is_dir():
        raise UserError(f"--workdir={workdir}: no such folder; name one that holds rows' workdirs.")
    for place in (workdir / folder / row, workdir / row, workdir):
        file = place / "scores.json"
        if file.exists():
            scores = read_json(file)
            if not isinstance(scores, Mapping):
                continue
            if (scores.get("row"), scores.get("dataset")) == (row, dataset):
                return scores
    return None
