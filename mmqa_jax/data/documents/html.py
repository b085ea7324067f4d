"""HTML by lxml: what a page says. Nothing in it is executed, and nothing is fetched."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any

from mmqa_jax.data.documents.document import (
    Document,
    DocumentError,
    Figure,
    Outline,
    Paragraph,
    one_line,
)

MOST_BYTES = 2**26  # of a page; its tree takes some ten times as much memory

# Elements whose text is none of the page's own.
_LEFT_OUT = (
    *("script", "style", "noscript", "template", "head", "nav", "svg", "math", "iframe", "object"),
    *("embed", "canvas", "audio", "video", "select", "textarea", "button"),
)
# Elements that do not end a paragraph; cells of a table and captions are looked after on their own.
_INLINE = frozenset({
    "a", "abbr", "acronym", "b", "bdi", "bdo", "big", "br", "cite", "code", "data", "del", "dfn",
    "em", "font", "i", "img", "ins", "kbd", "label", "mark", "q", "s", "samp", "small", "span",
    "strike", "strong", "sub", "sup", "time", "tt", "u", "var", "wbr", "td", "th",
})  # fmt: skip
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_CHARSET = re.compile(rb"<meta[^<>]+charset\s*=\s*+[\"']?\s*([\w.:-]+)", re.IGNORECASE)
_DATA_URI = re.compile(r"\s*data:image/[\w.+-]+;base64,", re.IGNORECASE)
_CELL = " | "


def read_html(data: bytes) -> Document:
    """A page's paragraphs, items of lists and rows of tables, and its pictures with their captions.

    A caption is the figcaption, or else the text that stands for the picture (alt). Pictures with
    neither are decoration and left out. The encoding is the one that the page declares, or UTF-8.

    Raises:
      DocumentError: too large, in another encoding than it says, or no HTML.
    """
    import lxml.etree
    import lxml.html

    if len(data) > MOST_BYTES:
        raise DocumentError(
            f"{len(data):,} bytes, more than the {MOST_BYTES:,} of a page; split it"
        )
    parser = lxml.html.HTMLParser(
        encoding="utf-8", remove_comments=True, remove_pis=True, no_network=True
    )
    try:
        root = lxml.html.document_fromstring(_in_utf8(data), parser=parser)
    except (lxml.etree.LxmlError, ValueError) as error:
        raise DocumentError(f"no HTML that can be read ({error})") from error
    for element in list(root.iter(*_LEFT_OUT)):
        if element.getparent() is not None:
            element.drop_tree()
    page = _Page()
    for event, element in lxml.etree.iterwalk(root, events=("start", "end")):
        if event == "start":
            page.begin(element)
        else:
            page.end(element)
    page.flush()
    return Document(tuple(page.paragraphs), tuple(page.figures), (), tuple(page.broken))


def _in_utf8(data: bytes) -> bytes:
    """The page in UTF-8, whatever encoding it declares."""
    declared = _CHARSET.search(data[:4096])
    encoding = declared[1].decode("ascii", "replace") if declared else "utf-8-sig"
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        encoding = "utf-16"
    elif data.startswith(b"\xef\xbb\xbf") or encoding.lower() in ("utf-8", "utf8"):
        encoding = "utf-8-sig"
    try:
        # As browsers do: what is called Latin-1 is Windows' encoding, which extends it.
        latin = encoding.lower() in ("iso-8859-1", "latin-1", "latin1")
        return data.decode("cp1252" if latin else encoding).encode()
    except (UnicodeError, LookupError, ValueError) as error:
        said = "declares no encoding and is not UTF-8" if not declared else f"is not {encoding}"
        raise DocumentError(f"{said}, which it was read as; save it as UTF-8") from error


class _Page:
    """Collects a page's content as its elements begin and end."""

    def __init__(self) -> None:
        self.paragraphs: list[Paragraph] = []
        self.figures: list[Figure] = []
        self.broken: list[str] = []
        self._outline = Outline()
        self._text: list[str] = []  # of the paragraph that is open
        self._heading = 0  # level of the heading that is open
        self._figure: list[tuple[str, str]] | None = None  # pictures of the open <figure>
        self._captions: list[str] = []  # of the open <figure>

    def begin(self, element: Any) -> None:
        tag = element.tag
        if tag not in _INLINE:
            self.flush()
        if tag in _HEADINGS:
            self._heading = _HEADINGS[tag]
        elif tag == "figure":
            self._figure, self._captions = [], []
        elif tag == "img":
            self._add_picture(element)
        elif tag == "br":
            self._text.append(" ")
        self._text.append(element.text or "")

    def end(self, element: Any) -> None:
        tag = element.tag
        if tag == "figcaption" and self._figure is not None:
            self._captions.append(one_line("".join(self._text)))
            self._text = []
        elif tag not in _INLINE:
            self.flush()
        if tag in _HEADINGS:
            self._heading = 0
        elif tag == "figure" and self._figure is not None:
            self._end_figure()
        elif tag in ("td", "th"):
            self._text.append(_CELL)
        self._text.append(element.tail or "")

    def flush(self) -> None:
        """Ends the paragraph or heading that is open."""
        text = one_line("".join(self._text)).removesuffix(_CELL.rstrip()).rstrip()
        self._text = []
        if text and self._heading:
            self._outline.enter(self._heading, text)
        elif text:
            self.paragraphs.append(Paragraph(text, self._outline.path))

    def _add_picture(self, element: Any) -> None:
        alt, link = element.get("alt") or element.get("title") or "", element.get("src") or ""
        if self._figure is not None:
            self._figure.append((alt, link))
        elif alt.strip():
            self._keep(alt, link)

    def _end_figure(self) -> None:
        assert self._figure is not None
        caption = " ".join(self._captions)
        for alt, link in self._figure:
            if caption or alt.strip():
                self._keep(caption or alt, link)
        if caption and not self._figure:  # of a table, or of what is not read
            self.paragraphs.append(Paragraph(caption, self._outline.path))
        self._figure, self._captions = None, []

    def _keep(self, caption: str, link: str) -> None:
        caption, heading = one_line(caption), self._outline.path
        encoded = _DATA_URI.match(link)
        if encoded is None:
            self.figures.append(Figure(caption, heading, link=link))
            return
        try:
            picture = base64.b64decode(link[encoded.end() :], validate=False)
        except (binascii.Error, ValueError) as error:
            self.broken.append(f"{caption[:60]!r}: its base64 is damaged ({error})")
            return
        self.figures.append(Figure(caption, heading, picture=picture))
