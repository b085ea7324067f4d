"""What a demo found: its scores as JSON, its tables, its HTML report."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from mmqa_jax.core.files import read_json
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.evaluation.report import (
    Example,
    ExampleAnswer,
    ExampleSource,
    ReportData,
    read_curves,
    write_report,
)
from mmqa_jax.evaluation.retrieval import score_rankings
from mmqa_jax.evaluation.scores import Scores
from mmqa_jax.evaluation.significance import Interval, bootstrap_interval
from mmqa_jax.evaluation.tables import Cell, Table, retrieval_table, to_rich
from mmqa_jax.evaluation.webqa import (
    Normalizer,
    constant_predictions,
    fit_constant_answers,
    score_answers,
)
from mmqa_jax.systems import webqa

SETTINGS = ("question_only", "oracle", "restricted", "full")
RETRIEVERS = ("bm25", "dense", "fused", "bm25_two_pass", "dense_two_pass", "fused_two_pass")
NOTICE = (
    "Atlas is mmqa_jax's own benchmark, made of OpenMoji pictures and World Factbook text. Its "
    "numbers are not WebQA's and compare with nobody else's."
)
_KS = (1, 2, 5, 10, 20, 50, 100)
_TASKS = {"contrastive": "retriever", "rerank": "source selector", "answer": "reader"}


@dataclasses.dataclass(frozen=True)
class Results:
    """Rankings and predictions of a finished demo.

    Attributes:
      rankings: name of a file in retrieval/ -> rankings, one per question.
      predictions: setting -> predictions, one per question.
      selection: `weight` of the similarity and `threshold` of the source selection, and
        `vlp_threshold` without the similarity, all tuned on the validation split.
    """

    folder: Path
    config: Mapping[str, Any]
    corpus: Corpus
    questions: Sequence[Question]
    rankings: Mapping[str, Sequence[Ranking]]
    predictions: Mapping[str, Sequence[Prediction]]
    selection: Mapping[str, Any]


def score_demo(results: Results) -> dict[str, Any]:
    """All scores: the JSON object of `mmqa demo --json`.

    Answers are scored with WebQA's accuracy without a lemmatiser (key `scorer`). Groups are
    WebQA's categories, with `text` also apart by hops.
    """
    questions = results.questions
    groups = question_groups(questions)
    scores: dict[str, float] = {}
    intervals: dict[str, list[float]] = {}
    by_category: dict[str, dict[str, dict[str, float]]] = {}
    resamples = results.config["evaluate"]["bootstrap"]
    for setting, answers in _answer_scores(results).items():
        values = {name.split("/")[0]: x for name, x in answers.per_question.items()}
        for name, per_question in values.items():
            key = f"{name}/{setting}"
            interval = bootstrap_interval(per_question, resamples=resamples)
            scores[key] = interval.mean
            intervals[key] = [interval.low, interval.high]
        by_category[setting] = _by_group(values, groups)

    recall: dict[str, dict[str, float]] = {}
    gold = [set(question.positives) for question in questions]
    for name in RETRIEVERS:
        found = score_rankings(gold, [r.sources for r in results.rankings[name]], _KS)
        recall[name] = {str(k): found.scores[f"recall@{k}"] for k in _KS}
        scores[f"recall_at_20/{name}"] = found.scores["recall@20"]
        by_category[f"retrieval/{name}"] = _by_group(
            {"recall_at_20": found.per_question["recall@20"]}, groups
        )

    for name, cited in cited_sources(results).items():
        f1 = webqa.source_f1s(questions, cited)
        interval = bootstrap_interval(f1, resamples=resamples)
        scores[f"source_f1/{name}"] = interval.mean
        intervals[f"source_f1/{name}"] = [interval.low, interval.high]
    return {
        "dataset": "atlas",
        "n": len(questions),
        "scorer": "webqa_acc/no_lemma",
        "selection": {k: results.selection[k] for k in ("weight", "threshold", "vlp_threshold")},
        "scores": scores,
        "intervals": intervals,
        "by_category": by_category,
        "recall": recall,
    }


def cited_sources(results: Results) -> dict[str, list[Ranking]]:
    """Cited sources per system: the top two of a retriever, or those the reranker selects.

    `bm25`, `dense`, `vlp` (the source head alone) and `reranked` (with the retriever's
    similarity) choose among each question's candidates (restricted); `full_*` in the whole
    collection.
    """
    rankings, tuned = results.rankings, results.selection
    return {
        "bm25": [webqa.top(r, 2) for r in rankings["restricted_bm25"]],
        "dense": [webqa.top(r, 2) for r in rankings["restricted_dense"]],
        "vlp": webqa.select_sources(rankings["restricted_vlp"], tuned["vlp_threshold"]),
        "reranked": webqa.select_sources(rankings["restricted_reranked"], tuned["threshold"]),
        "full_bm25": [webqa.top(r, 2) for r in rankings["bm25"]],
        "full_dense": [webqa.top(r, 2) for r in rankings["dense"]],
        "full_vlp": webqa.select_sources(rankings["full_vlp"], tuned["vlp_threshold"]),
        "full_reranked": webqa.select_sources(rankings["full_reranked"], tuned["threshold"]),
    }


def question_groups(questions: Sequence[Question]) -> dict[str, np.ndarray]:
    """Category -> places of its questions; `text` also as one-hop and two-hop text."""
    groups: dict[str, list[int]] = {}
    for place, question in enumerate(questions):
        groups.setdefault(question.category, []).append(place)
        if question.category == "text":
            hops = "two-hop" if question.extra.get("hops") == 2 else "one-hop"
            groups.setdefault(f"text, {hops}", []).append(place)
    return {name: np.array(groups[name]) for name in sorted(groups)}


def show_tables(
    results: Results, scores: Mapping[str, Any], stages: Mapping[str, Mapping[str, Any]]
) -> None:
    """Prints the tables on stderr, so that stdout stays the JSON's."""
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)
    console.print(f"\n{NOTICE}", soft_wrap=True)
    for table in [*result_tables(results, scores), stage_table(stages)]:
        console.print(to_rich(table))


def result_tables(results: Results, scores: Mapping[str, Any]) -> list[Table]:
    """Answers by setting and category, exact match, retrieval, sources."""
    n = scores["n"]
    tables = [
        _settings_table(results, scores, "webqa_acc", f"Answers: WebQA accuracy, {n} questions"),
        _settings_table(results, scores, "exact_match", f"Answers: exact match, {n} questions"),
    ]
    f1 = {name: scores["scores"].get(f"source_f1/full_{name}") for name in RETRIEVERS}
    recall = {
        name: {int(k): v for k, v in values.items() if int(k) in (1, 2, 5, 10, 20, 100)}
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
    cited = cited_sources(results)
    rows = [
        [
            name,
            Interval(
                scores["scores"][f"source_f1/{name}"], *scores["intervals"][f"source_f1/{name}"]
            ),
        ]
        for name in cited
    ]
    tuned = scores["selection"]
    note = (
        f"bm25, dense: top two. vlp: above {tuned['vlp_threshold']}. reranked: above "
        f"{tuned['threshold']}, VLP with {tuned['weight']:g} x similarity. Tuned on val."
    )
    tables.append(
        Table("Source F1 (restricted; full_: whole collection)", ["system", "F1"], rows, note)
    )
    return tables


def stage_table(stages: Mapping[str, Mapping[str, Any]]) -> Table:
    """Minutes and memory of every stage."""
    rows: list[list[Cell]] = [
        [name, round(record["seconds"] / 60, 2), record["peak_rss_mib"]]
        for name, record in stages.items()
    ]
    total = sum(record["seconds"] for record in stages.values())
    peak = max((record["peak_rss_mib"] for record in stages.values()), default=0)
    return Table("Stages", ["stage", "minutes", "peak MiB"], [*rows, ["all", total / 60, peak]])


def write_html(
    path: Path,
    results: Results,
    scores: Mapping[str, Any],
    stages: Mapping[str, Mapping[str, Any]],
) -> None:
    """Writes report.html."""
    run = read_json(results.folder / "config.json")
    commit = run["git"]["commit"][:10] if run.get("git") else "not from a checkout"
    device = run.get("devices", {})
    curves = {}
    for task, title in _TASKS.items():
        names = ("loss", "accuracy")
        curves[title] = read_curves(results.folder / task / "metrics.jsonl", names)
    headline = {
        "answer accuracy, oracle sources": scores["scores"]["webqa_acc/oracle"],
        "answer accuracy, full collection": scores["scores"]["webqa_acc/full"],
        "recall@20, dense two-pass": scores["scores"]["recall_at_20/dense_two_pass"],
        "source F1, restricted": scores["scores"]["source_f1/reranked"],
    }
    data = ReportData(
        title="Atlas: cited answers from pictures and prose",
        description=(
            f"{len(results.corpus):,} sources; {scores['n']} test questions about countries that "
            "no training question names. Retriever, source selector and reader were trained by "
            "this run."
        ),
        notice=NOTICE,
        attribution=results.corpus.manifest.get("attribution", "").strip().splitlines(),
        facts={
            "started": run["started"],
            "device": f"{device.get('count', '?')} x {device.get('kind', '?')}",
            "host": f"{run['host']['cpus']} CPU cores, Python {run['host']['python']}",
            "jax": run["versions"].get("jax", "?"),
            "commit": commit,
            "corpus": results.corpus.fingerprint[:16],
        },
        headline=headline,
        tables=result_tables(results, scores),
        curves=curves,
        recall={
            name: {int(k): v for k, v in values.items()}
            for name, values in scores["recall"].items()
        },
        stages=[(name, record["seconds"]) for name, record in stages.items()],
        examples=_examples(results),
    )
    write_report(path, data)


def _settings_table(results: Results, scores: Mapping[str, Any], metric: str, title: str) -> Table:
    """A row a category, a column a setting, the constant answer last."""
    by_category = scores["by_category"]
    groups = question_groups(results.questions)
    columns = (*SETTINGS, "constant")
    rows: list[list[Cell]] = [
        [name, len(places), *(by_category[setting][name][metric] for setting in columns)]
        for name, places in groups.items()
    ]
    overall: list[Cell] = ["all", len(results.questions)]
    for setting in columns:
        key = f"{metric}/{setting}"
        overall.append(Interval(scores["scores"][key], *scores["intervals"][key]))
    rows.append(overall)
    note = (
        "No lemmatiser. Constant: each category's best single answer, chosen on train and val. "
        "Intervals: 95 %, bootstrap over questions."
    )
    return Table(title, ["category", "n", *columns], rows, note)


def _answer_scores(results: Results) -> dict[str, Scores]:
    """Scores of every setting, and of constant answers chosen on the other splits."""
    normalizer = Normalizer("none")
    known = [q for q in results.corpus.questions() if q.split != "test"]
    constants = fit_constant_answers(known, lemmatizer=normalizer)
    predictions = {
        **{setting: results.predictions[setting] for setting in SETTINGS},
        "constant": constant_predictions(results.questions, constants),
    }
    return {
        name: score_answers(results.questions, given, lemmatizer=normalizer)
        for name, given in predictions.items()
    }


def _by_group(
    values: Mapping[str, np.ndarray], groups: Mapping[str, np.ndarray]
) -> dict[str, dict[str, float]]:
    """Group -> metric -> mean over its questions."""
    return {
        group: {name: float(x[places].mean()) for name, x in values.items()}
        for group, places in groups.items()
    }


def _examples(results: Results) -> list[Example]:
    """Example questions, evenly over the categories."""
    scored = _answer_scores(results)
    groups: dict[str, list[int]] = {}
    for place, question in enumerate(results.questions):
        groups.setdefault(question.category, []).append(place)
    each = -(-results.config["evaluate"]["examples"] // len(groups))
    return [
        _example(results, scored, place)
        for category in sorted(groups)
        for place in groups[category][:each]
    ]


def _example(results: Results, scored: Mapping[str, Scores], place: int) -> Example:
    question = results.questions[place]
    answers = []
    for setting in ("full", "restricted", "oracle", "question_only"):
        values = {
            name.split("/")[0]: float(x[place]) for name, x in scored[setting].per_question.items()
        }
        answers.append(ExampleAnswer(setting, results.predictions[setting][place].answer, values))
    ranking = results.rankings["full_reranked"][place]
    cited = set(results.predictions["full"][place].sources)
    shown = list(zip(ranking.sources[:6], ranking.scores[:6], strict=True))
    sources = [
        _source(results, name, rank, score, name in cited, question)
        for rank, (name, score) in enumerate(shown, start=1)
    ]
    listed = {name for name, _ in shown}
    ranks = {name: rank for rank, name in enumerate(ranking.sources, start=1)}
    sources += [
        _source(results, name, ranks.get(name), None, name in cited, question)
        for name in question.positives
        if name not in listed
    ]
    return Example(
        question=question.question,
        category=question.category,
        answers=answers,
        references=question.answers,
        keywords=question.keywords,
        sources=sources,
        picture=results.corpus.question_picture(question),
        id=question.id,
    )


def _source(
    results: Results,
    name: str,
    rank: int | None,
    score: float | None,
    cited: bool,
    question: Question,
) -> ExampleSource:
    row = results.corpus.row[name]
    source = results.corpus.sources[row]
    return ExampleSource(
        id=name,
        text=source.text,
        title=source.title,
        picture=results.corpus.picture(row),
        rank=rank,
        score=score,
        cited=cited,
        gold=name in question.positives,
    )
