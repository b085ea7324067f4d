"""Whole numbers as files write them: 11, "11", and pandas' 11.0."""

from __future__ import annotations

import re
from typing import Any

_DIGITS = re.compile(r"(\d{1,19})(?:\.0+)?")
LARGEST = 2**63 - 1
_EXACT = 2**53  # a double above it may be the rounding of another number


def whole_number(value: Any) -> int | None:
    """The number from 0 to 2**63 - 1 that a value or its text is; None where it is none."""
    if isinstance(value, str):
        match = _DIGITS.fullmatch(value)
        value = int(match[1]) if match else None
    elif isinstance(value, float):
        value = int(value) if value.is_integer() and abs(value) <= _EXACT else None
    return value if type(value) is int and 0 <= value <= LARGEST else None
