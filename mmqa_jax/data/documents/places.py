"""Where a passage, or a quote from it, stands in its file: rectangles, lines, cells.

A source keeps the places of its stretches (`Source.extra["places"]`, document.Place); what is shown
and cited is made of them here.
"""

from __future__ import annotations

import bisect
import dataclasses
import difflib
import itertools
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmqa_jax.data.documents.document import Paragraph, Place

LINED = (".txt", ".md", ".rst", ".tex", ".json", ".jsonl")  # formats that people read by lines
_WORD = re.compile(r"\w+")
_LEAST_QUOTE = 5  # words in a row that a longer answer shares with a passage, to quote it
_FAR, _NEAR = 20_000, 400  # letters of a file in which the next paragraph, or word, is looked for


def place_of(extra: Mapping[str, Any], start: int = 0, end: int | None = None) -> dict[str, Any]:
    """Where a source's text, or a stretch of it, stands in the source's file.

    Args:
      extra: of the source.
      start, end: the stretch, in characters of the source's text; None: to its end.

    Returns:
      `boxes`: one [left, top, right, bottom] a line of text, in points from the top left corner of
      the page as it is shown; `lines`: the first and the last line of the file, from 1, or None;
      `cells`: places as their program writes them (`Fees!A2:C2`, `slide 3`).
    """
    boxes: list[list[float]] = []
    lines: list[int] = []
    cells: list[str] = []
    for place in extra.get("places", ()):
        first, last = place["start"], place["end"]
        begin, stop = max(first, start), last if end is None else min(last, end)
        if begin >= stop and first < last:
            continue
        if "box" in place:
            boxes.append(_part(place["box"], first, last, begin, stop))
        elif "line" in place:
            lines.append(place["line"])
        else:
            cells.append(place["name"])
    return {
        "boxes": boxes,
        "lines": [min(lines), max(lines)] if lines else None,
        "cells": list(dict.fromkeys(cells)),
    }


def _part(box: Sequence[float], first: int, last: int, begin: int, stop: int) -> list[float]:
    """The part of a line's box that some of its characters take, were they equally wide."""
    left, top, right, bottom = box
    width = (right - left) / max(last - first, 1)
    ends = (right if stop == last else left + width * (stop - first)), bottom
    return [round(edge, 2) for edge in (left + width * (begin - first), top, *ends)]


def quote_of(text: str, answer: str) -> tuple[int, int] | None:
    """The stretch of a passage that an answer quotes, in characters; None where it quotes none.

    It is the whole answer where that stands in the passage word by word, or else the longest run
    of at least five words that both have. Case and punctuation do not count.
    """
    words = list(_WORD.finditer(text))
    ours = [word[0].casefold() for word in words]
    theirs = [word.casefold() for word in _WORD.findall(answer)]
    matcher = difflib.SequenceMatcher(None, ours, theirs, autojunk=False)
    run = matcher.find_longest_match()
    if not run.size or run.size < min(len(theirs), _LEAST_QUOTE):
        return None
    return words[run.a].start(), words[run.a + run.size - 1].end()


def cited_place(text: str, extra: Mapping[str, Any], answer: str = "") -> dict[str, Any]:
    """The place of a source, and its `quote`: text and place of what an answer quotes, or None."""
    stretch = quote_of(text, answer) if answer else None
    quote = (
        None if stretch is None else {"text": text[slice(*stretch)], **place_of(extra, *stretch)}
    )
    return {**place_of(extra), "quote": quote}


def shown_place(extra: Mapping[str, Any]) -> str:
    """A source's file, page and lines or cells, for people; "" of a source without a file."""
    if not (file := extra.get("file")):
        return ""
    place = place_of(extra)
    parts = [str(file)]
    if extra.get("page") is not None:
        parts.append(f"page {extra['page']}")
    if lines := place["lines"]:
        parts.append(f"line {lines[0]}" if lines[0] == lines[1] else f"lines {lines[0]}-{lines[1]}")
    if cells := [cell for cell in place["cells"] if not cell.startswith("slide ")]:
        parts.append(cells[0] if len(cells) == 1 else f"{cells[0]} to {cells[-1]}")
    return ", ".join(parts)


def with_lines(paragraphs: Sequence[Paragraph], text: str) -> Iterator[Paragraph]:
    """Paragraphs with the lines of the text file that they were read from.

    Markup says the same letters in the same order, mostly: a paragraph is found by its letters
    alone, or else word by word.
    """
    lines = unicodedata.normalize("NFC", text).split("\n")
    begins = list(itertools.accumulate(map(_count, lines), initial=0))
    letters, cursor = "".join(filter(str.isalnum, "".join(lines))), 0
    for paragraph in paragraphs:
        words = [(word.span(), _squashed(word[0])) for word in _WORD.finditer(paragraph.text)]
        whole = "".join(squashed for _, squashed in words)
        at = letters.find(whole, cursor, cursor + len(whole) + _FAR)
        is_whole, here = at >= 0, max(at, cursor)
        places: list[Place] = []
        for (start, end), word in words:
            if not is_whole:
                at = letters.find(word, here, here + len(word) + _NEAR)
            if at < 0 or not word:
                continue
            line = bisect.bisect_right(begins, at)
            at = here = at + len(word)
            if places and places[-1].line == line:
                places[-1] = Place(places[-1].start, end, line=line)
            else:
                places.append(Place(start, end, line=line))
        cursor = here
        yield (
            paragraph if paragraph.places else dataclasses.replace(paragraph, places=tuple(places))
        )


def _squashed(text: str) -> str:
    return "".join(filter(str.isalnum, text))


def _count(line: str) -> int:
    return sum(map(str.isalnum, line))
