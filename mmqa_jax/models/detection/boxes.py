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
    area = (right - left + last_pixel) * (bottom - top + last_pixel)
    other = (other_right - other_left + last_pixel) * (other_bottom - other_top + last_pixel)
    return divide(shared, area + other - shared)


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


# Greedy non-maximum suppression in static shapes, with torchvision's order and ties.
#
# From the best score down, a box is kept unless it overlaps one that was kept. Of equal scores
# the first in the list counts as better, as torchvision's stable sort has it.
#
# Which boxes are kept is the one set in which a box is kept exactly if nothing kept and better
# overlaps it. It is found by repetition: starting from all boxes, drop those that a kept one
# suppresses, look again with what is left, until nothing changes. After n rounds the n best are
# right, most often all after three or four; each round is one product of a mask and a matrix. In
# hundreds of classes GPUs have a kernel instead (faster_rcnn.py).


_BLOCK = 256  # boxes whose mutual suppression is settled at a time


def survivors(suppresses: jax.Array, alive: jax.Array) -> jax.Array:
    """Which boxes greedy suppression keeps.

    Args:
      suppresses: [N, N] bool, whether box i is better than box j and overlaps it.
      alive: [N] bool, the boxes that take part.

    Returns:
      [N] bool.
    """

    def look_again(state):
        surviving, _ = state
        beaten = jnp.any(suppresses & surviving[:, None], axis=0)
        again = alive & ~beaten
        return again, jnp.any(again != surviving)

    return jax.lax.while_loop(lambda state: state[1], look_again, (alive, jnp.any(alive)))[0]


def suppress(
    boxes: jax.Array, scores: jax.Array, valid: jax.Array, overlap: Overlap, limit: int
) -> tuple[jax.Array, jax.Array]:
    """The best boxes that do not overlap.

    Args:
      boxes: [N, 4].
      scores: [N].
      valid: [N] bool; other boxes neither are kept nor suppress any.
      overlap: when two are of one object.
      limit: how many are wanted; the search ends there.

    Returns:
      Indices [limit] of kept boxes, best first, and [limit] bool, which of them there are.
    """
    count = boxes.shape[0]
    blocks = -(-count // _BLOCK)
    padding = blocks * _BLOCK - count
    order = jnp.argsort(jnp.where(valid, -scores, jnp.inf), stable=True)
    ranked = jnp.pad(boxes[order], ((0, padding), (0, 0)))
    alive = jnp.pad(valid[order], (0, padding))
    place = jnp.arange(blocks * _BLOCK)

    def unfinished(state):
        block, alive = state
        chosen = jnp.sum(alive & (place < block * _BLOCK))
        return (block < blocks) & (chosen < limit) & jnp.any(alive & (place >= block * _BLOCK))

    def settle(state):
        block, alive = state
        start = block * _BLOCK
        block_boxes = jax.lax.dynamic_slice_in_dim(ranked, start, _BLOCK)
        too_near = overlap.between(block_boxes, ranked)  # [_BLOCK, all]
        among = jax.lax.dynamic_slice_in_dim(too_near, start, _BLOCK, axis=1)
        survives = survivors(
            jnp.triu(among, k=1), jax.lax.dynamic_slice_in_dim(alive, start, _BLOCK)
        )
        beaten = jnp.any(too_near & survives[:, None], axis=0) & (place >= start + _BLOCK)
        alive = jax.lax.dynamic_update_slice_in_dim(alive & ~beaten, survives, start, axis=0)
        return block + 1, alive

    settled, alive = jax.lax.while_loop(unfinished, settle, (jnp.int32(0), alive))
    survives = alive & (place < settled * _BLOCK)
    # Kept boxes first, in the order of their scores.
    first = jnp.argsort(~survives, stable=True)[:limit]
    chosen, there = jnp.pad(order, (0, padding))[first], survives[first]
    missing = limit - chosen.shape[0]
    if missing > 0:  # more are wanted than there are boxes
        chosen, there = jnp.pad(chosen, (0, missing)), jnp.pad(there, (0, missing))
    return chosen, there


def keep_in_class(
    boxes: jax.Array, scores: jax.Array, valid: jax.Array, overlap: Overlap
) -> jax.Array:
    """Which boxes of one class are kept: as `suppress`, but as a mask [N] in the given order."""
    better = scores[:, None] > scores[None]
    place = jnp.arange(scores.shape[0])
    better |= (scores[:, None] == scores[None]) & (place[:, None] < place[None])
    return survivors(overlap.between(boxes, boxes) & better, valid)


def keep_one_by_one(
    boxes: jax.Array, scores: jax.Array, valid: jax.Array, overlap: Overlap
) -> jax.Array:
    """`keep_in_class` from the best box down, one beside all at a time: no pairs are stored."""
    order = jnp.argsort(jnp.where(valid, -scores, jnp.inf), stable=True)
    ranked = boxes[order]
    place = jnp.arange(scores.shape[0])

    def settle(best, alive):
        best_box = jax.lax.dynamic_slice_in_dim(ranked, best, 1)
        beaten = overlap.between(best_box, ranked)[0] & (place > best)
        return alive & ~(beaten & alive[best])

    alive = jax.lax.fori_loop(0, scores.shape[0], settle, valid[order])
    return jnp.zeros_like(valid).at[order].set(alive)
