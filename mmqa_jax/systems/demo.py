"""`mmqa demo`: the whole path on Atlas in one command, resumable at every point.

Every stage reads files of the stages before it and writes its own, whole or not at all; a
stage that is done is not run again. Started again after a kill, the demo continues and ends
with the scores of an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from ml_collections import ConfigDict
from rich.console import Console

from mmqa_jax.core import startup
from mmqa_jax.core.config import check_section, to_plain_dict
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json, write_json
from mmqa_jax.core.workdir import Workdir
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.retrieval.rankings import read_rankings, write_rankings
from mmqa_jax.systems import retrieval_stages, stages, webqa
from mmqa_jax.systems.demo_results import SETTINGS, Results, score_demo, show_tables, write_html
from mmqa_jax.training.checks import check_config
from mmqa_jax.training.run import claimed, read_config, run_training

TASKS = ("contrastive", "rerank", "answer")
DATA, INDEX, RETRIEVAL, PREDICTIONS = "data", "index", "retrieval", "predictions"
SELECTION = "retrieval/selection.json"
# What reranking and answering start from in the full setting.
CANDIDATES = "dense_two_pass"


def run_demo(config: ConfigDict, folder: Path) -> dict[str, Any]:
    """Runs what is not yet done in `folder`; returns what `--json` prints.

    Raises:
      UserError: a config that cannot be run, or `folder` belongs to another config.
    """
    startup.start()
    _check(config)
    with claimed(folder, config, work="stages/[!.]*.json") as (workdir, resumed):
        if resumed:
            Console(stderr=True).print(
                f"{folder}: going on where the last start stopped.", soft_wrap=True
            )
        with workdir.stage("prepare") as todo:
            if todo:
                # An earlier start may have been killed between the last file and its record.
                stages.prepare_atlas(folder / DATA, config.countries, overwrite=True)
        corpus = open_corpus(folder / DATA)
        run = _Demo(config, folder, corpus)
        for name in ("contrastive", "embed", "search", "rerank", "select", "answer", "read"):
            with workdir.stage(name) as todo:
                if todo:
                    getattr(run, name)()
        with workdir.stage("score") as todo:
            if todo:
                run.score()
        return write_demo_report(folder, workdir)


def _check(config: ConfigDict) -> None:
    """Refuses a wrong config now, not when its stage comes."""
    from mmqa_jax.data.datasets.atlas.build import LEAST_COUNTRIES

    sections = {
        "search": {"top_k": int, "index": Literal["auto", "scann", "exact"]},
        "select": {"top_k": int, "dev_questions": int},
        "evaluate": {"questions": int, "bootstrap": int, "examples": int},
    }
    known = {"seed": int, "countries": int, **dict.fromkeys((*sections, *TASKS), dict)}
    check_section(config, "", known, known)
    for name, keys in sections.items():
        check_section(config[name], name, keys, keys)
    if config.countries != 0 and config.countries < LEAST_COUNTRIES:
        raise UserError(
            f"config key countries={config.countries}: 0 (all) or at least {LEAST_COUNTRIES} was "
            "expected; give a larger number."
        )
    for section, key in (("search", "top_k"), ("select", "top_k"), ("evaluate", "bootstrap")):
        if config[section][key] < 1:
            raise UserError(
                f"config key {section}.{key}={config[section][key]}: at least 1 was expected; give "
                "a larger number."
            )
    for name in TASKS:
        try:
            check_config(config[name])
        except UserError as error:
            raise UserError(f"config section {name}: {error}") from error


class _Demo:
    """The stages after `prepare`; every method is one stage."""

    def __init__(self, config: ConfigDict, folder: Path, corpus: Corpus):
        self.config, self.folder, self.corpus = config, folder, corpus
        self.questions = evaluated_questions(corpus, config.evaluate.questions)
        self.dev = evenly(corpus.questions("val"), config.select.dev_questions)

    def contrastive(self) -> None:
        """Trains the dual encoder."""
        run_training(self.config.contrastive, self.folder / "contrastive", self.corpus)

    def rerank(self) -> None:
        """Trains the source selector."""
        run_training(self.config.rerank, self.folder / "rerank", self.corpus)

    def answer(self) -> None:
        """Trains the reader."""
        run_training(self.config.answer, self.folder / "answer", self.corpus)

    def embed(self) -> None:
        """Embeds all sources and builds the index."""
        retrieval_stages.embed(self.folder / DATA, self.folder / "contrastive", self.folder / INDEX)
        retrieval_stages.index(self.folder / INDEX, self.config.search.index)

    def search(self) -> None:
        """Ranks the whole collection, and each question's candidates, in every way."""
        from mmqa_jax.systems.parts import BM25Retriever, FusedRetriever

        questions, top_k = self.questions, self.config.search.top_k
        candidates = webqa.restricted_candidates(questions, self.corpus)
        found = {}
        for suffix, two_pass in (("", False), ("_two_pass", True)):
            dense = self._dense(two_pass=two_pass)
            bm25 = BM25Retriever(self.corpus, two_pass=two_pass)
            found[f"bm25{suffix}"] = bm25.search(questions, top_k)
            found[f"dense{suffix}"] = dense.search(questions, top_k)
            fused = FusedRetriever([bm25, dense], depth=top_k)
            found[f"fused{suffix}"] = fused.search(questions, top_k)
        found["restricted_bm25"] = bm25.search_restricted(questions, candidates)
        found["restricted_dense"] = dense.search_restricted(questions, candidates)
        for name, rankings in found.items():
            self._write_rankings(name, rankings)

    def select(self) -> None:
        """Reranks; tunes the similarity's weight and the threshold on the validation split."""
        from mmqa_jax.systems.loading import load_reranker
        from mmqa_jax.systems.parts import TwoPassReranker

        reranker = TwoPassReranker(
            self._dense(two_pass=True), load_reranker(self.folder / "rerank", self.corpus)
        )
        dev = webqa.restricted_candidates(self.dev, self.corpus)
        hops = reranker.read(self.dev, dev)
        weight, threshold, sweep = webqa.tune_selection(self.dev, hops)
        vlp_threshold, _ = webqa.tune_threshold(self.dev, webqa.relevance_alone(hops))

        top_k = self.config.select.top_k
        candidates = {
            "restricted": webqa.restricted_candidates(self.questions, self.corpus),
            "full": [webqa.top(ranking, top_k) for ranking in self._rankings(CANDIDATES)],
        }
        for name, given in candidates.items():
            hops = reranker.read(self.questions, given)
            self._write_rankings(f"{name}_vlp", webqa.relevance_alone(hops))
            self._write_rankings(f"{name}_reranked", webqa.combine(hops, weight))
        write_json(
            self.folder / SELECTION,
            {
                "weight": weight,
                "threshold": threshold,
                "vlp_threshold": vlp_threshold,
                "dev_source_f1": [
                    {"weight": tried, "threshold": at, "source_f1": f1}
                    for (tried, at), f1 in sweep.items()
                ],
            },
        )

    def read(self) -> None:
        """Answers in the four settings."""
        from mmqa_jax.systems.loading import load_reader

        reader = load_reader(self.folder / "answer", self.corpus)
        threshold = read_json(self.folder / SELECTION)["threshold"]
        none = [webqa.cited_nothing(question) for question in self.questions]
        cited = {
            "question_only": none,
            "oracle": [webqa.gold_ranking(question) for question in self.questions],
            "restricted": webqa.select_sources(self._rankings("restricted_reranked"), threshold),
            "full": webqa.select_sources(self._rankings("full_reranked"), threshold),
        }
        for setting, predictions in webqa.answer_settings(self.questions, reader, cited).items():
            path = self.folder / PREDICTIONS / f"{setting}.jsonl"
            stages.write_predictions(path, predictions)

    def score(self) -> None:
        """Scores everything into scores.json."""
        results = read_results(self.config, self.folder, self.corpus)
        write_json(self.folder / "scores.json", score_demo(results))

    def _dense(self, *, two_pass: bool) -> Any:
        return retrieval_stages.open_retriever(
            self.corpus, self.folder / "contrastive", self.folder / INDEX, two_pass=two_pass
        )

    def _write_rankings(self, name: str, rankings: Sequence[Ranking]) -> None:
        write_rankings(self.folder / RETRIEVAL / f"{name}.jsonl", rankings)

    def _rankings(self, name: str) -> list[Ranking]:
        ids = [question.id for question in self.questions]
        return read_rankings(self.folder / RETRIEVAL / f"{name}.jsonl", ids, self.corpus.row)


def write_demo_report(folder: Path, workdir: Workdir | None = None) -> dict[str, Any]:
    """Prints the tables and writes report.html from what the demo left in `folder`."""
    if not (folder / "scores.json").exists():
        raise UserError(
            f"{folder}: holds no finished demo (no scores.json); run `mmqa demo "
            f"--workdir={folder}` to its end."
        )
    config = read_config(folder)
    corpus = open_corpus(folder / DATA)
    scores = read_json(folder / "scores.json")
    results = read_results(config, folder, corpus)
    stage_records = (workdir or Workdir(folder)).stages()
    show_tables(results, scores, stage_records)
    write_html(folder / "report.html", results, scores, stage_records)
    Console(stderr=True).print(f"Report: {folder / 'report.html'}", soft_wrap=True)
    return scores


def read_results(config: ConfigDict, folder: Path, corpus: Corpus) -> Results:
    """Rankings and predictions of a finished demo."""
    questions = evaluated_questions(corpus, config.evaluate.questions)
    ids = [question.id for question in questions]
    rankings = {
        file.stem: read_rankings(file, ids, corpus.row)
        for file in sorted((folder / RETRIEVAL).glob("*.jsonl"))
    }
    predictions = {
        setting: stages.read_predictions(folder / PREDICTIONS / f"{setting}.jsonl")
        for setting in SETTINGS
    }
    return Results(
        folder,
        to_plain_dict(config),
        corpus,
        questions,
        rankings,
        predictions,
        selection=read_json(folder / SELECTION),
    )


def evaluated_questions(corpus: Corpus, count: int) -> list[Question]:
    """`count` questions of the test split, evenly over it; all for 0."""
    return evenly(corpus.questions("test"), count)


def evenly(questions: Sequence[Question], count: int) -> list[Question]:
    """`count` of the questions, evenly spaced; all for 0 or too few of them."""
    if not 0 < count < len(questions):
        return list(questions)
    return [questions[i * len(questions) // count] for i in range(count)]
