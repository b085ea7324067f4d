"""Candidates for reading LaTeX, and a manual's example.

The candidate that is not installed fails; `pip install texsoup` brings it.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.bench.parsers.html import debian_files


def SAMPLES() -> dict[str, bytes]:
    """What Asymptote's manual gives as an example."""
    return debian_files("asymptote-doc", "usr/share/doc/asymptote/examples/latexusage.tex", 1)


def _pylatexenc(data: bytes) -> str:
    from pylatexenc.latex2text import LatexNodes2Text

    return LatexNodes2Text().latex_to_text(data.decode())


def _texsoup(data: bytes) -> str:
    from TexSoup import TexSoup

    return " ".join(map(str, TexSoup(data.decode()).text))


CANDIDATES: dict[str, Callable[[bytes], str]] = {"pylatexenc": _pylatexenc, "texsoup": _texsoup}
