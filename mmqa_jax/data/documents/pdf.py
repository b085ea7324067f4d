"""PDF by PDFium: text in reading order under headings, filled forms, notes, and pictures."""

from __future__ import annotations

import bisect
import ctypes
import dataclasses
import hashlib
import io
import itertools
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pypdfium2
import pypdfium2.raw as pdfium

from mmqa_jax.data.documents import document, layout, ocr
from mmqa_jax.data.documents.chunks import possible_begins
from mmqa_jax.data.documents.document import CELL, DocumentError, Place, letters, one_line
from mmqa_jax.data.documents.layout import Box, Line, Segment
from mmqa_jax.data.pictures.bounds import PictureError, check_pixels

MOST_CHARACTERS = 2**20  # of a page: a full one has some 5,000
_HEADING_SIZE = 1.15  # times the size of the document's text
_HEADING_WORDS = 20
_PARAGRAPH_GAP = 1.6  # times the size of the text, from a line's base to the next one's
_SMALLEST_SHOWN = 36.0  # points, half an inch
_SCAN_AREA = 0.6  # of a page, that pictures cover where it is a scan
_SCAN_LETTERS = 150  # that stamps on a scan, or the text of a page of an album, have at most
_OUTLINES = 50  # lines and curves that a page without text has, where they may be letters
_BROKEN_WORD = "\x02"  # PDFium's sign for the hyphen of a word that goes on in the next line
_LINE_ENDS = (10, 13, ord(_BROKEN_WORD))
_PAGE_NUMBER = re.compile(r"(?:page\s*)?[\divxlc]{1,6}(?:\s*(?:/|of)\s*\d+)?", re.IGNORECASE)
_FIRST_NUMBER, _LAST_NUMBER = re.compile(r"\A\d{1,6}"), re.compile(r"\d{1,6}(?=\W*+\Z)")
_EDGE = 0.15  # of the page's height, in which running heads and feet stand
_MARGIN = 0.065  # of the page's height, in which small letters are no text of the page
_MARGIN_WORDS = 12
_SLANT = 0.1  # quarter turns, by which the words of a line may deviate
_BOLD = 550  # of a font's weights, of which 400 is the usual one
DOTS = 144  # per inch, of a page's picture that is not larger than MOST_PIXELS then
# An A4 page at some 138 dots per inch, and what Qwen3-VL-Embedding sees of a picture at most.
MOST_PIXELS = 1800 * 32 * 32
_POINTS = 72.0  # of an inch
_ACROSS = 1000  # PDFium's device units a point: it rounds them to whole numbers
# What a person adds to a page; the text of links and of pop-up windows stands elsewhere.
_NOTES = ("TEXT", "FREETEXT", "LINE", "SQUARE", "CIRCLE", "POLYGON", "POLYLINE", "HIGHLIGHT")
_NOTES += ("UNDERLINE", "SQUIGGLY", "STRIKEOUT", "STAMP", "CARET", "INK", "FILEATTACHMENT")


@dataclasses.dataclass
class _Page:
    """A page holds text and pictures, or is one."""

    number: int
    size: tuple[float, float]  # width and height in points, as it is shown
    segments: list[Segment]  # its text, with values of fields and notes
    pictures: list[tuple[bytes, Box]]  # encoded, each with its box
    is_scan: bool  # it is a picture that was not read


def read_pdf(data: bytes, least_pixels: int = 64, scans: bool = True) -> document.Document:
    """A document's paragraphs with their places, and its embedded pictures with their captions.

    Text is read column by column and tables row by row. Values of form fields and notes stand
    where a person sees them. Running heads, feet and page numbers are left out. Pages that are
    pictures are read by OCR where its package is installed. Headings are lines in larger letters.
    A caption is the paragraph of the page that begins with `Figure N` and is nearest to the
    picture, or else all text of a page that has little. What is drawn by lines and curves is not
    a picture.

    Args:
      least_pixels: pictures with a shorter side are left out, as are those that are shown smaller
        than half an inch, and repetitions of one.
      scans: whether pages that are pictures are read, where that is installed.
    """
    with open_pdf(data) as pdf:
        reading = _Reading(least_pixels, scans and ocr.is_installed())
        for number in range(1, len(pdf) + 1):
            reading.add_page(number, pdf)
        title = one_line(pdf.get_metadata_value("Title"))
    return reading.document(title)


def open_pdf(data: bytes) -> Any:
    """PDFium's document, a context manager; DocumentError as `read_pdf`."""
    try:
        pdf = pypdfium2.PdfDocument(data)
        pdf.init_forms()
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise DocumentError("encrypted; save it without a password") from error
        raise DocumentError(f"no PDF that can be read ({error})") from error
    pages = len(pdf)  # which a closed document does not say
    if pages > len(data):
        pdf.close()
        raise DocumentError(f"claims {pages:,} pages in {len(data):,} bytes")
    return pdf


class _Reading:
    """A document's pages, one after another."""

    def __init__(self, least_pixels: int, scans: bool) -> None:
        self._least_pixels, self._scans = least_pixels, scans
        self._pages: list[_Page] = []
        self._content = document.Content()
        self._header: Line | None = None  # of the table whose rows were added last
        self._seen: set[bytes] = set()  # digests of pictures

    def add_page(self, number: int, pdf: Any) -> None:
        try:
            page = pdf[number - 1]
            frame = _Frame(page)
            text, codes = _characters(page, number)
            segments = list(_segments(text, codes, frame))
            held = letters(_whole("".join(map(chr, codes))))  # whatever is made of it below
            added = list(self._added(page, pdf.formenv, frame))
            segments += added
            images, drawn = _images(page, frame)
            is_picture = bool(images) or drawn >= _OUTLINES
            is_scan = is_picture and _is_scan(segments, images, frame)
            pictures = [] if is_scan else list(self._pictures(images, number))
            if is_scan and self._scans:
                seen = _outside(ocr.segments(page), segments)
                segments, added = segments + seen, added + seen
                is_scan = not segments
                if not seen and segments:  # a photograph that has a caption
                    pictures = list(self._pictures(images, number))
        except pypdfium2.PdfiumError as error:
            self._content.broken_figures.append(f"page {number}: {error}")
            return
        self._content.held += held + sum(letters(segment.text) for segment in added)
        self._pages.append(_Page(number, frame.size, segments, pictures, is_scan))

    def document(self, title: str) -> document.Document:
        """Returns the document, with headings by the size of letters in all of it."""
        content = self._content
        opening = " ".join(segment.text for page in self._pages[:1] for segment in page.segments)
        if title.casefold() not in one_line(opening).casefold():
            title = ""  # programs write names of files and templates there
        for page, heads in zip(self._pages, _running_heads(self._pages), strict=True):
            content.left_out["running heads"] += sum(letters(segment.text) for segment in heads)
            left = set(map(id, heads))
            page.segments = [segment for segment in page.segments if id(segment) not in left]
        usual = _usual_size(self._pages)
        for page in self._pages:
            self._add(page, usual)
        content.set_title(title)
        sizes = {page.number: page.size for page in self._pages}
        return dataclasses.replace(content.document(), page_sizes=sizes)

    def _add(self, page: _Page, usual: float) -> None:
        """Adds the blocks of a page and its pictures, the text's usual size given."""
        content = self._content
        content.page = page.number
        if page.is_scan:
            content.scanned_pages.append(page.number)
        captions: list[tuple[Box, str]] = []
        texts: list[str] = []
        for block in _blocks(layout.lines_in_order(page.segments)):
            (text, places), first = _joined(block), block[0]
            if not text:
                continue
            texts.append(text)
            if document.is_caption(text):
                captions.append((document.around([p.box for p in places if p.box]), text))
            is_large = first.size >= _HEADING_SIZE * usual and len(text.split()) <= _HEADING_WORDS
            is_slanted = first.first.turn >= layout.SLANTED  # DRAFT, across the page
            if is_large and not (first.is_row or is_slanted or document.is_caption(text)):
                content.enter(-round(first.size, 1), text, places)
                continue
            header = _joined([first.header])[0] if first.header else ""
            if header and first.header is not self._header:
                content.begin_table(header)
            self._header = first.header
            content.add(text, is_row=first.is_row, header=header, places=places)
        if not captions and letters("".join(texts)) <= _SCAN_LETTERS:  # of an album or of slides
            captions.append(((0.0, 0.0, *page.size), " ".join(texts)))
        for picture, box in page.pictures:
            near = min(captions, key=lambda caption: _apart(caption[0], box), default=None)
            content.add_figure(near[1] if near else "", picture, box=box, is_said=True)

    def _pictures(
        self, images: Sequence[tuple[Any, Box]], number: int
    ) -> Iterator[tuple[bytes, Box]]:
        """The encoded pictures of a page that are new, each with its box."""
        for image, box in images:
            shorter = min(box[2] - box[0], box[3] - box[1])
            if min(image.get_px_size()) < self._least_pixels or shorter < _SMALLEST_SHOWN:
                continue
            try:
                raw = bytes(image.get_data(decode_simple=False))
                digest = hashlib.sha256(raw).digest()
                if digest not in self._seen:  # a picture that is placed often is decoded once
                    self._seen.add(digest)
                    yield _encoded(image, raw, f"page {number}"), box
            except (PictureError, pypdfium2.PdfiumError, ValueError, OSError) as error:
                self._content.broken_figures.append(
                    f"a picture on page {number}: {one_line(str(error))}"
                )

    def _added(self, page: Any, forms: Any, frame: _Frame) -> Iterator[Segment]:
        """Values of a page's form fields, and the notes that were added to it."""
        for index in range(pdfium.FPDFPage_GetAnnotCount(page)):
            note = pdfium.FPDFPage_GetAnnot(page, index)
            if not note:
                continue
            try:
                text = one_line(_note_text(note, forms))
                flags = pdfium.FPDFAnnot_GetFlags(note)
                if flags & (pdfium.FPDF_ANNOT_FLAG_HIDDEN | pdfium.FPDF_ANNOT_FLAG_NOVIEW):
                    self._content.held += letters(text)
                    self._content.left_out["hidden notes"] += letters(text)
                elif text:
                    edges = pdfium.FS_RECTF()
                    pdfium.FPDFAnnot_GetRect(note, edges)
                    box = frame.box(edges.left, edges.bottom, edges.right, edges.top)
                    # Text of some 10 points stands in the middle of a field, or at its top.
                    base = box[1] + min((box[3] - box[1]) / 2, 10.0) + 3.5
                    yield Segment(text, 0.0, box, base)
            finally:
                pdfium.FPDFPage_CloseAnnot(note)


class _Frame:
    """Maps the coordinates of a page to points from the top left of the page as it is shown."""

    def __init__(self, page: Any) -> None:
        self.size = page.get_size()
        scale = _ACROSS if max(self.size) < 10**5 else 1
        size = [max(1, round(min(side * scale, 2**30))) for side in self.size]
        across, down = ctypes.c_int(), ctypes.c_int()
        corners = []
        for x, y in ((0, 0), (100, 0), (0, 100)):
            pdfium.FPDF_PageToDevice(page, 0, 0, *size, 0, x, y, across, down)
            corners.append(np.array([across.value, down.value]) / scale)
        self._origin = corners[0]
        self._matrix = np.stack([(corners[1] - corners[0]), (corners[2] - corners[0])]) / 100

    def boxes(self, corners: np.ndarray) -> np.ndarray:
        """Left, top, right, bottom of rectangles [n, 4] of two corners (x, y, x, y) each."""
        points = corners.reshape(-1, 2, 2) @ self._matrix + self._origin
        return np.concatenate([points.min(axis=1), points.max(axis=1)], axis=1)

    def box(self, *corners: float) -> Box:
        return tuple(self.boxes(np.array([corners], float))[0].tolist())

    def turn(self, x: float, y: float) -> int:
        """`Segment.turn` of text that runs into a direction of the page."""
        across, down = np.array([x, y]) @ self._matrix
        turns = math.atan2(down, across) / (math.pi / 2)
        slanted = abs(turns - round(turns)) > _SLANT
        return round(turns) % 4 + (layout.SLANTED if slanted else 0)


def _note_text(note: Any, forms: Any) -> str:
    """Returns what a note says, or the value of a form field."""
    kind = pdfium.FPDFAnnot_GetSubtype(note)
    if kind in {getattr(pdfium, f"FPDF_ANNOT_{name}") for name in _NOTES}:
        return _string(lambda *to: pdfium.FPDFAnnot_GetStringValue(note, b"Contents", *to))
    if kind != pdfium.FPDF_ANNOT_WIDGET or not forms:
        return ""
    field = pdfium.FPDFAnnot_GetFormFieldType(forms, note)
    if field in (pdfium.FPDF_FORMFIELD_CHECKBOX, pdfium.FPDF_FORMFIELD_RADIOBUTTON):
        return "☑ checked" if pdfium.FPDFAnnot_IsChecked(forms, note) else "☐"
    texts = (pdfium.FPDF_FORMFIELD_TEXTFIELD, pdfium.FPDF_FORMFIELD_COMBOBOX)
    if field in (*texts, pdfium.FPDF_FORMFIELD_LISTBOX):
        return _string(lambda *to: pdfium.FPDFAnnot_GetFormFieldValue(forms, note, *to))
    return ""


def _string(read: Callable[..., int]) -> str:
    """A string of PDFium's, which a first call measures and a second one copies."""
    size = read(None, 0)  # bytes
    buffer = (pdfium.FPDF_WCHAR * (size // 2 + 1))()
    read(buffer, size)
    return bytes(buffer)[: max(size - 2, 0)].decode("utf-16-le", "replace")


def _images(page: Any, frame: _Frame) -> tuple[list[tuple[Any, Box]], int]:
    """The pictures of a page, each with its box, and how many lines and curves it has beside."""
    objects = range(pdfium.FPDFPage_CountObjects(page))
    kinds = Counter(pdfium.FPDFPageObj_GetType(pdfium.FPDFPage_GetObject(page, i)) for i in objects)
    drawn = kinds[pdfium.FPDF_PAGEOBJ_PATH]
    if not kinds[pdfium.FPDF_PAGEOBJ_IMAGE] and not kinds[pdfium.FPDF_PAGEOBJ_FORM]:
        return [], drawn  # thousands of lines need no Python object each
    images = page.get_objects(filter=(pdfium.FPDF_PAGEOBJ_IMAGE,))
    return [(image, frame.box(*image.get_bounds())) for image in images], drawn


def _is_scan(segments: Sequence[Segment], images: Sequence[tuple[Any, Box]], frame: _Frame) -> bool:
    """Tells whether a page is a picture, perhaps with a stamp or a page number on it."""
    count = sum(letters(segment.text) for segment in segments)
    page: Box = (0.0, 0.0, *frame.size)
    area = sum(_area(_common(box, page)) for box in {box for _, box in images})
    covered = area >= _SCAN_AREA * _area(page)
    has_caption = any(document.is_caption(segment.text) for segment in segments)
    return not count or (count <= _SCAN_LETTERS and covered and not has_caption)


def _common(box: Box, other: Box) -> Box:
    return *map(max, box[:2], other[:2]), *map(min, box[2:], other[2:])


def _area(box: Box) -> float:
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


def _apart(box: Box, other: Box) -> float:
    """Points between two boxes, across and down together."""
    left, top, right, bottom = _common(box, other)
    return max(0.0, left - right) + max(0.0, top - bottom)


def _outside(seen: Sequence[Segment], segments: Sequence[Segment]) -> list[Segment]:
    """Returns the segments that OCR saw and the page does not have as text."""
    boxes = [segment.box for segment in segments]
    return [
        segment
        for segment in seen
        if not any(2 * _area(_common(segment.box, box)) > _area(segment.box) for box in boxes)
    ]


def _encoded(image: Any, raw: bytes, place: str) -> bytes:
    """A picture as it is embedded where that is a JPEG, otherwise as PNG."""
    check_pixels(*image.get_px_size(), len(raw), place)
    if image.get_filters() == ["DCTDecode"]:
        return raw
    packed = io.BytesIO()
    image.get_bitmap().to_pil().convert("RGB").save(packed, "PNG")
    return packed.getvalue()


def _characters(page: Any, number: int) -> tuple[Any, list[int]]:
    """PDFium's text of a page, and its characters in UTF-16."""
    text = page.get_textpage()
    count = text.count_chars()
    if count > MOST_CHARACTERS:
        raise DocumentError(
            f"page {number} has {count:,} characters, more than {MOST_CHARACTERS:,}"
        )
    return text, [pdfium.FPDFText_GetUnicode(text.raw, index) for index in range(count)]


def _segments(text: Any, codes: Sequence[int], frame: _Frame) -> Iterator[Segment]:
    """The lines of text of a page in the order of the file, cut at wide gaps."""
    raw, rectangles = text.raw, (pdfium.FS_RECTF * len(codes))()
    left, right, low, high = (ctypes.c_double() for _ in range(4))
    loosely, inked = pdfium.FPDFText_GetLooseCharBox, pdfium.FPDFText_GetCharBox
    ink = []
    for index, rectangle in enumerate(rectangles):
        loosely(raw, index, rectangle)
        inked(raw, index, left, right, low, high)
        ink.append((left.value, low.value, right.value, high.value))
    loose = np.frombuffer(rectangles, np.float32).reshape(-1, 4).astype(float)
    tight = np.array(ink).reshape(-1, 4)
    has_ink = (tight[:, 2:] > tight[:, :2]).all(axis=1, keepdims=True)
    boxes = np.stack([frame.boxes(loose), frame.boxes(np.where(has_ink, tight, loose))])
    start = 0
    for end in [i for i, code in enumerate(codes, 1) if code in _LINE_ENDS] + [len(codes)]:
        visible = np.array([i for i in range(start, end) if codes[i] > 32 and codes[i] != 160], int)
        if len(visible):
            yield from _cut(raw, codes, boxes, visible, end, frame)
        start = end


def _cut(
    raw: Any, codes: Sequence[int], boxes: np.ndarray, visible: np.ndarray, end: int, frame: _Frame
) -> Iterator[Segment]:
    """A line's segments.

    Args:
      boxes: [2, characters, 4] by the widths of letters and by their ink. A segment is as high as
        its ink, because fonts claim heights that reach into the lines above and below.
      visible: numbers of the line's characters that are no spaces.
      end: the number of the character after the line.
    """
    matrix, x, y = pdfium.FS_MATRIX(), ctypes.c_double(), ctypes.c_double()
    has_matrix = pdfium.FPDFText_GetMatrix(raw, int(visible[0]), matrix)
    turn = frame.turn(matrix.a, matrix.b) if has_matrix else 0
    scale = math.hypot(matrix.c, matrix.d) if has_matrix else 1.0
    size = pdfium.FPDFText_GetFontSize(raw, int(visible[0])) * scale
    left, _, right, _ = layout.upright(boxes[0, visible].T, turn)
    order = np.argsort(left, kind="stable")  # a number in Hebrew runs against its line
    gaps = left[order][1:] - np.maximum.accumulate(right[order])[:-1]
    part = np.empty(len(order), int)
    part[order] = np.concatenate([[0], np.cumsum(gaps > layout.GAP * size)])
    placed = boxes[0, visible]
    across = slice(1 - turn % 2, None, 2)  # sides of the line: top and bottom, or left and right
    placed[:, across] = boxes[1, visible, across]
    texts: dict[int, list[str]] = {}
    begin = int(visible[0])
    line = "".join(map(chr, codes[begin:end]))
    after = [*visible[1:].tolist(), end]
    for index, following, number in zip(visible.tolist(), after, part.tolist(), strict=True):
        texts.setdefault(number, []).append(line[index - begin : following - begin])
    for number, characters in texts.items():
        is_in = part == number
        text, char_boxes, first = "".join(characters), placed[is_in], int(visible[is_in][0])
        of_letters = np.repeat(char_boxes, list(map(len, characters)), axis=0)
        pdfium.FPDFText_GetCharOrigin(raw, first, x, y)
        origin = frame.box(x.value, y.value, x.value, y.value)
        yield Segment(
            _whole(text).strip(),
            pdfium.FPDFText_GetFontSize(raw, first) * scale,
            (*char_boxes[:, :2].min(axis=0).tolist(), *char_boxes[:, 2:].max(axis=0).tolist()),
            layout.upright(origin, turn)[1],
            pdfium.FPDFText_GetFontWeight(raw, first) >= _BOLD,
            turn,
            letters=_on_one_line(text, of_letters),
        )


def _on_one_line(text: str, boxes: np.ndarray) -> np.ndarray:
    """Maps the boxes [n, 4] of a text's characters to the characters of `one_line`."""
    line = one_line(text)
    if len(line) == len(text.strip()):
        return boxes[len(text) - len(text.lstrip()) :][: len(line)]
    of_words = []
    for word in re.finditer(r"\S+", text):
        if count := len(one_line(_whole(word[0]))):
            of_word = boxes[slice(*word.span())]
            if len(of_word) != count:  # letters that are composed, halves of a character, a hyphen
                around = np.concatenate([of_word[:, :2].min(axis=0), of_word[:, 2:].max(axis=0)])
                of_word = np.tile(around, (count, 1))
            of_words += [of_word, of_word[-1:]]  # and the space after it
    return np.concatenate(of_words)[:-1] if of_words else boxes[:0]


def _whole(text: str) -> str:
    """Text with the characters put together that PDFium gives as two halves (UTF-16)."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _usual_size(pages: Iterable[_Page]) -> float:
    segments = (segment for page in pages for segment in page.segments if segment.size)
    return _of_most_letters((round(segment.size, 1), segment) for segment in segments)


def _of_most_letters(segments: Iterable[tuple[float, Segment]]) -> Any:
    """The size, or the turn, that most letters have."""
    counts: Counter[float] = Counter()
    for value, segment in segments:
        counts[value] += len(segment.text)
    return counts.most_common(1)[0][0] if counts else 0


@dataclasses.dataclass(frozen=True)
class _Edge:
    """A line near the top or the foot of a page."""

    page: int  # its index
    is_top: bool
    rank: int  # 0 of the outermost line
    outside: float  # points from the edge of the page to the base of its letters
    share: float  # the same, of the page's height
    gap: float  # to the next line inwards, in sizes of its letters
    segments: list[Segment]

    @property
    def text(self) -> str:
        return one_line(" ".join(segment.text for segment in self.segments))

    @property
    def size(self) -> float:
        return self.segments[0].size


def _main_turn(page: _Page) -> int:
    return _of_most_letters((segment.turn, segment) for segment in page.segments)


def _edges(index: int, page: _Page) -> Iterator[_Edge]:
    """The two outermost lines above and below, where they are near the page's edge."""
    turn = _main_turn(page)
    _, top, _, foot = layout.upright((0.0, 0.0, *page.size), turn)
    rows = layout.rows([segment for segment in page.segments if segment.turn == turn])
    for is_top, ordered in ((True, rows), (False, rows[::-1])):
        for rank, row in enumerate(ordered[:2]):
            base = row[0].base
            inwards = ordered[rank + 1][0].base if rank + 1 < len(ordered) else math.inf
            gap = abs(inwards - base) / max(row[0].size, 1.0)
            outside = base - top if is_top else foot - base
            if outside < _EDGE * (foot - top):
                share = outside / (foot - top)
                yield _Edge(index, is_top, rank, outside, share, gap, row)


def _running_heads(pages: Sequence[_Page]) -> list[list[Segment]]:
    """Finds each page's running heads and feet: lines of its edge that several pages share.

    They repeat a text at one height, but for the number of the page; or stand, of whatever text,
    where at least half of the pages have such a line; or are small letters in the margin. So are
    stamps and watermarks: text in another direction than that of the page, on several pages.
    """
    edges = [edge for index, page in enumerate(pages) for edge in _edges(index, page)]
    usual = _usual_size(pages)
    alike: dict[tuple[str, bool], list[_Edge]] = defaultdict(list)
    for edge in edges:
        # `Chapter 3` in one piece is a heading, on page 3 too.
        is_heading = edge.size >= _HEADING_SIZE * usual and len(edge.segments) == 1
        for key in {edge.text.casefold()} if is_heading else _keys(edge.text, edge.page):
            alike[key, edge.is_top].append(edge)
    heads: dict[int, _Edge] = {}
    for same in alike.values():
        heights: dict[int, set[int]] = defaultdict(set)  # pages by height, in steps of 6 points
        for edge in same:
            heights[round(edge.outside / 6)].add(edge.page)
        for edge in same:
            step = round(edge.outside / 6)
            if len(heights[step]) > 1 or any(heights.get(step + by) for by in (-1, 1)):
                heads[id(edge)] = edge
    places = Counter(
        (edge.is_top, place)
        for edge in heads.values()
        for place in {math.floor(edge.outside / 2), math.ceil(edge.outside / 2)}
    )
    for edge in edges:
        text, is_apart = edge.text, edge.gap > _PARAGRAPH_GAP
        is_small = 0 < edge.size < 0.9 * usual and len(text.split()) <= _MARGIN_WORDS
        is_usual = edge.size < _HEADING_SIZE * usual and (
            places[edge.is_top, round(edge.outside / 2)] >= max(3, len(pages) / 2)
        )
        if edge.rank == 0 and (
            _PAGE_NUMBER.fullmatch(text)
            or (is_apart and is_usual)
            or (is_apart and is_small and edge.share < _MARGIN)
        ):
            heads[id(edge)] = edge
    left: list[list[Segment]] = [[] for _ in pages]
    for edge in heads.values():
        left[edge.page] += edge.segments
    turned = [
        (index, segment)
        for index, page in enumerate(pages)
        for turn in [_main_turn(page)]
        for segment in page.segments
        if segment.turn != turn
    ]
    often = Counter(text for _, text in {(index, segment.text) for index, segment in turned})
    for index, segment in turned:
        if often[segment.text] > 1:
            left[index].append(segment)
    # A page that holds nothing else is no page of running heads, but may be one of its number.
    is_number = [all(_PAGE_NUMBER.fullmatch(s.text.strip()) for s in heads) for heads in left]
    return [
        heads if is_number[index] or len(heads) < len(pages[index].segments) else []
        for index, heads in enumerate(left)
    ]


def _keys(text: str, page: int) -> set[str]:
    """Returns what running heads of several pages share: all but the page's number at an end."""
    folded = text.casefold()
    keys = {folded} if any(map(str.isalpha, folded)) else set()
    for number in (_LAST_NUMBER, _FIRST_NUMBER):
        keys.add(number.sub(lambda match: f"#{int(match[0]) - page:+}", folded))
    return {key for key in keys if any(map(str.isalpha, key))}


def _blocks(lines: Iterable[Line]) -> Iterator[list[Line]]:
    """Lines that are a paragraph, a heading or a row together."""
    block: list[Line] = []
    for line in lines:
        if block and not _goes_on(block[-1], line):
            yield block
            block = []
        block.append(line)
    if block:
        yield block


def _goes_on(line: Line, following: Line) -> bool:
    """Tells whether a line's paragraph goes on in the following line."""
    last, first = line.cells[-1][-1], following.first
    if (
        line.is_row
        or following.is_row
        or last.turn != first.turn
        or document.is_caption(first.text)
    ):
        return False
    size = line.size
    if abs(following.size - size) > 0.05 * size:
        return False
    fall = first.base - last.base
    if fall < 0:  # the next column, which begins within a sentence or not
        return not last.text.endswith((".", "!", "?", ":"))
    return fall <= _PARAGRAPH_GAP * max(size, 1.0)


def _joined(block: Sequence[Line]) -> tuple[str, list[Place]]:
    text, between = "", ""
    stretches: list[tuple[int, int, Segment]] = []
    for line in block:
        for column, cell in enumerate(line.cells):
            if column:
                between = CELL
            for segment in cell:
                piece = one_line(segment.text)
                if not piece:
                    continue
                if between == " " and _is_wide(text[-1:]) and _is_wide(piece[0]):
                    between = ""  # Chinese and Japanese have no spaces
                text += between
                stretches.append((len(text), len(text) + len(piece), segment))
                text += piece
                between = "" if segment.text.endswith(_BROKEN_WORD) else " "
    begins = [] if block[0].is_row else possible_begins(text)
    return text, [place for stretch in stretches for place in _places(*stretch, begins)]


def _places(start: int, end: int, segment: Segment, begins: Sequence[int]) -> Iterator[Place]:
    """The places of a segment in a paragraph, parted where passages may begin."""
    for first, last, box in segment.words:
        yield Place(start + first, start + last, box=box)
    if not segment.words:
        inside = begins[bisect.bisect_right(begins, start) : bisect.bisect_left(begins, end)]
        for first, last in itertools.pairwise((start, *inside, end)):
            box = segment.part(first - start, last - start) if inside else segment.box
            yield Place(first, last, box=box)


def _is_wide(character: str) -> bool:
    return bool(character) and unicodedata.east_asian_width(character) in "WF"


# Pages as pictures, as a reader sees them: text, tables, drawings and all


class PagePicture(NamedTuple):
    """A page."""

    number: int  # from 1
    picture: bytes | None  # PNG; None where the page is broken
    problem: str = ""  # why it is
    size: tuple[float, float] = (0.0, 0.0)  # its width and height in points, where it is not


def page_pictures(data: bytes, numbers: Collection[int] | None = None) -> Iterator[PagePicture]:
    """The pages of a PDF on white, each of at most MOST_PIXELS whatever size it claims.

    `numbers`: of the pages, from 1; None: all.
    """
    with open_pdf(data) as pdf:
        for number in range(1, len(pdf) + 1) if numbers is None else numbers:
            try:
                page = pdf[number - 1]
                yield PagePicture(number, _drawn(page), size=page.get_size())
            except (pypdfium2.PdfiumError, ValueError, OSError) as error:
                yield PagePicture(number, None, f"page {number}: {error}")


def _drawn(page: Any) -> bytes:
    width, height = page.get_size()  # points
    if not (width > 0 and height > 0 and math.isfinite(width * height)):
        raise ValueError(f"{width:g} x {height:g} points")
    scale = min(DOTS / _POINTS, math.sqrt(MOST_PIXELS / (width * height)))
    if min(width, height) * scale < 1 or max(width, height) * scale > MOST_PIXELS:
        raise ValueError(f"{width:g} x {height:g} points, too long and thin")
    packed = io.BytesIO()
    page.render(scale=scale).to_pil().convert("RGB").save(packed, "PNG")
    return packed.getvalue()
