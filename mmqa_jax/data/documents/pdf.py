"""PDF by PDFium: lines to paragraphs under headings, and the pictures that pages embed."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from mmqa_jax.data.documents.document import (
    Document,
    DocumentError,
    Figure,
    Outline,
    Paragraph,
    is_caption,
    one_line,
)
from mmqa_jax.data.picture_bounds import PictureError, check_pixels

MOST_CHARACTERS = 2**20  # of a page: a full one has some 5,000
_HEADING_SIZE = 1.15  # times the size of the document's text
_HEADING_WORDS = 20
_PARAGRAPH_GAP = 1.6  # times the size of the text, from a line's foot to the next one's
_SMALLEST_SHOWN = 36.0  # points, half an inch
_LINE_ENDS = (10, 13)
_BROKEN_WORD = "\x02"  # PDFium's sign for the hyphen of a word that goes on in the next line
_PAGE_NUMBER = re.compile(r"(?:page\s*)?[\divxlc]{1,6}(?:\s*(?:/|of)\s*\d+)?", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class _Line:
    text: str
    size: float  # of its letters, in points
    bottom: float  # from the page's foot, in points
    left: float


def read_pdf(data: bytes, least_pixels: int) -> Document:
    """A document's paragraphs with their pages, and its embedded pictures with their captions.

    Headings are lines in larger letters. A caption is the paragraph of the page that begins with
    `Figure N` and is nearest to the picture. What is drawn by lines and curves is not a picture.

    Args:
      least_pixels: pictures with a shorter side are left out, as are those that are shown smaller
        than half an inch, and repetitions of one.

    Raises:
      DocumentError: encrypted, damaged, or without a page.
    """
    with open_pdf(data) as document:
        reading = _Reading(least_pixels)
        for number in range(len(document)):
            reading.add_page(number + 1, document)
    return reading.document()


def open_pdf(data: bytes) -> Any:
    """PDFium's document, a context manager; DocumentError as `read_pdf`."""
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise DocumentError("encrypted; save it without a password") from error
        raise DocumentError(f"no PDF that can be read ({error})") from error
    pages = len(document)  # which a closed document does not say
    if pages > len(data):
        document.close()
        raise DocumentError(f"claims {pages:,} pages in {len(data):,} bytes")
    return document


class _Reading:
    """A document's pages, one after another."""

    def __init__(self, least_pixels: int) -> None:
        self._least_pixels = least_pixels
        self._pages: list[tuple[int, list[list[_Line]], list[tuple[bytes, float]]]] = []
        self._scanned: list[int] = []
        self._broken: list[str] = []
        self._seen: set[bytes] = set()  # pictures

    def add_page(self, number: int, document: Any) -> None:
        import pypdfium2

        try:
            page = document[number - 1]
            lines = list(_lines(page, number))
            pictures = list(self._pictures(page, number, bool(lines)))
        except pypdfium2.PdfiumError as error:
            self._broken.append(f"page {number}: {error}")
            return
        self._pages.append((number, list(_blocks(lines)), pictures))

    def document(self) -> Document:
        """What was read, with headings by the size of letters in the whole document."""
        sizes: Counter[float] = Counter()
        for _, blocks, _ in self._pages:
            for line in (line for block in blocks for line in block):
                sizes[round(line.size, 1)] += len(line.text)
        usual = sizes.most_common(1)[0][0] if sizes else 0.0
        outline = Outline()
        paragraphs: list[Paragraph] = []
        figures: list[Figure] = []
        for number, blocks, pictures in self._pages:
            captions: list[tuple[float, str]] = []
            for block in blocks:
                text, size = _joined(block), block[0].size
                if size >= _HEADING_SIZE * usual and len(text.split()) <= _HEADING_WORDS:
                    outline.enter(-round(size, 1), text)
                    continue
                paragraphs.append(Paragraph(text, outline.path, number))
                if is_caption(text):
                    captions.append((block[0].bottom, text))
            for picture, foot in pictures:
                near = min(captions, key=lambda caption: abs(caption[0] - foot), default=(0.0, ""))
                figures.append(Figure(near[1], outline.path, number, picture))
        return Document(
            tuple(paragraphs), tuple(figures), tuple(self._scanned), tuple(self._broken)
        )

    def _pictures(self, page: Any, number: int, has_text: bool) -> Iterator[tuple[bytes, float]]:
        """The encoded pictures of a page that are new, with the height of their feet."""
        import pypdfium2.raw

        found = page.get_objects(filter=(pypdfium2.raw.FPDF_PAGEOBJ_IMAGE,))
        if not has_text:  # a picture of text, which only OCR could read; or a blank page
            if next(iter(found), None) is not None:
                self._scanned.append(number)
            return
        for image in found:
            width, height = image.get_px_size()
            left, bottom, right, top = image.get_bounds()
            shown = min(right - left, top - bottom)
            if min(width, height) < self._least_pixels or shown < _SMALLEST_SHOWN:
                continue
            try:
                encoded = _encoded(image, f"page {number}")
            except (PictureError, pypdfium2.PdfiumError, ValueError, OSError) as error:
                self._broken.append(f"a picture on page {number}: {one_line(str(error))}")
                continue
            if encoded not in self._seen:
                self._seen.add(encoded)
                yield encoded, bottom


def _encoded(image: Any, place: str) -> bytes:
    """A picture as it is embedded where that is a JPEG, otherwise as PNG."""
    raw = image.get_data(decode_simple=False)
    check_pixels(*image.get_px_size(), len(raw), place)
    if image.get_filters() == ["DCTDecode"]:
        return bytes(raw)
    packed = io.BytesIO()
    image.get_bitmap().to_pil().convert("RGB").save(packed, "PNG")
    return packed.getvalue()


def _lines(page: Any, number: int) -> Iterator[_Line]:
    """The lines of text of a page, in the order in which the file has them."""
    import pypdfium2.raw as pdfium

    text = page.get_textpage()
    count = text.count_chars()
    if count > MOST_CHARACTERS:
        raise DocumentError(
            f"page {number} has {count:,} characters, more than {MOST_CHARACTERS:,}"
        )
    codes = [pdfium.FPDFText_GetUnicode(text, index) for index in range(count)]
    start = 0
    for end in [index for index, code in enumerate(codes) if code in _LINE_ENDS] + [count]:
        line = "".join(map(chr, codes[start:end]))
        written = len(line) - len(line.lstrip())
        if line.strip():
            yield _Line(_whole(line), *_place(text, start + written))
        start = end + 1


def _place(text: Any, index: int) -> tuple[float, float, float]:
    """Size, height above the page's foot and distance from its left of a character, in points."""
    import ctypes

    import pypdfium2.raw as pdfium

    left, right, bottom, top = (ctypes.c_double() for _ in range(4))
    pdfium.FPDFText_GetCharBox(text, index, left, right, bottom, top)
    matrix = pdfium.FS_MATRIX()
    scaled = pdfium.FPDFText_GetMatrix(text, index, matrix)
    scale = math.hypot(matrix.c, matrix.d) if scaled else 1.0
    size = pdfium.FPDFText_GetFontSize(text, index) * scale
    return size, bottom.value, left.value


def _whole(line: str) -> str:
    """A line with the characters put together that PDFium gives as two halves (UTF-16)."""
    return line.strip().encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _blocks(lines: Sequence[_Line]) -> Iterator[list[_Line]]:
    """Lines that are a paragraph or a heading together; numbers of pages are left out."""
    block: list[_Line] = []
    for position, line in enumerate(lines):
        at_edge = position in (0, len(lines) - 1)
        if at_edge and _PAGE_NUMBER.fullmatch(line.text):
            continue
        if block and not _goes_on(block[-1], line):
            yield block
            block = []
        block.append(line)
    if block:
        yield block


def _goes_on(line: _Line, following: _Line) -> bool:
    """Whether a line's paragraph goes on in the following line."""
    if abs(following.size - line.size) > 0.05 * line.size or is_caption(following.text):
        return False
    fall = line.bottom - following.bottom
    if fall < 0:  # the next column, which begins within a sentence or not
        return not line.text.endswith((".", "!", "?", ":"))
    return fall <= _PARAGRAPH_GAP * max(line.size, 1.0)


def _joined(block: Sequence[_Line]) -> str:
    """The block's text; words that were broken at a line's end are whole."""
    text = " ".join(line.text for line in block)
    return one_line(text.replace(f"{_BROKEN_WORD} ", ""))
