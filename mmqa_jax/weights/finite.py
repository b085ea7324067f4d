"""Whether a tensor is made of numbers alone."""

from __future__ import annotations

import numpy as np

# Bits of the exponent; all of them set: NaN or infinity. By NumPy's name of the type.
_EXPONENT = {
    "float16": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
    "float32": (np.uint32, 0x7F800000),
    "float64": (np.uint64, 0x7FF0000000000000),
}
_BLOCK = 2**20  # values looked at together, so that the copies stay small


def all_finite(tensor: np.ndarray) -> bool:
    """Whether no value is NaN or infinite; of integers none is.

    By the bits: np.isfinite takes several times as long for bfloat16, which is no type of NumPy.
    """
    if tensor.dtype.name not in _EXPONENT:
        return True
    integer, exponent = _EXPONENT[tensor.dtype.name]
    values = np.ravel(tensor, order="K").view(integer)  # no copy of a whole tensor or a transpose
    blocks = (values[start : start + _BLOCK] for start in range(0, values.size, _BLOCK))
    mask = integer(exponent)
    return not any(((block & mask) == mask).any() for block in blocks)
