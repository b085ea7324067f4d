"""The questions of a split, and even samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question

T = TypeVar("T")


def split_questions(corpus: Corpus, data: Path, split: str) -> list[Question]:
    """The questions of a split; UserError where there are none.

    Args:
      data: where the corpus comes from, for the message.
    """
    questions = corpus.questions(split)
    if not questions:
        known = sorted({question.split for question in corpus.questions()})
        remedy = f"choose one of {', '.join(known)}"
        if not known:
            remedy = "the corpus has no questions at all, prepare it with some"
        raise UserError(f"--split={split}: {data} has no such questions; {remedy}.")
    return questions


def evenly(items: Sequence[T], count: int) -> list[T]:
    """`count` of the items, evenly spaced; all for 0 or where there are fewer."""
    if not 0 < count < len(items):
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]
