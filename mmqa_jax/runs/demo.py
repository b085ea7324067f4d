"""`mmqa demo`: data, training, and every row of configs/atlas/tables.py, resumable at any point.

Every stage reads the files of earlier stages and writes its own, whole or not at all; a finished
stage is not run again. Restarted after a kill, the demo continues and ends with the same scores as
an uninterrupted run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
from ml_collections import ConfigDict

from mmqa_jax.core.config import find_config, load_module
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.core.mesh import platform
from mmqa_jax.core.progress import Screen, announce, within
from mmqa_jax.core.speed import best_precision, matmul_rates
from mmqa_jax.core.typed import Key, check_section
from mmqa_jax.core.workdir import Workdir, claim_workdir, read_config
from mmqa_jax.data.atlas.build import LEAST_COUNTRIES
from mmqa_jax.data.atlas.strangers import strangers
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.data.splits import evenly
from mmqa_jax.evaluation.refusals import tune_refusal
from mmqa_jax.evaluation.source_selection import SELECTIONS, tune_threshold
from mmqa_jax.extensions import similarity
from mmqa_jax.extensions.fusion_tuning import tune_fusion
from mmqa_jax.retrieval.fusion import DEPTH
from mmqa_jax.retrieval.rankings import nearest_similarities
from mmqa_jax.runs.demo_results import read_results, score_demo, show_tables, write_html
from mmqa_jax.runs.demo_time import (
    MACHINE,
    TRAININGS,
    about,
    fixed_seconds,
    open_time_left,
)
from mmqa_jax.runs.indexing import embed, index
from mmqa_jax.runs.opened_parts import OpenedParts
from mmqa_jax.runs.parts import RetrieverSpec, open_dense, open_fusions, with_similarity
from mmqa_jax.runs.prepare import prepare_atlas
from mmqa_jax.runs.row import Row, read_row
from mmqa_jax.runs.run import run_row
from mmqa_jax.tasks.reading import check_config
from mmqa_jax.tasks.rerank import load_reranker
from mmqa_jax.tasks.run import run_training

TASKS = TRAININGS
DATA, INDEX, ROWS = "data", "index", "rows"
SELECTION, FUSION = "retrieval/selection.json", "retrieval/fusion.json"
REFUSAL = "retrieval/refusal.json"


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
        time_left = open_time_left(config, folder, workdir.stages())
        with (
            _precision(machine["precision"]),
            within(lambda seconds: f"{about(time_left.seconds(seconds))} left of the demo"),
        ):
            for name, run in demo.stages().items():
                with workdir.stage(name) as todo:
                    if todo:
                        announce(f"Stage {name}: {about(time_left.start(name))} left of the demo.")
                        run()
                        time_left.finish(fixed_seconds(folder, name))
        return write_demo_report(folder, workdir)


def write_demo_report(folder: Path, workdir: Workdir | None = None) -> dict[str, Any]:
    """Prints the tables and writes report.html from a finished demo in `folder`."""
    if not (folder / "scores.json").exists():
        raise UserError(
            f"{folder}: holds no finished demo (no scores.json), no training run and no finished "
            f"row; finish a demo with `mmqa demo --workdir={folder}`."
        )
    results = _results(folder, read_config(folder), open_corpus(folder / DATA))
    scores = read_json(folder / "scores.json")
    records = (workdir or Workdir(folder)).stages()
    show_tables(results, scores, records)
    write_html(folder / "report.html", results, scores, records)
    Screen().print(f"Report: {folder / 'report.html'}", soft_wrap=True)
    return scores


def _measure(precision: str, folder: Path) -> dict[str, Any]:
    """GFLOP/s and precision of this run, measured once per workdir: a resumed run keeps them."""
    if not (folder / MACHINE).exists():
        rates = matmul_rates()
        if precision == "auto":
            on_cpu = platform() == "cpu"
            precision = best_precision(rates) if on_cpu else "float32"
        found = {"rates": rates, "precision": precision, "gflops": rates["float32"]}
        write_json(folder / MACHINE, found)
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
        dense = open_dense(self.corpus, str(self.folder / "contrastive"), str(self.folder / INDEX))
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
        dense = open_dense(self.corpus, str(self.folder / "contrastive"), str(self.folder / INDEX))
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
        """Runs the rows whose setting starts with `kind`; "": those that answer questions."""
        for name, row in self._tables.ROWS.items():
            if "system" in row or "llm" in row["parts"]:  # prompted, not of what the demo trains
                continue
            of_kind = row["setting"].partition("_")[0]
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
        results = _results(self.folder, self.config, self.corpus)
        write_json(self.folder / "scores.json", score_demo(results))


def _results(folder: Path, config: ConfigDict, corpus: Corpus) -> Any:
    questions = evenly(corpus.questions("test"), config["evaluate"]["questions"])
    return read_results(
        folder, folder / ROWS, corpus, questions, read_json(folder / SELECTION),
        config["evaluate"]["examples"],
    )  # fmt: skip
