"""Paragraphs packed into overlapping chunks: what is retrieved, read and cited."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import regex

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.documents.document import Paragraph, Place, around

VERSION = 3  # of how paragraphs are packed; raised when that changes

# The ends of sentences by Unicode's TR 29 (rules SB6 to SB11), in all scripts; but an opening
# bracket behind a stop begins the next one.
_AFTER = r"[\p{SB=Close}--\p{Ps}]*+ \p{SB=Sp}*+"
_TERM, _LETTER = r"\p{SB=STerm}\p{SB=ATerm}", r"\p{SB=OLetter}\p{SB=Upper}\p{SB=Lower}"
_STOP = rf"""
    \p{{SB=ATerm}} (?! \p{{SB=Numeric}} | (?<=[\p{{SB=Upper}}\p{{SB=Lower}}].) \p{{SB=Upper}} )
    {_AFTER} (?! [^{_LETTER}{_TERM}\p{{SB=Sep}}]*+ \p{{SB=Lower}} )
"""
_SENTENCE_END = regex.compile(
    rf"(?: \p{{SB=STerm}} {_AFTER} | {_STOP} ) (?! [{_TERM}\p{{SB=SContinue}}] )",
    regex.VERBOSE | regex.V1,
)
_WORD, _CHARACTER = regex.compile(r"\S+"), regex.compile(r"\X")
_SIGNS = regex.compile(r"\w+|[^\w\s]")
# A word counts once, but codes and addresses by their letters, and scripts without spaces too.
_LETTERS, _LONG_WORD = 8, regex.compile(r"\S{25,}")
_UNSPACED_LETTERS = 2
_LONG_SENTENCE = 80  # words or signs; shorter ones are cut by short chunks alone
_UNSPACED = regex.compile(r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]")


@dataclasses.dataclass(frozen=True)
class TokenLimit:
    """How much of a passage an encoder reads."""

    most: int  # tokens of a title and a text
    name: str  # of the tokenizer, which changes with anything of it
    # The numbers of tokens of texts.
    count: Callable[[Sequence[str]], list[int]] = dataclasses.field(compare=False, repr=False)


@dataclasses.dataclass(frozen=True)
class ChunkOptions:
    """How long chunks are."""

    # Of a chunk, at most; 140 with their headings mostly are no more than the 256 tokens that
    # MiniLM reads, and find more than 90 (tests/bench/RESULTS.md, Five folders).
    words: int = at_least(10, 140)
    # Words of a chunk's end, at most, with which the next one begins.
    overlap: int = at_least(0, 20)
    # What the encoder reads, beyond which no chunk goes but a single row of a table; None: words
    # alone count.
    tokens: TokenLimit | None = None

    def __post_init__(self) -> None:
        if self.words < 10:
            raise UserError(f"--chunk_words={self.words}: at least 10 was expected; give more.")
        if not 0 <= self.overlap < self.words:
            raise UserError(
                f"--chunk_overlap={self.overlap}: from 0 to less than --chunk_words={self.words} "
                "was expected; change one of them."
            )


class _Size(NamedTuple):
    """A length; tokens are 0 where they do not count."""

    words: int
    tokens: int

    def __add__(self, other: _Size) -> _Size:  # type: ignore[override]
        return _Size(self.words + other.words, self.tokens + other.tokens)

    def fits(self, most: _Size) -> bool:
        return self.words <= most.words and self.tokens <= most.tokens


class _Piece(NamedTuple):
    """A stretch of a paragraph that no chunk cuts: a sentence, a row, a part of a long sentence."""

    paragraph: Paragraph
    # start, end: in characters of the paragraph's text, without the space around it.
    start: int
    end: int
    size: _Size


def chunks(
    paragraphs: Iterable[Paragraph], options: ChunkOptions, title: str = ""
) -> Iterator[Paragraph]:
    """Packs paragraphs into chunks that end with a sentence or a row.

    None goes beyond a heading, a page or a table. Each chunk of a table begins with its header, and
    has the places that its letters have in their paragraphs.

    `title`: of chunks without a heading.
    """
    paragraphs = list(paragraphs)
    sentences = [(p, *span) for p in paragraphs for span in _sentences(p)]
    pieces = _measured(sentences, options.tokens)
    titles = list(dict.fromkeys(text for p in paragraphs for text in (p.heading, p.header)))
    sizes = dict(zip(titles, _sizes(titles, options.tokens), strict=True))
    sizes[""], size_of_title = _Size(0, 0), _sizes([title], options.tokens)[0]
    room = _Size(options.words, options.tokens.most if options.tokens else 0)
    for (heading, page, header), section in itertools.groupby(
        pieces,
        lambda piece: (piece.paragraph.heading, piece.paragraph.page, piece.paragraph.header),
    ):
        above = sizes[heading] if heading else size_of_title
        # A title or header that leaves less than half is cut by the encoder in place of the text.
        most = _Size(
            max(room.words - sizes[header].words, room.words // 2),
            max(room.tokens - above.tokens - sizes[header].tokens, room.tokens // 2),
        )
        parts = itertools.chain.from_iterable(
            [piece] if piece.size.fits(most) or piece.paragraph.is_row else
            _cut(piece, most, options.tokens) for piece in section
        )  # fmt: skip
        for packed in _packed(parts, most, options.overlap):
            text, places = _joined(packed, header)
            yield Paragraph(text, heading, page, places=places)


def _sentences(paragraph: Paragraph) -> Iterator[tuple[int, int]]:
    """Tells where the sentences of a paragraph begin and end; a row is one."""
    text, start = paragraph.text, 0
    if paragraph.is_row:  # which may begin with the indentation of its line
        yield 0, len(text)
        return
    for end in sentence_ends(text):
        sentence = text[start:end]
        if content := sentence.strip():
            begin = start + sentence.index(content)
            yield begin, begin + len(content)
        start = end


def sentence_ends(text: str) -> list[int]:
    """Returns where the sentences of a text end by Unicode's rules; the last one at its end."""
    return [*(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]


def possible_begins(text: str) -> list[int]:
    """Returns where chunks of a paragraph may begin: at sentences, and at words of long ones."""
    begins, start = [], 0
    for end in sentence_ends(text):
        sentence = text[start:end]
        if max(_words(sentence), len(_SIGNS.findall(sentence))) <= _LONG_SENTENCE:
            begins.append(start)
        else:
            for word in _WORD.finditer(text, start, end):
                is_long = _words(word[0]) > _LONG_SENTENCE
                parts = _CHARACTER.finditer(text, *word.span()) if is_long else [word]
                begins += [part.start() for part in parts]
        start = end
    return begins


def _measured(
    spans: Sequence[tuple[Paragraph, int, int]], tokens: TokenLimit | None
) -> Iterator[_Piece]:
    texts = [paragraph.text[start:end] for paragraph, start, end in spans]
    return map(_Piece._make, ((*s, n) for s, n in zip(spans, _sizes(texts, tokens), strict=True)))


def _sizes(texts: Sequence[str], tokens: TokenLimit | None) -> list[_Size]:
    counts = [0] * len(texts) if tokens is None else tokens.count(texts)
    return [_Size(_words(text), count) for text, count in zip(texts, counts, strict=True)]


def _words(text: str) -> int:
    """Counts how many words a text counts for."""
    if (text.isascii() or not _UNSPACED.search(text)) and not _LONG_WORD.search(text):
        return text.lstrip(" ").count(" ") + 1
    return sum(_words_of(word) for word in text.split())


def _words_of(word: str) -> int:
    if _UNSPACED.search(word):
        return -(-len(word) // _UNSPACED_LETTERS)
    return -(-len(word) // _LETTERS) if _LONG_WORD.match(word) else 1


def _cut(piece: _Piece, most: _Size, tokens: TokenLimit | None) -> Iterator[_Piece]:
    """A sentence that is longer than a chunk, as the longest parts that are not."""
    spans = [
        (piece.paragraph, match.start(), match.end())
        for match in _WORD.finditer(piece.paragraph.text, piece.start, piece.end)
    ]
    for words in _packed(_cut_words(spans, most, tokens), most, 0):
        size = functools.reduce(_Size.__add__, (word.size for word in words))
        yield words[0]._replace(end=words[-1].end, size=size)


def _cut_words(
    spans: Sequence[tuple[Paragraph, int, int]], most: _Size, tokens: TokenLimit | None
) -> Iterator[_Piece]:
    """Halves words that are longer than a chunk until they fit."""
    for word in _measured(spans, tokens):
        characters = []
        if not word.size.fits(most):
            text = word.paragraph.text
            characters = [m.start() for m in _CHARACTER.finditer(text, word.start, word.end)]
        if len(characters) < 2:
            yield word
        else:
            middle = characters[len(characters) // 2]
            halves = [(word.start, middle), (middle, word.end)]
            yield from _cut_words([(word.paragraph, *half) for half in halves], most, tokens)


def _packed(pieces: Iterable[_Piece], most: _Size, overlap: int) -> Iterator[list[_Piece]]:
    """Packs the pieces in chunks, each of which begins with the end of the chunk before it."""
    chunk: list[_Piece] = []
    size, repeated = _Size(0, 0), 0
    for piece in pieces:
        if len(chunk) > repeated and not (size + piece.size).fits(most):
            yield chunk
            room = _Size(
                min(overlap, most.words - piece.size.words), most.tokens - piece.size.tokens
            )
            chunk, size = ([], _Size(0, 0)) if piece.paragraph.is_row else _tail(chunk, room)
            repeated = len(chunk)
        chunk.append(piece)
        size += piece.size
    if chunk:
        yield chunk


def _tail(chunk: list[_Piece], most: _Size) -> tuple[list[_Piece], _Size]:
    """The last pieces of a chunk that fit, and their size."""
    size = _Size(0, 0)
    for count, piece in enumerate(reversed(chunk)):
        if not (size + piece.size).fits(most):
            return chunk[len(chunk) - count :], size
        size += piece.size
    return list(chunk), size


def _joined(pieces: Sequence[_Piece], header: str) -> tuple[str, tuple[Place, ...]]:
    """The text of a chunk and its places: each paragraph on lines of its own, below a header."""
    text, places = header, []
    for _, stretch in itertools.groupby(pieces, lambda piece: id(piece.paragraph)):
        of_paragraph = list(stretch)
        paragraph, start, _, _ = of_paragraph[0]
        end = of_paragraph[-1].end
        text += "\n" if text else ""
        moved = len(text) - start
        text += paragraph.text[start:end]
        first = bisect.bisect_right(paragraph.places, start, key=lambda place: place.end)
        last = bisect.bisect_left(paragraph.places, end, key=lambda place: place.start)
        for place in paragraph.places[first:last]:
            begin, stop = max(place.start, start) + moved, min(place.end, end) + moved
            before = places[-1] if places else None
            if before is not None and before.end + 1 >= begin and _is_one_line(before, place):
                begin, box = before.start, around([before.box, place.box])
                places[-1] = Place(begin, stop, box=box)
            else:
                places.append(dataclasses.replace(place, start=begin, end=stop))
    return text, tuple(places)


def _is_one_line(place: Place, other: Place) -> bool:
    """Tells whether two places are parts of one line, which are equally high."""
    both = place.box is not None and other.box is not None
    return both and place.box[1::2] == other.box[1::2]
