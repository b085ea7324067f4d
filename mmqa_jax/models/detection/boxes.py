"""Boxes as (left, top, right, bottom) in pixels: size, overlap, regression and clipping.

Caffe, Detectron and maskrcnn-benchmark count the last pixel as part of a box: a box from 3 to 5 is
3 wide. torchvision and detectron2 do not. `last_pixel` is 1 or 0 accordingly.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

Corners = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # left, top, right, bottom

# A regressed side grows at most to this many times the anchor's (Detectron's BBOX_XFORM_CLIP).
_LARGEST_GROWTH = math.log(1000 / 16)


def sides(boxes: jax.Array, last_pixel: int) -> tuple[jax.Array, jax.Array]:
    """Widths and heights: boxes [..., 4] -> two arrays [...]."""
    left, top, right, bottom = jnp.moveaxis(boxes, -1, 0)
    return right - left + last_pixel, bottom - top + last_pixel


def areas(boxes: jax.Array, last_pixel: int) -> jax.Array:
    """Boxes [..., 4] -> [...] square pixels."""
    width, height = sides(boxes, last_pixel)
    return width * height


def overlaps(a: jax.Array, b: jax.Array, last_pixel: int) -> jax.Array:
    """Intersection over union of all pairs: a [N, 4], b [M, 4] -> [N, M].

    A pair of boxes without area has none over none, which is NaN and above no threshold, as in
    torchvision and Detectron.
    """
    # Coordinate by coordinate: arrays of pairs with two or four values last are slow on TPUs.
    ours, others = (jnp.moveaxis(x, -1, 0) for x in (a[:, None], b[None]))
    return corner_overlaps(tuple(ours), tuple(others), last_pixel)


def corner_overlaps(
    a: Corners,
    b: Corners,
    last_pixel: int,
    divide: Callable[[jax.Array, jax.Array], jax.Array] = jnp.divide,
) -> jax.Array:
    """`overlaps` of boxes by their corners, each of a shape that broadcasts; see `overlaps`.

    divide: a kernel's own division.
    """
    (left, top, right, bottom), (other_left, other_top, other_right, other_bottom) = a, b
    width = jnp.minimum(right, other_right) - jnp.maximum(left, other_left) + last_pixel
    height = jnp.minimum(bottom, other_bottom) - jnp.maximum(top, other_top) + last_pixel
    width, height = jnp.maximum(width, 0), jnp.maximum(height, 0)
    shared = width * height
    own = (right - left + last_pixel) * (bottom - top + last_pixel)
    other = (other_right - other_left + last_pixel) * (other_bottom - other_top + last_pixel)
    return divide(shared, own + other - shared)


class Overlap(NamedTuple):
    """When two boxes are of one object.

    Attributes:
      threshold: intersection over union.
      inclusive: whether the threshold itself is too much: Detectron's and py-faster-rcnn's CPU
        code; torchvision and the CUDA code ask for more.
      last_pixel: see the module.
    """

    threshold: float
    inclusive: bool
    last_pixel: int

    def between(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Whether pairs overlap too much: a [N, 4], b [M, 4] -> [N, M] bool."""
        return self._too_much(overlaps(a, b, self.last_pixel))

    def of_corners(
        self, a: Corners, b: Corners, divide: Callable[[jax.Array, jax.Array], jax.Array]
    ) -> jax.Array:
        """`between` for kernels: see `corner_overlaps`."""
        return self._too_much(corner_overlaps(a, b, self.last_pixel, divide))

    def _too_much(self, shared: jax.Array) -> jax.Array:
        return shared >= self.threshold if self.inclusive else shared > self.threshold


def clip(boxes: jax.Array, size: jax.Array, last_pixel: int) -> jax.Array:
    """Boxes within a picture.

    Args:
      boxes: [..., 4].
      size: [2], height and width of the picture.
      last_pixel: see the module; coordinates end at the side's length less this.
    """
    limit = jnp.tile(size[::-1].astype(boxes.dtype) - last_pixel, 2)
    return jnp.clip(boxes, 0, jnp.maximum(limit, 0))


def large_enough(boxes: jax.Array, smallest: jax.Array | float, last_pixel: int) -> jax.Array:
    """Whether both sides have at least `smallest` pixels: boxes [..., 4] -> [...] bool."""
    width, height = sides(boxes, last_pixel)
    return (width >= smallest) & (height >= smallest)


@dataclasses.dataclass(frozen=True)
class BoxCoder:
    """How a regression's four values move and scale a box (Girshick 2014, appendix C).

    Attributes:
      weights: what the regressed x, y, width and height are divided by.
      last_pixel: whether a box's width counts its last pixel (see the module).
      end_pixel: what is taken off the right and bottom edge of a decoded box: 1 in Detectron and
        maskrcnn-benchmark; py-faster-rcnn forgets it, as Detectron notes.
      bounded: whether growth is limited to 1000 / 16; py-faster-rcnn does not.
    """

    weights: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)
    last_pixel: int = 1
    end_pixel: int = 1
    bounded: bool = True

    def decode(self, deltas: jax.Array, boxes: jax.Array) -> jax.Array:
        """The boxes that the regression `deltas` makes of `boxes`; both [..., 4]."""
        width, height = sides(boxes, self.last_pixel)
        x, y, log_width, log_height = jnp.moveaxis(deltas / jnp.array(self.weights), -1, 0)
        if self.bounded:
            log_width = jnp.minimum(log_width, _LARGEST_GROWTH)
            log_height = jnp.minimum(log_height, _LARGEST_GROWTH)
        center_x = boxes[..., 0] + 0.5 * width + x * width
        center_y = boxes[..., 1] + 0.5 * height + y * height
        half_width = 0.5 * jnp.exp(log_width) * width
        half_height = 0.5 * jnp.exp(log_height) * height
        corners = (
            center_x - half_width,
            center_y - half_height,
            center_x + half_width - self.end_pixel,
            center_y + half_height - self.end_pixel,
        )
        return jnp.stack(corners, axis=-1)

    def encode(self, targets: jax.Array, boxes: jax.Array) -> jax.Array:
        """The deltas that decode to `targets`; both [..., 4], both with sides above 0."""
        width, height = sides(boxes, self.last_pixel)
        wanted_width, wanted_height = sides(targets, self.end_pixel)
        x = targets[..., 0] + 0.5 * wanted_width - boxes[..., 0] - 0.5 * width
        y = targets[..., 1] + 0.5 * wanted_height - boxes[..., 1] - 0.5 * height
        growth = jnp.log(wanted_width / width), jnp.log(wanted_height / height)
        return jnp.stack((x / width, y / height, *growth), axis=-1) * jnp.array(self.weights)
