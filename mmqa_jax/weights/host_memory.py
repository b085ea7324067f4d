"""Host memory that becomes an array of the CPU as it is."""

from __future__ import annotations

import math

import numpy as np

_ALIGNMENT = 64  # of memory that JAX takes as an array of the CPU without copying it


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array without values; `jax.device_put` of it to a CPU device copies nothing.

    It must not be written to afterwards.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
