"""Plain text and Markdown: paragraphs between blank lines, Markdown's headings and pictures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import decode_text
from mmqa_jax.data.documents.document import (
    Document,
    DocumentError,
    Figure,
    Outline,
    Paragraph,
    one_line,
)

_HEADING = re.compile(r" {0,3}(#{1,6})\s+(.*)")
_UNDERLINE = re.compile(r" {0,3}(=+|-+)\s*$")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_ITEM = re.compile(r"\s*(?:[-*+]|\d{1,9}[.)])\s+")
_PICTURE = re.compile(r"!\[([^\][]*)\]\(\s*<?((?:[^()\s>]++|\([^()\s>]*\))++)>?[^()]*\)")
_LINK = re.compile(r"\[([^\][]+)\]\((?:[^()]++|\([^()]*\))*+\)")


def read_plain(data: bytes) -> Document:
    """A UTF-8 text."""
    blocks = re.split(r"\n\s*\n", _decoded(data))
    return Document(tuple(Paragraph(text) for text in filter(None, map(one_line, blocks))))


def read_markdown(data: bytes) -> Document:
    """A UTF-8 text in Markdown; HTML in it stays as it is written."""
    outline = Outline()
    paragraphs: list[Paragraph] = []
    figures: list[Figure] = []
    for level, text in _blocks(_decoded(data).split("\n")):
        for caption, link in _PICTURE.findall(text):
            figures.append(Figure(one_line(caption), outline.path, link=link))
        text = one_line(_LINK.sub(r"\1", _PICTURE.sub("", text)))
        if text and level:
            outline.enter(level, text)
        elif text:
            paragraphs.append(Paragraph(text, outline.path))
    return Document(tuple(paragraphs), tuple(figures))


def _decoded(data: bytes) -> str:
    try:
        return decode_text(data, "")
    except UserError as error:
        raise DocumentError(str(error).removeprefix(": ")) from error


def _blocks(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """The level of a heading, or 0, and the text of every block."""
    block: list[str] = []
    fence = ""
    for line in lines:
        if fence and not line.strip().startswith(fence):  # code: no heading begins with its #
            block.append(line)
        elif fence or (opened := _FENCE.match(line)):
            yield 0, "\n".join(block)
            block, fence = [], "" if fence else opened[1]
        elif heading := _HEADING.match(line):
            yield 0, "\n".join(block)
            yield len(heading[1]), heading[2].rstrip().rstrip("#").rstrip()
            block = []
        elif len(block) == 1 and (underline := _UNDERLINE.match(line)):
            yield 1 if "=" in underline[1] else 2, block[0]
            block = []
        elif not line.strip() or _ITEM.match(line):
            yield 0, "\n".join(block)
            block = [line] if line.strip() else []
        else:
            block.append(line)
    yield 0, "\n".join(block)
