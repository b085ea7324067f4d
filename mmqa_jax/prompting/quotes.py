"""The sentences of the passages that answer a question, by an encoder of texts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mmqa_jax.data.documents.chunks import sentence_ends
from mmqa_jax.data.schema import Source

CONFIDENCE = "confidence"  # key of a trace: geometric mean of the probabilities of its tokens
# A reader of fewer parameters is small: a quote stands before its words where its confidence is
# below UNSURE, chosen on val by `python -m tests.bench evidence` (prompting/RESULTS.md).
SMALL, UNSURE = 500_000_000, 0.9
# What a sentence loses for each passage before its own, chosen with the other choices of
# `best_quote` on the same val questions.
_BEHIND = 0.06
_LEAST_WORDS = 4  # of a sentence that can answer
_WORD = re.compile(r"\w+")


class Quote(NamedTuple):
    """A stretch of a source.

    Attributes:
      place: of the source among those that were asked.
      start, end: in characters of its text.
      similarity: of its first sentence to the question (`best_quote`).
    """

    place: int
    start: int
    end: int
    similarity: float


def quote_below(parameters: int | None) -> float:
    """The confidence below which a quote stands before the words of a reader of this size, 0 where
    it is large or its size is not known."""
    return UNSURE if parameters is not None and parameters < SMALL else 0.0


def best_quote(
    question: str, sources: Sequence[Source], embedder: Any, words: str = ""
) -> Quote | None:
    """The sentence, or row of a table, that is nearest to a question, and the one after it.

    A sentence's similarity is the mean of its cosines to the question alone and to the question
    with a reader's words, less 0.06 for each source before its own.

    Args:
      sources: the nearest first.
      embedder: of texts, as retrieval/text_encoder.py's.
      words: what the reader answered.

    Returns:
      None where no source has a sentence.
    """
    spans = [
        (place, *span) for place, source in enumerate(sources) for span in _sentences(source.text)
    ]
    if not spans:
        return None
    texts = [sources[place].text[start:end] for place, start, end in spans]
    asked = np.mean(embedder.embed_questions([question, f"{question} {words}".strip()]), axis=0)
    similarities = embedder.embed_passages(texts) @ asked  # [sentences]
    places = np.array([place for place, _, _ in spans])
    best = int(np.argmax(similarities - _BEHIND * places))
    place, start, end = spans[best]
    if best + 1 < len(spans) and spans[best + 1][0] == place:
        end = spans[best + 1][2]
    return Quote(place, start, end, float(similarities[best]))


def _sentences(text: str) -> Iterator[tuple[int, int]]:
    ends = sorted({0, *sentence_ends(text), *(match.end() for match in re.finditer("\n", text))})
    for begin, end in itertools.pairwise(ends):
        content = text[begin:end].strip()
        if len(_WORD.findall(content)) >= _LEAST_WORDS:
            start = begin + text[begin:end].index(content)
            yield start, start + len(content)
