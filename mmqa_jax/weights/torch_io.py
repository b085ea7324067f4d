"""Torch checkpoint files read one tensor at a time, without running their pickles."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import ml_dtypes
import numpy as np

from mmqa_jax.core.errors import UserError

if TYPE_CHECKING:
    import torch


_MAPPED_BYTES = 1 << 28  # read from a mapping before it is made anew


class TorchFile:
    """One torch file of named tensors, memory-mapped where its format allows it.

    Pages of a mapping count as resident memory once they are read, so the mapping is renewed
    after every 256 MiB: reading a whole model does not keep it in memory.

    Raises:
      UserError: no such file, a broken one, one that holds anything but named tensors, or torch
        is not installed.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        if not self.path.is_file():
            raise UserError(f"{path}: no such file; check the path.")
        # The format before torch 1.6 is no zip archive and cannot be mapped.
        self._mapped = zipfile.is_zipfile(path)
        self._tensors = _read_state_dict(self.path, self._mapped)
        self._bytes = 0

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every tensor, by key, without reading any."""
        return {
            key: jax.ShapeDtypeStruct(tuple(tensor.shape), _numpy_dtype(tensor))
            for key, tensor in self._tensors.items()
        }

    def read(self, key: str) -> np.ndarray:
        """One tensor, a copy: nothing depends on the file afterwards."""
        array = _to_numpy(self._tensors[key])
        self._bytes += array.nbytes
        if self._mapped and self._bytes > _MAPPED_BYTES:
            self._tensors, self._bytes = _read_state_dict(self.path, mapped=True), 0
        return array


class TorchSource:
    """State dicts of torch files (`.pth`, `.bin`, `.pt`), read one tensor at a time.

    Args:
      files: each holds tensors under names of its own (one file, or transformers' shards).
      name: what messages call them; the first file by default.

    Raises:
      UserError: as TorchFile, or a name in two files.
    """

    def __init__(self, files: Sequence[str | os.PathLike], name: str | None = None):
        self.name = name or str(files[0])
        self._files: dict[str, TorchFile] = {}
        for path in files:
            file = TorchFile(path)
            for key in file.specs():
                if key in self._files:
                    raise UserError(
                        f"{path}: tensor {key!r} lies in another file of {self.name} too; "
                        "keep one of them."
                    )
                self._files[key] = file

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every tensor, by key, without reading any."""
        found = {}
        for file in dict.fromkeys(self._files.values()):
            found |= file.specs()
        return found

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor from its file."""
        return self._files[key].read(key)


def _read_state_dict(path: Path, mapped: bool) -> dict[str, torch.Tensor]:
    try:
        import torch
    except ImportError as error:
        raise UserError(
            f"{path}: reading a torch file needs torch; install it, or convert the file to "
            "safetensors."
        ) from error
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = re.split(r"[.\n]", str(error), maxsplit=1)[0]
        raise UserError(
            f"{path}: not a torch file of plain tensors ({reason}); fetch it again or convert it "
            "to safetensors."
        ) from error
    if not isinstance(tensors, dict) or not all(torch.is_tensor(t) for t in tensors.values()):
        raise UserError(f"{path}: not a state dict (names and tensors); give the weights alone.")
    return tensors


def _numpy_dtype(tensor: torch.Tensor) -> np.dtype:
    return np.dtype(str(tensor.dtype).removeprefix("torch."))


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A copy as numpy, with ml_dtypes' bfloat16 for torch's."""
    import torch

    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()
    return tensor.numpy().copy()
