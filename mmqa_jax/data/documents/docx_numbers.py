"""The numbers of Word's lists and headings, which its files do not hold as text: `3.2.1`, `(a)`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from mmqa_jax.data.documents.office import attribute, child, is_on, local, number

_ROMAN = ((1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"), (50, "l"),
          (40, "xl"), (10, "x"), (9, "ix"), (5, "v"), (4, "iv"), (1, "i"))  # fmt: skip
_LEVELS = 9  # of a list
_LARGEST = 32767  # number of an item in Word


class Numbering:
    """The lists of a document, counted paragraph by paragraph.

    Args:
      numbering, styles: the roots of these parts; None where the file has none.
    """

    def __init__(self, numbering: Any, styles: Any) -> None:
        self._styles = _by_id(styles, "style", "styleId")
        self._lists = _by_id(numbering, "num", "numId")
        self._kinds = _by_id(numbering, "abstractNum", "abstractNumId")
        self._counts: dict[Any, dict[int, int]] = {}  # of a kind: level -> its last number
        self._begun: set[str] = set()  # lists

    def labels(self, root: Any) -> dict[Any, str]:
        """Paragraphs of a part -> the number before each, with the space after it."""
        if not self._lists:
            return {}
        labels = ((paragraph, self._next(paragraph)) for paragraph in root.iter("{*}p"))
        return {paragraph: label for paragraph, label in labels if label}

    def _next(self, paragraph: Any) -> str:
        style = _value(paragraph, "pPr", "pStyle")
        list_id, level = self._use(child(paragraph, "pPr"), style)
        kind, mark = self._kind(list_id), child(paragraph, "pPr", "rPr")
        if kind is None or child(mark, "del") is not None or child(mark, "moveFrom") is not None:
            return ""
        levels = {number(attribute(e, "ilvl")): e for e in kind if local(e) == "lvl"}
        counts, starts = self._counts.setdefault(kind, {}), {}
        for override in self._lists[list_id]:
            replaced, start = child(override, "lvl"), _value(override, "startOverride")
            of = number(attribute(override, "ilvl"))
            levels |= {} if replaced is None else {of: replaced}
            starts |= {of: number(start, 1)} if start else {}
            if start and list_id not in self._begun:
                counts.pop(of, None)
        self._begun.add(list_id)
        if level < 0:  # the style's own level, or else the first
            level = next((n for n, e in levels.items() if _value(e, "pStyle") == style != ""), 0)
        if level not in levels or level >= _LEVELS:
            return ""

        def start_of(of: int) -> int:
            return starts.get(of, number(_value(levels.get(of), "start"), 1))

        for above in range(level):
            counts.setdefault(above, start_of(above))
        counts[level] = counts[level] + 1 if level in counts else start_of(level)
        for deeper in [n for n in counts if n > level]:
            after = _value(levels.get(deeper), "lvlRestart")
            if not after or level < number(after):
                del counts[deeper]
        about = levels[level]
        if _value(about, "numFmt") in ("bullet", "none") or is_on(child(about, "rPr", "vanish")):
            return ""

        def written(place: re.Match[str]) -> str:
            of = int(place[1]) - 1
            form, count = _value(levels.get(of), "numFmt"), counts.get(of, start_of(of))
            is_decimal = is_on(child(about, "isLgl")) and form != "decimalZero"
            write = _FORMS.get(form) if 0 < count <= _LARGEST and not is_decimal else None
            return write(count) if write else str(count)

        label = re.sub(r"%([1-9])", written, _value(about, "lvlText"))
        return label + ("" if _value(about, "suff") == "nothing" or not label else " ")

    def _use(self, properties: Any, style: str, most: int = 20) -> tuple[str, int]:
        """The list of a paragraph or of its styles, and the level; -1 where none is named."""
        use = child(properties, "numPr")
        list_id, level = _value(use, "numId"), number(_value(use, "ilvl"), -1)
        if list_id or style not in self._styles or not most:  # damaged styles go in circles
            return list_id, level
        above = self._styles[style]
        list_id, inherited = self._use(child(above, "pPr"), _value(above, "basedOn"), most - 1)
        return list_id, inherited if level < 0 else level

    def _kind(self, list_id: str, is_linked: bool = False) -> Any:
        """The abstractNum of a list, also by way of the style that defines it; None without one."""
        kind = self._kinds.get(_value(self._lists.get(list_id), "abstractNumId"))
        style = self._styles.get(_value(kind, "numStyleLink"))
        if style is None or is_linked:
            return kind
        return self._kind(_value(style, "pPr", "numPr", "numId"), is_linked=True)


def _by_id(root: Any, name: str, key: str) -> dict[str, Any]:
    return {} if root is None else {attribute(e, key): e for e in root.iter(f"{{*}}{name}")}


def _value(element: Any, *path: str) -> str:
    """The `val` of the element at the end of a path; "" where there is none."""
    holder = child(element, *path)
    return "" if holder is None else attribute(holder, "val")


def _roman(count: int) -> str:
    text = ""
    for value, sign in _ROMAN:
        text, count = text + sign * (count // value), count % value
    return text


def _letters(count: int) -> str:
    """Word's letters: a ... z, aa, bb ... zz, aaa."""
    return chr(ord("a") + (count - 1) % 26) * ((count - 1) // 26 + 1)


def _ordinal(count: int) -> str:
    last = count % 10 if count // 10 % 10 != 1 else 0
    return f"{count}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(last, 'th') }"


_FORMS: Mapping[str, Callable[[int], str]] = {  # the others are decimal here
    "lowerRoman": _roman, "upperRoman": lambda count: _roman(count).upper(),
    "lowerLetter": _letters, "upperLetter": lambda count: _letters(count).upper(),
    "decimalZero": "{:02}".format, "ordinal": _ordinal,
}  # fmt: skip
