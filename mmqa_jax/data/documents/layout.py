"""Reading order of a page: columns, rows of tables and lines, from where its text stands.

Coordinates are points. What follows takes text that runs to the right, and lines that follow
downwards: `Segment.upright` turns and mirrors text that stands otherwise.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mmqa_jax.data.documents.document import Box

_Gap = tuple[float, float]  # left and right end

SLANTED = 4
GAP = 0.9  # times the size of the letters: a wider one parts cells and columns, not words
_LEAST_GUTTER = 0.8  # times the size, between columns of prose
_LEAST_SHARED = 0.3  # times the size, between cells of all rows of a table
_STRIP = 3.0  # times the size, from line to line, of white across the page
_LINES = 3  # that a column of prose has at least
_LINE_LETTERS = 12  # that its lines have on average
_CONTINUED = 1.4  # times the size, from a line of a cell to the next one of the same cell
# A sign or a number before an item of a list, which belongs to the text after it.
_MARKER = re.compile(r"\W|[(\[]?\w{1,3}[.)\]]")


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a line without a wide gap."""

    text: str
    size: float  # of its letters
    box: Box  # on the page as it is shown
    base: float  # of its letters, from the top of the page as the text stands
    bold: bool = False
    # Clockwise quarter turns of the text on the page; SLANTED more where it is not turned by about
    # that.
    turn: int = 0
    # Start, end and box of each, where they are known (OCR).
    words: tuple[tuple[int, int, Box], ...] = ()
    # Boxes [n, 4] of the characters of its text on one line, where they are known.
    letters: np.ndarray | None = dataclasses.field(default=None, compare=False, repr=False)
    is_mirrored: bool = False  # lines of its page run to the left, as those of Arabic and Hebrew do

    @property
    def upright(self) -> Box:
        """Returns its box on the page turned, and mirrored, so that lines run to the right."""
        left, top, right, bottom = upright(self.box, self.turn)
        return (-right, top, -left, bottom) if self.is_mirrored else (left, top, right, bottom)

    def part(self, start: int, end: int) -> Box:
        """The box of a stretch of its text, as high as the line; its own where it is not known."""
        if self.letters is None or self.turn >= SLANTED:
            return self.box
        side = self.turn % 2  # along the line: left and right, or top and bottom
        box = list(self.box)
        box[side] = float(self.letters[start:end, side].min())
        box[side + 2] = float(self.letters[start:end, side + 2].max())
        return tuple(box)


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A line of text, or a row of a table."""

    # Of a row, each the segments of one or more lines; of a line of text, one.
    cells: tuple[tuple[Segment, ...], ...]
    is_row: bool = False  # it is a row of a table
    header: Line | None = None  # of a row, the table's first row where that names the columns

    @property
    def first(self) -> Segment:
        return self.cells[0][0]

    @property
    def size(self) -> float:
        """The size that most letters have: a bullet before them may be larger."""
        return max((s for cell in self.cells for s in cell), key=lambda s: len(s.text)).size


def upright(box: Sequence[Any], turn: int) -> tuple[Any, Any, Any, Any]:
    """A box, or arrays of its four sides, on a page turned back by clockwise quarter turns."""
    left, top, right, bottom = box
    return (
        (left, top, right, bottom),
        (top, -right, bottom, -left),
        (-right, -bottom, -left, -top),
        (-bottom, left, -top, right),
    )[turn % SLANTED]


def lines_in_order(segments: Sequence[Segment]) -> Iterator[Line]:
    """The lines of a page as a person reads them; the direction of most text comes first."""
    turns: dict[int, list[Segment]] = {}
    for segment in segments:
        turns.setdefault(segment.turn, []).append(segment)
    for turned in sorted(turns.values(), key=lambda turned: -sum(len(s.text) for s in turned)):
        em = float(np.median([segment.size for segment in turned])) or 1.0
        text = "".join(segment.text for segment in turned)
        directions = [unicodedata.bidirectional(character) for character in text]
        if sum(d in ("R", "AL") for d in directions) > directions.count("L"):
            turned = [dataclasses.replace(segment, is_mirrored=True) for segment in turned]
        for region in _regions(turned, em):
            yield from _lines(rows(region), em)


def rows(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments that stand on one line, top row first, each row from left to right."""
    rows: list[list[Segment]] = []
    for segment in sorted(segments, key=lambda segment: segment.base):
        near = rows[-1][0] if rows else None
        if near and segment.base - near.base < 0.4 * max(near.size, segment.size, 1.0):
            rows[-1].append(segment)
        else:
            rows.append([segment])
    return [sorted(row, key=lambda segment: segment.upright[0]) for row in rows]


def _regions(segments: Sequence[Segment], em: float) -> list[list[Segment]]:
    """Parts of a page in reading order: what lies across columns, and each column of prose.

    Text that crosses the gutter (titles, wide tables) parts the columns into bands above each
    other; a band's left column is read before its right one.
    """
    best: list[list[Segment]] = []
    most = 0
    for gutter in _gutters(segments, em):
        regions: list[list[Segment]] = []
        in_columns = 0
        bands = itertools.groupby(_bands(segments, gutter, em), key=lambda band: band[0])
        for is_columns, parts in bands:
            band = [segment for _, part in parts for segment in part]
            if is_columns:
                in_columns += len(band)
                for side in _sides(band, gutter):
                    regions += _regions(side, em)
            else:
                regions.append(band)
        if in_columns > most:
            best, most = regions, in_columns
    return best or [list(segments)]


def _gutters(segments: Sequence[Segment], em: float) -> list[float]:
    """Finds places that fewer segments cross than places beside them: columns may part there."""
    if len(segments) < 2 * _LINES:
        return []
    boxes = np.array([segment.upright for segment in segments])
    places = np.arange(boxes[:, 0].min(), boxes[:, 2].max(), 0.4 * em)[:500]
    crossed = ((boxes[:, :1] < places) & (boxes[:, 2:3] > places)).sum(axis=0)
    ends = np.flatnonzero(np.diff(crossed)) + 1
    gutters = []
    for run in np.split(np.arange(len(places)), ends):
        before, after = run[0] - 1, run[-1] + 1
        if before >= 0 and after < len(places):
            level = crossed[run[0]]
            if crossed[before] > level < crossed[after]:
                gutters.append((int(level), float(places[run].mean())))
    return [place for _, place in sorted(gutters)[:8]]


def _sides(band: Sequence[Segment], gutter: float) -> tuple[list[Segment], list[Segment]]:
    left = [segment for segment in band if segment.upright[2] <= gutter]
    return left, [segment for segment in band if segment.upright[2] > gutter]


def _bands(
    segments: Sequence[Segment], gutter: float, em: float
) -> Iterator[tuple[bool, list[Segment]]]:
    """Stretches of a page from top to bottom, and whether each is columns beside the gutter."""
    band: list[Segment] = []
    for segment in sorted(segments, key=lambda segment: segment.base):
        left, _, right, _ = segment.upright
        is_across = left < gutter < right
        if band and (is_across or segment.base - band[-1].base > _STRIP * em):
            yield _is_columns(band, gutter, em), band
            band = []
        if is_across:
            yield False, [segment]
        else:
            band.append(segment)
    if band:
        yield _is_columns(band, gutter, em), band


def _is_columns(band: Sequence[Segment], gutter: float, em: float) -> bool:
    """Whether both sides of the gutter are prose: several lines, most of them long and full."""
    left, right = _sides(band, gutter)
    if not left or not right:
        return False
    gap = min(s.upright[0] for s in right) - max(s.upright[2] for s in left)
    return gap >= _LEAST_GUTTER * em and all(_is_prose(side) for side in (left, right))


def _is_prose(side: Sequence[Segment]) -> bool:
    """Tells whether most of its lines are long and as wide as others; it may be several columns."""
    widths = np.array([segment.upright[2] - segment.upright[0] for segment in side])
    full = widths >= 0.6 * np.percentile(widths, 90)
    letters = sum(len(segment.text) for segment in side)
    is_long = letters >= _LINE_LETTERS * len(side)
    return is_long and bool(full.mean() >= 0.5) and len(rows(side)) >= _LINES


def _lines(region: Sequence[list[Segment]], em: float) -> Iterator[Line]:
    """A region's rows as rows of tables, where several have a gap at one place, and as lines."""
    start = 0
    while start < len(region):
        table, end = _table(region, start, em)
        if len(table) > 1:
            header = table[0] if _is_header(table) else None
            for row in table[1:] if header else table:
                yield dataclasses.replace(row, header=header)
        else:
            end = start + 1
            yield Line((tuple(region[start]),))
        start = end


def _table(region: Sequence[list[Segment]], start: int, em: float) -> tuple[list[Line], int]:
    """The rows of a table that begins at a row of the region, and the row after its end."""
    gutters = _gaps(region[start], em)
    end = start + 1
    last = region[start][0].base
    begins = [start]  # rows that begin a row of the table
    while gutters and end < len(region):
        row = region[end]
        gaps = _gaps(row, em)
        shared = [
            (max(a[0], b[0]), min(a[1], b[1]))
            for a in gutters
            for b in gaps
            if min(a[1], b[1]) - max(a[0], b[0]) >= _LEAST_SHARED * em
        ]
        near = row[0].base - last <= _CONTINUED * max(row[0].size, 1.0)
        if near and len(begins) > 1 and row[0].upright[0] >= gutters[0][1] and _fits(row, gutters):
            pass  # its first cell is empty: the cells above go on
        elif shared and len(row) > 1 and _fits(row, shared):
            gutters = shared
            begins.append(end)
        else:
            break
        last = row[0].base
        end += 1
    ends = [*begins[1:], end]
    return [_row(region[first:after]) for first, after in zip(begins, ends, strict=True)], end


def _gaps(row: Sequence[Segment], em: float) -> list[_Gap]:
    """The gaps between a row's segments, without the one after an item's sign or number."""
    pairs = list(itertools.pairwise(row))
    if pairs and _MARKER.fullmatch(row[0].text.strip()):
        pairs = pairs[1:]
    gaps = [(before.upright[2], after.upright[0]) for before, after in pairs]
    return [gap for gap in gaps if gap[1] - gap[0] >= _LEAST_SHARED * em]


def _fits(row: Sequence[Segment], gutters: Sequence[_Gap]) -> bool:
    """Tells whether no segment of a row crosses a gutter."""
    return not any(
        segment.upright[0] < gap[0] + 0.1 and segment.upright[2] > gap[1] - 0.1
        for segment in row
        for gap in gutters
    )


def _row(rows: Sequence[Sequence[Segment]]) -> Line:
    """A row of one or more lines: what stands below a cell of the first line belongs to it."""
    cells = [[segment] for segment in rows[0]]
    for segment in itertools.chain.from_iterable(rows[1:]):
        left, _, right, _ = segment.upright
        columns = [cell[0].upright for cell in cells]
        apart = [max(column[0] - right, left - column[2]) for column in columns]
        cells[apart.index(min(apart))].append(segment)
    return Line(tuple(map(tuple, cells)), is_row=True)


def _is_header(table: Sequence[Line]) -> bool:
    """Tells whether a table's first row names its columns: in bold, or alone without a digit."""
    first, *others = table
    if len(others) < 2 or any(len(first.cells) < len(row.cells) for row in others):
        return False
    if not all(segment.size for cell in first.cells for segment in cell):
        return False  # a value that was filled in
    texts = ["".join(segment.text for cell in row.cells for segment in cell) for row in table]
    digits = [any(map(str.isdigit, text)) for text in texts]
    is_bold = all(segment.bold for cell in first.cells for segment in cell)
    return (is_bold and not others[0].first.bold) or (
        len(first.cells) > 2 and not digits[0] and all(digits[1:])
    )
