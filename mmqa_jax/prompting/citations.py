"""Citations in an answer, in the spellings that language models use.

Read are `[1]`, `[1][2]`, `[1, 2 and 3]`, `[1-3]`, `[[1]]`, `[Source 1]`, `[^1]`, `[1](file.txt)`,
escaped brackets, those of other scripts (`【1†L3】`), and the digits of all scripts. The index of
an array in code (`a[1]`) is none.
"""

from __future__ import annotations

import re
import string
from typing import NamedTuple

from mmqa_jax.core.errors import decimal_number

# Two expressions, an outer and an inner one, so that each is linear.
_MARKER = re.compile(
    r"(?<!\s)\s*(?:<sup>)?\\?[\[【［]{1,2}([^\[\]【】［］]+)[\]】］]{1,2}(?:</sup>)?(?:\([^()\s]{1,200}\))?"
)
_SEPARATOR = re.compile(r"[,;、，&]|\band\b", re.IGNORECASE)
_ITEM = re.compile(
    r"(?:\^|№|#|(?:source|doc|document|passage|ref|reference)s?\.?)?\s*"
    r"\d+(?:\s*[-–—]\s*\d+)?(?:†.*)?",
    re.IGNORECASE,
)
_PAGE = re.compile(r"(?:pp?|pages?)\.?\s*\d+(?:\s*[-–—]\s*\d+)?", re.IGNORECASE)
_DIGITS = re.compile(r"\d+")
_BETWEEN = re.compile(r"\s*(?:[;&]|,(?:\s*and)?|and)?", re.IGNORECASE)
_LETTERS_OF_NAMES = f"{string.ascii_letters}{string.digits}_"
_HEADING = re.compile(r"(?<!\s)\s*\b(?:sources?|references?|citations?)\s*:$", re.IGNORECASE)
_LONGEST_RANGE = 50


class Citations(NamedTuple):
    """An answer without its markers, the numbers of the sources that it names (from 1, in the order
    in which it names them first), and how many numbers name no source."""

    text: str
    numbers: tuple[int, ...]
    wrong: int


def read_citations(text: str, sources: int) -> Citations:
    """Reads the citations out of an answer to that many sources."""
    pieces, named, end = [], [], 0
    for marker in _MARKER.finditer(text):
        numbers = _numbers(marker[1])
        if not numbers or _is_index(text, marker):
            continue
        between = text[end : marker.start()]
        if not (named and end and _BETWEEN.fullmatch(between)):  # "[1] and [3]" is one list
            pieces.append(between)
        end = marker.end()
        named += numbers
    right = [number for number in named if number is not None and 1 <= number <= sources]
    answer = "".join([*pieces, text[end:]]).strip()
    if named:
        answer = _HEADING.sub("", answer)
    return Citations(answer, tuple(dict.fromkeys(right)), len(named) - len(right))


def _is_index(text: str, marker: re.Match[str]) -> bool:
    """Whether a marker is an index of code: in a span of code, or right behind a name of one
    letter or with an underscore."""
    start = marker.start()
    if text[start : start + 1].isspace():
        return False
    line = text[text.rfind("\n", 0, start) + 1 : start]
    word = line[len(line.rstrip(_LETTERS_OF_NAMES)) :]
    return line.count("`") % 2 == 1 or "_" in word or (len(word) == 1 and word.isalpha())


def _numbers(inner: str) -> list[int | None]:
    """The numbers between two brackets, None for one that is too long to be any source's; [] where
    there is something else."""
    numbers: list[int | None] = []
    parts = [part.strip() for part in _SEPARATOR.split(inner.removesuffix("\\"))]
    for place, part in enumerate(parts):
        if numbers and (_PAGE.fullmatch(part) or (not part and place == len(parts) - 1)):
            continue
        if not _ITEM.fullmatch(part):
            return []
        ends = list(map(decimal_number, _DIGITS.findall(part.partition("†")[0])))
        first, last = ends[0], ends[-1]
        if first is None or last is None or not first < last < first + _LONGEST_RANGE:
            numbers += ends
        else:
            numbers += range(first, last + 1)
    return numbers
