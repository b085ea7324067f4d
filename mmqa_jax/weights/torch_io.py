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


class TorchSource:
    """State dicts of torch files (`.pth`, `.bin`, `.pt`), memory-mapped.

    Args:
      files: each holds tensors under names of its own (one file, or transformers' shards).
      name: what messages call them; the first file by default.

    Raises:
      UserError: a missing or broken file, one that holds anything but named tensors, a name in
        two files, or torch is not installed.
    """

    def __init__(self, files: Sequence[str | os.PathLike], name: str | None = None):
        self.name = name or str(files[0])
        self._tensors: dict[str, torch.Tensor] = {}
        for file in files:
            tensors = read_state_dict(file)
            twice = self._tensors.keys() & tensors.keys()
            if twice:
                raise UserError(
                    f"{file}: tensor {min(twice)!r} lies in another file of {self.name} too; "
                    "keep one of them."
                )
            self._tensors |= tensors

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every tensor, by key, without reading any."""
        return {key: spec_of(tensor) for key, tensor in self._tensors.items()}

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor from its file."""
        return to_numpy(self._tensors[key])


def read_state_dict(file: str | os.PathLike) -> dict[str, torch.Tensor]:
    """The tensors of one torch file by name, mapped from disk where its format allows it.

    Raises:
      UserError: as TorchSource.
    """
    file = Path(file)
    if not file.is_file():
        raise UserError(f"{file}: no such file; check the path.")
    try:
        import torch
    except ImportError as error:
        raise UserError(
            f"{file}: reading a torch file needs torch; install it, or convert the file to "
            "safetensors."
        ) from error
    try:
        # The format before torch 1.6 is no zip archive and cannot be mapped.
        tensors = torch.load(
            file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = re.split(r"[.\n]", str(error), maxsplit=1)[0]
        raise UserError(
            f"{file}: not a torch file of plain tensors ({reason}); fetch it again or convert it "
            "to safetensors."
        ) from error
    if not isinstance(tensors, dict) or not all(torch.is_tensor(t) for t in tensors.values()):
        raise UserError(f"{file}: not a state dict (names and tensors); give the weights alone.")
    return tensors


def spec_of(tensor: torch.Tensor) -> jax.ShapeDtypeStruct:
    """Shape and numpy dtype of a torch tensor."""
    return jax.ShapeDtypeStruct(
        tuple(tensor.shape), np.dtype(str(tensor.dtype).removeprefix("torch."))
    )


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A torch tensor as numpy, with ml_dtypes' bfloat16 for torch's."""
    import torch

    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
