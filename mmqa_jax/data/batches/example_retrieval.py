"""Training batches of a retriever of examples: questions, candidates and what each helped."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_jsonl, write_jsonl
from mmqa_jax.data.batches.feed import Batches, FeedConfig, PlannedBatch, Table, feed_batches
from mmqa_jax.data.batches.packing import Bucket, Packed
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question
from mmqa_jax.data.tokenizers import Tokenizer, TokenTable, text_inputs


def example_retrieval_batches(
    tokenizer: Tokenizer,
    questions: Mapping[str, Question],
    rows: Sequence[ExampleScores],
    text_of: Callable[[Question], str],
    feed: FeedConfig,
    *,
    length: int,
    candidates: int,
) -> Batches:
    """Questions with `candidates` of their examples each, drawn anew in every epoch.

    A batch of B questions with m candidates each: query_ids int32 and query_mask bool
    [B, length], candidate_ids and candidate_mask [B, m, length], scores float32[B, m]; index
    int32[B]: of `rows`; truncated int32[B]: tokens lost.

    Args:
      questions: by id, those of `rows` and their candidates.
      rows: judged questions; one with fewer than `candidates` is left out.
      text_of: what is embedded of a question.
      length: tokens, [CLS] and [SEP] among them; longer texts lose their tail.
      candidates: m.
    """
    usable = [row for row, judged in enumerate(rows) if len(judged.scores) >= candidates]
    if not usable:
        raise UserError(
            f"config key batches.candidates={candidates}: no judged question has so many; lower "
            "it, or run `mmqa judge` with a larger judge.candidates."
        )
    named = sorted(
        {name for row in usable for name in (rows[row].question_id, *rows[row].candidates)}
    )
    place = {name: i for i, name in enumerate(named)}
    tokens = TokenTable(tokenizer, [text_of(questions[name]) for name in named])

    def sample(epoch: int) -> Table:
        rng = np.random.default_rng((15, feed.seed, epoch))
        drawn = [rng.permutation(len(rows[row].scores))[:candidates] for row in usable]
        return {
            "row": np.array(usable),
            "drawn": np.stack(drawn),
            "bucket": np.zeros(len(usable), np.int64),
        }

    def inputs(names: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return text_inputs([tokens[place[name]] for name in names], length, tokenizer)

    def make(planned: PlannedBatch, table: Table) -> Packed:
        judged = [rows[row] for row in table["row"]]
        drawn = [
            (row, i) for row, columns in zip(judged, table["drawn"], strict=True) for i in columns
        ]
        scores = np.array([row.scores[i] for row, i in drawn], np.float32)
        query_ids, query_mask, query_lost = inputs([row.question_id for row in judged])
        candidate_ids, candidate_mask, lost = inputs([row.candidates[i] for row, i in drawn])
        return {
            "query_ids": query_ids,
            "query_mask": query_mask,
            "candidate_ids": candidate_ids.reshape(len(judged), candidates, length),
            "candidate_mask": candidate_mask.reshape(len(judged), candidates, length),
            "scores": scores.reshape(-1, candidates),
            "index": table["row"].astype(np.int32),
            "truncated": query_lost + lost.reshape(-1, candidates).sum(axis=1, dtype=np.int32),
        }

    return feed_batches(sample, [Bucket(0, length)], make, feed)


# How much each candidate example helped a language model with a question, as a file.
#
# One JSON object a line: `question_id`, `alone` (the model's score without any example) and
# `candidates`, a list of `{"id", "similarity", "score"}`, most similar first. A score is the
# log-probability of the right option among the question's options, at most 0.


FILE = "example_scores.jsonl"


class ExampleScores(NamedTuple):
    """A question's candidates.

    Attributes:
      alone: the score without examples; None: it has none.
      candidates: ids of examples.
      similarities, scores: one for each.
    """

    question_id: str
    alone: float | None
    candidates: tuple[str, ...]
    similarities: tuple[float, ...]
    scores: tuple[float, ...]


def write_example_scores(path: str | os.PathLike, rows: Iterable[ExampleScores]) -> None:
    """Writes the file, whole or not at all."""
    write_jsonl(
        path,
        (
            {
                "question_id": row.question_id,
                "alone": None if row.alone is None else round(row.alone, 6),
                "candidates": [
                    {"id": name, "similarity": round(similarity, 6), "score": round(score, 6)}
                    for name, similarity, score in zip(
                        row.candidates, row.similarities, row.scores, strict=True
                    )
                ],
            }
            for row in rows
        ),
    )


def read_example_scores(path: str | os.PathLike) -> list[ExampleScores]:
    """Reads the file."""
    if Path(path).is_dir():
        path = Path(path) / FILE
    return [_row(value, f"{path}, line {number}") for number, value in read_jsonl(path)]


def judged_questions(path: str | os.PathLike, corpus: Corpus, split: str) -> list[ExampleScores]:
    """The rows of a split's questions."""
    split_of = {question.id: question.split for question in corpus.questions()}
    judged = read_example_scores(path)
    for row in judged:
        for name in (row.question_id, *row.candidates):
            if name not in split_of:
                raise UserError(
                    f"{path}: names the question {name}, which data.dir does not hold; judge the "
                    "examples of this data."
                )
    rows = [row for row in judged if split_of[row.question_id] == split]
    if not rows:
        raise UserError(
            f"{path}: holds no question of split {split}; name it in data.splits of `mmqa judge`."
        )
    return rows


def _row(value: Any, place: str) -> ExampleScores:
    try:
        candidates = value["candidates"]
        alone = value["alone"]
        row = ExampleScores(
            str(value["question_id"]),
            None if alone is None else float(alone),
            tuple(str(candidate["id"]) for candidate in candidates),
            tuple(float(candidate["similarity"]) for candidate in candidates),
            tuple(float(candidate["score"]) for candidate in candidates),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"{place}: not a line of `mmqa judge` (question_id, alone, candidates with id, "
            f"similarity and score were expected: {type(error).__name__} {error}); write the file "
            "again."
        ) from error
    if not all(map(math.isfinite, row.scores)):
        raise UserError(f"{place}: a score is not finite; write the file again.")
    return row
