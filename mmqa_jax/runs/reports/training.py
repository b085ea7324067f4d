"""`mmqa report` of a training run, and of the runs of a sweep: curves, validation and progress."""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_jsonl
from mmqa_jax.core.progress import Screen
from mmqa_jax.core.workdir import read_config
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.data.schema import Question
from mmqa_jax.evaluation import report
from mmqa_jax.evaluation.tables import Table, show
from mmqa_jax.runs.reports.row import run_facts
from mmqa_jax.runs.traces import reference_rows, turn_node
from mmqa_jax.tasks.registry import known_tasks
from mmqa_jax.training.attempts import Goodput, goodput, read_attempts
from mmqa_jax.training.best_weights import read_best

METRICS = "metrics.jsonl"
_VALIDATION = "eval/"
# Of a policy that learns by reward.
_EARNED = ("reward", "answer", "evidence", "searches", "deciding", "kl", "engine_gap")
_EPISODES = 10  # of the first and of the last batch that a searcher drew


def run_curves(folder: Path) -> dict[str, report.Points]:
    """Loss, accuracy and validation of the run in `folder`: name -> [(step, value)]."""
    return {
        name: points
        for name, points in report.read_curves(folder / METRICS).items()
        if name in ("loss", "accuracy", *_EARNED) or name.startswith(_VALIDATION)
    }


def overlaid_curves(folders: Mapping[str, Path]) -> list[report.LinePlot]:
    """A plot for each metric of `run_curves`, with a line for each run (name -> workdir)."""
    curves = {run: run_curves(folder) for run, folder in folders.items()}
    names = dict.fromkeys(name for of_run in curves.values() for name in of_run)
    lines = {name: {run: curves[run].get(name, ()) for run in folders} for name in names}
    return [
        report.LinePlot(report.curve_name(name), "step", lines[name], steps=True) for name in names
    ]


def write_training_report(folder: Path) -> dict[str, Any]:
    """Prints the validation of a finished or running training run and writes its report.html."""
    data = training_report(folder)
    for table in (*data.tables, *data.run_tables):
        show(table)
    report.write_report(folder / "report.html", data)
    Screen().print(f"Report: {folder / 'report.html'}", soft_wrap=True)
    task, best = read_config(folder).task, read_best(folder)
    return {"task": task, "report": str(folder / "report.html"), "best": best}


def training_report(folder: Path) -> report.ReportData:
    """Collects the content of a training run's report.html."""
    config = read_config(folder)
    if "task" not in config:
        raise UserError(
            f"{folder}: holds no training run (config key task is {config.get('task')!r}); name "
            "the workdir of `mmqa train` or of `mmqa demo`."
        )
    curves, best, product = run_curves(folder), read_best(folder), _product(config.task)
    title = f"Training of the {product}"
    tables = [_validation_table(curves)] if any(_VALIDATION in name for name in curves) else []
    headline = {} if best is None else {f"best {best['metric']}": best["value"]}
    measured = goodput(read_attempts(folder))
    times = [] if measured is None else [_time_table(measured)]
    facts = run_facts(folder)
    if best is not None:
        facts = {"best step": f"{best['step']} (weights: {best['weights']})", **facts}
    where = f" of {config.data.dir}" if config.data.dir else ""
    cards = _episode_cards(folder, config)
    return report.ReportData(
        title=title,
        description=f"{config.train.steps:,} steps on split {config.data.split}{where}.",
        headline=headline,
        cards=cards,
        card_note="right: by the answer's score in the reward" if cards else "",
        tables=tables,
        curves={product: curves},
        best_steps={} if best is None else {product: best["step"]},
        run_tables=times,
        facts=facts,
    )


def _episode_cards(folder: Path, config: Any) -> list[report.Card]:
    """Episodes that a searcher drew before it learned, and in its last batch, in turn."""
    kept = Path(config.get("episodes", {}).get("dir") or folder / "rollouts")
    files = sorted(kept.glob("[0-9]*.jsonl"))
    if not files:
        return []
    try:
        corpus = open_corpus(config.data.dir)
    except UserError:  # it may be gone: turns and ids of sources are here
        corpus = Corpus([])
    asked = {question.id: question for question in corpus.questions()}
    maker = report.CardMaker(corpus)
    of_both: dict[str, list[report.Card]] = {}
    for when, file in dict.fromkeys((("before", files[0]), ("after", files[-1]))):
        rows = [row for _, row in read_jsonl(file)]
        for place in report.in_turn([row["question_id"] for row in rows], _EPISODES):
            row, earned = rows[place], rows[place]["earned"]
            last = row["turns"][-1] if row["turns"] else {"action": ""}
            text = last.get("content", "") if last["action"] == "answer" else ""
            name = f"{when} (batch {int(file.stem)})"
            question = asked.get(row["question_id"], Question("", "", row["question"]))
            question = dataclasses.replace(question, category=name)
            read = [source for turn in row["turns"] for source in turn.get("sources", ())]
            values = {key: x for key, x in earned.items() if x is not None}
            of_both.setdefault(when, []).append(
                maker.card(
                    question,
                    [report.CardAnswer("", text, earned["answer"], values)],
                    None,
                    [()],
                    [source for source in dict.fromkeys(read) if source in corpus.row],
                    rows=[
                        *reference_rows(question),
                        ("earned", ", ".join(f"{key} {x:.3g}" for key, x in values.items())),
                        *([("ended", row["problem"])] if row["problem"] else []),
                    ],
                    tree=[turn_node(n, turn) for n, turn in enumerate(row["turns"], start=1)],
                )
            )
    pairs = itertools.zip_longest(*of_both.values())
    return [card for pair in pairs for card in pair if card is not None]


def _product(task: str) -> str:
    """Returns the product of a task in words, or the name of a task that a config file defines."""
    kind = known_tasks().get(task)
    return task if kind is None else kind.product


def _time_table(measured: Goodput) -> Table:
    """Tabulates the wall time of all attempts by use."""
    rows = [
        [name, round(seconds, 1), seconds / measured.wall_seconds]
        for name, seconds in measured.seconds.items()
    ]
    return Table(
        "Wall time",
        ["what", "seconds", "share"],
        rows,
        note=f"Goodput: {measured.text()}. training/COSTS.md says what the rows are.",
    )


def _validation_table(curves: dict[str, report.Points]) -> Table:
    """One row per evaluation, one column per value."""
    values = {
        name.removeprefix(_VALIDATION): dict(points)
        for name, points in curves.items()
        if name.startswith(_VALIDATION)
    }
    steps = sorted({step for points in values.values() for step in points})
    rows = [[int(step), *(points.get(step) for points in values.values())] for step in steps]
    return Table("Validation", ["step", *values], rows)
