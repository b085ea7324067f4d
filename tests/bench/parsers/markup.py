"""Candidates for reading reStructuredText and LaTeX, with sources of Debian's documentation.

The candidates that are not installed fail; `pip install texsoup markitdown` brings them.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.bench.parsers.html import debian_files


def SAMPLES() -> dict[str, bytes]:
    """Sources of thirty pages of Python's documentation, and of a paper."""
    pages = debian_files("python3.11-doc", "usr/share/doc/python3.11/html/_sources/**/*.txt", 30)
    papers = debian_files("asymptote-doc", "usr/share/doc/asymptote/examples/latexusage.tex", 1)
    return {**{name.removesuffix(".txt"): page for name, page in pages.items()}, **papers}


def _docutils(data: bytes) -> str:
    import docutils.core

    if b"\\begin{document}" in data:
        raise ValueError("LaTeX")
    settings = {"report_level": 5, "file_insertion_enabled": False, "raw_enabled": False}
    return docutils.core.publish_doctree(data, settings_overrides=settings).astext()


def _pylatexenc(data: bytes) -> str:
    from pylatexenc.latex2text import LatexNodes2Text

    if b"\\begin{document}" not in data:
        raise ValueError("reStructuredText")
    return LatexNodes2Text().latex_to_text(data.decode())


def _texsoup(data: bytes) -> str:
    from TexSoup import TexSoup

    if b"\\begin{document}" not in data:
        raise ValueError("reStructuredText")
    return " ".join(map(str, TexSoup(data.decode()).text))


CANDIDATES: dict[str, Callable[[bytes], str]] = {
    "docutils": _docutils,
    "pylatexenc": _pylatexenc,
    "texsoup": _texsoup,
}
