"""The results of a row: scores, the files of its workdir, its tables and report.html."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.files import read_json, write_json, write_jsonl
from mmqa_jax.core.workdir import read_config
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question, Ranking, prediction_row
from mmqa_jax.evaluation.benchmarks import BENCHMARKS
from mmqa_jax.evaluation.report import ReportData, Trace, evenly_by_category, example, write_report
from mmqa_jax.evaluation.retrieval import score_modality, score_rankings
from mmqa_jax.evaluation.scores import Scores, count_empty
from mmqa_jax.evaluation.scoring import Evaluation, notes_of_counts, score_predictions
from mmqa_jax.evaluation.tables import Table
from mmqa_jax.prompting.llm_reader import READER
from mmqa_jax.retrieval.rankings import write_rankings
from mmqa_jax.runs.agent_report import agent_summary, agent_tables
from mmqa_jax.runs.answered import Answered
from mmqa_jax.runs.parts import RetrieverSpec
from mmqa_jax.runs.row import Row
from mmqa_jax.runs.traces import counts_table, llm_cost, report_traces, trace_counts, trace_rows

_EXAMPLES = 60
_HEADLINE = (
    *("webqa_acc", "exact_match", "source_f1/official", "recall@20", "vqa_accuracy"),
    *("a_okvqa", "scienceqa", "mmbench", "seed_bench", "choice_accuracy"),
)
# Dataset -> the scorers that tell right from wrong, the best first; of others the first there is.
_VERDICTS = {
    "scienceqa": ("scienceqa/letter_or_wrong",),  # letter_or_random draws where there is no letter
    "aokvqa": ("a_okvqa_mc/official", "a_okvqa_da/official"),
    "mmbench": ("mmbench/vanilla",),  # circular: of all passes, of which one is shown
    "seedbench": ("seed_bench/likelihood", "seed_bench/letter"),
}
_CHOSEN = ("scienceqa/recorded_choice",)  # before them, where options were ranked


@dataclasses.dataclass(frozen=True)
class RowRun:
    """The results of one row.

    Attributes:
      rankings: `candidates` of the retriever and `relevance` of the reranker, if the row has them.
      scores: the content of scores.json.
    """

    questions: Sequence[Question]
    corpus: Corpus
    rankings: Mapping[str, Sequence[Ranking]]
    predictions: Sequence[Prediction]
    evaluation: Evaluation
    scores: Mapping[str, Any]


def write_results(
    folder: Path,
    row: Row,
    corpus: Corpus,
    questions: Sequence[Question],
    answered: Answered,
    limit: int | None,
) -> RowRun:
    """Scores a row's answers to the questions, and writes all that it writes to its workdir."""
    predictions, rankings = answered.predictions, answered.rankings
    evaluation = _evaluate(row, corpus, questions, predictions, rankings)
    evaluation.notes += row.answering.notes(questions, row.options)
    if row.answers:
        evaluation.notes += notes_of_counts(evaluation, predictions)
    if answered.unscored:
        evaluation.notes.append(
            f"pairs of question and source without a score, which count as 0: {answered.unscored:,}"
        )
    scores = _scores(row, questions, predictions, evaluation, limit, answered.llm)
    if answered.engine is not None:
        scores["engine"] = answered.engine
    if answered.serving:
        scores["serving"] = answered.serving
    row_run = RowRun(questions, corpus, rankings, predictions, evaluation, scores)
    _write(folder, row_run, answered.seconds, limit)
    return row_run


def _evaluate(
    row: Row,
    corpus: Corpus,
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    rankings: Mapping[str, Sequence[Ranking]],
) -> Evaluation:
    if row.dataset in BENCHMARKS:
        benchmark = BENCHMARKS[row.dataset]
        if not any(map(benchmark.has_reference, questions)):
            return Evaluation(notes=["the answers of this split are not published"])
        return benchmark.score(questions, predictions)
    hidden = not any(q.answers or q.positives or q.keywords for q in questions)
    if hidden:  # WebQA's test split
        return Evaluation(notes=["gold answers and sources of this split are not published"])
    evaluation = score_predictions(
        row.dataset,
        questions,
        predictions,
        lemmatizer=row.scoring.lemmatizer or None,
        bart=Path(row.scoring.bart) if row.scoring.bart else None,
        sources=row.finds_sources,
        answers=row.answers,
        citations=row.reads_its_corpus,
    )
    if row.answers and row.dataset == "webqa" and not row.scoring.bart:
        evaluation.notes.append("no fluency (webqa_fl): scoring.bart names no weights")
    retriever = row.parts.get("retriever")
    if isinstance(retriever, RetrieverSpec) and retriever.modality == "classified":
        modality = score_modality(questions, corpus, rankings["candidates"])
        evaluation.scored += [modality] if modality.n else []
    ranked = rankings.get("relevance") or rankings.get("candidates")
    if ranked and any(question.positives for question in questions):
        retrieval = score_rankings(
            [set(question.positives) for question in questions], [r.sources for r in ranked]
        )
        kept = [questions[number] for number in retrieval.rows]
        metrics = retrieval.per_question.items()
        evaluation.retrieval = Scores(
            tuple(question.id for question in kept),
            tuple(question.category for question in kept),
            {name: x for name, x in metrics if name.startswith(("recall", "mrr"))},
            unscored=retrieval.excluded,
        )
    return evaluation


def _scores(
    row: Row,
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    evaluation: Evaluation,
    limit: int | None,
    llm: Mapping[str, int],
) -> dict[str, Any]:
    prompted = any(prediction.trace for prediction in predictions)
    shots = row.options.get("shots", 0)
    # A corpus of one's own need not have pictures or captions.
    with_pictures = questions if row.dataset in BENCHMARKS else ()
    return {
        "dataset": row.dataset,
        "row": row.row,
        "setting": row.setting,
        "split": row.data.split,
        "limit": limit,
        "sample": row.data.questions,
        "questions": len(questions),
        **evaluation.summary(),
        "intervals": evaluation.intervals(),
        "notes": evaluation.notes,
        "empty": count_empty(predictions),
        **({"prompts": trace_counts(with_pictures, predictions, shots)} if prompted else {}),
        **({"llm": llm_cost(llm, len(questions))} if llm else {}),
        **agent_summary(predictions),
    }


def _seconds(spent: float) -> dict[str, float]:
    """The key of per_question.jsonl; left out where no part tells its questions' time.

    A language model answers many questions at once, or finds their answers in its cache.
    """
    return {"seconds": round(spent, 6)} if spent else {}


def _write(folder: Path, run: RowRun, seconds: Mapping[str, float], limit: int | None) -> None:
    limited = {} if limit is None else {"limit": limit}
    for name, rankings in run.rankings.items():
        write_rankings(folder / "retrieval" / f"{name}.jsonl", rankings)
    write_jsonl(
        folder / "predictions.jsonl",
        ({**prediction_row(prediction), **limited} for prediction in run.predictions),
    )
    scores = run.evaluation.per_question()
    if any(prediction.trace for prediction in run.predictions):
        write_jsonl(folder / "trace.jsonl", trace_rows(run.questions, run.predictions, scores))
    write_jsonl(
        folder / "per_question.jsonl",
        (
            {
                "question_id": prediction.question_id,
                "scores": scores.get(prediction.question_id, {}),
                "answer": prediction.answer,
                "sources": prediction.sources,
                **_seconds(seconds.get(prediction.question_id, 0.0)),
                **limited,
            }
            for prediction in run.predictions
        ),
    )
    write_json(folder / "scores.json", run.scores)
    write_row_report(
        folder,
        run.scores,
        run.evaluation,
        run.corpus,
        run.questions,
        run.predictions,
        run.rankings,
    )


def row_title(scores: Mapping[str, Any]) -> str:
    """`webqa, val: vlp (first 100 questions)`."""
    title = f"{scores['dataset']}, {scores['split']}: {scores['row']}"
    if scores["limit"] is not None:
        title += f" (first {scores['limit']} questions)"
    return title


def write_row_report(
    folder: Path,
    scores: Mapping[str, Any],
    evaluation: Evaluation,
    corpus: Corpus,
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    rankings: Mapping[str, Sequence[Ranking]],
) -> list[Table]:
    """Writes a row's report.html; returns the tables in it."""
    tables = [*evaluation.tables(row_title(scores)), *agent_tables(agent_summary(predictions))]
    tables += counts_table(scores.get("prompts", {}))
    if "llm" in scores:
        tables.append(_cost_table(scores["llm"]))
    ranked = rankings.get("relevance") or rankings.get("candidates")
    per_question = evaluation.per_question()
    scorer = verdict_scorer(scores["dataset"], evaluation, predictions)
    traces = report_traces(corpus, questions, predictions, per_question, scorer)
    recall = {
        int(name.partition("@")[2]): value
        for name, value in scores["scores"].items()
        if name.startswith("recall@")
    }
    data = ReportData(
        title=row_title(scores),
        description=f"Setting {scores['setting']}; {len(questions):,} questions.",
        notice="; ".join(scores["notes"]),
        attribution=corpus.manifest.get("attribution", "").strip().splitlines(),
        facts=row_facts(folder) | run_facts(folder, corpus),
        traces=_with_scores(traces, predictions, per_question),
        trace_scorer=scorer,
        headline={
            name: value for name, value in scores["scores"].items() if name.startswith(_HEADLINE)
        },
        tables=tables,
        recall={scores["row"]: recall} if recall else {},
        examples=[
            example(
                corpus,
                questions[i],
                {scores["setting"]: (predictions[i], per_question.get(questions[i].id, {}))},
                ranked[i] if ranked else _cited(predictions[i]),
                predictions[i].sources,
            )
            for i in evenly_by_category(questions, _EXAMPLES)
            # Other traces show all.
            if not predictions[i].trace or READER in predictions[i].trace
        ],
    )
    write_report(folder / "report.html", data)
    return tables


def verdict_scorer(dataset: str, evaluation: Evaluation, predictions: Sequence[Prediction]) -> str:
    """The scorer by which the report calls an answer right or wrong; "" without scores.

    It reads the answer that is shown: no random draw, no other pass of the question. Of options
    that a model ranked, the choice itself counts.
    """
    known = [name for scores in evaluation.scored for name in scores.per_question]
    preferred = _VERDICTS.get(dataset, ())
    if any("option_scores" in prediction.trace for prediction in predictions):
        preferred = (*_CHOSEN, *preferred)
    return next((name for name in (*preferred, *known) if name in known), "")


def _with_scores(
    traces: Sequence[Trace],
    predictions: Sequence[Prediction],
    per_question: Mapping[str, Mapping[str, float]],
) -> list[Trace]:
    """The traces with all scores of their questions."""
    traced = [prediction for prediction in predictions if prediction.trace]
    chosen = []
    for trace, prediction in zip(traces, traced, strict=True):
        scores = per_question.get(prediction.question_id, {})
        listed = " · ".join(f"{name} {score:.2f}" for name, score in scores.items())
        rows = [*trace.rows, ("scored", listed)] if listed else trace.rows
        chosen.append(dataclasses.replace(trace, rows=rows))
    return chosen


def row_facts(folder: Path) -> dict[str, str]:
    """What the row in `folder` is, changes of its config included: setting, options and models."""
    config = read_config(folder)
    options = ", ".join(f"{name}={value}" for name, value in config.options.items())
    models = {
        f"model of {name}": part.model for name, part in config.parts.items() if part.get("model")
    }
    return {
        "setting": f"{config.system}, {config.setting}",
        "options": options or "the setting's own",
        **models,
    }


def run_facts(folder: Path, corpus: Corpus | None = None) -> dict[str, str]:
    """When, where and with which code (and on which corpus) the run in `folder` was made."""
    run = read_json(folder / "config.json")
    device = run.get("devices", {})
    return {
        "started": run["started"],
        "device": f"{device.get('count', '?')} x {device.get('kind', '?')}",
        "host": f"{run['host']['cpus']} CPU cores, Python {run['host']['python']}",
        "jax": run["versions"].get("jax", "?"),
        "commit": run["git"]["commit"][:10] if run.get("git") else "not from a checkout",
        **({} if corpus is None else {"corpus": corpus.fingerprint[:16]}),
    }


def _cost_table(cost: Mapping[str, float]) -> Table:
    """Calls and tokens of the language model, per question and in all."""
    names = ("calls", "prompt_tokens", "completion_tokens")
    rows = [[name.replace("_", " "), cost[f"{name}_per_question"], cost[name]] for name in names]
    return Table("Language model", ("cost", "per question", "all questions"), rows)


def _cited(prediction: Prediction) -> Ranking:
    scores = prediction.source_scores or (1.0,) * len(prediction.sources)
    return Ranking(prediction.question_id, prediction.sources, scores)
