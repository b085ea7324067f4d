"""TREC's files: runs (rankings) and qrels (gold sources), which trec_eval and its kin read.

    run      question Q0 source rank score tag        a line a source, best first
    qrels    question 0 source relevance              relevance 0: judged, and not relevant

Columns are separated by spaces or tabs, so that an id with a space cannot be written. A question
for which nothing was found has no line. Tools of TREC order a question's sources by their scores
and break ties as they please (trec_eval: the later id first); here ties keep the order of the file.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write, read_text
from mmqa_jax.data.schema import Question, Ranking

RUN = ".trec"  # how the names of runs end
UNIIR_RUN, UNIIR_QRELS = "_run.txt", "_qrels.txt"  # UniIR's (M-BEIR), where a task may end a line
TAG = "mmqa_jax"  # the last column of our runs
_RUN_COLUMNS = ("question", "Q0", "source", "rank", "score", "tag")
_QRELS_COLUMNS = ("question", "0", "source", "relevance")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_WHOLE = re.compile(r"-?\d{1,9}")


def is_run(path: str | os.PathLike) -> bool:
    """Whether a file's name says that it is a run: it ends in `.trec`, or as UniIR's does."""
    return str(path).endswith((RUN, UNIIR_RUN))


def is_qrels(path: str | os.PathLike) -> bool:
    """Whether a file's name says that it is qrels: `test.qrels`, `2019qrels-pass.txt`."""
    return "qrels" in Path(path).name.lower() and not Path(path).is_dir()


def check_ids(
    path: str | os.PathLike, questions: Iterable[Question], source_ids: Iterable[str]
) -> None:
    """UserError if questions or sources have ids that TREC's files cannot hold."""
    for question in questions:
        _check_id(question.id, "question", path)
    for name in source_ids:
        _check_id(name, "source", path)


def write_run(path: str | os.PathLike, rankings: Sequence[Ranking]) -> None:
    """Writes rankings as a run, the file whole or not at all."""
    for ranking in rankings:
        _check_id(ranking.question_id, "question", path)
        for rank, name in enumerate(ranking.sources, start=1):
            _check_id(name, "source", path)
            if not math.isfinite(ranking.scores[rank - 1]):
                raise UserError(
                    f"{path}: question {ranking.question_id!r}: the score of source {name!r} is "
                    f"{ranking.scores[rank - 1]}; rank it again with finite scores."
                )
            if rank > 1 and ranking.scores[rank - 1] > ranking.scores[rank - 2]:
                raise UserError(
                    f"{path}: question {ranking.question_id!r}: source {name!r} at rank {rank} has "
                    "a higher score than the one before it, and tools of TREC order by score; "
                    "write .jsonl instead."
                )
    with atomic_write(path) as file:
        for ranking in rankings:
            places = enumerate(zip(ranking.sources, ranking.scores, strict=True), start=1)
            for rank, (name, score) in places:
                file.write(f"{ranking.question_id} Q0 {name} {rank} {float(score)!r} {TAG}\n")


def read_run(path: str | os.PathLike) -> Iterator[tuple[int, Ranking]]:
    """The rankings of a run: each with the number of its question's first line.

    Sources are ordered by score, equal ones as in the file; the column of ranks is not used, as by
    trec_eval.
    """
    found: dict[str, dict[str, float]] = {}
    first: dict[str, int] = {}
    for number, (question, _, source, rank, score, *_) in _rows(path, _RUN_COLUMNS):
        where = f"{path}, line {number}"
        if not _WHOLE.fullmatch(rank):
            raise UserError(f"{where}: rank is {rank!r:.60}, a whole number was expected.")
        value = float(score) if _NUMBER.fullmatch(score) else math.nan
        if not math.isfinite(value):
            raise UserError(f"{where}: score is {score!r:.60}, a finite number was expected.")
        scores = found.setdefault(question, {})
        first.setdefault(question, number)
        if source in scores:
            raise UserError(
                f"{where}: source {source!r} is ranked twice for question {question!r}; remove one."
            )
        scores[source] = value
    if not found:
        raise UserError(f"{path}: holds no rankings; write one source a line, as a run has it.")
    for question, scores in found.items():
        order = sorted(scores, key=lambda name: -scores[name])
        yield (
            first[question],
            Ranking(question, tuple(order), tuple(scores[name] for name in order)),
        )


def write_qrels(path: str | os.PathLike, questions: Sequence[Question]) -> None:
    """Writes the gold sources of questions, each with relevance 1; the file whole or not at all."""
    check_qrels(path, questions)
    with atomic_write(path) as file:
        for question in questions:
            for name in question.positives:
                file.write(f"{question.id} 0 {name} 1\n")


def check_qrels(path: str | os.PathLike, questions: Sequence[Question]) -> None:
    """UserError if the gold sources of questions cannot be written as qrels."""
    judged = [question for question in questions if question.positives]
    if not judged:
        raise UserError(
            f"{path}: none of the {len(questions):,} questions has gold sources, so that there are "
            "no qrels; choose a split that has them, such as val."
        )
    check_ids(path, judged, (name for question in judged for name in question.positives))


def read_qrels(path: str | os.PathLike) -> dict[str, dict[str, int]]:
    """Question id -> source id -> relevance, of all that were judged, in the order of the file."""
    judged: dict[str, dict[str, int]] = {}
    for number, (question, _, source, relevance, *_) in _rows(path, _QRELS_COLUMNS):
        where = f"{path}, line {number}"
        if not _WHOLE.fullmatch(relevance):
            raise UserError(
                f"{where}: relevance is {relevance!r:.60}, a whole number was expected."
            )
        of_question = judged.setdefault(question, {})
        if source in of_question:
            raise UserError(
                f"{where}: source {source!r} is judged twice for question {question!r}; remove one."
            )
        of_question[source] = int(relevance)
    if not judged:
        raise UserError(f"{path}: holds no judgments; write `{' '.join(_QRELS_COLUMNS)}` a line.")
    return judged


def gold_of(judged: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Reads qrels: question id -> source id -> relevance above 0; may be empty."""
    return {
        question: {name: value for name, value in sources.items() if value > 0}
        for question, sources in judged.items()
    }


def _rows(path: str | os.PathLike, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """(line number, cells) of every line that is not blank."""
    most = len(columns) + str(path).endswith((UNIIR_RUN, UNIIR_QRELS))
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        cells = line.split()
        if cells and not len(columns) <= len(cells) <= most:
            raise UserError(
                f"{path}, line {number}: has {len(cells)} columns, {len(columns)} were expected "
                f"(`{' '.join(columns)}`); repair that line."
            )
        if cells:
            yield number, cells


def _check_id(name: str, kind: str, path: str | os.PathLike) -> None:
    if len(name.split()) != 1 or name.split()[0] != name:
        raise UserError(
            f"{path}: {kind} {name!r:.80} is empty or has a space, which separates columns of "
            "TREC's files; write .jsonl instead, or prepare the corpus with other ids."
        )
