"""Word's documents: readers of .docx to compare (`CANDIDATES`), and documents (`SAMPLES`)."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

from office_files import PIECES, cell, para, t, table, word


def by_markitdown(ending: str) -> Callable[[bytes], str]:
    """Microsoft's markitdown, of files with this ending."""

    def read(data: bytes) -> str:
        from markitdown import MarkItDown, StreamInfo

        info = StreamInfo(extension=ending)
        return (
            MarkItDown(enable_plugins=False)
            .convert_stream(io.BytesIO(data), stream_info=info)
            .markdown
        )

    return read


def by_docling(module: str, backend: str, kind: str) -> Callable[[bytes], str]:
    """A backend of docling-slim, which needs no models."""

    def read(data: bytes) -> str:
        import importlib

        from docling.datamodel.base_models import InputFormat
        from docling.datamodel.document import InputDocument

        made = getattr(importlib.import_module(f"docling.backend.{module}"), backend)
        document = InputDocument(
            path_or_stream=io.BytesIO(data),
            format=InputFormat[kind],
            backend=made,
            filename=f"a.{kind.lower()}",
        )
        return made(document, io.BytesIO(data)).convert().export_to_markdown()

    return read


def _python_docx(data: bytes) -> str:
    import docx

    lines = []
    for block in docx.Document(io.BytesIO(data)).iter_inner_content():
        if hasattr(block, "rows"):
            lines += [" | ".join(c.text for c in row.cells) for row in block.rows]
        else:
            lines.append(block.text)
    return "\n".join(lines)


def _docx2python(data: bytes) -> str:
    from docx2python import docx2python

    with docx2python(io.BytesIO(data)) as document:
        return document.text


def _mammoth(data: bytes) -> str:
    import mammoth

    return re.sub("<[^>]+>", " ", mammoth.convert_to_html(io.BytesIO(data)).value)


CANDIDATES: dict[str, Callable[[bytes], str]] = {
    "python-docx": _python_docx,
    "docx2python": _docx2python,
    "mammoth": _mammoth,
    "markitdown": by_markitdown(".docx"),
    "docling-slim": by_docling("msword_backend", "MsWordDocumentBackend", "DOCX"),
}


def SAMPLES() -> dict[str, bytes]:
    """A document of all pieces that a file may hold, and a long one of plain sections."""
    section = "".join(
        para(t(f"Section {number}"), "berschrift1")
        + para(t(f"The filter of pump {number} is cleaned every {number % 30} days. ")) * 5
        + table(cell("Part") + cell("Days"), *[cell(f"Seal {n}") + cell(str(n)) for n in range(5)])
        for number in range(300)
    )
    return {
        "pieces.docx": word("".join(body for body, _ in PIECES.values())),
        "long.docx": word(section),
    }
