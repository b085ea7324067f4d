"""The readers of documents, by the ending of the file."""

from __future__ import annotations

import functools
import importlib.util
import math
import posixpath
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from mmqa_jax.core.box import Budget
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.documents.document import Document
from mmqa_jax.data.documents.docx import read_docx
from mmqa_jax.data.documents.epub import read_epub
from mmqa_jax.data.documents.html import read_html
from mmqa_jax.data.documents.mail import read_eml, read_msg
from mmqa_jax.data.documents.odf import read_odf
from mmqa_jax.data.documents.plain import (
    read_delimited,
    read_json,
    read_json_lines,
    read_markdown,
    read_notebook,
    read_plain,
    read_rst,
)
from mmqa_jax.data.documents.pptx import read_pptx
from mmqa_jax.data.documents.xlsx import read_xlsx

VERSION = 4  # of what the readers make of a file; raised when that changes
PAGES_VERSION = 1  # of what is made of a page as a picture; raised when that changes
_SECONDS, _MOST_SECONDS = 3, 1800  # of processor time for a file of no bytes, and for any file
_RATE = 200_000  # bytes that are worth a second, of formats that say nothing else
_MEMORY = 768 << 20  # bytes of memory for a file of no bytes
_OUTPUT, _OUTPUT_PER_BYTE = 128 << 20, 8  # bytes of text and figures
# A page takes some 3 seconds, and its networks map more than they hold (850 MiB).
_FIRST_SCANS = 60  # seconds of them that any file may have
_SECONDS_OF_SCAN, _RATE_OF_SCANS, _MEMORY_OF_SCANS = 15, 2_000, 2 << 30


class Reader(NamedTuple):
    """How documents of one ending are read.

    Attributes:
      read: the file's bytes -> the document.
      module, package: the library that it needs, and its name on PyPI; "": none.
      rate: bytes of a file that are worth a second of processor time: fewer than are read.
    """

    read: Callable[[bytes], Document]
    module: str = ""
    package: str = ""
    rate: int = _RATE


# Modules that begin with the import of their library.


def _read_tex(data: bytes) -> Document:
    from mmqa_jax.data.documents.tex import read_tex

    return read_tex(data)


def _read_pdf(data: bytes) -> Document:
    from mmqa_jax.data.documents.pdf import read_pdf

    return read_pdf(data)


def _office(read: Callable[[bytes], Document]) -> Reader:
    return Reader(read, "lxml", "lxml", 50_000)


_HTML = Reader(read_html, "turbohtml", "turbohtml")
READERS: Mapping[str, Reader] = {
    ".txt": Reader(read_plain),
    ".md": Reader(read_markdown, "pyromark", "pyromark"),
    ".html": _HTML,
    ".htm": _HTML,
    ".pdf": Reader(_read_pdf, "pypdfium2", "pypdfium2", 20_000),
    ".docx": _office(read_docx),
    ".pptx": _office(read_pptx),
    ".xlsx": _office(read_xlsx),
    ".csv": Reader(read_delimited),
    ".tsv": Reader(functools.partial(read_delimited, delimiter="\t")),
    ".odt": _office(functools.partial(read_odf, ending=".odt")),
    ".ods": _office(functools.partial(read_odf, ending=".ods")),
    ".odp": _office(functools.partial(read_odf, ending=".odp")),
    ".rst": Reader(read_rst, "docutils", "docutils", 50_000),
    ".tex": Reader(_read_tex, "pylatexenc", "pylatexenc", 20_000),
    ".json": Reader(read_json),
    ".jsonl": Reader(read_json_lines),
    ".ipynb": Reader(read_notebook, "nbformat", "nbformat"),
    ".epub": Reader(read_epub, "turbohtml", "turbohtml", rate=50_000),
    ".eml": Reader(read_eml, "turbohtml", "turbohtml"),
    ".msg": Reader(read_msg, "oxmsg", "python-oxmsg"),
}


def budget_of(ending: str, size: int) -> Budget:
    """Returns what a file of so many bytes may take in the box, by what it is worth."""
    rate = READERS[ending].rate if ending in READERS else _RATE
    seconds = min(_SECONDS + math.ceil(size / rate), _MOST_SECONDS)
    return Budget(seconds, _MEMORY, _OUTPUT + _OUTPUT_PER_BYTE * size)


def budget_of_scans(pages: int, size: int) -> Budget:
    """What reading pages that are pictures may take beside it, of a file that was read without."""
    seconds = math.ceil(min(_SECONDS_OF_SCAN * pages, _FIRST_SCANS + size / _RATE_OF_SCANS))
    return Budget(min(_SECONDS + seconds, _MOST_SECONDS), _MEMORY_OF_SCANS, _OUTPUT)


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
    return posixpath.splitext(name)[1].lower()
