"""The question under construction, and small helpers that all question makers share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np


@dataclasses.dataclass(slots=True)
class Draft:
    """One question before its negatives are mined.

    Attributes:
      question: the text asked.
      answers: reference wordings, the main one first.
      keywords: the answer's key words.
      category: WebQA category.
      template: which template made it.
      topic: `flag`, `emoji`, or the fact's field of knowledge.
      positives: gold sources: ("t", snippet row) or ("i", picture row).
      group: the countries or pictures it is about; they fix its split.
      hops: gold sources that must be chained, 1 or 2.
      entities: strings in question, answer and sources that entity replacement may exchange;
        the country's names first.
      palette_safe: whether `permute_palette` keeps the answer true.
      banned: further sources that must not be its negatives, as they tell the answer too.
      split: `train`, `val` or `test`.
    """

    question: str
    answers: list[str]
    keywords: str
    category: str
    template: str
    topic: str
    positives: list[tuple[str, int]]
    group: tuple[str, ...]
    hops: int = 1
    entities: list[str] = dataclasses.field(default_factory=list)
    palette_safe: bool = False
    banned: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    split: str = ""


def wordings(frames: Iterable[str], rng: np.random.Generator, **values: str) -> list[str]:
    """All frames filled in, in an order drawn from `rng`; each opens with a capital."""
    filled = [frame.format(**values) for frame in frames]
    filled = [text[0].upper() + text[1:] for text in filled]
    return [filled[i] for i in rng.permutation(len(filled))]


def join_words(words: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
