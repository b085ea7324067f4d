"""Scores of cited rectangles beside gold ones, by overlap."""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_LEAST_OVERLAP = 0.5  # intersection over union of a rectangle that is found
_SMALL = 1e-6  # in the union, as CiteVQA's eval/run.py has it


class PageBox(NamedTuple):
    """A rectangle on a page of a document, in any unit; documents and pages count from 1."""

    document: int
    page: int
    left: float
    top: float
    right: float
    bottom: float

    @property
    def area(self) -> float:
        """Its area."""
        return (self.right - self.left) * (self.bottom - self.top)


def boxes_found(gold: Sequence[PageBox], cited: Sequence[PageBox]) -> int:
    """How many gold rectangles have a cited one on their page with an IoU of .5 at least (CiteVQA's
    eval/run.py: eval_recall_single)."""
    return sum(any(_overlap(box, other) >= _LEAST_OVERLAP for other in cited) for box in gold)


def _overlap(box: PageBox, other: PageBox) -> float:
    if box[:2] != other[:2]:
        return 0.0
    width = min(box.right, other.right) - max(box.left, other.left)
    height = min(box.bottom, other.bottom) - max(box.top, other.top)
    if width <= 0 or height <= 0:
        return 0.0
    both = width * height
    return both / (box.area + other.area - both + _SMALL)


def zone_f1(gold: Sequence[PageBox], cited: Sequence[PageBox]) -> float:
    """F1 of the areas that the rectangles of either side cover together, overlaps once.

    ViDoRe V3 (Loison et al., 2026) reports such an F1 (benchmarks/vidore.py).
    """
    pages = {box[:2] for box in (*gold, *cited)}
    both = total = 0.0
    for page in pages:
        ours, theirs = ([box for box in boxes if box[:2] == page] for boxes in (gold, cited))
        covered = [_covered(ours), _covered(theirs)]
        both += sum(covered) - _covered([*ours, *theirs])
        total += sum(covered)
    return 2 * both / total if total else 0.0


def _covered(boxes: Sequence[PageBox]) -> float:
    """The area of a union: strips between all edges, each as wide as its boxes' merged spans."""
    edges = sorted({edge for box in boxes for edge in (box.top, box.bottom)})
    area = 0.0
    for top, bottom in itertools.pairwise(edges):
        inside = [box for box in boxes if box.top <= top and box.bottom >= bottom]
        area += (bottom - top) * _length((box.left, box.right) for box in inside)
    return area


def _length(spans: Iterable[tuple[float, float]]) -> float:
    length, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length
