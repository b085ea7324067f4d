"""Text as words that can be found again: one analyzer for BM25, titles, file names and key words.

Letters are compared in Unicode's compatibility form without case (NFKC and case folding), so that
`ﬁlter`, `FILTER` and `fil<soft hyphen>ter` are one word, and `é` is one letter whether a file
writes it in one part or two. Marks belong to their words. Scripts that put no spaces between words
(and Korean, which joins particles to them) become pairs of neighboring letters, as in Lucene's
CJKAnalyzer, and each Chinese character by itself too.

Of ASCII these are the words that `\\w+` finds in the lowercase text.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import regex
from jaxtyping import Int64

from mmqa_jax.core.errors import UserError, import_optional

VERSION = 1  # of the words of a text; raised when they change, so that no index is of both
_SEEN = "LMN"  # first letters of the categories whose characters words are made of
_SCRIPTS = ("Han", "Hiragana", "Katakana", "Hangul", "Thai", "Lao", "Khmer", "Myanmar")
_RUN = regex.compile(
    "|".join(rf"(?P<{name}>(?:\p{{scx={name}}}\p{{M}}*)+)" for name in _SCRIPTS) + "|(?P<other>.)"
)
# Where they may be, and no letter of Latin, Greek, Cyrillic, Hebrew, Arabic or Indic scripts.
_MAY_BE_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u11ff\u1780-\u17ff\u2e80-\ud7ff\uf900-\ufaff\U0001b000-\U0003ffff]"
)
_IGNORED = regex.compile(r"[\p{Cf}\p{Default_Ignorable_Code_Point}]+")
_LETTER = regex.compile(r"\X")


class _Folded(dict[int, str]):
    """A table that maps each character to a space between words, to lower case, or to nothing."""

    def __missing__(self, code: int) -> str:
        category, plain = unicodedata.category(chr(code)), folded(chr(code))
        is_between = category[0] not in _SEEN and category != "Pc" and plain != ""
        self[code] = " " if is_between else plain
        return self[code]


_FOLDED = _Folded()  # which fills as a cache does


@dataclasses.dataclass(frozen=True)
class Analyzer:
    """How texts become words."""

    language: str = "english"  # of the stop words and the stemmer, in English and lower case
    stop_words: bool = True  # leave out the language's most common words (bm25s's lists)
    stemming: bool = False  # cut words to their stems (Snowball; package PyStemmer)

    def __post_init__(self) -> None:
        if self.stop_words and self.language != "english":  # bm25s's import is not for all
            stop_words(self.language)
        if self.stemming:
            _stemmer(self.language)

    def words(self, text: str) -> list[str]:
        """The words of a text, in its order."""
        removed = stop_words(self.language) if self.stop_words else ()
        return self._stems([word for word in split_words(text) if word not in removed])

    def question_words(self, text: str) -> list[str]:
        """The words of a question that say what it is about: without `who`, `does`, ...

        All its words where there are no others.
        """
        removed = stop_words(self.language, of_questions=True)
        about = [word for word in split_words(text) if word not in removed]
        return self._stems(about) or self.words(text)

    def to_json(self) -> dict[str, Any]:
        """Returns what an index states of the words in it."""
        return {"version": VERSION, **dataclasses.asdict(self)}

    def _stems(self, words: list[str]) -> list[str]:
        return _stemmer(self.language)(words) if self.stemming else words


class Vocabulary(dict[str, int]):
    """The number of each word as a text has it; -1 of a stop word."""

    def __init__(self, analyzer: Analyzer):
        self.analyzer = analyzer
        self.names: list[str] = []  # the words, or their stems, by their numbers
        self._stems: dict[str, int] = {}

    def __missing__(self, word: str) -> int:
        removed = self.analyzer.stop_words and word in stop_words(self.analyzer.language)
        number = -1 if removed else self._number(word)
        self[word] = number
        return number

    def _number(self, word: str) -> int:
        if self.analyzer.stemming:
            (word,) = _stemmer(self.analyzer.language)([word])
            if word in self._stems:
                return self._stems[word]
            self._stems[word] = len(self.names)
        self.names.append(word)
        return len(self.names) - 1

    def numbered(
        self, texts: Sequence[str]
    ) -> tuple[Int64[np.ndarray, " words"], Int64[np.ndarray, " words"]]:
        """The numbers of all words of some texts, and of each the index of its text."""
        all_words: list[str] = []
        lengths = []
        for text in texts:
            words = split_words(text)
            lengths.append(len(words))
            all_words += words
        numbers = np.fromiter(map(self.__getitem__, all_words), np.int64, len(all_words))
        rows = np.repeat(np.arange(len(texts)), lengths)
        in_vocabulary = numbers >= 0
        return numbers[in_vocabulary], rows[in_vocabulary]


def folded(text: str) -> str:
    """A text without differences of form and case, and without letters that are not seen."""
    plain = unicodedata.normalize("NFKC", _IGNORED.sub("", text)).replace("İ", "I")
    return unicodedata.normalize("NFKC", plain.casefold())


def split_words(text: str) -> list[str]:
    """All words of a text, folded."""
    if text.isascii():
        return text.translate(_FOLDED).split()
    plain = unicodedata.normalize("NFKC", text).translate(_FOLDED)
    words = unicodedata.normalize("NFKC", plain).split()  # case may have kept letters apart
    if _MAY_BE_UNSPACED.search(plain):
        return [part for word in words for part in _parts(word)]
    return words


def _parts(word: str) -> Iterator[str]:
    """Pairs of letters of a word's runs in scripts without spaces; other letters stay together."""
    for is_other, group in itertools.groupby(_RUN.finditer(word), lambda m: m.lastgroup == "other"):
        if is_other:
            yield "".join(match[0] for match in group)
            continue
        for run in group:
            letters = _LETTER.findall(run[0])
            if run.lastgroup == "Han" or len(letters) == 1:
                yield from letters
            yield from map("".join, itertools.pairwise(letters))


@functools.cache
def stop_words(language: str, of_questions: bool = False) -> frozenset[str]:
    """The most common words of a language, as bm25s has them.

    `of_questions`: for English with those that ask (179 in place of 33); other lists have them.
    """
    # Imported on first use: the import runs a JAX computation, so hosts must be joined first.
    constants = vars(importlib.import_module("bm25s.stopwords")).items()
    lists = {name[10:].lower(): words for name, words in constants if name.startswith("STOPWORDS_")}
    english = lists.pop("en"), lists.pop("en_plus")
    lists["english"] = english[of_questions]
    if language not in lists:
        raise UserError(
            f"--language={language}: there are no stop words of it; name one of "
            f"{', '.join(sorted(lists))}, or leave it out."
        )
    return frozenset(lists[language])


@functools.cache
def _stemmer(language: str) -> Callable[[list[str]], list[str]]:
    stemmers = import_optional("Stemmer", "--stemming:", "stemming", "PyStemmer")
    if language not in stemmers.algorithms():
        raise UserError(
            f"--language={language}: there is no stemmer of it; name one of "
            f"{', '.join(stemmers.algorithms())}, or leave --stemming out."
        )
    return stemmers.Stemmer(language).stemWords
