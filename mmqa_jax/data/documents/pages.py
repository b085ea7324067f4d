"""Pages of a PDF as pictures, as a reader sees them: text, tables, drawings and all."""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from mmqa_jax.data.documents.pdf import open_pdf

VERSION = 1  # of what is made of a page; raised when that changes
DOTS = 144  # per inch, of a page that is not larger than MOST_PIXELS then
# An A4 page at some 138 dots per inch, and what Qwen3-VL-Embedding sees of a picture at most.
MOST_PIXELS = 1800 * 32 * 32
_POINTS = 72.0  # of an inch


class PagePicture(NamedTuple):
    """A page.

    Attributes:
      number: from 1.
      picture: PNG; None where the page is broken.
      problem: why it is.
      size: its width and height in points, where it is not.
    """

    number: int
    picture: bytes | None
    problem: str = ""
    size: tuple[float, float] = (0.0, 0.0)


def page_pictures(data: bytes, numbers: Collection[int] | None = None) -> Iterator[PagePicture]:
    """The pages of a PDF on white, each of at most MOST_PIXELS whatever size it claims.

    Args:
      numbers: of the pages, from 1; None: all.
    """
    import pypdfium2

    with open_pdf(data) as document:
        for number in range(1, len(document) + 1) if numbers is None else numbers:
            try:
                page = document[number - 1]
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
