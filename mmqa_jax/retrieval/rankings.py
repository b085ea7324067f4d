"""Files of rankings: retrieval/*.jsonl, or runs of TREC (*.trec).

A line of JSON is a Ranking, `{"question_id", "sources", "scores"}`, best first.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from jaxtyping import Int32

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write, read_jsonl, read_text, write_jsonl
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.formats.tables import real_number
from mmqa_jax.data.schema import Question, Ranking

# What of a question is searched for: its text and its picture, as one query, or one of them.
Asks = Literal["both", "text", "picture"]


def to_rankings(
    question_ids: Sequence[str], rows: np.ndarray, scores: np.ndarray, source_ids: Sequence[str]
) -> list[Ranking]:
    """Makes Rankings of rows and scores [n, k] as a search returns them, of which rows of -1
    (padding) are left out; `source_ids` has the id of every row of the corpus."""
    rankings = []
    for question_id, source_rows, values in zip(question_ids, rows, scores, strict=True):
        ranked = [
            (int(row), float(value))
            for row, value in zip(source_rows, values, strict=True)
            if row >= 0
        ]
        names = tuple(source_ids[row] for row, _ in ranked)
        rankings.append(_checked(Ranking(question_id, names, tuple(value for _, value in ranked))))
    return rankings


def write_rankings(path: str | os.PathLike, rankings: Sequence[Ranking]) -> None:
    """Writes one ranking a line, or a run if the name ends in .trec; whole or not at all."""
    if is_run(path):
        write_run(path, rankings)
    else:
        write_jsonl(path, map(ranking_row, rankings))


def check_rankings_out(
    path: str | os.PathLike, questions: Sequence[Question], corpus: Corpus
) -> None:
    """UserError if `write_rankings` cannot write their ids there: before the search, not after."""
    if is_run(path):
        check_ids(path, questions, corpus.row)


def ranking_row(ranking: Ranking) -> dict[str, Any]:
    """A line of a file of rankings."""
    return {
        "question_id": ranking.question_id,
        "sources": list(ranking.sources),
        "scores": list(ranking.scores),
    }


def ranking_of(row: Mapping[str, Any]) -> Ranking:
    """The ranking of which `ranking_row` made a line; UserError for a score that is not finite."""
    return _checked(Ranking(row["question_id"], tuple(row["sources"]), tuple(row["scores"])))


def read_rankings(
    path: str | os.PathLike,
    question_ids: Sequence[str] | None = None,
    source_ids: Container[str] | None = None,
) -> list[Ranking]:
    """Reads rankings, checking every line.

    Args:
      path: a run if its name ends in .trec, else JSON lines. A question without a line in a run has
        an empty ranking: nothing was found.
      question_ids: the questions that the file must rank, each exactly once; the result is in
        their order. None: any questions, in the file's order.
      source_ids: the corpus's source ids (a set or dict); None: not checked.
    """
    known = None if question_ids is None else frozenset(question_ids)
    by_question: dict[str, Ranking] = {}
    for number, ranking in _lines(path):
        where = f"{path}, line {number}"
        question_id = ranking.question_id
        if known is not None and question_id not in known:
            raise UserError(
                f"{where}: question {question_id!r} is not among the {len(known)} questions "
                "to be ranked; the file belongs to another split or dataset."
            )
        if question_id in by_question:
            raise UserError(f"{where}: question {question_id!r} is ranked twice; remove one row.")
        for source in ranking.sources:
            if source_ids is not None and source not in source_ids:
                raise UserError(
                    f"{where}: source {source!r} is not in the corpus; search that corpus again."
                )
        by_question[question_id] = ranking
    if question_ids is None:
        return list(by_question.values())
    if is_run(path):
        return [by_question.get(name, Ranking(name, (), ())) for name in question_ids]
    missing = [question_id for question_id in question_ids if question_id not in by_question]
    if missing:
        raise UserError(
            f"{path}: {len(missing)} of {len(question_ids)} questions have no ranking, the first "
            f"is {missing[0]!r}; run `mmqa search` again for all of them."
        )
    return [by_question[question_id] for question_id in question_ids]


def _lines(path: str | os.PathLike) -> Iterator[tuple[int, Ranking]]:
    """The rankings of a file, each with the number of its (first) line."""
    if is_run(path):
        yield from read_run(path)
        return
    for number, row in read_jsonl(path):
        yield number, _parse(row, f"{path}, line {number}")


def holds_rankings(path: str | os.PathLike) -> bool:
    """Whether a file of predictions or rankings holds rankings, by its name and first line."""
    if is_run(path):
        return True
    first = next(read_jsonl(path), (0, {}))[1]
    return isinstance(first, dict) and "scores" in first and "answer" not in first


def _parse(row: Any, where: str) -> Ranking:
    if not isinstance(row, dict) or not {"question_id", "sources", "scores"} <= row.keys():
        raise UserError(
            f'{where}: expected {{"question_id", "sources", "scores"}}, got {row!r:.80}.'
        )
    question_id, sources, scores = row["question_id"], row["sources"], row["scores"]
    if not isinstance(question_id, str):
        raise UserError(f"{where}: question_id must be a string, got {question_id!r:.80}.")
    if not isinstance(sources, list) or not all(isinstance(source, str) for source in sources):
        raise UserError(f"{where}: sources must be a list of id strings, got {sources!r:.80}.")
    if not isinstance(scores, list) or not all(real_number(score) is not None for score in scores):
        raise UserError(f"{where}: scores must be a list of finite numbers, got {scores!r:.80}.")
    if len(sources) != len(scores):
        raise UserError(
            f"{where}: {len(sources)} sources but {len(scores)} scores; one score per source was "
            "expected."
        )
    if len(set(sources)) != len(sources):
        repeated = next(source for source in sources if sources.count(source) > 1)
        raise UserError(f"{where}: source {repeated!r} is ranked twice; remove one.")
    return Ranking(question_id, tuple(sources), tuple(map(float, scores)))


def check_scores(question_id: str, scores: Mapping[str, float]) -> None:
    """UserError if a score of a question's sources is no finite number: a NaN has no rank."""
    for name, score in scores.items():
        if not math.isfinite(score):
            raise UserError(
                f"question {question_id!r}: the score of source {name!r} is {float(score)}; the "
                "checkpoint that gave it is broken: train again or use another one."
            )


def _checked(ranking: Ranking) -> Ranking:
    check_scores(ranking.question_id, dict(zip(ranking.sources, ranking.scores, strict=True)))
    return ranking


def with_mined_negatives(
    questions: Sequence[Question], files: Sequence[str], source_ids: Container[str]
) -> list[Question]:
    """Gives questions more hard negatives: retrieved sources that are not gold, from files of `mmqa
    search` that rank all of them. It raises what `read_rankings` does."""
    for path in files:
        rankings = read_rankings(path, [question.id for question in questions], source_ids)
        questions = [
            dataclasses.replace(
                question,
                negatives=tuple(
                    dict.fromkeys(
                        name
                        for name in (*question.negatives, *ranking.sources)
                        if name not in question.positives
                    )
                ),
            )
            for question, ranking in zip(questions, rankings, strict=True)
        ]
    return list(questions)


def without_own_source(
    questions: Sequence[Question], rankings: Sequence[Ranking], top_k: int
) -> list[Ranking]:
    """Rankings cut to `top_k`, without the source that a question was made from.

    A question made from a passage of the corpus names it under the key `from_source`; that source
    would always rank first and never be an answer.
    """
    shortened = []
    for question, ranking in zip(questions, rankings, strict=True):
        asking_source = question.extra.get("from_source")
        indices = [i for i, name in enumerate(ranking.sources) if name != asking_source][:top_k]
        names = tuple(ranking.sources[i] for i in indices)
        shortened.append(
            Ranking(ranking.question_id, names, tuple(ranking.scores[i] for i in indices))
        )
    return shortened


def rescored(candidates: Sequence[Ranking], scores: np.ndarray) -> list[Ranking]:
    """Ranks the same sources by other scores, best first; ties keep their order. The scores are
    float [N], of the sources of all candidates, concatenated."""
    rankings, ends = [], np.cumsum([len(ranking.sources) for ranking in candidates])
    for ranking, end in zip(candidates, ends, strict=True):
        values = scores[end - len(ranking.sources) : end]
        rankings.append(
            by_score(ranking.question_id, dict(zip(ranking.sources, values, strict=True)))
        )
    return rankings


def best_of(first: Sequence[Ranking], second: Sequence[Ranking]) -> list[Ranking]:
    """Two sets of rankings merged: every source with the higher of its scores, best first.

    Scores must be comparable (similarities, probabilities). Ties keep the order of the rankings,
    `first` before `second`.
    """
    merged = []
    for ranking, other in zip(first, second, strict=True):
        scores = dict(zip(ranking.sources, ranking.scores, strict=True))
        for name, score in zip(other.sources, other.scores, strict=True):
            scores[name] = max(score, scores.get(name, score))
        merged.append(by_score(ranking.question_id, scores))
    return merged


def by_score(question_id: str, scores: Mapping[str, float]) -> Ranking:
    """A question's sources, best first; ties keep their order. UserError as of `check_scores`."""
    check_scores(question_id, scores)
    order = sorted(scores, key=lambda name: -scores[name])
    return Ranking(question_id, tuple(order), tuple(float(scores[name]) for name in order))


def restricted_candidates(
    questions: Sequence[Question], corpus: Corpus, cap: int | None = None
) -> list[Ranking]:
    """Each question's own candidates (gold and hard negatives), without scores.

    They are sorted by id, so that their order does not reveal which are gold.

    `cap`: at most this many of each modality: gold sources first, then negatives in the file's
    order (the baseline shuffles these once). Questions whose gold sources are hidden keep all
    candidates: a cap could drop the gold ones.
    """
    rankings = []
    for question in questions:
        sources = [corpus.sources[row] for row in corpus.candidates(question)]
        most = cap if question.positives else None
        candidates = [
            source.id
            for modality in ("text", "image")
            for source in [source for source in sources if source.modality == modality][:most]
        ]
        rankings.append(Ranking(question.id, tuple(sorted(candidates)), (0.0,) * len(candidates)))
    return rankings


def check_gold(questions: Sequence[Question]) -> None:
    """Raises UserError if the gold sources of all questions are hidden."""
    if not any(question.positives for question in questions):
        raise UserError(
            f"oracle sources: the gold sources of all {len(questions):,} questions of this split "
            "are hidden; choose a split that has them, such as val, or let `mmqa rerank` select."
        )


def gold_ranking(question: Question) -> Ranking:
    """The question's gold sources, all with score 1."""
    return Ranking(question.id, question.positives, (1.0,) * len(question.positives))


def find_candidates(
    questions: Sequence[Question], retriever: Retriever, top_k: int
) -> list[Ranking]:
    """The `top_k` sources of the whole collection, without the one a question was made from."""
    made_from_source = any("from_source" in question.extra for question in questions)
    rankings = retriever.search(questions, top_k + made_from_source)
    return without_own_source(questions, rankings, top_k)


# The interface of every retriever: dense, BM25, fused, routed by modality, with a second hop.


class Retriever(Protocol):
    """Ranks sources for questions; a question's picture is `Question.image`."""

    def search(self, questions: Sequence[Question], top_k: int) -> list[Ranking]:
        """The `top_k` sources of the whole collection for every question, best first."""

    def search_within(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> list[Ranking]:
        """Each question's own candidates, best first (the restricted setting)."""


def nearest_similarities(retriever: Retriever, questions: Sequence[Question]) -> list[float]:
    """The score of each question's best source."""
    return [float(ranking.scores[0]) for ranking in retriever.search(questions, 1)]


def candidate_rows(rows: Sequence[int], size: int, what: str) -> Int32[np.ndarray, " m"]:
    """A question's candidates as an array; UserError for a row that an index of `size` lacks."""
    candidates = np.asarray(rows, np.int32)
    if len(candidates) and (candidates.min() < 0 or candidates.max() >= size):
        raise UserError(
            f"{what}: candidate rows must be in 0..{size - 1}, got {candidates.min()}.."
            f"{candidates.max()}; the index belongs to another corpus."
        )
    return candidates


def check_top_k(top_k: int, rows: int, allowed: np.ndarray | None, what: str) -> None:
    """UserError unless 1 <= top_k <= number of allowed rows; TypeError for what is no mask."""
    if allowed is not None and not (isinstance(allowed, np.ndarray) and allowed.dtype == bool):
        kind = getattr(allowed, "dtype", type(allowed).__name__)
        raise TypeError(
            f"{what}: the allowed rows are {kind}, a NumPy mask was expected; give bool[{rows}], "
            "True for the rows that may be found."
        )
    if allowed is not None and allowed.shape != (rows,):
        raise UserError(
            f"{what}: the mask of allowed rows has shape {allowed.shape}, ({rows},) was expected."
        )
    available = rows if allowed is None else int(np.count_nonzero(allowed))
    if not 1 <= top_k <= available:
        raise UserError(
            f"{what}: top_k={top_k} is out of range, {available} sources are available; "
            f"choose 1 to {available}."
        )


# TREC's files: runs (rankings) and qrels (gold sources), which trec_eval and its kin read.
#
# run question Q0 source rank score tag a line a source, best first qrels question 0 source
# relevance relevance 0: judged, and not relevant
#
# Columns are separated by spaces or tabs, so that an id with a space cannot be written. A
# question for which nothing was found has no line. Tools of TREC order a question's sources by
# their scores and break ties as they please (trec_eval: the later id first); here ties keep the
# order of the file.


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


def write_run(
    path: str | os.PathLike, rankings: Sequence[Ranking], tags: Sequence[str] | None = None
) -> None:
    """Writes rankings as a run, the file whole or not at all; `tags` end a ranking's lines."""
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
        for ranking, tag in zip(rankings, tags or [TAG] * len(rankings), strict=True):
            places = enumerate(zip(ranking.sources, ranking.scores, strict=True), start=1)
            for rank, (name, score) in places:
                file.write(f"{ranking.question_id} Q0 {name} {rank} {float(score)!r} {tag}\n")


def read_run(path: str | os.PathLike) -> Iterator[tuple[int, Ranking]]:
    """The rankings of a run: each with the number of its question's first line.

    Sources are ordered by score, equal ones as in the file; the column of ranks is not used, as by
    trec_eval.
    """
    scores_of: dict[str, dict[str, float]] = {}
    first: dict[str, int] = {}
    for number, (question, _, source, rank, score, *_) in _rows(path, _RUN_COLUMNS):
        where = f"{path}, line {number}"
        if not _WHOLE.fullmatch(rank):
            raise UserError(f"{where}: rank is {rank!r:.60}, a whole number was expected.")
        value = float(score) if _NUMBER.fullmatch(score) else math.nan
        if not math.isfinite(value):
            raise UserError(f"{where}: score is {score!r:.60}, a finite number was expected.")
        scores = scores_of.setdefault(question, {})
        first.setdefault(question, number)
        if source in scores:
            raise UserError(
                f"{where}: source {source!r} is ranked twice for question {question!r}; remove one."
            )
        scores[source] = value
    if not scores_of:
        raise UserError(f"{path}: holds no rankings; write one source a line, as a run has it.")
    for question, scores in scores_of.items():
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
