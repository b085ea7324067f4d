"""Books in EPUB: the chapters in their reading order, each read as HTML (html.Page)."""

from __future__ import annotations

import html
import io
import posixpath
import re
import urllib.parse
import zipfile
from typing import Any

from mmqa_jax.data.documents import document
from mmqa_jax.data.documents.document import DocumentError, letters, one_line
from mmqa_jax.data.documents.html import Page

_CONTAINER = "META-INF/container.xml"
_XML_ENTITIES = ("amp", "lt", "gt", "quot", "apos")


def read_epub(data: bytes) -> document.Document:
    """A book's chapters (EPUB 2 and 3) with their pictures."""
    import turbohtml

    page, of_content = Page(), (KeyError, AttributeError, ValueError, turbohtml.HTMLParseError)
    errors = zipfile.BadZipFile, RuntimeError, OSError, *of_content
    with document.naming_damage("EPUB", *errors), zipfile.ZipFile(io.BytesIO(data)) as archive:
        if "META-INF/rights.xml" in archive.namelist():
            raise DocumentError("encrypted; save it without its protection")
        name = _xml(archive.read(_CONTAINER)).find("rootfile").attr("full-path")
        package = _xml(archive.read(name))
        chapters = {
            item.attr("id"): _resolved(name, item.attr("href") or "")
            for item in package.find_all("item")
            if item.attr("media-type") in ("application/xhtml+xml", "text/html")
        }
        page.set_title(title.text if (title := package.find("dc:title")) else "")
        order = [item.attr("idref") for item in package.find_all("itemref")]
        for number in dict.fromkeys(order):
            if chapter := chapters.pop(number, ""):
                _add_chapter(page, archive, chapter)
        rest = sum(letters(one_line(_xml(archive.read(c)).text)) for c in chapters.values())
        page.add_left_out("parts outside the reading order", rest)
    return page.document()


def _add_chapter(page: Page, archive: zipfile.ZipFile, name: str) -> None:
    def open_link(link: str) -> bytes | None:
        try:
            return archive.read(_resolved(name, link))
        except KeyError:  # no file of the book
            return None

    page.open_link = open_link
    page.add_tree(_xml(archive.read(name)))


def _xml(data: bytes) -> Any:
    """The tree of XML; of HTML that is none, as browsers read it."""
    import turbohtml

    declared = re.match(rb"\s*<\?xml[^>]*encoding=[\"']([\w.-]+)", data)
    try:
        text = data.decode(declared[1].decode() if declared else "utf-8-sig").removeprefix("\ufeff")
        # Books name characters as HTML does, which XML alone does not know.
        text = re.sub(
            r"&(\w+);", lambda m: m[0] if m[1] in _XML_ENTITIES else html.unescape(m[0]), text
        )
        return turbohtml.parse_xml(text)
    except (turbohtml.HTMLParseError, UnicodeError, LookupError):
        return turbohtml.parse(data, positions=False)


def _resolved(document: str, link: str) -> str:
    """The member of the archive that a link of another one names."""
    path = urllib.parse.unquote(link.partition("#")[0])
    return posixpath.normpath(posixpath.join(posixpath.dirname(document), path))
