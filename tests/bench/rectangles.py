"""`python -m tests.bench rectangles --data=FOLDER`: whether passages of PDFs stand where they say.

A passage is exact where the characters that PDFium places in its rectangles (those whose ink has
its centre there) are those of its text, apart from spaces, hyphens and the header of its table.
Pages that are pictures are left out: PDFium has no characters of them. Values of forms and notes
stand in no rectangle of PDFium's, and count as not exact. There is no peer: `ours` is the share.
"""

from __future__ import annotations

import ctypes
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.host import device_name
from mmqa_jax.data.documents.chunks import ChunkOptions, chunks
from mmqa_jax.data.documents.document import CELL, Box, Paragraph
from mmqa_jax.data.documents.pdf import read_pdf
from mmqa_jax.retrieval.text_encoder import minilm_token_limit
from tests.bench import Options

_LEAST_PIXELS = 64
_DEVICE_UNITS = 1000  # a point
_ROUNDED = 0.01  # points


def run(options: Options) -> dict[str, Any]:
    """A row for each PDF of the folder, and one for all of them."""
    files = sorted(Path(options.data or "").glob("*.pdf")) if options.data else []
    if not files:
        raise UserError("--data: name a folder of PDFs to measure on.")
    chunk = ChunkOptions(tokens=minilm_token_limit())
    rows = []
    for file in files:
        exact = [is_exact for _, is_exact in placed(file.read_bytes(), chunk)]
        rows.append({"name": file.name, "passages": len(exact), "exact": sum(exact)})
    rows.append({"name": "all", **{k: sum(row[k] for row in rows) for k in ("passages", "exact")}})
    shares = [{"ours": round(row["exact"] / max(row["passages"], 1), 4)} for row in rows]
    empty = {"peer": None, "ratio": None, "unit": "of passages", "floor": None}
    return {
        "bench": "rectangles",
        "device": device_name(),
        "rows": [{**row, **share, **empty} for row, share in zip(rows, shares, strict=True)],
    }


def placed(data: bytes, chunk: ChunkOptions) -> Iterator[tuple[Paragraph, bool]]:
    """The passages of a PDF, and whether each one's rectangles hold its characters alone."""
    import pypdfium2

    passages = list(chunks(read_pdf(data, _LEAST_PIXELS, scans=False).paragraphs, chunk))
    with pypdfium2.PdfDocument(data) as document:
        pages: dict[int, _Page] = {}
        for passage in passages:
            assert passage.page is not None, "a PDF has pages"
            if passage.page not in pages:
                pages = {passage.page: _Page(document[passage.page - 1])}
            boxes = [place.box for place in passage.places if place.box]
            text = passage.text[passage.places[0].start :]  # below the header of a table
            yield passage, pages[passage.page].within(boxes) == _folded(text)


class _Page:
    """PDFium's characters of a page, with the centres of their ink."""

    def __init__(self, page: Any) -> None:
        import pypdfium2.raw as pdfium

        self._page, text = page, page.get_textpage()
        numbers = range(text.count_chars())
        self._codes = [pdfium.FPDFText_GetUnicode(text.raw, number) for number in numbers]
        sides = [ctypes.c_double() for _ in range(4)]
        self._centres = np.empty((len(numbers), 2))
        for number in numbers:
            pdfium.FPDFText_GetCharBox(text.raw, number, *sides)
            left, right, low, high = (side.value for side in sides)
            self._centres[number] = (left + right) / 2, (low + high) / 2

    def within(self, boxes: list[Box]) -> Counter[str]:
        """The folded characters in boxes, which are points from the top left of the page."""
        inside = np.zeros(len(self._codes), bool)
        for left, top, right, bottom in boxes:
            corners = np.array([self._unturned(left, top), self._unturned(right, bottom)])
            above = self._centres >= corners.min(axis=0) - _ROUNDED
            inside |= (above & (self._centres <= corners.max(axis=0) + _ROUNDED)).all(axis=1)
        text = "".join(chr(self._codes[number]) for number in np.flatnonzero(inside))
        return _folded(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))

    def _unturned(self, x: float, y: float) -> tuple[float, float]:
        """A point in the page's own coordinates, which count from the foot of an unturned page."""
        import pypdfium2.raw as pdfium

        size = [round(side * _DEVICE_UNITS) for side in self._page.get_size()]
        point = round(x * _DEVICE_UNITS), round(y * _DEVICE_UNITS)
        across, up = ctypes.c_double(), ctypes.c_double()
        pdfium.FPDF_DeviceToPage(self._page.raw, 0, 0, *size, 0, *point, across, up)
        return across.value, up.value


def _folded(text: str) -> Counter[str]:
    """How often each character stands in a text, without spaces, hyphens and bars of cells."""
    folded = unicodedata.normalize("NFKC", text)
    return Counter(
        character
        for character in folded
        if unicodedata.category(character) not in ("Cc", "Cf", "Pd")
        and character not in CELL
        and not character.isspace()
    )
