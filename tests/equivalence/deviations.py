"""`pytest tests/equivalence --deviations`: how far apart the two sides of each comparison were.

conftest.py measures while the tests run and prints `table` at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from mmqa_jax.models.check import deviation

# Modules whose first parameter names a model, up to a comma.
_OF_MANY = (
    *("decoder_families", "vlm_families", "cut_pictures", "text_encoders", "text_decoders"),
)
_HEADER = ("model", "compared", "largest deviation", "allowed", "of values up to")


class Measured(NamedTuple):
    """The largest deviation of one test's comparisons that share a bound."""

    allowed: float
    largest: float
    size: float  # the largest absolute value that was compared with

    @classmethod
    def of(cls, got: Any, want: Any, allowed: float) -> Measured:
        """Measures one comparison, in float64."""
        got, want = (np.asarray(x, dtype=np.float64) for x in (got, want))
        finite = np.isfinite(got) & np.isfinite(want)  # NaNs and infinities are equal or refused
        return cls(float(allowed), *deviation(np.where(finite, got, 0), np.where(finite, want, 0)))

    def join(self, other: Measured) -> Measured:
        """Both, under one bound."""
        return Measured(self.allowed, *map(max, self[1:], other[1:]))


def table(found: Iterable[tuple[str, Measured]]) -> list[str]:
    """Lines of a Markdown table.

    Args:
      found: (node id, e.g. `tests/equivalence/test_clip.py::test_x[a]`; what was measured there).

    Returns:
      One line for each model (the test module's name, or a parameter), test (its name in words,
      all its parameters together) and bound.
    """
    rows: dict[tuple[str, str, float], Measured] = {}
    for node, measured in found:
        module, _, test = node.partition("::")
        model = module.rpartition("/")[2].removesuffix(".py").removeprefix("test_")
        if model in _OF_MANY:
            model = re.split(r"[,\]-]", test.partition("[")[2])[0] or model
        words = test.partition("[")[0].removeprefix("test_").replace("_", " ")
        key = (model, words, measured.allowed)
        rows[key] = measured.join(rows[key]) if key in rows else measured
    cells = [_HEADER, *[("---",) * len(_HEADER)]]
    for (model, words, allowed), measured in sorted(rows.items()):
        numbers = (measured.largest, allowed, measured.size)
        cells.append((model, words, *(f"{number:.1e}" for number in numbers)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "| " + " | ".join(map(str.ljust, line, widths)) + " |"  # as Markdown aligns it
        for line in cells
    ]
