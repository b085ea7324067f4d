"""The readers of documents, by the ending of the file."""

from __future__ import annotations

import importlib.util
import math
import posixpath
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from mmqa_jax.core.box import Budget
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.documents.document import Document

VERSION = 5  # of what the readers make of a file; raised when that changes
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


def _by(module: str, name: str, **about: str) -> Callable[[bytes], Document]:
    """A reader by its module, which is imported where documents are parsed and nowhere else."""

    def read(data: bytes) -> Document:
        return getattr(importlib.import_module(f"{__package__}.{module}"), name)(data, **about)

    return read


def _office(module: str, **about: str) -> Reader:
    return Reader(_by(module, f"read_{module}", **about), "lxml", "lxml", 50_000)


_HTML = Reader(_by("html", "read_html"), "turbohtml", "turbohtml")
READERS: Mapping[str, Reader] = {
    ".txt": Reader(_by("plain", "read_plain")),
    ".md": Reader(_by("plain", "read_markdown"), "pyromark", "pyromark"),
    ".html": _HTML,
    ".htm": _HTML,
    ".pdf": Reader(_by("pdf", "read_pdf"), "pypdfium2", "pypdfium2", 20_000),
    ".docx": _office("docx"),
    ".pptx": _office("pptx"),
    ".xlsx": _office("xlsx"),
    ".csv": Reader(_by("plain", "read_delimited")),
    ".tsv": Reader(_by("plain", "read_delimited", delimiter="\t")),
    ".odt": _office("odf", ending=".odt"),
    ".ods": _office("odf", ending=".ods"),
    ".odp": _office("odf", ending=".odp"),
    ".rst": Reader(_by("plain", "read_rst"), "docutils", "docutils", 50_000),
    ".tex": Reader(_by("tex", "read_tex"), "pylatexenc", "pylatexenc", 20_000),
    ".json": Reader(_by("plain", "read_json")),
    ".jsonl": Reader(_by("plain", "read_json_lines")),
    ".ipynb": Reader(_by("plain", "read_notebook"), "nbformat", "nbformat"),
    ".epub": Reader(_by("html", "read_epub"), "turbohtml", "turbohtml", rate=50_000),
    ".eml": Reader(_by("mail", "read_eml"), "turbohtml", "turbohtml"),
    ".msg": Reader(_by("mail", "read_msg"), "oxmsg", "python-oxmsg"),
}


def budget_of(ending: str, size: int) -> Budget:
    """Returns what a file of so many bytes may take in the box, by what it is worth."""
    rate = READERS[ending].rate if ending in READERS else _RATE
    seconds = min(_SECONDS + math.ceil(size / rate), _MOST_SECONDS)
    return Budget(seconds, _MEMORY, _OUTPUT + _OUTPUT_PER_BYTE * size)


def budget_of_scans(pages: int, size: int) -> Budget:
    """The budget for reading a file's pages as pictures, beside that of the file itself."""
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
