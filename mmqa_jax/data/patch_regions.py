"""Regions of a picture without a detector: its patches, and what colors they show."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from mmqa_jax.data.colors import COLOR_TERMS, color_shares
from mmqa_jax.data.examples import RawSource
from mmqa_jax.data.images import patch_boxes, patches


class Tags(NamedTuple):
    """Words for what a picture shows, as the object tags of Oscar (Li et al. 2020).

    Attributes:
      regions: one tag per region.
      picture: tags of the whole picture, the most visible first.
      parts: tags of the picture's parts; read where only one picture is shown.
    """

    regions: tuple[str, ...]
    picture: tuple[str, ...]
    parts: tuple[str, ...] = ()


# Part of a picture -> whether a region's center (x, y in 0..1, downward) is in it.
_PARTS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "top": lambda x, y: y < 1 / 3,
    "bottom": lambda x, y: y > 2 / 3,
    "left": lambda x, y: x < 1 / 3,
    "right": lambda x, y: x > 2 / 3,
    "center": lambda x, y: (abs(x - 0.5) < 1 / 6) & (abs(y - 0.5) < 1 / 6),
    "upper left": lambda x, y: (x < 1 / 3) & (y < 1 / 3),
    "upper right": lambda x, y: (x > 2 / 3) & (y < 1 / 3),
    "lower left": lambda x, y: (x < 1 / 3) & (y > 2 / 3),
    "lower right": lambda x, y: (x > 2 / 3) & (y > 2 / 3),
}


class PatchRegions:
    """Regions = the patches of the picture, their raw pixels scaled to [-1, 1].

    Args:
      size: side of the pixels, a multiple of `patch`.
      patch: side of a patch.
      whole: a last region is added, the whole picture shrunk to a patch.
      colors: a region's position also holds its share of each basic color (data.colors), as
        VLP's positions hold the probabilities of the detector's classes.
      where: further tags name the dominant color of each part: "top red ...".

    Attributes:
      slots: regions of a picture.
      dim: values of a region, patch * patch * 3.
      position_dim: values of a region's position: 6 of its box and, with `colors`, 11 shares.
    """

    def __init__(
        self,
        size: int,
        patch: int,
        *,
        whole: bool = False,
        colors: bool = False,
        where: bool = False,
    ):
        self._size, self._patch, self._whole, self._colors = size, patch, whole, colors
        self._parts: dict[str, np.ndarray] = {}  # name -> bool[R], the regions in it
        boxes = patch_boxes(size, patch)  # [R, 6]
        if whole:
            boxes = np.concatenate([boxes, patch_boxes(size, size)])
        self._boxes = boxes
        if where:
            x, y = (boxes[:, 0] + boxes[:, 2]) / 2, (boxes[:, 1] + boxes[:, 3]) / 2
            is_patch = np.arange(len(boxes)) < (size // patch) ** 2  # not the whole picture
            self._parts = {name: inside(x, y) & is_patch for name, inside in _PARTS.items()}
        self.slots, self.dim = len(boxes), patch * patch * 3
        self.position_dim = boxes.shape[1] + len(COLOR_TERMS) * colors

    def __call__(
        self, source: RawSource
    ) -> tuple[Float[np.ndarray, "R F"], Float[np.ndarray, "R P"]] | None:
        if source.pixels is None:
            return None
        pixels = source.pixels.astype(np.float32)
        shown = patches(pixels, self._patch)  # [R, F], values 0 to 255
        seen = [shown.reshape(len(shown), -1, 3)]  # pixels of every region
        if self._whole:
            step = self._size // self._patch
            blocks = pixels.reshape(self._patch, step, self._patch, step, 3)
            shown = np.concatenate([shown, blocks.mean(axis=(1, 3)).reshape(1, -1)])
            seen.append(pixels.reshape(1, -1, 3))
        features = shown * np.float32(1 / 127.5) - 1
        positions = self._boxes
        if self._colors:
            shares = [color_shares(part.astype(np.uint8)) for part in seen]
            positions = np.concatenate([positions, np.concatenate(shares)], axis=1)
        return features, positions

    def tags(self, positions: Float[np.ndarray, "R P"]) -> Tags:
        """The colors of regions with these `positions`, which hold the shares of `colors`."""
        shares = positions[:, -len(COLOR_TERMS) :]  # [R, C], square roots
        regions = tuple(COLOR_TERMS[term] for term in shares.argmax(axis=1))
        shares = np.square(shares)
        total = shares.mean(axis=0)
        order = [term for term in np.argsort(-total, kind="stable") if total[term] >= 0.01]
        parts: list[str] = []
        for name, inside in self._parts.items():
            if inside.any():
                parts += [*name.split(), COLOR_TERMS[shares[inside].mean(axis=0).argmax()]]
        return Tags(regions, tuple(COLOR_TERMS[term] for term in order), tuple(parts))
