"""`mmqa demo`: data, training, and every row of configs/atlas/tables.py, resumable at any point.

Every stage reads the files of earlier stages and writes its own, whole or not at all; a finished
stage is not run again. Restarted after a kill, the demo continues and ends with the same scores as
an uninterrupted run.
"""

import contextlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
from ml_collections import ConfigDict

from mmqa_jax.core.config import find_config, load_module
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.core.host import best_precision, matmul_rates
from mmqa_jax.core.mesh import platform
from mmqa_jax.core.progress import Screen, announce, duration
from mmqa_jax.core.typed import Key, check_section
from mmqa_jax.core.workdir import Workdir, claim_workdir, read_config
from mmqa_jax.data.atlas.build import LEAST_COUNTRIES, strangers
from mmqa_jax.data.corpus import Corpus, evenly, open_corpus
from mmqa_jax.evaluation import report
from mmqa_jax.evaluation.tables import Cell, Table, to_rich
from mmqa_jax.evaluation.webqa import SELECTIONS, tune_refusal, tune_threshold
from mmqa_jax.extensions import similarity
from mmqa_jax.extensions.fusion_tuning import tune_fusion
from mmqa_jax.retrieval.fusion import DEPTH
from mmqa_jax.retrieval.rankings import nearest_similarities
from mmqa_jax.runs.part import OpenedParts
from mmqa_jax.runs.parts import RetrieverSpec, open_fusions, with_similarity
from mmqa_jax.runs.prepare import prepare_atlas
from mmqa_jax.runs.reports.row import report_rows, run_facts
from mmqa_jax.runs.reports.training import run_curves
from mmqa_jax.runs.row import Row, read_row
from mmqa_jax.runs.run import run_row
from mmqa_jax.runs.status import finished_rows, seconds_left
from mmqa_jax.runs.verbs.indexing import embed, index
from mmqa_jax.tasks.embedder import open_dense
from mmqa_jax.tasks.registry import check_config, known_tasks
from mmqa_jax.tasks.rerank import load_reranker
from mmqa_jax.tasks.run import run_training
from mmqa_jax.training.best_weights import read_best

TASKS = ("contrastive", "rerank", "answer")
MACHINE = "machine.json"  # what this machine was measured to do, and the precision of this run
DATA, INDEX, ROWS = "data", "index", "rows"
SELECTION, FUSION = "retrieval/selection.json", "retrieval/fusion.json"
REFUSAL = "retrieval/refusal.json"
NOTICE = (
    "Atlas is mmqa_jax's own benchmark, made from OpenMoji pictures and World Factbook text. Its "
    "scores are not comparable with WebQA's or with any other benchmark's."
)
_TUNED = ("weight", "weight_at_edge", "threshold", "vlp_threshold")
_KEPT = ("scores", "intervals", "by_category")  # of a row's scores.json


def run_demo(config: ConfigDict, folder: Path) -> dict[str, Any]:
    """Runs the unfinished stages in `folder`; returns what `--json` prints."""
    _check(config)
    with claim_workdir(folder, config, work=("stages/[!.]*.json",)) as (workdir, resumed):
        if resumed:
            Screen().print(f"{folder}: continuing where the last run stopped.", soft_wrap=True)
        with workdir.stage("prepare") as todo:
            if todo:
                # An earlier run may have been killed between the last file and its record.
                prepare_atlas(folder / DATA, config.countries, overwrite=True)
        demo = _Demo(config, folder, open_corpus(folder / DATA))
        machine = _measure(config.precision, folder)
        with _precision(machine["precision"]):
            for name, run in demo.stages().items():
                left = seconds_left(workdir.stages())
                with workdir.stage(name) as todo:
                    if todo:
                        announce(f"Stage {name}: about {duration(left)} left of the demo.")
                        run()
        return write_demo_report(folder, workdir)


def _measure(precision: str, folder: Path) -> dict[str, Any]:
    """GFLOP/s and precision of this run, measured once per workdir: a resumed run keeps them."""
    if not (folder / MACHINE).exists():
        rates = matmul_rates()
        if precision == "auto":
            on_cpu = platform() == "cpu"
            precision = best_precision(rates) if on_cpu else "float32"
        measured = {"rates": rates, "precision": precision, "gflops": rates["float32"]}
        write_json(folder / MACHINE, measured)
    return read_json(folder / MACHINE)


def _precision(name: str) -> contextlib.AbstractContextManager[None]:
    """How models round what they multiply: `bfloat16`, or the platform's default."""
    return jax.default_matmul_precision(name) if name == "bfloat16" else contextlib.nullcontext()


def _check(config: ConfigDict) -> None:
    """Refuses an invalid config at the start, not when its stage runs."""
    count = Key(int, minimum=0)
    spec = {
        "seed": int,
        "countries": count,
        "precision": Literal["auto", "float32", "bfloat16"],
        "search": {"index": Literal["auto", "scann", "exact"], "dev_questions": count},
        "select": {"top_k": Key(int, minimum=1), "dev_questions": count},
        "evaluate": {"questions": count, "examples": count},
        **dict.fromkeys(TASKS, dict),
    }
    check_section(config, "", spec)
    if config.countries != 0 and config.countries < LEAST_COUNTRIES:
        raise UserError(
            f"config key countries={config.countries}: 0 (all) or at least {LEAST_COUNTRIES} was "
            "expected; give a larger number."
        )
    for name in TASKS:
        try:
            check_config(config[name])
        except UserError as error:
            raise UserError(f"config section {name}: {error}") from error


class _Demo:
    """The stages after `prepare`."""

    def __init__(self, config: ConfigDict, folder: Path, corpus: Corpus):
        self.config, self.folder, self.corpus = config, folder, corpus
        self._opened = OpenedParts(corpus, folder / "journals")
        self._tables = load_module(find_config("configs/atlas/tables.py"))

    def stages(self) -> dict[str, Callable[[], None]]:
        """Name -> function that runs the stage, in order."""
        return {
            "contrastive": lambda: self._train("contrastive"),
            "embed": self._embed,
            "search": self._search,
            "rerank": lambda: self._train("rerank"),
            "tune": self._tune,
            "refuse": self._refuse,
            "select": lambda: self._run_rows("select"),
            "answer": lambda: self._train("answer"),
            "read": lambda: self._run_rows(""),
            "score": self._score,
        }

    def _dense(self) -> Any:
        """The retriever that this demo has trained."""
        return open_dense(self.corpus, str(self.folder / "contrastive"), str(self.folder / INDEX))

    def _train(self, task: str) -> None:
        run_training(self.config[task], self.folder / task, self.corpus)

    def _embed(self) -> None:
        embed(self.folder / DATA, self.folder / "contrastive", self.folder / INDEX)
        index(self.folder / INDEX, self.config.search.index)

    def _search(self) -> None:
        """Chooses the fusion weight on the validation split, then runs the retrievers' rows."""
        dev = evenly(self.corpus.questions("val"), self.config.search.dev_questions)
        fused = RetrieverSpec("fused", str(self.folder / "contrastive"), str(self.folder / INDEX))
        tuned = tune_fusion(dev, open_fusions(self.corpus, fused), DEPTH)
        write_json(
            self.folder / FUSION,
            {
                "weight": tuned.weight,
                "dev_scores": [{"weight": w, **scores} for w, scores in tuned.sweep.items()],
            },
        )
        self._run_rows("retrieve")

    def _tune(self) -> None:
        """Chooses the similarity weight and the thresholds on the validation split."""
        dev = evenly(self.corpus.questions("val"), self.config.select.dev_questions)
        dense = self._dense()
        reranker = load_reranker(self.folder / "rerank", self.corpus)
        evidence = similarity.read_restricted(
            dev, self.corpus, with_similarity(reranker, dense, self.corpus, 0.0)
        )
        best = SELECTIONS["best"]
        tuned = similarity.tune_selection(dev, evidence, best)
        vlp_threshold, _ = tune_threshold(dev, similarity.combine(evidence, 0.0), best)
        write_json(
            self.folder / SELECTION,
            {
                "weight": tuned.weight,
                "weight_at_edge": tuned.at_edge,
                "threshold": tuned.threshold,
                "vlp_threshold": vlp_threshold,
                "dev_source_f1": [
                    {"weight": weight, "threshold": threshold, "source_f1": f1}
                    for (weight, threshold), f1 in tuned.sweep.items()
                ],
            },
        )

    def _refuse(self) -> None:
        """Chooses how similar the nearest source of a question must be for `mmqa ask`.

        The reranker cannot say it: among the sources of a question that none answers it still
        finds one relevant, because all that it was trained on had an answer.
        """
        dense = self._dense()
        asked = [question for question in self.corpus.questions("val") if question.image is None]
        chosen = tune_refusal(
            nearest_similarities(dense, asked), nearest_similarities(dense, strangers())
        )
        write_json(
            self.folder / REFUSAL,
            {
                "least_similarity": chosen.threshold,
                "refused": {"val": chosen.answerable, "strangers": chosen.foreign},
            },
        )

    def _run_rows(self, kind: str) -> None:
        """Runs the rows whose setting starts with `kind`; "": the rows that answer questions."""
        for name in demo_rows(self._tables):
            of_kind = self._tables.ROWS[name]["setting"].partition("_")[0]
            if of_kind == kind or (not kind and of_kind not in ("retrieve", "select")):
                run_row(self._row(name), self.folder / ROWS / name, opened=self._opened)

    def _row(self, name: str) -> Row:
        """A row with the demo's own data, models and tuned selection."""
        config = self._tables.get_config(name)
        folders = {
            self._tables.DATA: DATA,
            self._tables.INDEX: INDEX,
            **{getattr(self._tables, task.upper()): task for task in TASKS},
        }
        config.data.dir = str(self.folder / DATA)
        config.data.questions = self.config.evaluate.questions
        for part in config.parts.values():
            for section in (part, part.get("similarity") or {}):
                for key in ("model", "index"):
                    if section.get(key):
                        section[key] = str(self.folder / folders[section[key]])
        retriever = config.parts.get("retriever", {})
        if "fusion_weight" in retriever:
            retriever.fusion_weight = read_json(self.folder / FUSION)["weight"]
        if "threshold" in config.options:
            tuned = read_json(self.folder / SELECTION)
            ours = config.parts.reranker.similarity_weight > 0
            config.options.threshold = tuned["threshold" if ours else "vlp_threshold"]
            config.parts.reranker.similarity_weight = tuned["weight"] if ours else 0.0
        if "top_k" in config.options and config.setting != "retrieve_full_scale":
            config.options.top_k = self.config.select.top_k
        return read_row(config)

    def _score(self) -> None:
        write_json(self.folder / "scores.json", demo_scores(self.folder, self._tables))


# The results of the demo: those of its rows, beside each other.


def demo_scores(folder: Path, tables: Any) -> dict[str, Any]:
    """Scores of all rows, and what was tuned for them: the JSON object of `mmqa demo --json`.

    Args:
      folder: the demo's workdir.
      tables: the module of its rows.
    """
    rows = finished_rows(folder / ROWS)
    if missing := sorted(set(demo_rows(tables)) - rows.keys()):
        raise UserError(
            f"{folder / ROWS}: lacks {', '.join(missing)}, which finished stages of the demo "
            f"wrote; delete search.json, select.json and read.json in {folder / 'stages'}, and run "
            "`mmqa demo` again."
        )
    return {
        "dataset": "atlas",
        "n": max(scores["questions"] for scores in rows.values()),
        "selection": {name: read_json(folder / SELECTION)[name] for name in _TUNED},
        "rows": {name: {key: scores[key] for key in _KEPT} for name, scores in rows.items()},
    }


def write_demo_report(folder: Path, workdir: Workdir | None = None) -> dict[str, Any]:
    """Prints the tables and writes report.html from a finished demo in `folder`."""
    if not (folder / "scores.json").exists():
        raise UserError(
            f"{folder}: holds no finished demo (no scores.json), no training run and no finished "
            f"row; finish a demo with `mmqa demo --workdir={folder}`."
        )
    scores, corpus = read_json(folder / "scores.json"), open_corpus(folder / DATA)
    read_config(folder)  # a run's
    stages = (workdir or Workdir(folder)).stages()
    tasks = {task: kind for task, kind in known_tasks().items() if task in TASKS}
    best = {kind.product: read_best(folder / task) for task, kind in tasks.items()}
    page = report.ReportData(
        title="Atlas: cited answers from pictures and prose",
        description=(
            f"{len(corpus):,} sources; {scores['n']} test questions about countries that no "
            "training question names. This run trained the retriever, the source selector and the "
            "reader. A row's name leads to its questions, answers and sources."
        ),
        notice=NOTICE,
        tables=[_selection_table(scores["selection"])],
        curves={kind.product: run_curves(folder / task) for task, kind in tasks.items()},
        best_steps={title: step["step"] for title, step in best.items() if step is not None},
        stages=[(name, record["seconds"]) for name, record in stages.items()],
        facts=run_facts(folder, corpus),
    )
    path, tables = report_rows(folder, ROWS, page)
    # On stderr, because stdout is reserved for the JSON.
    console = Screen(width=None if sys.stderr.isatty() else 120)
    console.print(f"\n{NOTICE}", soft_wrap=True)
    for table in [*tables, _stage_table(stages)]:
        console.print(to_rich(table))
    Screen().print(f"Report: {path}", soft_wrap=True)
    return scores


def demo_rows(tables: Any) -> list[str]:
    """The rows that the demo runs: those of the models that it trains, none that is prompted."""
    return [
        name
        for name, row in tables.ROWS.items()
        if "system" not in row and "llm" not in row["parts"]
    ]


def _selection_table(tuned: Mapping[str, Any]) -> Table:
    """What was tuned on val."""
    note = "Tuned on val: VLP's threshold alone, and with `weight` times the similarity."
    if tuned.get("weight_at_edge"):
        note += " That weight is the largest one tried: a larger one may be better."
    return Table("Source selection", _TUNED, [[tuned[name] for name in _TUNED]], note)


def _stage_table(stages: Mapping[str, Mapping[str, Any]]) -> Table:
    """Time and memory of every stage."""
    rows: list[list[Cell]] = [
        [name, round(record["seconds"] / 60, 2), record["peak_rss_mib"]]
        for name, record in stages.items()
    ]
    total = sum(record["seconds"] for record in stages.values())
    peak = max((record["peak_rss_mib"] for record in stages.values()), default=0)
    return Table("Stages", ["stage", "minutes", "peak MiB"], [*rows, ["all", total / 60, peak]])
