"""The readers of documents, by the ending of the file."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.documents.document import Document
from mmqa_jax.data.documents.docx import read_docx
from mmqa_jax.data.documents.epub import read_epub
from mmqa_jax.data.documents.html import read_html
from mmqa_jax.data.documents.mail import read_eml, read_msg
from mmqa_jax.data.documents.pdf import read_pdf
from mmqa_jax.data.documents.plain import (
    read_json,
    read_json_lines,
    read_markdown,
    read_notebook,
    read_plain,
    read_rst,
)

VERSION = 2  # of what the readers make of a file; raised when that changes


class Reader(NamedTuple):
    """How documents of one ending are read.

    Attributes:
      read: (the file's bytes, the shortest side of an embedded picture) -> the document.
      module, package: the library that it needs, and its name on PyPI; "": none.
    """

    read: Callable[[bytes, int], Document]
    module: str = ""
    package: str = ""


def _read_tex(data: bytes, _: int) -> Document:
    from mmqa_jax.data.documents.tex import read_tex  # which is made of a library's classes

    return read_tex(data)


_HTML = Reader(lambda data, _: read_html(data), "turbohtml", "turbohtml")
READERS: Mapping[str, Reader] = {
    ".txt": Reader(lambda data, _: read_plain(data)),
    ".md": Reader(lambda data, _: read_markdown(data), "pyromark", "pyromark"),
    ".html": _HTML,
    ".htm": _HTML,
    ".pdf": Reader(read_pdf, "pypdfium2", "pypdfium2"),
    ".docx": Reader(lambda data, _: read_docx(data), "docx", "python-docx"),
    ".rst": Reader(lambda data, _: read_rst(data), "docutils", "docutils"),
    ".tex": Reader(_read_tex, "pylatexenc", "pylatexenc"),
    ".json": Reader(lambda data, _: read_json(data)),
    ".jsonl": Reader(lambda data, _: read_json_lines(data)),
    ".ipynb": Reader(lambda data, _: read_notebook(data), "nbformat", "nbformat"),
    ".epub": Reader(lambda data, _: read_epub(data), "turbohtml", "turbohtml"),
    ".eml": Reader(lambda data, _: read_eml(data), "turbohtml", "turbohtml"),
    ".msg": Reader(lambda data, _: read_msg(data), "oxmsg", "python-oxmsg"),
}


def check_libraries(names: Iterable[str]) -> None:
    """UserError with the remedy where documents of these names need a library that is missing."""
    for ending in sorted({ending_of(name) for name in names} & set(READERS)):
        reader = READERS[ending]
        if reader.module and importlib.util.find_spec(reader.module) is None:
            raise UserError(
                f"{ending}: needs the package {reader.package}; install it with "
                "`pip install 'mmqa-jax[documents]'`."
            )


def ending_of(name: str) -> str:
    """The ending by which a file is read: `.pdf` of `Manual.PDF`."""
    return PurePosixPath(name).suffix.lower()
