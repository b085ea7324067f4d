"""Candidates for reading Markdown, and the pages in Markdown of the packages installed here.

The candidates that are not installed fail; `pip install mistune cmarkgfm` brings them.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path


def SAMPLES() -> dict[str, bytes]:
    """The forty largest ones."""
    folder = Path(sysconfig.get_paths()["purelib"])
    pages = sorted(folder.rglob("*.md"), key=lambda path: -path.stat().st_size)[:40]
    return {f"{number}.md": page.read_bytes() for number, page in enumerate(pages)}


def _text(markup: str) -> str:
    import turbohtml

    return turbohtml.parse(markup, positions=False).to_text()


def _pyromark(data: bytes) -> str:
    import pyromark

    return _text(pyromark.html(data.decode(), options=pyromark.Options.ENABLE_GFM))


def _markdown_it(data: bytes) -> str:
    from markdown_it import MarkdownIt

    return _text(MarkdownIt("commonmark").enable(["table"]).render(data.decode()))


def _mistune(data: bytes) -> str:
    import mistune

    return _text(mistune.create_markdown(escape=False, plugins=["table"])(data.decode()))


def _cmarkgfm(data: bytes) -> str:
    import cmarkgfm

    return _text(cmarkgfm.github_flavored_markdown_to_html(data.decode()))


CANDIDATES: dict[str, Callable[[bytes], str]] = {
    "pyromark": _pyromark,
    "markdown-it-py": _markdown_it,
    "mistune": _mistune,
    "cmarkgfm": _cmarkgfm,
}
