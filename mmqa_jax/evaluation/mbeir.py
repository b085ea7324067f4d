"""M-BEIR's scores and its run files (UniIR src/common/mbeir_retriever.py, mbeir_analyst.py).

    mbeir/recall@k      1 where any positive is among the first k, else 0
    mbeir/official      recall@5, of Fashion200K and FashionIQ recall@10

Each set has a score of its own; their average, which papers report, stands in a note. In the pool
of all sets a first candidate that is wrong may be of the wrong modality or of another domain: a
table says how often.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.datasets.mbeir import SETS, TASKS, candidate_modality, dataset_of
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.evaluation.found_sources import has_positives, read_found
from mmqa_jax.evaluation.scores import predictions_by_question, questions_that_count, scores_of
from mmqa_jax.evaluation.scoring import Evaluation
from mmqa_jax.evaluation.tables import Table

OFFICIAL = "mbeir/official"
KS = (1, 5, 10, 20, 50)
_USUAL_K, _FASHION_K = 5, 10
_FASHION = ("fashion200k", "fashioniq")
DOMAINS = {
    **dict.fromkeys(("visualnews", "edis"), "news"),
    **dict.fromkeys(("fashion200k", "fashioniq"), "fashion"),
    **dict.fromkeys(("webqa", "oven", "infoseek"), "wiki"),
    **dict.fromkeys(("nights", "cirr", "mscoco"), "common"),
}
_ERRORS = ("wrong modality", "wrong domain", "other")


def official_k(name: str) -> int:
    """The k by which a set (`webqa_task1`) is compared."""
    return _FASHION_K if name.startswith(_FASHION) else _USUAL_K


def score_mbeir(questions: Sequence[Question], predictions: Sequence[Prediction]) -> Evaluation:
    """recall@k by set and by task; a query without a ranking has found nothing."""
    given = predictions_by_question(questions, predictions)
    scored = questions_that_count(questions, has_positives, "positives")
    first = np.array([_first_rank(given.get(one.id), one) for one in scored])
    depth = max((len(one.sources) for one in given.values()), default=0)
    per_question = {OFFICIAL: first <= np.array([official_k(one.category) for one in scored])}
    per_question |= {f"mbeir/recall@{k}": first <= k for k in KS if k <= max(depth, _FASHION_K)}
    values = {name: hits.astype(float) for name, hits in per_question.items()}
    scores = scores_of(questions, scored, given, values, _groups(scored))
    evaluation = Evaluation([scores], has_modalities=False)
    found = [name for name in sets_of(scored) if scores.counts[name]]
    average = float(np.mean([scores.of_category(OFFICIAL, name).mean() for name in found]))
    evaluation.notes.append(
        f"average of {len(found)} of {len(SETS)} sets, recall@{_USUAL_K} (Fashion200K, FashionIQ: "
        f"@{_FASHION_K}): {100 * average:.2f} %"
    )
    if depth < _FASHION_K:
        evaluation.notes.append(f"the rankings hold {depth} candidates at most")
    return evaluation


def sets_of(questions: Sequence[Question]) -> list[str]:
    """The sets of the queries, in the order of UniIR's table."""
    there = dict.fromkeys(question.category for question in questions)
    return sorted(there, key=lambda name: SETS.index(name) if name in SETS else len(SETS))


def first_errors(
    corpus: Corpus, questions: Sequence[Question], predictions: Sequence[Prediction]
) -> list[Table]:
    """What is wrong with first candidates that are no positives, as shares of these, by set."""
    given = predictions_by_question(questions, predictions)
    wrong: dict[str, Counter[str]] = {name: Counter() for name in sets_of(questions)}
    for question in questions:
        found = given[question.id].sources[:1] if question.id in given else ()
        if not found or found[0] in question.positives or not question.positives:
            continue
        name = found[0]
        if name not in corpus.row:
            raise UserError(
                f"--references: candidate {name!r}, the first of query {question.id!r}, is not in "
                "that pool; name the corpus that was searched, or the pool of all sets."
            )
        source = corpus.sources[corpus.row[name]]
        if candidate_modality(source) != wanted_modality(question):
            wrong[question.category]["wrong modality"] += 1
        elif DOMAINS.get(dataset_of(name)) != DOMAINS.get(dataset_of(question.id)):
            wrong[question.category]["wrong domain"] += 1
        else:
            wrong[question.category]["other"] += 1
    rows = [
        [name, counts.total(), *(counts[kind] / counts.total() for kind in _ERRORS)]
        for name, counts in wrong.items()
        if counts.total()
    ]
    note = "Of the first candidates that are no positives; shares add up to 1."
    columns = ["", "wrong", *_ERRORS]
    return [Table("mbeir: errors at rank 1", columns, rows, note)] if rows else []


def wanted_modality(question: Question) -> str:
    """The modality of a query's positives, by the task of its set."""
    task = int(question.category.rpartition("_task")[2])
    return next(wanted for (_, wanted), number in TASKS.items() if number == task)


def official_id(question: Question) -> str:
    """A query's id in M-BEIR's files, which does not tell the split."""
    return question.id.removeprefix(f"{question.split}:")


def read_mbeir_runs(path: Path, questions: Sequence[Question] = ()) -> list[Prediction]:
    """As `read_found`; queries may have their official ids."""
    own = {official_id(question): question.id for question in questions}
    return [
        dataclasses.replace(one, question_id=own.get(one.question_id, one.question_id))
        for one in read_found(path, questions)
    ]


def write_mbeir_run(
    questions: Sequence[Question], predictions: Sequence[Prediction], path: Path
) -> None:
    """Writes the rankings as UniIR's run files: TREC's columns, and the number of the task."""
    given = predictions_by_question(questions, predictions)
    with atomic_write(path) as file:
        for question in questions:
            one = given.get(question.id, Prediction(question.id))
            # Only the order counts where a file gives no scores.
            scores = one.source_scores or [1 / rank for rank in range(1, len(one.sources) + 1)]
            tag = f"mbeir_{question.category}_{question.split}"
            task = question.category.rpartition("_task")[2]
            for rank, (name, score) in enumerate(zip(one.sources, scores, strict=True), start=1):
                file.write(
                    f"{official_id(question)} Q0 {name} {rank} {float(score)!r} {tag} {task}\n"
                )


def _first_rank(given: Prediction | None, question: Question) -> float:
    """The rank of the first positive; infinite where there is none."""
    gold = set(question.positives)
    sources = given.sources if given is not None else ()
    return next((rank for rank, one in enumerate(sources, start=1) if one in gold), np.inf)


def _groups(questions: Sequence[Question]) -> Mapping[str, np.ndarray]:
    categories = np.array([question.category for question in questions])
    tasks = {
        f"task {number}: {query} to {wanted}": np.char.endswith(categories, f"_task{number}")
        for (query, wanted), number in TASKS.items()
    }
    return {**{name: categories == name for name in sets_of(questions)}, **tasks}
