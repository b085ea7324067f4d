"""Wikitext as plain text, by sections; mwparserfromhell parses it.

What is left out: templates (infoboxes, citations; what they would expand to is not known without
all of the wiki), tables, references, formulas, pictures with their captions, categories, comments,
and tags that are not shown. Links keep their words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.wikipedia.articles import Section

_SPACES = re.compile(r"[ \t]+")
_LINES = re.compile(r"\n{2,}")
_MARKS = re.compile(r"^[*#:;]+\s*", re.MULTILINE)  # of lists
_NO_TEXT = {
    "table",
    "ref",
    "references",
    "math",
    "gallery",
    "timeline",
    "imagemap",
    "score",
    "chem",
}
_SWITCHES = re.compile(r"__[A-Z]+__")  # __NOTOC__


def parser() -> ModuleType:
    """mwparserfromhell; UserError where it is not installed."""
    try:
        import mwparserfromhell
    except ImportError as error:
        raise UserError(
            "wikipedia: reading a dump needs the package mwparserfromhell; run "
            "`pip install 'mmqa-jax[wikipedia]'`."
        ) from error
    return mwparserfromhell


def plain_sections(wikitext: str, not_text: Sequence[str]) -> list[Section]:
    """The sections of a page, in order, without those that have no text.

    Args:
      not_text: names of the namespaces whose links are no words, in lower case: `file`, `category`.
    """
    package = parser()
    nodes = package.nodes
    prefixes = tuple(f"{name}:" for name in not_text)
    sections: list[Section] = []
    heading, kept = "", []

    def finish() -> None:
        text = _plain(package.wikicode.Wikicode(kept).strip_code(keep_template_params=False))
        if text:
            sections.append(Section(heading, text))

    for node in _shown(package.parse(wikitext, skip_style_tags=True).nodes, nodes, prefixes):
        if isinstance(node, nodes.Heading):
            finish()
            heading, kept = _plain(node.title.strip_code()), []
        else:
            kept.append(node)
    finish()
    return sections


def _shown(found: Sequence[Any], nodes: ModuleType, prefixes: tuple[str, ...]) -> Iterator[Any]:
    """The nodes whose words are read, in order; those within a tag in its place."""
    for node in found:
        if isinstance(node, nodes.Wikilink) and str(node.title).strip().lower().startswith(
            prefixes
        ):
            continue
        if isinstance(node, nodes.Tag) and node.contents is not None:
            if str(node.tag).strip().lower() not in _NO_TEXT:
                yield from _shown(node.contents.nodes, nodes, prefixes)
            continue
        yield node


def _plain(text: str) -> str:
    text = _SWITCHES.sub("", text.replace("'''''", "").replace("'''", "").replace("''", ""))
    text = _MARKS.sub("", _SPACES.sub(" ", text.replace("\xa0", " ")))
    return _LINES.sub("\n", text).strip()
