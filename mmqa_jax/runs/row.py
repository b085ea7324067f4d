"""One row of a paper's table, end to end: `mmqa run`.

A row is a config: the system and its setting, the parts and their paths, the data, the options,
and the published figures. A run writes retrieval/*.jsonl, predictions.jsonl, per_question.jsonl,
scores.json and report.html to its workdir. Its questions are answered in chunks (core.chunks):
parts/ keeps those that are finished, journals/ the finished batches of the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from ml_collections import ConfigDict

from mmqa_jax.core.chunks import PARTS, Engine, Job
from mmqa_jax.core.config import config_fingerprint, flatten, to_plain_dict
from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.files import write_json, write_jsonl
from mmqa_jax.core.host import cache_dir
from mmqa_jax.core.local_copies import local_copy, with_local_copies
from mmqa_jax.core.paths import as_path, in_store, key_of
from mmqa_jax.core.sections import Key, check_section, spec_of
from mmqa_jax.core.shards import WHOLE, Shard
from mmqa_jax.core.workdir import claim_workdir, is_free, read_config
from mmqa_jax.data.corpus import Corpus, open_corpus
from mmqa_jax.data.predictions import prediction_row
from mmqa_jax.data.question_pictures import GoldContext, with_gold_sources
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.data.splits import evenly, split_questions
from mmqa_jax.evaluation.benchmarks import BENCHMARKS
from mmqa_jax.evaluation.retrieval import score_rankings
from mmqa_jax.evaluation.retrieval_tables import score_modality
from mmqa_jax.evaluation.scores import Scores, count_empty
from mmqa_jax.evaluation.scoring import Evaluation, notes_of_counts, score_predictions
from mmqa_jax.evaluation.source_selection import check_threshold
from mmqa_jax.retrieval.modality import of_modality
from mmqa_jax.retrieval.rankings import write_rankings
from mmqa_jax.runs import identity
from mmqa_jax.runs.agent_report import agent_summary
from mmqa_jax.runs.answered import Answered, answering
from mmqa_jax.runs.opened_parts import OpenedParts, read_parts
from mmqa_jax.runs.parts import RerankerSpec, RetrieverSpec
from mmqa_jax.runs.prompted_parts import LLM_FREE, check_prompted
from mmqa_jax.runs.run_report import write_row_report
from mmqa_jax.runs.settings import (
    check_options,
    check_questions,
    known_systems,
    needs_all,
    notes_of,
    options_of,
    parts_of,
)
from mmqa_jax.runs.traces import llm_cost, trace_counts, trace_rows
from mmqa_jax.tasks.library import LibrarySpec, has_picture
from mmqa_jax.weights.hub import is_hub_name

CHUNK = 512  # questions

_SPEC: dict[str, Any] = {
    "row": str,
    "system": str,
    "setting": str,
    "dataset": Literal["atlas", "webqa", "corpus", *BENCHMARKS],
    "data": {
        "dir": str,
        "split": str,
        "questions": Key(int, minimum=0),
        "modality": Literal["", "text", "image"],
        "where": Key(dict, False),
        "context": Key(Literal["", *get_args(GoldContext)], False),
    },
    "scoring": {"lemmatizer": Literal["", "none", "spacy"], "bart": str},
    "published": tuple[dict, ...],
    "made_by": tuple[tuple[str, str], ...],
}
# Names of models that are installed packages.
_INSTALLED = ("minilm", "smollm2")
# Parts that find sources; without them, a row's sources are the gold ones or none, and no result.
_FINDING = ("retriever", "reranker")
_ANSWERING = ("reader", "llm", "heuristics", "finished")  # parts that answer in words
_FREE = tuple(f"parts.llm.{key}" for key in LLM_FREE)  # may be changed in a workdir
_ANSWERS = 2  # raised where the same row answers otherwise than before: its parts are made again
_MAY_BE_ZERO = {"shots", "seed", "candidates"}  # of the options that are whole numbers


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


def run_row(
    config: ConfigDict,
    folder: Path,
    *,
    limit: int | None = None,
    opened: OpenedParts | None = None,
    shard: Shard = WHOLE,
    chunk: int = CHUNK,
    engine: Engine | None = None,
) -> RowRun | None:
    """Runs a row in `folder`, or continues it there.

    Args:
      config: a row's config (configs/*/tables.py).
      limit: only the first `limit` questions of the split; recorded in every output.
      opened: parts that several rows share; their journals are used instead of the folder's own.
      shard, chunk, engine: see core.chunks.Job.

    Returns:
      The results; None while other shards have not finished theirs.

    Raises:
      UserError: a config that is not a row's; missing data or parts (all are named); a folder
        that holds another row.
    """
    check_row(config)
    if limit is not None and limit < 1:
        raise UserError(
            f"--limit={limit}: at least 1 was expected; leave it out for all questions."
        )
    missing = missing_inputs(config)
    if missing:
        listed = "; ".join(f"{path} ({how})" for path, how in missing.items())
        raise UserError(f"row {config.row}: {len(missing)} of its inputs are missing: {listed}.")
    _check_folder(folder, config.row)
    listed_only = ("published", "made_by")  # these do not affect the results
    recorded = {k: v for k, v in config.to_dict().items() if k not in listed_only}
    recorded = ConfigDict({**recorded, "limit": limit})
    shared = shard.count > 1
    worker = engine is not None and engine.is_worker
    claimed = contextlib.nullcontext()
    if not worker:
        # Also a run that fails before any work is done leaves nothing: a wrong server's name, say,
        # can be corrected in the same workdir.
        claimed = claim_workdir(
            folder,
            recorded,
            work=(f"{PARTS}/[0-9]*", "journals/*"),
            shared=shared,
            free=_FREE,
            undone_by=(UserError, RunError),
        )
    with claimed:
        given, config = config, with_local_copies(config)
        corpus = opened.corpus if opened is not None else open_corpus(config.data.dir)
        if context := config.data.get("context"):
            assert opened is None, "parts that other rows opened read questions as they are"
            corpus = with_gold_sources(corpus, context)
        questions = row_questions(config, corpus)[:limit]
        system = known_systems()[config.system]
        check_questions(system, config.setting, questions)
        if needs_all(system, config.setting):
            chunk = len(questions)
        with Job(
            folder / PARTS, _what(given, corpus, questions), len(questions), chunk=chunk,
            shard=shard, engine=engine,
        ) as job:  # fmt: skip
            here = cache_dir() / "journals" / key_of(str(folder)) if in_store(folder) else folder
            journals = here / "journals"
            if shared:
                journals /= f"{shard.index}-of-{shard.count}"
            if worker:
                journals /= f"worker-{socket.gethostname()}-{os.getpid()}"
            parts = opened or OpenedParts(corpus, journals)
            try:
                job.run(lambda: answering(config, questions, corpus, parts))
            finally:
                parts.close()
            committed = job.parts()
            if committed is None:
                job.waiting()
                return None
            row_run = write_results(
                folder, config, corpus, questions, Answered.of(committed), limit
            )
            job.done()
    return row_run


def write_results(
    folder: Path,
    config: ConfigDict,
    corpus: Corpus,
    questions: Sequence[Question],
    answered: Answered,
    limit: int | None,
) -> RowRun:
    """Scores a row's answers to the questions, and writes all that it writes to its workdir."""
    predictions, rankings = answered.predictions, answered.rankings
    evaluation = _evaluate(config, corpus, questions, predictions, rankings)
    system = known_systems()[config.system]
    evaluation.notes += notes_of(system, config.setting, questions, config.options)
    if _answers(config):
        evaluation.notes += notes_of_counts(evaluation, predictions)
    scores = _scores(config, questions, predictions, evaluation, limit, answered.llm)
    if answered.engine is not None:
        scores["engine"] = answered.engine
    if answered.serving:
        scores["serving"] = answered.serving
    row_run = RowRun(questions, corpus, rankings, predictions, evaluation, scores)
    _write(folder, row_run, answered.seconds, limit)
    return row_run


def _answers(config: ConfigDict) -> bool:
    """Whether a row answers in words or by a choice, not with sources alone."""
    return any(part in config.parts for part in _ANSWERING)


def _what(config: ConfigDict, corpus: Corpus, questions: Sequence[Question]) -> dict[str, Any]:
    """All that a row's answers depend on."""
    used = {key: config.get(key) for key in ("system", "setting", "parts", "options")}
    values = flatten(to_plain_dict(used))
    affecting = {key: value for key, value in values.items() if not is_free(key, _FREE)}
    return {
        "verb": "run",
        "row": config.row,
        "answers": _ANSWERS,
        "corpus": corpus.fingerprint,
        "questions": identity.of_questions(questions),
        "config": config_fingerprint(affecting),
        "inputs": {
            path: identity.of_path(local_copy(path) if in_store(path) else path)
            for path in _part_paths(config)
        },
    }


def check_row(config: ConfigDict) -> None:
    """Raises UserError if a config is not a row's, or its setting does not take its options."""
    if not isinstance(config.get("row"), str) or not config.get("system"):
        raise UserError(
            "--config: the file does not define a row of a table (no key `row`); name one such as "
            "configs/webqa/tables.py:vlp."
        )
    systems = known_systems()
    if config.system not in systems:
        known = ", ".join(systems)
        raise UserError(f"config key system={config.system}: use one of {known}.")
    system = systems[config.system]
    if config.get("setting") not in system.SETTINGS:
        known = ", ".join(system.SETTINGS)
        raise UserError(f"config key setting={config.get('setting')}: use one of {known}.")
    taken = parts_of(system, config.setting)
    parts = {name: Key(dict, needed) for name, needed in taken.items()}
    given = ("questions", "corpus", *system.PARTS)
    options = spec_of(system.SETTINGS[config.setting], *given, minimum=1)
    for name in _MAY_BE_ZERO & options.keys():
        options[name] = dataclasses.replace(options[name], minimum=0)
    check_section(config, "", {**_SPEC, "parts": parts, "options": options})
    opened = read_parts(config.parts)
    if isinstance(library := opened.get("library"), LibrarySpec):
        check_prompted(options_of(system, config.setting, config.options), library)
    if "threshold" in config.options:
        check_threshold(config.options.threshold, "config key options.threshold")
    if isinstance(retriever := opened.get("retriever"), RetrieverSpec):
        retriever.check("parts.retriever")
    if isinstance(reranker := opened.get("reranker"), RerankerSpec) and reranker.similarity:
        reranker.similarity.check("parts.reranker.similarity")
    check_options(system, config.setting, config.options, config.parts)


def _check_folder(folder: Path, row: str) -> None:
    """Raises UserError where the folder holds another row's run."""
    held = read_config(folder).get("row") if (folder / "config.json").exists() else None
    if held not in (None, row):
        raise UserError(
            f"--workdir={folder}: holds a run of row {held}; name a new --workdir for {row}."
        )


def missing_inputs(config: ConfigDict) -> dict[str, str]:
    """Missing paths of data, parts and weights -> how to get each."""
    paths = [config.data.dir, config.scoring.bart, *_part_paths(config)]
    made_by = dict(config.made_by)
    llm = config.parts.get("llm", {}).get("model", "")
    # A model on the Hugging Face hub is looked for in its cache when it is opened.
    found = {*_INSTALLED, *({llm} if is_hub_name(llm) and llm not in made_by else ())}
    return {
        path: made_by.get(path, "no such path; name another with --config.KEY=PATH")
        for path in dict.fromkeys(filter(None, paths))
        if path not in found and not as_path(path).exists()
    }


def _part_paths(config: ConfigDict) -> list[str]:
    """What the parts of a row read: paths, and names of installed models."""
    paths = [path for part in read_parts(config.parts).values() for path in part.paths()]
    return list(dict.fromkeys(filter(None, paths)))


def row_questions(config: ConfigDict, corpus: Corpus) -> list[Question]:
    """The questions of a row, sampled evenly down to data.questions.

    They are of its split and modality, and have the values of data.where in their `extra`.

    Raises:
      UserError: there are none.
    """
    questions = split_questions(corpus, Path(config.data.dir), config.data.split)
    if where := dict(config.data.get("where") or {}):
        total = len(questions)
        questions = [q for q in questions if all(q.extra.get(k) == v for k, v in where.items())]
        if not questions:
            asked = " and ".join(f"{key}={value!r}" for key, value in where.items())
            raise UserError(
                f"config key data.where: none of the {total:,} questions of "
                f"{config.data.dir} ({config.data.split}) has {asked}; change one of them."
            )
    modality = config.data.modality or None
    if config.dataset in BENCHMARKS and modality:
        questions = [q for q in questions if has_picture(q) == (modality == "image")]
    else:
        questions = of_modality(questions, corpus, modality)
    return evenly(questions, config.data.questions)


def _evaluate(
    config: ConfigDict,
    corpus: Corpus,
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    rankings: Mapping[str, Sequence[Ranking]],
) -> Evaluation:
    if config.dataset in BENCHMARKS:
        benchmark = BENCHMARKS[config.dataset]
        if not any(map(benchmark.has_reference, questions)):
            return Evaluation(notes=["the answers of this split are not published"])
        return benchmark.score(questions, predictions)
    hidden = not any(q.answers or q.positives or q.keywords for q in questions)
    if hidden:  # WebQA's test split
        return Evaluation(notes=["gold answers and sources of this split are not published"])
    answers = _answers(config)
    evaluation = score_predictions(
        config.dataset,
        questions,
        predictions,
        lemmatizer=config.scoring.lemmatizer or None,
        bart=Path(config.scoring.bart) if config.scoring.bart else None,
        sources=any(part in config.parts for part in _FINDING),
        answers=answers,
    )
    if answers and config.dataset == "webqa" and not config.scoring.bart:
        evaluation.notes.append("no fluency (webqa_fl): scoring.bart names no weights")
    if config.parts.get("retriever", {}).get("modality") == "classified":
        modality = score_modality(questions, corpus, rankings["candidates"])
        evaluation.scored += [modality] if modality.n else []
    ranked = rankings.get("relevance") or rankings.get("candidates")
    if ranked and any(question.positives for question in questions):
        retrieval = score_rankings(
            [set(question.positives) for question in questions], [r.sources for r in ranked]
        )
        kept = [questions[row] for row in retrieval.rows]
        metrics = retrieval.per_question.items()
        evaluation.retrieval = Scores(
            tuple(question.id for question in kept),
            tuple(question.category for question in kept),
            {name: x for name, x in metrics if name.startswith(("recall", "mrr"))},
            unscored=retrieval.excluded,
        )
    return evaluation


def _scores(
    config: ConfigDict,
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    evaluation: Evaluation,
    limit: int | None,
    llm: Mapping[str, int],
) -> dict[str, Any]:
    prompted = any(prediction.trace for prediction in predictions)
    shots = config.options.get("shots", 0)
    # A corpus of one's own need not have pictures or captions.
    shown = questions if config.dataset in BENCHMARKS else ()
    return {
        "dataset": config.dataset,
        "row": config.row,
        "setting": config.setting,
        "split": config.data.split,
        "limit": limit,
        "sample": config.data.questions,
        "questions": len(questions),
        **evaluation.summary(),
        "intervals": evaluation.intervals(),
        "notes": evaluation.notes,
        "empty": count_empty(predictions),
        **({"prompts": trace_counts(shown, predictions, shots)} if prompted else {}),
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
