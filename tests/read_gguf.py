"""The package gguf's reader of a file, without what its slices of a memory map cost."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest


def read_gguf(path: Path) -> gguf.GGUFReader:
    """The file, read at once: each slice of a memmap runs Python code of NumPy's, which is two
    thirds of what SmolLM2's header of 147,000 strings and numbers costs the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "memmap", lambda path, mode: np.fromfile(path, np.uint8))
        return gguf.GGUFReader(path)
