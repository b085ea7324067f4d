"""The questions of a split, and parts of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question


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


def evenly(questions: Sequence[Question], count: int) -> list[Question]:
    """`count` of the questions, evenly spaced; all for 0 or where there are fewer."""
    if not 0 < count < len(questions):
        return list(questions)
    return [questions[i * len(questions) // count] for i in range(count)]
