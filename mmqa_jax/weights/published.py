"""Checkpoints as research code publishes them, and as it wants them back.

Its files are whole training states or TorchScript archives rather than state dicts
(`open_published`), and its layer numbers are not always those of our stacks: Prophet counts
attention and MLP as layers of their own, CLIP's ResNet counts the one block of a stage that is
not like the others. A table of prefixes, published -> ours, says how they correspond: `renames`
reads with it, `PublishedSource` writes with it.
"""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.weights.safetensors_io import (
    ArraySource,
    SafetensorsSource,
    TensorSource,
    write_safetensors,
)

_TORCH_SUFFIXES = (".bin", ".pkl", ".pt", ".pth")


def renames(prefixes: Mapping[str, str]) -> list[tuple[str, str]]:
    """`KeyMap.rename` that turns published prefixes into ours."""
    return [(f"^{re.escape(theirs)}", ours) for theirs, ours in prefixes.items()]


class PublishedSource:
    """A model's tensors under published keys: what `renames` does, undone.

    Args:
      source: the model's tensors under the keys of its key map (keymap.StateSource).
      prefixes: published prefix -> ours, as given to `renames`.
      constants: tensors that the original keeps in its file and our model computes.
    """

    def __init__(
        self,
        source: TensorSource,
        prefixes: Mapping[str, str],
        constants: Mapping[str, np.ndarray] | None = None,
    ):
        self.name = source.name
        self._source = source
        self._constants = dict(constants or {})
        published = {ours: theirs for theirs, ours in prefixes.items()}
        self._ours: dict[str, str] = {}
        for key in source.specs():
            prefix = next((p for p in published if key.startswith(p)), "")
            self._ours[published.get(prefix, "") + key[len(prefix) :]] = key

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every tensor, by published key."""
        ours = self._source.specs()
        found = {key: ours[other] for key, other in self._ours.items()}
        for key, array in self._constants.items():
            found[key] = jax.ShapeDtypeStruct(array.shape, array.dtype)
        return found

    def read(self, key: str) -> np.ndarray:
        """One tensor in its published layout."""
        if key in self._constants:
            return self._constants[key]
        return self._source.read(self._ours[key])

    def save(self, path: str | os.PathLike) -> None:
        """Writes all tensors as a safetensors file, one in memory at a time."""
        specs = self.specs()
        write_safetensors(path, specs, ((key, self.read(key)) for key in specs))


def open_published(path: str | os.PathLike) -> TensorSource:
    """Opens safetensors, a torch state dict, a training state or a TorchScript archive.

    Of a training state (a dict with `state_dict`, beside optimizer and counters) the state dict
    is taken. Torch files are read without running their pickles, TorchScript archives (OpenAI's
    CLIP) without running their code.

    Raises:
      UserError: a missing or broken file, one without named tensors, or torch is not installed.
    """
    path = Path(path)
    if path.suffix not in _TORCH_SUFFIXES:
        return SafetensorsSource(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file; check the path.")
    try:
        import torch
    except ImportError as error:
        raise UserError(
            f"{path}: reading a torch file needs torch; install it, or convert the file to "
            "safetensors."
        ) from error
    try:
        if _is_torchscript(path):
            tensors = torch.jit.load(path, map_location="cpu").state_dict()
        else:
            tensors = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        reason = re.split(r"[.\n]", str(error), maxsplit=1)[0]
        raise UserError(
            f"{path}: not a torch file of plain tensors ({reason}); fetch it again or convert it "
            "to safetensors."
        ) from error
    if isinstance(tensors, dict) and isinstance(tensors.get("state_dict"), dict):
        tensors = tensors["state_dict"]
    if not isinstance(tensors, dict) or not all(torch.is_tensor(t) for t in tensors.values()):
        raise UserError(
            f"{path}: neither a state dict (names and tensors) nor a training state that holds "
            "one as `state_dict`; give the weights alone."
        )
    # numpy has no bfloat16 of torch's; float32 holds all of its values.
    arrays = {
        key: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy()
        for key, tensor in tensors.items()
    }
    return ArraySource(arrays, str(path))


def _is_torchscript(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())
