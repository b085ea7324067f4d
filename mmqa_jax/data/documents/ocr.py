"""Pages that are pictures, read by RapidOCR: PP-OCR's networks, which its package holds.

A vision-language model may read them in its place: it runs in the process that reads the folder
(data/folder.py), outside the box, and sees the pages as pdf.page_pictures draws them.
"""

import dataclasses
import functools
import importlib.util
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from mmqa_jax.data.documents.document import one_line
from mmqa_jax.data.documents.layout import Box, Segment

_DOTS = 200  # per inch, of the picture that is read
_MOST_PIXELS = 3000 * 4000
_POINTS = 72.0  # of an inch
_SIZE = 0.75  # of letters, of the height of their line
# Heights of lines of one size differ by less, for the letters that they happen to have.
_ALIKE = 0.25
_BELOW = 0.2  # of a line's height, below the base of its letters


class PageText(NamedTuple):
    """Holds the text of a page, a paragraph a line, and the problem where it was not read whole."""

    text: str
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class PageReader:
    """A model that reads pages in place of RapidOCR."""

    name: str  # as the user names it
    fingerprint: str  # changes with anything of what it reads
    # A context manager of a function: encoded pictures of pages -> what each of them says.
    open: Callable[[], AbstractContextManager[Callable[[Sequence[bytes]], list[PageText]]]] = (
        dataclasses.field(compare=False, repr=False)
    )


def is_installed() -> bool:
    """Tells whether the packages of the extra `ocr` are there."""
    return all(importlib.util.find_spec(name) for name in ("rapidocr", "onnxruntime"))


def segments(page: Any) -> list[Segment]:
    """The lines of a page of PDFium's that is a picture, with a box for each word."""
    width, height = page.get_size()
    scale = min(_DOTS / _POINTS, (_MOST_PIXELS / max(width * height, 1.0)) ** 0.5)
    result = _engine()(page.render(scale=scale).to_numpy(), return_word_box=True)
    if result.boxes is None:
        return []
    boxes = [_box(corners, scale) for corners in result.boxes.tolist()]
    usual = statistics.median(box[3] - box[1] for box in boxes)
    lines = []
    for line, box, words in zip(result.txts, boxes, result.word_results, strict=True):
        text, high = one_line(line), box[3] - box[1]
        size = _SIZE * (usual if abs(high - usual) < _ALIKE * usual else high)
        places = tuple(_places(text, words, scale))
        lines.append(Segment(text, size, box, box[3] - _BELOW * high, words=places))
    return lines


def _places(text: str, words: Sequence[Any], scale: float) -> Iterator[tuple[int, int, Box]]:
    end = 0
    for word, _, corners in words:
        start = text.find(word, end)
        if start >= 0:
            end = start + len(word)
            yield start, end, _box(corners, scale)


def _box(corners: Sequence[Sequence[float]], scale: float) -> Box:
    """The box in points around corners in pixels."""
    across = [corner[0] / scale for corner in corners]
    down = [corner[1] / scale for corner in corners]
    return min(across), min(down), max(across), max(down)


@functools.cache
def _engine() -> Any:
    from rapidocr import RapidOCR

    # One thread: documents are read by several processes, and onnxruntime's threads spin.
    threads = {"intra_op_num_threads": 1, "inter_op_num_threads": 1}
    options = {f"EngineConfig.onnxruntime.{name}": number for name, number in threads.items()}
    return RapidOCR(params={"Global.log_level": "error", **options})
