"""How much each candidate example helped a language model with a question, as a file.

One JSON object a line: `question_id`, `alone` (the model's score without any example) and
`candidates`, a list of `{"id", "similarity", "score"}`, most similar first. A score is the
log-probability of the right option among the question's options, at most 0.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_jsonl, write_jsonl
from mmqa_jax.data.corpus import Corpus

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
    found = read_example_scores(path)
    for row in found:
        for name in (row.question_id, *row.candidates):
            if name not in split_of:
                raise UserError(
                    f"{path}: names the question {name}, which data.dir does not hold; judge the "
                    "examples of this data."
                )
    rows = [row for row in found if split_of[row.question_id] == split]
    if not rows:
        raise UserError(
            f"{path}: holds no question of split {split}; name it in data.splits of `mmqa judge`."
        )
    return rows


def _row(value: Any, place: str) -> ExampleScores:
    try:
        found = value["candidates"]
        alone = value["alone"]
        row = ExampleScores(
            str(value["question_id"]),
            None if alone is None else float(alone),
            tuple(str(one["id"]) for one in found),
            tuple(float(one["similarity"]) for one in found),
            tuple(float(one["score"]) for one in found),
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
