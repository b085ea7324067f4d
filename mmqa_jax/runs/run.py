"""`mmqa run`: one row of a paper's table, end to end.

A run writes retrieval/*.jsonl, predictions.jsonl, per_question.jsonl, scores.json and report.html
to its workdir. Its questions are answered in chunks (core.chunks): parts/ keeps those that are
finished, journals/ the finished batches of the others.
"""

import contextlib
import dataclasses
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mmqa_jax.benchmarks import NAMES
from mmqa_jax.benchmarks.benchmark import open_benchmark, scorer_of
from mmqa_jax.core.chunks import PARTS, WHOLE, Engine, Shard
from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.files import write_json, write_jsonl
from mmqa_jax.core.host import cache_dir
from mmqa_jax.core.local_copies import with_local_copies
from mmqa_jax.core.paths import in_store, key_of
from mmqa_jax.core.workdir import claim_workdir, read_config
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.documents.document import cited_place
from mmqa_jax.data.schema import Prediction, Question, Ranking, prediction_row
from mmqa_jax.evaluation import retrieval as ranking_scores
from mmqa_jax.evaluation import scoring
from mmqa_jax.evaluation.scores import count_empty
from mmqa_jax.retrieval.rankings import write_rankings
from mmqa_jax.runs.part import OpenedParts
from mmqa_jax.runs.parts import RetrieverSpec
from mmqa_jax.runs.reports.row import RowRun, verdict_scorer, write_row_matches, write_row_report
from mmqa_jax.runs.row import FREE, Row, read_row
from mmqa_jax.runs.stages import Answered, answering
from mmqa_jax.runs.traces import agent_summary, llm_cost, trace_counts, trace_rows

CHUNK = 512  # questions


def run_row(
    row: Row,
    folder: Path,
    *,
    limit: int | None = None,
    opened: OpenedParts | None = None,
    shard: Shard = WHOLE,
    chunk: int = CHUNK,
    engine: Engine | None = None,
) -> RowRun | None:
    """Runs a row in `folder`, or continues it there; None while other shards have not finished
    theirs.

    Args:
      limit: only the first `limit` questions of the split; recorded in every output.
      opened: parts that several rows share; their journals are used instead of the folder's own.
      shard, chunk, engine: see core.chunks.Job.
    """
    if limit is not None and limit < 1:
        raise UserError(
            f"--limit={limit}: at least 1 was expected; leave it out for all questions."
        )
    row.check_inputs()
    worker = engine is not None and engine.is_worker
    with contextlib.nullcontext() if worker else _claimed(row, folder, limit, shard):
        here = _with_local_copies(row)
        assert opened is None or not here.data.context, "others' parts read questions as they are"
        corpus = here.open_corpus() if opened is None else opened.corpus
        questions = here.questions(corpus)[:limit]
        here.check_questions(questions)
        parts = opened or OpenedParts(corpus, _journals(folder, shard, worker=worker))
        with answering(
            here.stage(row.what(corpus, questions), questions, parts),
            folder / PARTS,
            questions,
            parts,
            chunk=len(questions) if row.needs_all else chunk,
            shard=shard,
            engine=engine,
        ) as job:
            chunks = job.parts()
            if chunks is None:
                job.waiting()
                return None
            answered = Answered.of(chunks)
            opened_parts = parts.once_opened()
            if any(hasattr(getattr(part, "dense", part), "embedder") for part in opened_parts):
                ranked = answered.rankings.get("candidates", ())
                predictions = answered.predictions
                write_row_matches(folder, row.row, questions, predictions, ranked, opened_parts)
            row_run = write_results(folder, here, corpus, questions, answered, limit)
            job.done()
    return row_run


def _claimed(
    row: Row, folder: Path, limit: int | None, shard: Shard
) -> contextlib.AbstractContextManager:
    """The workdir as this row's.

    Also a run that fails before any work is done leaves nothing: a wrong server's name, say, can be
    corrected in the same workdir.
    """
    held = read_config(folder).get("row") if (folder / "config.json").exists() else None
    if held not in (None, row.row):
        raise UserError(
            f"--workdir={folder}: holds a run of row {held}; name a new --workdir for {row.row}."
        )
    no_results = ("published", "made_by")  # keys that do not affect them
    recorded = {key: value for key, value in row.config.items() if key not in no_results}
    return claim_workdir(
        folder,
        ConfigDict({**recorded, "limit": limit}),
        work=(f"{PARTS}/[0-9]*", "journals/*"),
        shared=shard.count > 1,
        free=FREE,
        undone_by=(UserError, RunError),
    )


def _with_local_copies(row: Row) -> Row:
    """Returns the row with copies on this host in place of objects in a store."""
    config = ConfigDict(row.config)
    copied = with_local_copies(config)
    return row if copied is config else read_row(copied)


def _journals(folder: Path, shard: Shard, *, worker: bool) -> Path:
    """The folder of this process's finished batches."""
    home = cache_dir() / "journals" / key_of(str(folder)) if in_store(folder) else folder
    journals = home / "journals"
    if shard.count > 1:
        journals /= f"{shard.index}-of-{shard.count}"
    if worker:
        journals /= f"worker-{socket.gethostname()}-{os.getpid()}"
    return journals


# The results of a row: scores and the files of its workdir, report.html among them.


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
    benchmark = open_benchmark(row.dataset) if row.dataset in NAMES else None
    if benchmark is not None and benchmark.write_submission and _is_hidden(row, questions):
        benchmark.write_submission(questions, predictions, folder / benchmark.submission)
    evaluation = _evaluate(row, corpus, questions, predictions, rankings)
    evaluation.notes += row.answering.notes(questions, row.options)
    if row.answers:
        evaluation.notes += scoring.notes_of_counts(evaluation, predictions)
    if answered.unscored:
        evaluation.notes.append(
            f"pairs of question and source without a score, which count as 0: {answered.unscored:,}"
        )
    run = RowRun(corpus, questions, predictions, rankings, evaluation)
    run.scores = _scores(row, run, limit, answered)
    _write(folder, run, answered.seconds, limit)
    return run


def _is_hidden(row: Row, questions: Sequence[Question]) -> bool:
    """Whether none of a benchmark's questions has a published answer."""
    return not any(map(open_benchmark(row.dataset).has_reference, questions))


def _evaluate(
    row: Row,
    corpus: Corpus,
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    rankings: Mapping[str, Sequence[Ranking]],
) -> scoring.Evaluation:
    if row.dataset in NAMES:
        benchmark = open_benchmark(row.dataset)
        if _is_hidden(row, questions):
            note = "the answers of this split are not published"
            if benchmark.write_submission is not None:
                note = (
                    f"{note}: nothing is scored; {benchmark.submission} is the leaderboard's file"
                )
            return scoring.Evaluation(notes=[note])
        evaluation = scoring.Evaluation(has_modalities=False)
        if row.answers or benchmark.ranks:
            score = scorer_of(row.dataset, row.scoring.bem, "config key scoring.bem")
            placed = [
                dataclasses.replace(p, trace=p.trace | evidence(corpus, p)) for p in predictions
            ]
            evaluation = score(questions, placed)
        scoring.score_cited(
            evaluation,
            questions,
            predictions,
            sources=row.finds_sources and not benchmark.ranks,
            citations=row.answers and row.reads_its_corpus,
        )
    else:
        hidden = not any(q.answers or q.positives or q.keywords for q in questions)
        if hidden:  # WebQA's test split
            return scoring.Evaluation(
                notes=["gold answers and sources of this split are not published"]
            )
        evaluation = scoring.score_predictions(
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
        modality = ranking_scores.score_modality(questions, corpus, rankings["candidates"])
        evaluation.scored += [modality] if modality.n else []
    ranked = rankings.get("relevance") or rankings.get("candidates")
    if ranked and any(question.positives for question in questions):
        gold = [set(question.positives) for question in questions]
        ranking = ranking_scores.score_rankings(gold, [ranking.sources for ranking in ranked])
        evaluation.retrieval = ranking.of(questions)
    if row.finds_sources and ranking_scores.know_articles(questions):
        of_articles = _rankings_of_articles(row, predictions, ranked)
        if of_articles is not None:
            evaluation.retrieval = ranking_scores.score_articles(
                corpus.articles, questions, of_articles
            )
    return evaluation


def _rankings_of_articles(
    row: Row, predictions: Sequence[Prediction], ranked: Sequence[Ranking] | None
) -> Sequence[Ranking] | None:
    """Returns the rankings that find articles: the row's own order, its sources, or its parts'."""
    if any(ranking_scores.ARTICLES in prediction.trace for prediction in predictions):
        return [
            Ranking(prediction.question_id, names, (0.0,) * len(names))
            for prediction in predictions
            for names in (tuple(prediction.trace.get(ranking_scores.ARTICLES, {}).values()),)
        ]
    if row.answers:
        return ranked
    return [
        Ranking(prediction.question_id, prediction.sources, prediction.source_scores)
        for prediction in predictions
    ]


def _scores(row: Row, run: RowRun, limit: int | None, answered: Answered) -> dict[str, Any]:
    """The content of scores.json."""
    prompted = any(prediction.trace for prediction in run.predictions)
    shots, count = row.options.get("shots", 0), len(run.questions)
    # A corpus of one's own need not have pictures or captions.
    with_pictures = run.questions if row.dataset in NAMES else ()
    scores = {
        "dataset": row.dataset,
        "row": row.row,
        "setting": row.setting,
        "split": row.data.split,
        "limit": limit,
        "sample": row.data.questions,
        "questions": count,
        **run.evaluation.summary(),
        "intervals": run.evaluation.intervals(),
        "notes": run.evaluation.notes,
        "empty": count_empty(run.predictions),
        **({"prompts": trace_counts(with_pictures, run.predictions, shots)} if prompted else {}),
        **({"llm": llm_cost(answered.llm, count)} if answered.llm else {}),
        **agent_summary(run.predictions),
        "materials": list(map(dataclasses.asdict, row.materials(run.corpus))),
        **_lost(row, run),
    }
    if answered.engine is not None:
        scores["engine"] = answered.engine
    return scores | ({"serving": answered.serving} if answered.serving else {})


def _lost(row: Row, run: RowRun) -> dict[str, Any]:
    """The key `lost`, what each stage of a chain loses; {} without gold sources or scores."""
    candidates = run.rankings.get("candidates") or run.rankings.get("relevance")
    if not row.answers or not candidates:
        return {}
    scorer = verdict_scorer(row.dataset, run.evaluation, run.predictions)
    scored = run.evaluation.per_question().items()
    right = {name: scores[scorer] for name, scores in scored if scorer in scores}
    losses = scoring.losses_by_stage(run.questions, candidates, run.predictions, right)
    return {"lost": {"scorer": scorer, "stages": losses}} if losses else {}


def _write(folder: Path, run: RowRun, seconds: Mapping[str, float], limit: int | None) -> None:
    limited = {} if limit is None else {"limit": limit}
    for name, rankings in run.rankings.items():
        write_rankings(folder / "retrieval" / f"{name}.jsonl", rankings)
    write_jsonl(
        folder / "predictions.jsonl",
        (
            {**prediction_row(prediction), **evidence(run.corpus, prediction), **limited}
            for prediction in run.predictions
        ),
    )
    scores = run.evaluation.per_question()
    # A language model answers many questions at once, or finds their answers in its cache: no part
    # tells its questions' time.
    spent = {name: {"seconds": round(time, 6)} for name, time in seconds.items() if time}
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
                **spent.get(prediction.question_id, {}),
                **limited,
            }
            for prediction in run.predictions
        ),
    )
    write_json(folder / "scores.json", run.scores)
    write_row_report(folder, run)


def evidence(corpus: Corpus, prediction: Prediction) -> dict[str, Any]:
    """`evidence` of a line of predictions.jsonl: file, page and place of each cited source, and of
    what the answer quotes; {} where none was read from a file."""
    rows = [corpus.row[name] for name in prediction.sources if name in corpus.row]
    cited = [corpus.sources[row] for row in rows]
    if not any(source.extra.get("file") for source in cited):
        return {}
    places = [
        {
            "id": source.id,
            "file": source.extra.get("file"),
            "page": source.extra.get("page"),
            "page_size": source.extra.get("page_size"),
            **cited_place(source.text, source.extra, prediction.answer),
        }
        for source in cited
    ]
    return {"evidence": places}
