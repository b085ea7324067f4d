"""Layers as research code numbers them, and as it wants them back.

Its layer numbers are not always those of our stacks: Prophet counts attention and MLP as layers
of their own, CLIP's ResNet counts the one block of a stage that is not like the others. A table
of prefixes, published -> ours, says how they correspond: `renames` reads with it,
`PublishedSource` gives the published keys back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import jax
import numpy as np

from mmqa_jax.weights.safetensors_io import TensorSource


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
