"""Markdown of an answer as nested elements, of which the page makes nodes: no HTML is ever parsed.

An element is [tag, children], or [tag, children, address] of a link; a text is a string. HTML that
an answer spells is text, and a picture its description.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Node = str | list[Any]

_TAGS = {
    "Paragraph": "p", "Emphasis": "em", "Strong": "strong", "Strikethrough": "s", "Item": "li",
    "TableHead": "thead", "TableRow": "tr", "TableCell": "td", "Table": "table", "List": "ul",
    "CodeBlock": "pre", "BlockQuote": "blockquote", "Heading": "h3", "HtmlBlock": "p",
}  # fmt: skip
_LINKS = ("https://", "http://")


def elements_of(text: str) -> list[Node]:
    """The elements of a Markdown text."""
    import pyromark

    kinds = pyromark.Options
    options = kinds.ENABLE_TABLES | kinds.ENABLE_STRIKETHROUGH
    top: list[Any] = ["", []]
    open_ones = [top]
    for event in pyromark.events(text, options=options):
        kind, value = event, None
        if isinstance(event, Mapping):
            ((kind, value),) = event.items()
        children = open_ones[-1][1]
        if kind == "Start":
            element = _element(value)
            children.append(element)
            open_ones.append(element)
        elif kind == "End":
            open_ones.pop()
        elif kind == "Code":
            children.append(["code", [value]])
        elif kind in ("HardBreak", "Rule"):
            children.append(["br" if kind == "HardBreak" else "hr", []])
        elif piece := "\n" if kind == "SoftBreak" else value if isinstance(value, str) else "":
            if children and isinstance(children[-1], str):
                piece = children.pop() + piece
            children.append(piece)
    return top[1]


def _element(start: str | Mapping[str, Any]) -> list[Any]:
    """The element that begins with an event, still empty."""
    name, value = start, None
    if isinstance(start, Mapping):
        ((name, value),) = start.items()
    if name == "Link" and value["dest_url"].startswith(_LINKS):
        return ["a", [], value["dest_url"]]
    if name == "List" and value is not None:
        return ["ol", []]
    return [_TAGS.get(str(name), "span"), []]
