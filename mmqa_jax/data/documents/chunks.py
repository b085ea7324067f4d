"""Paragraphs packed into overlapping chunks: what is retrieved, read and cited."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.documents.document import Paragraph

# A sentence ends at a full stop before a capital, a digit or a quotation; in Chinese and Japanese
# at their own stops, which no space follows.
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[\"'“‘(\[]?[^\W_a-z])|(?<=[。！？])")
_ENDS = (*".!?:;)\"'”’»。！？",)
_LETTERS = 8  # of a word at most: texts without spaces are measured by their letters


@dataclasses.dataclass(frozen=True)
class ChunkOptions:
    """How long chunks are.

    Attributes:
      words: of a chunk, at most; 90 with their headings mostly are no more than the 128 tokens
        that MiniLM was trained on.
      overlap: words of a chunk's end, at most, with which the next one begins.
    """

    words: int = at_least(10, 90)
    overlap: int = at_least(0, 15)

    def __post_init__(self) -> None:
        if self.words < 10:
            raise UserError(f"--chunk_words={self.words}: at least 10 was expected; give more.")
        if not 0 <= self.overlap < self.words:
            raise UserError(
                f"--chunk_overlap={self.overlap}: from 0 to less than --chunk_words={self.words} "
                "was expected; change one of them."
            )


@dataclasses.dataclass(frozen=True)
class _Sentence:
    text: str
    words: int
    page: int | None


def chunks(paragraphs: Iterable[Paragraph], options: ChunkOptions) -> Iterator[Paragraph]:
    """Packs paragraphs into chunks that end with a sentence; none goes beyond a heading or a page.

    Of the page before, only the beginning of a sentence that goes on is repeated.
    """
    for heading, section in itertools.groupby(paragraphs, lambda paragraph: paragraph.heading):
        sentences = [
            sentence for paragraph in section for sentence in _sentences(paragraph, options.words)
        ]
        for packed in _packed(sentences, options):
            text = " ".join(sentence.text for sentence in packed)
            yield Paragraph(text, heading, packed[-1].page)


def _packed(sentences: list[_Sentence], options: ChunkOptions) -> Iterator[list[_Sentence]]:
    chunk: list[_Sentence] = []
    repeated = 0  # sentences at the chunk's begin that the one before ends with
    for sentence in sentences:
        is_full = _words(chunk) + sentence.words > options.words
        turned = bool(chunk) and chunk[-1].page != sentence.page
        if len(chunk) > repeated and (is_full or turned):
            yield chunk
            if turned:
                chunk = [] if chunk[-1].text.endswith(_ENDS) else chunk[-1:]
            chunk = _tail(chunk, min(options.overlap, options.words - sentence.words))
            repeated = len(chunk)
        chunk.append(sentence)
    if chunk:
        yield chunk


def _tail(chunk: list[_Sentence], most: int) -> list[_Sentence]:
    """The last sentences of a chunk, of `most` words together."""
    kept = 0
    while kept < len(chunk) and _words(chunk[-kept - 1 :]) <= most:
        kept += 1
    return chunk[len(chunk) - kept :]


def _words(sentences: list[_Sentence]) -> int:
    return sum(sentence.words for sentence in sentences)


def _sentences(paragraph: Paragraph, most: int) -> Iterator[_Sentence]:
    """A paragraph's sentences; longer ones than `most` words are cut."""
    for sentence in _SENTENCE_END.split(paragraph.text):
        words: list[str] = []
        for word in sentence.split():
            step = most * _LETTERS
            words += [word[start : start + step] for start in range(0, len(word), step)]
        piece: list[str] = []
        length = 0
        for word in words:
            cost = -(-len(word) // _LETTERS) if len(word) > 3 * _LETTERS else 1
            if piece and length + cost > most:
                yield _Sentence(" ".join(piece), length, paragraph.page)
                piece, length = [], 0
            piece.append(word)
            length += cost
        if piece:
            yield _Sentence(" ".join(piece), length, paragraph.page)
