"""An answer as people write it, from the reader's lower-case tokens.

The reader's vocabulary is uncased and its text has spaces around all punctuation: `nairobi is the
capital of kenya .`. For display, what was copied gets back the spelling of the source it was
copied from. Metrics take the reader's own text.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_TOKEN = re.compile(r"[^\W_]+|[^\w\s]|_")  # BERT's words and punctuation marks
_OPENING, _CLOSING = set("([{$£€¿¡#"), set(",.;:!?%)]}…")
_JOINING = set("-/'’–@")  # no space on either side
_SENTENCE_ENDS = set(".!?:;•")


class _Word(NamedTuple):
    """A token of a source: its normalized form, its place, whether a sentence starts with it."""

    form: str
    start: int
    end: int
    first: bool


def as_written(raw: str, sources: Sequence[str], names: Sequence[str] = ()) -> str:
    """The answer with capital letters, accents, spaces and a final period.

    The longest runs of tokens that a source has too are copied from it, letter by letter. A
    capital letter that only starts a sentence there does not count as the word's spelling.

    Args:
      raw: tokens joined by spaces, as `WordPiece.decode` gives them.
      sources: texts that the answer may have copied from, in order of preference: cited sources,
        the question.
      names: texts in which every capital letter counts, such as titles.
    """
    tokens = raw.split()
    if not tokens:
        return ""
    texts = [(text, _words(text, starts=False)) for text in names]
    texts += [(text, _words(text)) for text in sources]
    spellings = _spellings(texts)
    written, position = "", 0
    quotes = 0
    while position < len(tokens):
        length, words = _longest_run(tokens, position, texts)
        for i, token in enumerate(tokens[position : position + max(length, 1)]):
            if 0 < i < length:  # the source's own space
                gap = " " if words[i - 1].end < words[i].start else ""
            else:
                gap = _gap(written, token, quotes)
            quotes += token == '"'
            written += gap + spellings.get(_form(token), token)
        position += max(length, 1)
    written = written[0].upper() + written[1:]
    return written if written[-1] in ".!?" else written + "."


def _form(text: str) -> str:
    """Lower case without accents, as the uncased tokenizer sees a word."""
    parts = unicodedata.normalize("NFD", text.lower())
    return "".join(letter for letter in parts if unicodedata.category(letter) != "Mn")


def _words(text: str, *, starts: bool = True) -> list[_Word]:
    words, first = [], starts
    for match in _TOKEN.finditer(text):
        words.append(_Word(_form(match[0]), match.start(), match.end(), first))
        # A quotation mark or bracket does not end the start of a sentence.
        if match[0] in _SENTENCE_ENDS or match[0].isalnum():
            first = starts and match[0] in _SENTENCE_ENDS
    # Two capitalized words at the start of a sentence are a name: New Delhi is ...
    return [
        word._replace(first=word.first and not text[after.start].isupper())
        for word, after in itertools.pairwise(words)
    ] + words[-1:]


def _spellings(texts: Iterable[tuple[str, list[_Word]]]) -> dict[str, str]:
    """Normalized word -> its most frequent spelling; words that start sentences count less."""
    counts: dict[str, Counter[tuple[bool, str]]] = {}
    for text, words in texts:
        for word in words:
            spelling = text[word.start : word.end]
            if word.first and spelling[1:] == spelling[1:].lower():
                spelling = spelling.lower()
            counts.setdefault(word.form, Counter())[not word.first, spelling] += 1
    return {
        form: max(count.items(), key=lambda item: (item[0][0], item[1]))[0][1]
        for form, count in counts.items()
    }


def _longest_run(
    tokens: Sequence[str], position: int, texts: Iterable[tuple[str, list[_Word]]]
) -> tuple[int, list[_Word]]:
    """Tokens from `position` on that follow each other in a text: how many, and its words."""
    best: tuple[int, list[_Word]] = (0, [])
    for _, words in texts:
        for i, word in enumerate(words):
            if word.form != _form(tokens[position]):
                continue
            pairs = zip(tokens[position:], words[i:], strict=False)
            length = next(
                (n for n, (token, other) in enumerate(pairs) if _form(token) != other.form),
                min(len(tokens) - position, len(words) - i),
            )
            if length > best[0]:
                best = length, words[i : i + length]
    return best


def _gap(before: str, token: str, quotes: int) -> str:
    """Returns the space before the next token, after so many quotation marks."""
    if not before:
        return ""
    last = before[-1]
    if token in _CLOSING or last in _OPENING or token in _JOINING or last in _JOINING:
        return ""
    if token == '"':
        return "" if quotes % 2 else " "
    if last == '"':
        return "" if quotes % 2 else " "
    number = len(before) > 1 and before[-2].isdigit() and token[0].isdigit()
    return "" if number and last in ",." else " "
