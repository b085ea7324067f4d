"""Candidates for reading HTML, and pages of Python's documentation to read with them.

The candidates that are not installed fail; `pip install selectolax trafilatura markitdown
docling-slim beautifulsoup4` brings them.
"""

from __future__ import annotations

import io
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path


def debian_files(package: str, pattern: str, most: int) -> dict[str, bytes]:
    """The largest files of a Debian package (`apt-get download`) that a pattern names."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["apt-get", "-q", "download", package], cwd=folder, check=True)
        (packed,) = Path(folder).glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", packed, folder], check=True)
        files = sorted(Path(folder).glob(pattern), key=lambda path: -path.stat().st_size)[:most]
        return {path.name: path.read_bytes() for path in files}


def SAMPLES() -> dict[str, bytes]:
    """Twelve pages."""
    return debian_files("python3.11-doc", "usr/share/doc/python3.11/html/**/*.html", 12)


def _lxml(data: bytes) -> str:
    import lxml.html

    parser = lxml.html.HTMLParser(huge_tree=True)
    return lxml.html.document_fromstring(data, parser=parser).text_content()


def _selectolax(data: bytes) -> str:
    from selectolax.lexbor import LexborHTMLParser

    root = LexborHTMLParser(data).root
    return root.text(separator=" ") if root else ""


def _turbohtml(data: bytes) -> str:
    import turbohtml

    return turbohtml.parse(data, positions=False).to_text()


def _trafilatura(data: bytes) -> str:
    import trafilatura

    return trafilatura.extract(data, favor_recall=True) or ""


def markitdown(data: bytes, ending: str = ".html") -> str:
    """What markitdown reads of a file of this ending."""
    from markitdown import MarkItDown, StreamInfo

    info = StreamInfo(extension=ending)
    return MarkItDown().convert_stream(io.BytesIO(data), stream_info=info).text_content


def _docling(data: bytes) -> str:
    from docling.backend.html_backend import HTMLDocumentBackend
    from docling.datamodel.base_models import InputFormat
    from docling.datamodel.document import InputDocument

    stream = io.BytesIO(data)
    document = InputDocument(stream, InputFormat.HTML, HTMLDocumentBackend, filename="page.html")
    return HTMLDocumentBackend(document, stream).convert().export_to_markdown()


CANDIDATES: dict[str, Callable[[bytes], str]] = {
    "lxml": _lxml,
    "selectolax": _selectolax,
    "turbohtml": _turbohtml,
    "trafilatura": _trafilatura,
    "markitdown": markitdown,
    "docling-slim": _docling,
}
