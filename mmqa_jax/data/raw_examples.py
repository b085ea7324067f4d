"""Raw examples: what an augmentation may change, before tokens and regions are made of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import UInt8

from mmqa_jax.data.schema import Question


@dataclasses.dataclass(frozen=True, slots=True)
class RawSource:
    """A source as an augmentation sees it.

    Attributes:
      text: the snippet, or the picture's caption.
      title: title of the page it comes from.
      pixels: uint8[S, S, 3], None for a snippet (and where pictures are not decoded).
      row: its row in the corpus, None for a picture that comes with a question.
    """

    text: str
    title: str = ""
    pixels: UInt8[np.ndarray, "S S 3"] | None = None
    row: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RawExample:
    """Question, sources and answer of one training example, before tokenization.

    `keywords` are the answer's keywords. `record` is the question as the corpus holds it, for
    what else an augmentation needs to know (id, category, extra).
    """

    question: str
    sources: tuple[RawSource, ...]
    answer: str = ""
    record: Question | None = None
    keywords: str = ""


# Changes names or colors in question, sources, answer and keywords alike; must not keep state.
Augment = Callable[[RawExample, np.random.Generator], RawExample]
