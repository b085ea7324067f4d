"""`mmqa merge`: the results of a job from its parts alone, without the command that made them.

A job's folder is data, perhaps somebody else's. Nothing in it is executed, no model is opened, and
the results go to the place that the folder's own name gives, whatever its files say. Only the
scores of a row need more: the questions and BART's weights, where its config.json says.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mmqa_jax.core.chunks import PARTS, JobRecord, locked_folder, read_job, read_parts, write_job
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import check_out, write_jsonl
from mmqa_jax.core.local_copies import local_copy
from mmqa_jax.core.locks import alone
from mmqa_jax.core.paths import in_store
from mmqa_jax.core.store import check_file, check_no_link
from mmqa_jax.core.workdir import read_config
from mmqa_jax.data.schema import Prediction, prediction_of, prediction_row
from mmqa_jax.extensions import similarity
from mmqa_jax.retrieval.rankings import check_scores, ranking_of, ranking_row
from mmqa_jax.runs import part
from mmqa_jax.runs.reports.row import RowRun
from mmqa_jax.runs.row import read_row
from mmqa_jax.runs.run import write_results
from mmqa_jax.runs.stages import Answered

_SUFFIX = f".{PARTS}"
_SHAPE = (KeyError, TypeError, ValueError, AttributeError, IndexError)  # of rows of another kind


def merge_parts(folder: Path) -> RowRun | dict[str, Any]:
    """Writes the results of a job whose parts are all there: a file, or a row's.

    `folder`: of the parts; `OUT.parts` makes OUT, `W/parts` what `mmqa run` writes to W.

    Returns:
      A row's results; of another verb what `mmqa merge` prints as JSON.
    """
    folder = folder if in_store(folder) else folder.absolute()
    check_no_link(folder)
    record = read_job(folder)
    verb = record.job.get("verb")
    is_row = folder.name == PARTS
    if verb not in ("run", *_ROWS):
        raise UserError(f"{folder}: is of no verb that makes parts, but {verb!r}; name another.")
    if is_row != (verb == "run") or not (is_row or folder.name.endswith(_SUFFIX)):
        expected = f"W/{PARTS}" if verb == "run" else f"OUT{_SUFFIX}"
        raise UserError(
            f"{folder}: holds parts of `mmqa {verb}`, which lie in {expected}; give the folder "
            "such a name."
        )
    out = folder.with_name(folder.name.removesuffix(_SUFFIX))
    if not is_row:
        check_out(out, flag="")
    with locked_folder(folder, shared=True):
        parts = read_parts(folder, record)
        try:
            answered = Answered.of(parts) if is_row else None
            for prediction in answered.predictions if answered else ():
                _check(prediction)
            rows = [] if is_row else _ROWS[verb](record, [r for part in parts for r in part.rows])
        except _SHAPE as error:
            raise UserError(
                f"{folder}: its parts do not hold what `mmqa {verb}` writes "
                f"({type(error).__name__}: {error}); start the job again in another place."
            ) from error
        if answered is not None:
            result = _merge_row(folder.parent, record, answered)
        else:
            write_jsonl(out, rows)
            result = {"out": str(out), "rows": len(rows)}
        with alone(folder / ".claim"):
            write_job(folder, record._replace(complete=True))
    return result


def _rankings(record: JobRecord, rows: Sequence[Any]) -> list[Any]:
    return [ranking_row(ranking_of(row)) for row in rows]


def _relevance(record: JobRecord, rows: Sequence[Any]) -> list[Any]:
    evidence = similarity.evidence_of(rows)
    weight = float(record.job["similarity_weight"])
    return list(map(ranking_row, similarity.combine(evidence, weight))) if rows else []


def _predictions(record: JobRecord, rows: Sequence[Any]) -> list[Any]:
    predictions = [prediction_of(row) for row in rows]
    for prediction in predictions:
        _check(prediction)
    return list(map(prediction_row, predictions))


def _answers(record: JobRecord, rows: Sequence[Any]) -> list[Any]:
    for row in rows:
        row["id"]
    return list(rows)


# Verb -> the lines of its file, from the rows of its parts.
_ROWS: Mapping[str, Callable[[JobRecord, Sequence[Any]], list[Any]]] = {
    "search": _rankings,
    "rerank": _relevance,
    "answer": _predictions,
    "prompt": _answers,
}


def _check(prediction: Prediction) -> None:
    """Raises ValueError for a prediction whose types cannot be scored and shown."""
    texts = (prediction.question_id, prediction.answer, *prediction.sources)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"a prediction holds {prediction.answer!r:.40} as its answer")
    check_scores(
        prediction.question_id,
        dict(zip(prediction.sources, prediction.source_scores, strict=False)),
    )


def _merge_row(folder: Path, record: JobRecord, answered: Answered) -> RowRun:
    check_file(folder / "config.json")
    check_no_link(folder / "retrieval")
    recorded = read_config(folder).to_dict()
    limit = recorded.pop("limit", None)
    row = read_row(ConfigDict(recorded))
    row = dataclasses.replace(
        row,
        data=dataclasses.replace(
            row.data, dir=_on_this_host(row.data.dir), sources=_on_this_host(row.data.sources)
        ),
        scoring=dataclasses.replace(
            row.scoring, bart=_on_this_host(row.scoring.bart), bem=_on_this_host(row.scoring.bem)
        ),
    )
    corpus = row.open_corpus()
    questions = row.questions(corpus)[:limit]
    asked = {"corpus": corpus.fingerprint, "questions": part.of_questions(questions)}
    for key, name in (("corpus", "collection of sources"), ("questions", "set of questions")):
        if record.job.get(key) != asked[key]:
            raise UserError(
                f"{row.data.dir}: holds another {name} than was answered in {folder}; put the "
                "data there that it was started with."
            )
    if [p.question_id for p in answered.predictions] != [q.id for q in questions]:
        raise UserError(
            f"{folder}: its parts answer other questions; start the job again in another place."
        )
    return write_results(folder, row, corpus, questions, answered, limit)


def _on_this_host(path: str) -> str:
    """Returns a path, or the path of a copy if it is in an object store."""
    return str(local_copy(path)) if in_store(path) else path
