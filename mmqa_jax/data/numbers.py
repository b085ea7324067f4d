"""Numbers as files write them: 11, "11" and pandas' 11.0; reals that a float holds."""

from __future__ import annotations

import math
import re
from typing import Any

_DIGITS = re.compile(r"(\d{1,19})(?:\.0+)?")
LARGEST = 2**63 - 1
_LARGEST_REAL = 10**308
_EXACT = 2**53  # a double above it may be the rounding of another number


def whole_number(value: Any) -> int | None:
    """The number from 0 to 2**63 - 1 that a value or its text is; None where it is none."""
    if isinstance(value, str):
        match = _DIGITS.fullmatch(value)
        value = int(match[1]) if match else None
    elif isinstance(value, float):
        value = int(value) if value.is_integer() and abs(value) <= _EXACT else None
    return value if type(value) is int and 0 <= value <= LARGEST else None


def real_number(value: Any, *, finite: bool = True) -> float | None:
    """A JSON number as a float; None for another value, or an integer that no float holds.

    Args:
      finite: whether NaN and infinity are None too.
    """
    if type(value) not in (int, float) or (type(value) is int and abs(value) > _LARGEST_REAL):
        return None
    return None if finite and not math.isfinite(value) else float(value)
