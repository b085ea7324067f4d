"""Word's documents (.docx) by python-docx; how much they may unpack to is bounded first."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from typing import Any

from mmqa_jax.core.arguments import decimal_number
from mmqa_jax.data.documents.document import (
    Document,
    DocumentError,
    Figure,
    Outline,
    Paragraph,
    is_caption,
    one_line,
)
from mmqa_jax.data.picture_bounds import MOST_BYTES

# What XML may unpack to. Word's packs 10 to 30 times; its tree takes some ten times its bytes.
_FREE_XML, _XML_PER_BYTE, _MOST_XML = 2**23, 100, 2**26
_OLE = b"\xd0\xcf\x11\xe0"  # what Word encrypts, and .doc, are files of this kind


def read_docx(data: bytes) -> Document:
    """A document's paragraphs, rows of tables, and pictures with their captions.

    A caption is the paragraph after the picture in Word's style Caption, or that begins with
    `Figure N`, or else the text that stands for the picture (alt).

    Raises:
      DocumentError: encrypted, damaged, not a .docx, or it unpacks to too much.
    """
    import docx

    if data.startswith(_OLE):
        raise DocumentError("encrypted, or Word's old format; save it as .docx without a password")
    _check_unpacked(data)
    try:
        document = docx.Document(io.BytesIO(data))
        return _read(document)
    except DocumentError:
        raise
    except Exception as error:  # python-docx raises errors of many kinds for damaged parts
        raise DocumentError(
            f"no .docx that can be read ({type(error).__name__}: {one_line(str(error))[:120]})"
        ) from error


def _check_unpacked(data: bytes) -> None:
    """DocumentError for a zip bomb. zipfile never unpacks more of a member than it claims."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise DocumentError(f"no .docx: {one_line(str(error))}") from error
    if any(member.flag_bits & 1 for member in members):
        raise DocumentError("encrypted; save it without a password")
    xml = sum(m.file_size for m in members if m.filename.lower().endswith((".xml", ".rels")))
    most = min(_FREE_XML + _XML_PER_BYTE * len(data), _MOST_XML)
    if xml > most:
        raise DocumentError(
            f"unpacks to {xml:,} bytes of text, more than the {most:,} that {len(data):,} bytes "
            "may hold"
        )
    whole = sum(member.file_size for member in members)
    if whole > MOST_BYTES:
        raise DocumentError(f"unpacks to {whole:,} bytes, more than {MOST_BYTES:,}; split it")


def _read(document: Any) -> Document:
    outline = Outline()
    paragraphs: list[Paragraph] = []
    figures: list[Figure] = []
    uncaptioned: list[int] = []  # figures that wait for a caption
    for block in document.iter_inner_content():
        if hasattr(block, "rows"):
            paragraphs += [Paragraph(text, outline.path) for text in _rows(block)]
            continue
        text = one_line(block.text)
        style = (block.style.name if block.style is not None else "") or ""
        if text and (level := _level(style)) is not None:
            outline.enter(level, text)
        elif text:
            paragraphs.append(Paragraph(text, outline.path))
            if style == "Caption" or is_caption(text):
                for number in uncaptioned:
                    figures[number] = Figure(text, outline.path, picture=figures[number].picture)
            uncaptioned = []
        for picture, alt in _pictures(block):
            uncaptioned.append(len(figures))
            figures.append(Figure(one_line(alt), outline.path, picture=picture))
    return Document(tuple(paragraphs), tuple(figures))


def _level(style: str) -> int | None:
    """The level of a heading by its style's name; python-docx gives it in English."""
    if style == "Title":
        return 0
    name, _, number = style.partition(" ")
    return decimal_number(number) if name == "Heading" else None


def _rows(table: Any) -> Iterator[str]:
    """A line for every row of a table; a cell that spans several counts once."""
    for row in table.rows:
        cells = {cell._tc: one_line(cell.text) for cell in row.cells}
        if text := " | ".join(filter(None, cells.values())):
            yield text


def _pictures(paragraph: Any) -> Iterator[tuple[bytes, str]]:
    """The encoded pictures of a paragraph, with their alt texts."""
    for drawing in paragraph._p.xpath(".//w:drawing"):
        about = drawing.xpath(".//wp:docPr/@descr")
        for reference in drawing.xpath(".//a:blip/@r:embed"):
            part = paragraph.part.related_parts.get(reference)
            if part is not None:
                yield part.blob, about[0] if about else ""
