"""Calls from Python that would go wrong in silence: one text where several are expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def check_several(values: Any, where: str, what: str = "texts") -> None:
    """TypeError for one text in place of a sequence: as a sequence it is its letters.

    Args:
      where: the call, which begins the sentence.
      what: was expected.
    """
    if isinstance(values, str | bytes):
        raise TypeError(
            f"{where}: one text was given, {values!r:.60}, and a sequence of {what} was expected; "
            "put it into a list."
        )


def check_questions(questions: Sequence[Any], where: str) -> None:
    """TypeError unless these are Questions, or a sequence of them to all appearances."""
    check_several(questions, where, "Questions")
    first = next(iter(questions), None) if isinstance(questions, Sequence) else None
    if isinstance(first, str | bytes):
        raise TypeError(
            f"{where}: texts were given, the first is {first!r:.60}, and Questions were expected; "
            'make them with mmqa_jax.data.schema.Question(id, "test", text).'
        )
