"""`mmqa demo`: data, training, and every row of configs/atlas/tables.py, resumable at any point.

Every stage reads the files of earlier stages and writes its own, whole or not at all; a finished
stage is not run again. Restarted after a kill, the demo continues and ends with the same scores as
an uninterrupted run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
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
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.evaluation import report, webqa
from mmqa_jax.evaluation.compare import read_run
from mmqa_jax.evaluation.prediction_lines import read_answers
from mmqa_jax.evaluation.significance import Interval, bootstrap_interval
from mmqa_jax.evaluation.tables import Cell, Table, retrieval_table, to_rich
from mmqa_jax.evaluation.webqa import SELECTIONS, tune_refusal, tune_threshold
from mmqa_jax.extensions import similarity
from mmqa_jax.extensions.fusion_tuning import tune_fusion
from mmqa_jax.retrieval.fusion import DEPTH
from mmqa_jax.retrieval.rankings import nearest_similarities, read_rankings
from mmqa_jax.runs.part import OpenedParts
from mmqa_jax.runs.parts import RetrieverSpec, open_dense, open_fusions, with_similarity
from mmqa_jax.runs.prepare import prepare_atlas
from mmqa_jax.runs.reports.row import run_facts, verdict_note
from mmqa_jax.runs.reports.training import run_curves
from mmqa_jax.runs.row import Row, read_row
from mmqa_jax.runs.run import run_row
from mmqa_jax.runs.status import seconds_left
from mmqa_jax.runs.traces import reference_rows
from mmqa_jax.runs.verbs.indexing import embed, index
from mmqa_jax.tasks.registry import check_config, known_tasks
from mmqa_jax.tasks.rerank import load_reranker
from mmqa_jax.tasks.run import run_training
from mmqa_jax.training.best_weights import read_best

TASKS = ("contrastive", "rerank", "answer")
MACHINE = "machine.json"  # what this machine was measured to do, and the precision of this run
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
        with _precision(machine["precision"]):
            for name, run in demo.stages().items():
                left = seconds_left(workdir.stages())
                with workdir.stage(name) as todo:
                    if todo:
                        announce(f"Stage {name}: about {duration(left)} left of the demo.")
                        run()
        return write_demo_report(folder, workdir)


def write_demo_report(folder: Path, workdir: Workdir | None = None) -> dict[str, Any]:
    """Prints the tables and writes report.html from a finished demo in `folder`."""
    if not (folder / "scores.json").exists():
        raise UserError(
            f"{folder}: holds no finished demo (no scores.json), no training run and no finished "
            f"row; finish a demo with `mmqa demo --workdir={folder}`."
        )
    results = read_results(folder, read_config(folder), open_corpus(folder / DATA))
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
        results = read_results(self.folder, self.config, self.corpus)
        write_json(self.folder / "scores.json", score_demo(results))


# The results of the demo's rows: scores as JSON, tables, the HTML report.


SETTINGS = ("question_only", "oracle", "restricted", "full")
RETRIEVERS = (
    *("bm25", "dense", "rrf", "fused"),
    *("bm25_second_hop", "dense_second_hop", "rrf_second_hop", "fused_second_hop"),
)
# Source F1 in the JSON: name -> row. The first four choose among each question's own candidates.
SOURCE_F1 = {
    "bm25": "restricted_bm25",
    "dense": "restricted_dense",
    "vlp": "restricted_vlp",
    "reranked": "restricted",
    "full_bm25": "bm25",
    "full_dense": "dense",
    "full_vlp": "full_vlp",
    "full_reranked_one_hop": "full_one_hop",
    "full_reranked": "full",
}
METRICS = ("webqa_acc", "exact_match")
_SCORER = "webqa_acc/no_lemma"
NOTICE = (
    "Atlas is mmqa_jax's own benchmark, made from OpenMoji pictures and World Factbook text. Its "
    "scores are not comparable with WebQA's or with any other benchmark's."
)
_TUNED = ("weight", "weight_at_edge", "threshold", "vlp_threshold")
_KS = (1, 2, 5, 10, 20, 50, 100)


@dataclasses.dataclass(frozen=True)
class Results:
    """The outputs of the rows of a finished demo.

    Attributes:
      scores: row -> scorer -> float64[questions].
      relevance: scored candidates of the row `full`, one Ranking per question.
      selection: `weight` of the similarity, `threshold`, and `vlp_threshold` (VLP alone).
      examples: approximate number of questions that the report shows.
    """

    folder: Path
    corpus: Corpus
    questions: Sequence[Question]
    scores: Mapping[str, Mapping[str, np.ndarray]]
    predictions: Mapping[str, Sequence[Prediction]]
    relevance: Sequence[Ranking]
    selection: Mapping[str, Any]
    examples: int


def read_results(folder: Path, config: ConfigDict, corpus: Corpus) -> Results:
    """Reads the outputs of every row below `folder`; adds the constant answers as a row."""
    rows = folder / ROWS
    runs = {file.parent.name: read_run(file.parent) for file in sorted(rows.glob("*/scores.json"))}
    if missing := sorted({*SETTINGS, *RETRIEVERS, *SOURCE_F1.values()} - runs.keys()):
        raise UserError(
            f"{rows}: lacks {', '.join(missing)}, which finished stages of the demo wrote; delete "
            f"search.json, select.json and read.json in {folder / 'stages'}, and run `mmqa demo` "
            "again."
        )
    questions = evenly(corpus.questions("test"), config.evaluate.questions)
    ids = [question.id for question in questions]
    scores: dict[str, Mapping[str, np.ndarray]] = {
        name: {x: np.array([run.per_question[i][x] for i in ids]) for x in run.scorers}
        for name, run in runs.items()
    }
    normalizer = webqa.Normalizer("none")
    known = [question for question in corpus.questions() if question.split != "test"]
    constants = webqa.constant_predictions(
        questions, webqa.fit_constant_answers(known, lemmatizer=normalizer)
    )
    scores["constant"] = webqa.score_answers(
        questions, constants, lemmatizer=normalizer
    ).per_question
    return Results(
        folder,
        corpus,
        questions,
        scores,
        {name: read_answers(rows / name / "predictions.jsonl") for name in runs},
        read_rankings(rows / "full" / "retrieval" / "relevance.jsonl", ids, corpus.row),
        read_json(folder / SELECTION),
        config.evaluate.examples,
    )


def score_demo(results: Results) -> dict[str, Any]:
    """All scores: the JSON object of `mmqa demo --json`.

    Answers are scored with WebQA's accuracy without a lemmatizer (key `scorer`). Groups are
    WebQA's categories, with `text` also split by number of hops.
    """
    groups = question_groups(results.questions)
    answering, scored = (*SETTINGS, "constant"), results.scores
    named = {f"{m}/{row}": scored[row][f"{m}/no_lemma"] for row in answering for m in METRICS}
    f1 = "source_f1/official"
    named |= {f"source_f1/{name}": scored[row][f1] for name, row in SOURCE_F1.items()}
    intervals = {name: bootstrap_interval(values) for name, values in named.items()}
    recall = {
        row: {str(k): float(scored[row][f"recall@{k}"].mean()) for k in _KS} for row in RETRIEVERS
    }

    def by_group(values: Mapping[str, np.ndarray]) -> dict[str, dict[str, float]]:
        """Returns group -> name -> mean of the group's questions."""
        return {
            group: {name: float(x[members].mean()) for name, x in values.items()}
            for group, members in groups.items()
        }

    by_category = {row: by_group({m: named[f"{m}/{row}"] for m in METRICS}) for row in answering}
    by_category |= {
        f"retrieval/{row}": by_group({"recall_at_20": scored[row]["recall@20"]})
        for row in RETRIEVERS
    }
    return {
        "dataset": "atlas",
        "n": len(results.questions),
        "scorer": _SCORER,
        "selection": {k: results.selection[k] for k in _TUNED},
        "scores": {name: interval.mean for name, interval in intervals.items()}
        | {f"recall_at_20/{row}": values["20"] for row, values in recall.items()},
        "intervals": {name: [x.low, x.high] for name, x in intervals.items()},
        "by_category": by_category,
        "recall": recall,
    }


def question_groups(questions: Sequence[Question]) -> dict[str, np.ndarray]:
    """Category -> indices of its questions; `text` also as one-hop and two-hop text."""
    groups: dict[str, list[int]] = {}
    for i, question in enumerate(questions):
        groups.setdefault(question.category, []).append(i)
        if question.category == "text":
            hops = "two-hop" if question.extra.get("hops") == 2 else "one-hop"
            groups.setdefault(f"text, {hops}", []).append(i)
    return {name: np.array(groups[name]) for name in sorted(groups)}


def show_tables(
    results: Results, scores: Mapping[str, Any], stages: Mapping[str, Mapping[str, Any]]
) -> None:
    """Prints the tables on stderr, because stdout is reserved for the JSON."""
    console = Screen(width=None if sys.stderr.isatty() else 120)
    console.print(f"\n{NOTICE}", soft_wrap=True)
    for table in [*result_tables(results, scores), stage_table(stages)]:
        console.print(to_rich(table))


def result_tables(results: Results, scores: Mapping[str, Any]) -> list[Table]:
    """Tables of answers by setting and category, exact match, retrieval, source selection."""
    n = scores["n"]
    tables = [
        _settings_table(results, scores, "webqa_acc", f"Answers: WebQA accuracy, {n} questions"),
        _settings_table(results, scores, "exact_match", f"Answers: exact match, {n} questions"),
    ]
    f1 = {row: float(results.scores[row]["source_f1/official"].mean()) for row in RETRIEVERS}
    recall = {
        name: {int(k): v for k, v in values.items() if int(k) != 50}
        for name, values in scores["recall"].items()
    }
    tables.append(
        retrieval_table("Retrieval over the whole collection", recall, f1, "Source F1: top two.")
    )
    groups = list(scores["by_category"]["retrieval/bm25"])
    rows = [
        [name, *(scores["by_category"][f"retrieval/{name}"][g]["recall_at_20"] for g in groups)]
        for name in RETRIEVERS
    ]
    tables.append(Table("recall@20 by category", ["retriever", *groups], rows))
    tuned = scores["selection"]
    note = (
        f"bm25, dense: top two. vlp: above {tuned['vlp_threshold']}. reranked: above "
        f"{tuned['threshold']}, VLP with {tuned['weight']:g} x similarity. Tuned on val."
    )
    if tuned.get("weight_at_edge"):
        note += " That weight is the largest one tried: a larger one may be better."
    cited = [[name, _interval(scores, f"source_f1/{name}")] for name in SOURCE_F1]
    title = "Source F1 (restricted; full_: whole collection)"
    return [*tables, Table(title, ["system", "F1"], cited, note)]


def stage_table(stages: Mapping[str, Mapping[str, Any]]) -> Table:
    """Time and memory of every stage."""
    rows: list[list[Cell]] = [
        [name, round(record["seconds"] / 60, 2), record["peak_rss_mib"]]
        for name, record in stages.items()
    ]
    total = sum(record["seconds"] for record in stages.values())
    peak = max((record["peak_rss_mib"] for record in stages.values()), default=0)
    return Table("Stages", ["stage", "minutes", "peak MiB"], [*rows, ["all", total / 60, peak]])


def write_html(
    path: Path, results: Results, scores: Mapping[str, Any], stages: Mapping[str, Mapping[str, Any]]
) -> None:
    """Writes report.html."""
    products = {kind.product: results.folder / task for task, kind in known_tasks().items()}
    best = {product: read_best(folder) for product, folder in products.items()}
    data = report.ReportData(
        title="Atlas: cited answers from pictures and prose",
        description=(
            f"{len(results.corpus):,} sources; {scores['n']} test questions about countries that "
            "no training question names. This run trained the retriever, the source selector and "
            "the reader."
        ),
        notice=NOTICE,
        headline={
            "answer accuracy, oracle sources": scores["scores"]["webqa_acc/oracle"],
            "answer accuracy, full collection": scores["scores"]["webqa_acc/full"],
            "recall@20, dense with second hop": scores["scores"]["recall_at_20/dense_second_hop"],
            "source F1, restricted": scores["scores"]["source_f1/reranked"],
        },
        cards=_cards(results),
        card_note=verdict_note(_SCORER) + " Sources: those of the setting full.",
        tables=result_tables(results, scores),
        recall={
            name: {int(k): v for k, v in values.items()}
            for name, values in scores["recall"].items()
        },
        curves={
            kind.product: run_curves(results.folder / task) for task, kind in known_tasks().items()
        },
        best_steps={title: step["step"] for title, step in best.items() if step is not None},
        stages=[(name, record["seconds"]) for name, record in stages.items()],
        facts=run_facts(results.folder, results.corpus),
        materials=results.corpus.materials,
    )
    report.write_report(path, data)


def _cards(results: Results) -> list[report.Card]:
    """About `examples` questions, equally many of each category, the best first.

    A card is right where the setting `full` is.
    """
    questions, predictions = results.questions, results.predictions["full"]
    scores = {
        row: {f"{metric}/no_lemma": results.scores[row][f"{metric}/no_lemma"] for metric in METRICS}
        for row in ("full", "restricted", "oracle", "question_only")
    }
    maker = report.CardMaker(results.corpus)

    def answer(row: str, i: int) -> report.CardAnswer:
        values = {name: float(of_row[i]) for name, of_row in scores[row].items()}
        text = results.predictions[row][i].answer
        return report.CardAnswer(row.replace("_", " "), text, values[_SCORER], values)

    order = maker.best_first(
        questions,
        predictions,
        scores["full"][_SCORER].tolist(),
        report.in_turn([question.category for question in questions], results.examples),
    )
    return [
        maker.card(
            questions[i],
            [answer(row, i) for row in scores],
            results.relevance[i],
            [predictions[i].sources],
            rows=reference_rows(questions[i]),
            picture=results.corpus.question_picture(questions[i]),
        )
        for i in order
    ]


def _settings_table(results: Results, scores: Mapping[str, Any], metric: str, title: str) -> Table:
    """One row per category, one column per setting, the constant answer last."""
    by_category = scores["by_category"]
    columns = (*SETTINGS, "constant")
    rows: list[list[Cell]] = [
        [name, len(members), *(by_category[setting][name][metric] for setting in columns)]
        for name, members in question_groups(results.questions).items()
    ]
    overall = [_interval(scores, f"{metric}/{setting}") for setting in columns]
    rows.append(["all", len(results.questions), *overall])
    note = (
        "No lemmatizer. Constant: each category's best single answer, chosen on train and val. "
        "Intervals: 95%, bootstrap over questions."
    )
    return Table(title, ["category", "n", *columns], rows, note)


def _interval(scores: Mapping[str, Any], name: str) -> Interval:
    return Interval(scores["scores"][name], *scores["intervals"][name])
