"""The papers' tables: every row with its published figures and, once run, the measured ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmqa_jax.benchmarks import NAMES
from mmqa_jax.benchmarks.benchmark import Board, open_benchmark
from mmqa_jax.core.config import find_config, load_module
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.evaluation.significance import Interval
from mmqa_jax.evaluation.tables import Cell, Table, llm_columns, llm_use
from mmqa_jax.prompting.backends.http_client import URL
from mmqa_jax.runs.parts import LLMSpec
from mmqa_jax.runs.row import Row, read_row

# Paper -> the folders of configs/ whose tables.py has rows of it.
PAPERS = {
    "webqa": ("webqa",),
    "pica": ("okvqa", "aokvqa"),
    "rmr": ("scienceqa", "aokvqa", "mmbench", "seedbench", "openstax"),
    "mavl": ("okvqa", "aokvqa"),
    "llava": ("scienceqa", "mmbench", "seedbench"),
    "mmcot": ("scienceqa",),
    "atlas": ("atlas",),
    "openstax": ("openstax",),
    "multimodalqa": ("multimodalqa",),
    "echosight": ("evqa", "infoseek"),
    "infoseek": ("infoseek",),
    "evqa": ("evqa",),
    "mbeir": ("mbeir",),
    "vidore": ("vidore",),
    "mmmu": ("mmmu",),
    "mragbench": ("mragbench",),
    "mathvista": ("mathvista",),
    "bright": ("bright",),
    **{
        name: (name,)
        for name in ("dynvqa", "mmsearch", "fvqa", "livevqa", "mmeb", "mmlongbench", "citevqa")
    },
}
# Folders of rows' workdirs that are looked into where no other is named.
PLACES = ("runs/tables", "workdir-demo/rows")

# Models of published figures that nobody can ask any more, by the model that a row of ours names.
SHUT_DOWN = {
    "gemini-pro-vision": "Gemini 1.0 Pro Vision was shut down on 9 April 2025",
    "davinci-002": "GPT-3's davinci was shut down on 4 January 2024 (davinci-002 is another model)",
}

_WIDEST = 9  # columns of figures that a terminal of 120 characters holds


def datasets() -> list[str]:
    """The data sets that have rows."""
    return list(dict.fromkeys(dataset for folders in PAPERS.values() for dataset in folders))


def list_rows(name: str | None, workdir: Path | None = None) -> list[dict[str, Any]]:
    """Every published figure of a paper's or a data set's tables: the rows of `mmqa tables --json`.

    Args:
      name: of PAPERS or of `datasets()`; what is both lists all rows of the data set. None: all.
      workdir: folder of rows' workdirs (WORKDIR/ROW), one row's own, or a demo's; by default the
        PLACES that exist.

    Returns:
      One dict per figure: paper, dataset, table, row, column, published, tolerance, scorer,
      command, needs, shut_down (why nobody can measure the published figure again, or ""),
      measured, interval (95%) and n (where scores.json has them), llm (calls and prompt tokens per
      question), limit, sample (if not the row's own `data.questions`), workdir (of the measured
      figure) and status: `pass` or `fail` (of all questions of the row), `partial` (of some of
      them or of another split, which neither passes nor fails), `leaderboard` (run, but only that
      has the answers of the row's split), `not run`, `needs` (inputs are missing), `cited only`,
      `missing` (not implemented yet), or, of a row of ours without a published figure, `measured`.
    """
    there = [place for place in map(Path, PLACES) if place.is_dir()]
    places = there if workdir is None else [workdir]
    if workdir is not None and not workdir.is_dir():
        raise UserError(f"--workdir={workdir}: no such folder; name one that holds rows' workdirs.")
    return [
        {**figure, "dataset": dataset}
        for paper, folders in PAPERS.items()
        for dataset in folders
        if name in (None, dataset) or (name == paper and name not in datasets())
        for figure in _rows_of(paper, dataset, places)
    ]


def _rows_of(paper: str, dataset: str, places: Sequence[Path]) -> list[dict[str, Any]]:
    """The figures of one paper in configs/DATASET/tables.py."""
    tables = load_module(find_config(f"configs/{dataset}/tables.py"))
    listed = []
    for name, content in tables.ROWS.items():
        if content.get("paper", dataset) != paper:
            continue
        row = read_row(tables.get_config(name))
        measured = _scores(places, dataset, name, row)
        needs = [f"{path}: {how}" for path, how in row.missing_inputs().items()]
        needs += _missing_server(row)
        command = (
            f"mmqa run --config=configs/{dataset}/tables.py:{name} "
            f"--workdir=runs/tables/{dataset}/{name}"
        )
        for cell in row.published or _ours(dataset, name, measured and measured.scores):
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


def _shut_down(row: Row | None) -> str:
    """Why nobody can run the published row again; "" where one can, or of no row."""
    llm = None if row is None else row.parts.get("llm")
    return SHUT_DOWN.get(llm.model, "") if isinstance(llm, LLMSpec) and row.published else ""


def _ours(dataset: str, name: str, scores: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """A figure per score of a row that no paper has; without any one that says so."""
    scorers = list(scores["scores"] if scores else ()) or [""]
    unpublished = {"published": None, "tolerance": None, "group": ""}
    about = {"table": f"ours, {dataset}", "row": name, **unpublished}
    return [{**about, "column": scorer, "scorer": scorer} for scorer in scorers]


def paper_tables(listed: list[dict[str, Any]]) -> list[Table]:
    """The figures of one paper, of `list_rows`, as tables.

    The published ones, a line per row; below them what has been measured of these rows, and of
    our own.
    """
    paper = listed[0]["paper"]
    published = [figure for figure in listed if figure["published"] is not None]
    numbers = sorted(dict.fromkeys(figure["table"] for figure in published), key=_numbered)
    tables = [
        table
        for number in numbers
        for table in _published(
            paper, [figure for figure in published if figure["table"] == number]
        )
    ]
    measured = [figure for figure in listed if figure["measured"] is not None]
    for title in dict.fromkeys(_group(figure) for figure in measured):
        figures = [figure for figure in measured if _group(figure) == title]
        tables.append(_measured_table(f"{paper}, {title}", figures))
    return tables


def board_tables(listed: Sequence[Mapping[str, Any]]) -> list[Table]:
    """The boards of the benchmarks whose figures `list_rows` gave.

    A board has the best published systems and what was measured of our rows, best first.
    """
    tables = []
    for dataset in dict.fromkeys(figure["dataset"] for figure in listed):
        runs = {
            figure["config_row"]: Path(figure["workdir"])
            for figure in listed
            if figure["dataset"] == dataset and figure["workdir"]
        }
        for board in open_benchmark(dataset).boards if dataset in NAMES else ():
            lines: list[list[Cell]] = [
                [system.system, system.percent / 100, None, system.source, system.date]
                for system in board.systems
            ]
            lines += _our_lines(board, runs)
            lines.sort(key=lambda cells: -cells[1])
            columns = ("system", board.measure, "n", "source", "date")
            tables.append(Table(f"{dataset}, {board.title}", columns, lines))
    return tables


def _our_lines(board: Board, runs: Mapping[str, Path]) -> Iterator[list[Cell]]:
    """The lines of a board's rows of ours, from the folders of their runs."""
    measured: dict[str, list[tuple[float, int]]] = {}
    for row, folder in runs.items():
        scores = read_json(folder / "scores.json")
        sets = [name for name in board.sets if name in scores["by_category"]]
        if board.sets and len(sets) != (len(board.sets) if board.one_pool else 1):
            continue
        system, means = row, [_mean_of_set(scores, board, name) for name in sets]
        if not board.sets:
            means = [_measured(scores, board.scorer, "")]
        elif not board.one_pool:
            system = row.removesuffix(f"_{sets[0]}")
        count = _certainty(scores, board.scorer, "")["n"] or scores["n"]
        if None not in means:
            measured.setdefault(system, []).extend((mean, count // len(means)) for mean in means)
    for system, scored in measured.items():
        means, counts = zip(*scored, strict=True)
        mean = sum(means) / len(means)
        part = f", {len(means)} of {len(board.sets)} sets" if board.sets else ""
        yield [system, mean, sum(counts), f"ours{part}", ""]


def _mean_of_set(scores: Mapping[str, Any], board: Board, name: str) -> float | None:
    """A set's score: the mean over its languages, or the board's, where it has several."""
    groups, of_languages = scores["by_category"], f"{name}, {board.language}"
    languages = [group for group in groups if group.startswith(of_languages)] or [name]
    means = [groups[language].get(board.scorer) for language in languages]
    return None if None in means else sum(means) / len(means)


def _numbered(table: str) -> int:
    """A table's number; tables and figures with a name of their own come behind the numbered."""
    return int(table) if table.isdigit() else sys.maxsize


def _published(paper: str, figures: list[dict[str, Any]]) -> Iterator[Table]:
    """One table of a paper, in pieces of at most _WIDEST columns."""
    number = figures[0]["table"]
    name = f"{paper}, table {number}" if number.isdigit() else f"{paper}, {number}"
    columns = list(dict.fromkeys(figure["column"] for figure in figures))
    for start in range(0, len(columns), _WIDEST):
        part_columns = columns[start : start + _WIDEST]
        rows: dict[tuple[str, str], dict[str, float]] = {}
        for figure in figures:
            run = figure["config_row"] if figure["command"] else f"({figure['status']})"
            if figure["column"] in part_columns:
                cells = rows.setdefault((figure["row"], run), {})
                cells[figure["column"]] = figure["published"]
        part = f" ({start // _WIDEST + 1})" if len(columns) > _WIDEST else ""
        yield Table(
            f"{name}, published{part}",
            ("row", "config row", *(column.replace("_", " ") for column in part_columns)),
            [[*names, *map(values.get, part_columns)] for names, values in rows.items()],
        )


def _group(figure: Mapping[str, Any]) -> str:
    """`measured`, or `ours, DATASET`."""
    return "measured" if figure["published"] is not None else figure["table"]


def _measured_table(title: str, figures: list[dict[str, Any]]) -> Table:
    """A line per measured figure; of the papers' with the published one and whether it is met."""
    ours = figures[0]["published"] is None
    used, counts = llm_columns([figure["llm"] for figure in figures])
    rows: list[list[Cell]] = []
    for figure, asked in zip(figures, counts, strict=True):
        value: Cell = figure["measured"]
        if figure["interval"]:
            value = Interval(figure["measured"], *figure["interval"])
        note = f"first {figure['limit']} only" if figure["limit"] else ""
        if figure["sample"]:
            note = f"{figure['sample']:,} questions only"
        if not note and figure["status"] == "partial":
            note = f"split {figure['split']}"
        if not ours:
            note = figure["status"] + (f" ({note})" if note else "")
        published = () if ours else (figure["published"],)
        rows.append(
            [figure["config_row"], figure["column"], *published, value, figure["n"], *asked, note]
        )
    between = () if ours else ("published",)
    columns = ("config row", "score", *between, "measured [95% interval]", "n", *used, "status")
    return Table(title, columns, rows)


def commands_table(listed: list[dict[str, Any]]) -> Table:
    """Lists one paper's rows: each config, and where it was run or what it needs."""
    rows: dict[str, list[Cell]] = {}
    for figure in listed:
        if figure["command"]:
            _, _, config = figure["command"].partition(" --config=")
            needs = "; ".join(need.partition(":")[0] for need in figure["needs"])
            state = f"run: {figure['workdir']}" if figure["workdir"] else ""
            if figure["shut_down"]:
                needs = f"{needs}; model shut down".lstrip("; ")
            rows[figure["command"]] = [config.partition(" ")[0], state or needs or "–"]
    here = {figure["row"] for figure in listed if figure["command"]}
    cited = dict.fromkeys(figure["row"] for figure in listed if figure["row"] not in here)
    gone = dict.fromkeys(figure["shut_down"] for figure in listed if figure["shut_down"])
    note = (
        "Run one with: mmqa run --config=CONFIG --workdir=runs/tables/DATASET/ROW. What is missing "
        "and where it comes from: mmqa tables --json, key needs."
    ) + "".join(f" {reason}: its published figures cannot be measured again." for reason in gone)
    if cited:
        note += f" Cited from the paper, with no command here: {', '.join(cited)}."
    title = f"{listed[0]['paper']}, rows to run"
    return Table(title, ("config", "run, or still needs"), list(rows.values()), note)


def _figure(
    paper: str,
    name: str,
    cell: Mapping[str, Any],
    command: str,
    needs: list[str],
    run: _Measured | None,
    row: Row | None,
) -> dict[str, Any]:
    scores = None if run is None else run.scores
    measured = None if scores is None else _measured(scores, cell["scorer"], cell["group"])
    status = "needs" if needs else "not run"
    needs_bart = cell["scorer"].startswith("webqa_fl") and row and not row.scoring.bart
    if measured is None and needs_bart:
        needs = [*needs, "--config.scoring.bart: bart-large-cnn with BARTScore's bart.pth"]
        status = "needs"
    limit = None if scores is None else scores.get("limit")
    # How many questions a run took of those that its row does, by `data.questions`.
    sample = None if scores is None else scores.get("sample") or None
    if row is not None and sample == (row.data.questions or None):
        sample = None
    if measured is not None and cell["published"] is None:
        status = "measured"
    elif measured is not None and run.whole:
        within = abs(measured - cell["published"]) <= cell["tolerance"]
        status = "pass" if within else "fail"
    elif measured is not None:
        status = "partial"
    elif scores is not None and not scores["scores"]:
        status = "leaderboard"
    columns = ("table", "row", "column", "published", "tolerance", "scorer")
    return {
        "paper": paper,
        **{column: cell[column] for column in columns},
        "config_row": name,
        "command": command,
        "needs": needs,
        "shut_down": _shut_down(row),
        "measured": measured,
        **_certainty({} if measured is None else scores, cell["scorer"], cell["group"]),
        "llm": {} if scores is None else llm_use(scores),
        "limit": limit,
        "sample": sample,
        "split": None if scores is None else scores["split"],
        "workdir": None if run is None else str(run.folder),
        "status": status,
    }


def _measured(scores: Mapping[str, Any], scorer: str, group: str) -> float | None:
    """The mean of a scorer over all questions, a category or a modality; None: not scored."""
    if not group:
        return scores["scores"].get(scorer)
    for key in ("by_category", "by_modality"):
        value = scores.get(key, {}).get(group, {}).get(scorer)
        if value is not None:
            return value
    return None


def _certainty(scores: Mapping[str, Any], scorer: str, group: str) -> dict[str, Any]:
    """The 95% interval of a score over all questions, and over how many questions a score is."""
    if group:
        return {"interval": None, "n": scores.get("n_by_category", {}).get(group)}
    interval = scores.get("intervals", {}).get(scorer)
    return {"interval": interval, "n": scores.get("n_by_scorer", {}).get(scorer)}


class _Measured(NamedTuple):
    """A finished run of a row; `whole` if it took all questions that published figures are of."""

    folder: Path
    scores: Mapping[str, Any]
    whole: bool


def _scores(places: Sequence[Path], folder: str, name: str, row: Row) -> _Measured | None:
    """The first run of a row below `places` that took all its questions, or the first of all.

    A place is a folder of workdirs (PLACE/FOLDER/ROW or PLACE/ROW), a row's workdir or a demo's.
    """
    runs = []
    for place in places:
        for workdir in (place / folder / name, place / name, place / "rows" / name, place):
            file = workdir / "scores.json"
            scores = read_json(file) if file.exists() else None
            if not isinstance(scores, Mapping):
                continue
            if (scores.get("row"), scores.get("dataset")) == (name, row.dataset):
                whole = (
                    scores.get("limit") is None
                    and (scores.get("sample") or 0) == row.data.questions
                    and scores.get("split") == row.data.split
                )
                runs.append(_Measured(workdir, scores, whole))
    return next((run for run in runs if run.whole), runs[0] if runs else None)
