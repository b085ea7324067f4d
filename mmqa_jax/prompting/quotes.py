"""The sentence of the passages that answers a question, by an encoder of texts."""

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
_LEAST_WORDS = 4  # of a sentence that can answer
_WORD = re.compile(r"\w+")


class Quote(NamedTuple):
    """A stretch of a source.

    Attributes:
      place: of the source among those that were asked.
      start, end: in characters of its text.
      similarity: cosine of the sentence and the question.
    """

    place: int
    start: int
    end: int
    similarity: float


def quote_below(parameters: int | None) -> float:
    """The confidence below which a quote stands before the words of a reader of this size, 0 where
    it is large or its size is not known."""
    return UNSURE if parameters is not None and parameters < SMALL else 0.0


def best_quote(question: str, sources: Sequence[Source], embedder: Any) -> Quote | None:
    """The sentence, or row of a table, that is nearest to a question; None where there is none.

    Args:
      embedder: of texts, as retrieval/text_encoder.py's.
    """
    spans = [
        (place, *span) for place, source in enumerate(sources) for span in _sentences(source.text)
    ]
    if not spans:
        return None
    texts = [sources[place].text[start:end] for place, start, end in spans]
    (asked,) = embedder.embed_questions([question])
    cosines = embedder.embed_passages(texts) @ asked  # [sentences]
    best = int(np.argmax(cosines))
    return Quote(*spans[best], float(cosines[best]))


def _sentences(text: str) -> Iterator[tuple[int, int]]:
    ends = sorted({0, *sentence_ends(text), *(match.end() for match in re.finditer("\n", text))})
    for begin, end in itertools.pairwise(ends):
        content = text[begin:end].strip()
        if len(_WORD.findall(content)) >= _LEAST_WORDS:
            start = begin + text[begin:end].index(content)
            yield start, start + len(content)
