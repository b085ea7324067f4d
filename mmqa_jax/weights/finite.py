"""What a tensor of a damaged checkpoint looks like: NaN, infinity, nothing but zeros."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

# Bits of the exponent; all of them set: NaN or infinity. By NumPy's name of the type.
_EXPONENT = {
    "float16": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
    "float32": (np.uint32, 0x7F800000),
    "float64": (np.uint64, 0x7FF0000000000000),
}
_BLOCK = 2**16  # values looked at together, so that the copies stay small


def all_finite(tensor: np.ndarray) -> bool:
    """Whether no value is NaN or infinite; of integers none is.

    By the bits: np.isfinite takes several times as long for bfloat16, which is no type of NumPy.
    """
    if tensor.dtype.name not in _EXPONENT:
        return True
    integer, exponent = _EXPONENT[tensor.dtype.name]
    mask = integer(exponent)
    return not any(((block.view(integer) & mask) == mask).any() for block in _blocks(tensor))


def all_zero(tensor: np.ndarray) -> bool:
    """Whether every value is 0; true of no values. Of others it ends with the first block."""
    return not any(block.view(np.uint8).any() for block in _blocks(tensor))


def _blocks(tensor: np.ndarray) -> Iterator[np.ndarray]:
    values = np.ravel(tensor, order="K")  # no copy of a whole tensor, nor of its transpose
    return (values[start : start + _BLOCK] for start in range(0, values.size, _BLOCK))
