"""Candidates for reading PDF, and manuals of Debian's packages to read with them.

The candidates that are not installed fail; `pip install liteparse pdf_oxide docling-parse
pdfplumber pypdf` brings them.
"""

from __future__ import annotations

import io
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

# Package -> its manual: a book, two columns of a newsletter, formulas, tables of an API.
_MANUALS = {
    "bash-doc": "usr/share/doc/bash/bashref.pdf",
    "libtasn1-doc": "usr/share/doc/libtasn1-doc/libtasn1.pdf",
    "texlive-latex-base-doc": "usr/share/doc/texlive-doc/latex/base/ltnews35.pdf",
    "gnuplot-doc": "usr/share/doc/gnuplot/gnuplot.pdf",
}


def _pdfium(data: bytes) -> str:
    import pypdfium2

    with pypdfium2.PdfDocument(data) as document:
        return "\n".join(page.get_textpage().get_text_bounded() for page in document)


def _liteparse(data: bytes) -> str:
    from liteparse import LiteParse

    options = {"extract_blocks": True, "extract_form_fields": True, "extract_annotations": True}
    parser = LiteParse(
        ocr_enabled=False, quiet=True, output_format="markdown", max_pages=10_000, **options
    )
    return parser.parse(data).text


def _pdf_oxide(data: bytes) -> str:
    import pdf_oxide

    document = pdf_oxide.PdfDocument.from_bytes(data)
    return "\n".join(document.to_markdown(page) for page in range(document.page_count()))


def _docling_parse(data: bytes) -> str:
    from docling_parse.pdf_parser import DoclingPdfParser

    pages = DoclingPdfParser(loglevel="fatal").load(io.BytesIO(data)).iterate_pages()
    return "\n".join(cell.text for _, page in pages for cell in page.textline_cells)


def _pdfplumber(data: bytes) -> str:
    import pdfplumber

    read = []
    with pdfplumber.open(io.BytesIO(data)) as document:
        for page in document.pages:
            read.append(page.extract_text())
            page.close()
    return "\n".join(read)


def _pypdf(data: bytes) -> str:
    import pypdf

    return "\n".join(page.extract_text() for page in pypdf.PdfReader(io.BytesIO(data)).pages)


CANDIDATES: dict[str, Callable[[bytes], str]] = {
    "pypdfium2": _pdfium,
    "liteparse": _liteparse,
    "pdf_oxide": _pdf_oxide,
    "docling-parse": _docling_parse,
    "pdfplumber": _pdfplumber,
    "pypdf": _pypdf,
}


def SAMPLES() -> dict[str, bytes]:
    """The manuals, from the packages that `apt-get download` brings."""
    samples = {}
    for package, manual in _MANUALS.items():
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["apt-get", "-q", "download", package], cwd=folder, check=True)
            (packed,) = Path(folder).glob("*.deb")
            subprocess.run(["dpkg-deb", "-x", packed, folder], check=True)
            samples[Path(manual).name] = Path(folder, manual).read_bytes()
    return samples
