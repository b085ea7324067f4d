"""The tables and the HTML report of one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.files import read_json
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.evaluation.examples import evenly_by_category, example
from mmqa_jax.evaluation.report import ReportData, write_report
from mmqa_jax.evaluation.scoring import Evaluation
from mmqa_jax.evaluation.tables import Table
from mmqa_jax.systems.mavl_record import agent_summary, agent_tables
from mmqa_jax.systems.traces import report_traces

_EXAMPLES = 60
_HEADLINE = (
    *("webqa_acc", "exact_match", "source_f1/official", "recall@20", "vqa_accuracy"),
    *("a_okvqa", "scienceqa", "mmbench", "seed_bench", "choice_accuracy"),
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
    if "llm" in scores:
        tables.append(_cost_table(scores["llm"]))
    ranked = rankings.get("relevance") or rankings.get("candidates")
    per_question = evaluation.per_question()
    scorer = next(iter(evaluation.scored[-1].per_question), "") if evaluation.scored else ""
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
        facts=run_facts(folder, corpus),
        traces=report_traces(corpus, questions, predictions, per_question, scorer),
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
            if not predictions[i].trace  # the traces show all
        ],
    )
    write_report(folder / "report.html", data)
    return tables


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
