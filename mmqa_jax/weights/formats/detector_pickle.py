"""Pickles of detectors' weights: Detectron's and detectron2's, read as arrays only."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mmqa_jax.core.array_pickle import load_arrays
from mmqa_jax.core.errors import UserError
from mmqa_jax.weights.formats.safetensors import ArraySource, TensorSource
from mmqa_jax.weights.layouts import open_source, read_magic

# What torch.save's format before 1.6 begins with: a pickle of a number of ten bytes.
_LEGACY_TORCH = b"\x8a\x0a"
_HELD_IN = ("blobs", "model")  # by Detectron, and by detectron2


def open_detector_source(path: Path) -> TensorSource:
    """The tensors of a detector's checkpoint.

    Args:
      path: a pickle of arrays by name, alone or as Detectron's `blobs` or detectron2's `model`; or
        what `open_source` reads.
    """
    if not path.is_file() or read_magic(path) != "torch" or _by_torch(path):
        return open_source(path)
    content = load_arrays(path, encoding="latin1")  # Detectron runs on Python 2
    for key in _HELD_IN:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    arrays = content.items() if isinstance(content, dict) else ()
    found = {
        key: value
        for key, value in arrays
        if isinstance(key, str) and isinstance(value, np.ndarray) and value.dtype.kind == "f"
    }
    if not found:
        raise UserError(
            f"{path}: holds no arrays by name, neither as `blobs` nor as `model`; give Detectron's "
            "or detectron2's file of weights."
        )
    return ArraySource(found, str(path))


def _by_torch(path: Path) -> bool:
    """Whether torch wrote it: a zip archive, or its older format."""
    with open(path, "rb") as file:
        head = file.read(4)
    return head.startswith(b"PK") or head[2:] == _LEGACY_TORCH
