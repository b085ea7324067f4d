"""Regions of a picture without a detector: its patches."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from mmqa_jax.data.examples import RawSource
from mmqa_jax.data.images import patch_boxes, patches


class PatchRegions:
    """Regions = the patches of the picture, their raw pixels scaled to [-1, 1].

    Args:
      size: side of the pixels, a multiple of `patch`.
      patch: side of a patch.

    Attributes:
      slots: regions of a picture.
      dim: values of a region, patch * patch * 3.
      position_dim: values of a region's position, the 6 of its box.
    """

    def __init__(self, size: int, patch: int):
        self._patch, self._boxes = patch, patch_boxes(size, patch)  # [R, 6]
        self.slots, self.dim = len(self._boxes), patch * patch * 3
        self.position_dim = self._boxes.shape[1]

    def __call__(
        self, source: RawSource
    ) -> tuple[Float[np.ndarray, "R F"], Float[np.ndarray, "R P"]] | None:
        """Features and positions; None for a snippet."""
        if source.pixels is None:
            return None
        pixels = source.pixels.astype(np.float32)
        return self._values(pixels) * np.float32(1 / 127.5) - 1, self._positions(pixels)

    def _values(self, pixels: Float[np.ndarray, "S S 3"]) -> Float[np.ndarray, "R F"]:
        """The pixels of every region, 0 to 255."""
        return patches(pixels, self._patch)

    def _positions(self, pixels: Float[np.ndarray, "S S 3"]) -> Float[np.ndarray, "R P"]:
        return self._boxes
