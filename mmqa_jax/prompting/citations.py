"""Citations in an answer, in the spellings that language models use.

Read are `[1]`, `[1][2]`, `[1, 2 and 3]`, `[1-3]`, `[[1]]`, `[Source 1]`, `[^1]`, `[1](file.txt)`,
escaped brackets, those of other scripts (`【1†L3】`), and the digits of all scripts. The index of
an array in code (`a[1]`) is none.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from mmqa_jax.core.errors import decimal_number

_NAME = r"(?:\^|№\s*|#|(?:sources?|docs?|documents?|passages?|refs?|references?)\.?\s*)"
_ITEM = rf"{_NAME}?\d+(?:\s*[-–—]\s*\d+)?(?:†[^\]】］]{{0,40}})?"
_SEPARATOR = r"(?:\s*[,;、，&]\s*(?:and\s+)?|\s+and\s+)"
_PAGE = r"(?:,\s*(?:pp?|pages?)\.?\s*\d+(?:\s*[-–]\s*\d+)?)?"
_MARKER = re.compile(
    rf"(?<!\s)\s*(?:<sup>)?\\?[\[【［]{{1,2}}\s*({_ITEM}(?:{_SEPARATOR}{_ITEM})*){_PAGE}\s*(?:[,;]\s*)?"
    r"\\?[\]】］]{1,2}(?:</sup>)?(?:\([^()\s]{1,200}\))?",
    re.IGNORECASE,
)
_NUMBERS = re.compile(r"(\d+)(?:\s*[-–—]\s*(\d+))?(?:†[^\]】］,;]*)?")
_BETWEEN = re.compile(r"\s*(?:[,;&]|,?\s*and)?", re.IGNORECASE)
# A name of code in front of an index: one letter, or one with an underscore or a call.
_CODE = re.compile(r"(?:(?<![^\W\d_])[A-Za-z]|[A-Za-z]\w*_\w*|\w\(\w*\))$")
_HEADING = re.compile(r"\s*\b(?:sources?|references?|citations?)\s*:\s*$", re.IGNORECASE)
_LONGEST_NAME = 60  # characters before an index that are looked at
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
        if _is_index(text, marker):
            continue
        between = text[end : marker.start()]
        if not (named and end and _BETWEEN.fullmatch(between)):  # "[1] and [3]" is one list
            pieces.append(between)
        end = marker.end()
        named += _numbers(marker[1])
    right = [number for number in named if number is not None and 1 <= number <= sources]
    answer = "".join([*pieces, text[end:]]).strip()
    if named:
        answer = _HEADING.sub("", answer)
    return Citations(answer, tuple(dict.fromkeys(right)), len(named) - len(right))


def _is_index(text: str, marker: re.Match[str]) -> bool:
    """Whether a marker is an index of code: in a span of code, or right behind a name of code."""
    start = marker.start()
    if text[start : start + 1].isspace():
        return False
    line = text[text.rfind("\n", 0, start) + 1 : start]
    return line.count("`") % 2 == 1 or bool(_CODE.search(line[-_LONGEST_NAME:]))


def _numbers(inner: str) -> list[int | None]:
    """The numbers between two brackets, None for one that is too long to be any source's."""
    numbers: list[int | None] = []
    for first, last in _NUMBERS.findall(inner):
        begin, stop = decimal_number(first), decimal_number(last) if last else None
        if begin is None or stop is None or not begin <= stop < begin + _LONGEST_RANGE:
            numbers += [begin, stop] if last else [begin]
        else:
            numbers += range(begin, stop + 1)
    return numbers
