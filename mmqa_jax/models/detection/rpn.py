"""Region proposal network (Ren et al. 2015, section 3.1): where objects may be.

A small convolution says of each cell's anchors how much an object they look like and how to move
them. The best are clipped to the picture and suppressed, level by level; of a pyramid's levels the
best of all are then taken together. How the originals differ is in the configuration.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common.layers import Linear
from mmqa_jax.models.detection.boxes import BoxCoder, Overlap, clip, large_enough, suppress
from mmqa_jax.models.detection.resnext import Conv, cells_within, within


@dataclasses.dataclass(frozen=True)
class RPNConfig:
    """Sizes and rules; the defaults are maskrcnn-benchmark's for one level.

    Attributes:
      strides: pixels per cell of each level.
      sizes: of the anchors of each level (see anchors).
      ratios: heights over widths.
      hidden: channels of the convolution.
      paired: whether an anchor has two scores, for nothing and for an object, the ones of nothing
        of all anchors first (Caffe), or one.
      before: how many anchors of a level are looked at, the best.
      after: how many of them are left after suppression, and of all levels together.
      threshold: intersection over union of the suppression.
      inclusive: see Overlap.
      smallest: shortest side of a proposal, in pixels of the original picture.
      small_first: whether small ones are taken out before the best are counted (Caffe), or after.
      end_pixel, bounded: see BoxCoder.
    """

    strides: tuple[int, ...] = (16,)
    sizes: tuple[tuple[int, ...], ...] = ((32, 64, 128, 256, 512),)
    ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    hidden: int = 1024
    paired: bool = False
    before: int = 6000
    after: int = 300
    threshold: float = 0.7
    inclusive: bool = False
    smallest: int = 0
    small_first: bool = False
    end_pixel: int = 1
    bounded: bool = True

    def __post_init__(self):
        counts = {len(sizes) for sizes in self.sizes}
        if len(self.strides) != len(self.sizes) or len(counts) != 1:
            raise UserError(
                f"rpn: strides {self.strides} and sizes {self.sizes}; give as many sizes as "
                "strides, each with as many anchors, since one convolution serves all levels."
            )

    @property
    def anchors(self) -> int:
        """Anchors of a cell."""
        return len(self.ratios) * len(self.sizes[0])

    @property
    def coder(self) -> BoxCoder:
        """How proposals are regressed."""
        return BoxCoder(end_pixel=self.end_pixel, bounded=self.bounded)


class RPN(nnx.Module):
    """One convolution for all levels."""

    def __init__(self, config: RPNConfig, in_channels: int, *, rngs: nnx.Rngs):
        names = ("embed", "mlp")
        self.conv = Conv(in_channels, config.hidden, 3, names, rngs=rngs, use_bias=True)
        scores = config.anchors * (2 if config.paired else 1)
        self.objectness = Linear(config.hidden, scores, ("mlp", "proj"), rngs=rngs)
        self.deltas = Linear(config.hidden, 4 * config.anchors, ("mlp", "proj"), rngs=rngs)
        self.config = config

    def __call__(self, level: jax.Array, extent: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A level's map [B, H, W, C] -> probabilities of an object [B, H, W, A], deltas [..., 4].

        Both are float32.
        """
        hidden = jax.nn.relu(self.conv(within(level, extent)))
        scores = self.objectness(hidden).astype(jnp.float32)
        deltas = self.deltas(hidden).astype(jnp.float32)
        deltas = deltas.reshape(*deltas.shape[:-1], self.config.anchors, 4)
        if self.config.paired:
            nothing, something = jnp.split(scores, 2, axis=-1)
            return jax.nn.softmax(jnp.stack([nothing, something]), axis=0)[1], deltas
        return jax.nn.sigmoid(scores), deltas

    def proposals(
        self,
        levels: list[tuple[jax.Array, jax.Array, jax.Array]],
        size: jax.Array,
        scale: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Proposes the regions of one picture.

        Args:
          levels: of each level the probabilities [H, W, A], the deltas [H, W, A, 4] and the extent.
          size: [2], height and width that boxes are clipped to.
          scale: pixels per pixel of the original picture.

        Returns:
          Boxes [after, 4], best first, and [after] bool, which of them there are.
        """
        config = self.config
        best = [self._of_level(index, *level, size, scale) for index, level in enumerate(levels)]
        boxes, scores, there = (jnp.concatenate(part) for part in zip(*best, strict=True))
        if len(levels) > 1:
            scores, order = jax.lax.top_k(jnp.where(there, scores, -1.0), config.after)
            boxes, there = boxes[order], scores >= 0
        return jnp.where(there[:, None], boxes, 0.0), there

    def _of_level(
        self,
        index: int,
        scores: jax.Array,
        deltas: jax.Array,
        extent: jax.Array,
        size: jax.Array,
        scale: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Boxes [after, 4], scores [after] and whether they are there [after] bool."""
        config = self.config
        height, width, anchors = scores.shape
        stride = config.strides[index]
        cell = cell_anchors(stride, config.sizes[index], config.ratios)
        grid = grid_anchors(cell, height, width, stride).reshape(-1, 4)
        deltas = deltas.reshape(-1, 4)

        def decoded(rows) -> tuple[jax.Array, jax.Array]:
            boxes = clip(config.coder.decode(deltas[rows], grid[rows]), size, 1)
            return boxes, large_enough(boxes, config.smallest * scale, 1)

        inside = jnp.repeat(cells_within(extent, height, width).ravel(), anchors)
        if config.small_first:
            inside &= decoded(slice(None))[1]
        best, order = jax.lax.top_k(
            jnp.where(inside, scores.ravel(), -1.0), min(config.before, inside.shape[0])
        )
        boxes, fits = decoded(order)  # of the best alone: a pyramid has a quarter of a million
        valid = (best >= 0) & fits
        overlap = Overlap(config.threshold, config.inclusive, 1)
        chosen, there = suppress(boxes, best, valid, overlap, config.after)
        return boxes[chosen], best[chosen], there


# The anchors of a region proposal network, as py-faster-rcnn lays them out.
#
# An anchor has one of some sizes and one of some ratios of height to width, around the middle of
# the first cell. Sides of the ratio are rounded to whole pixels of a box as large as the stride,
# and then scaled (generate_anchors.py of py-faster-rcnn, Detectron and maskrcnn-benchmark);
# torchvision and detectron2 scale first, and detectron2 does not round.


def cell_anchors(stride: int, sizes: tuple[float, ...], ratios: tuple[float, ...]) -> np.ndarray:
    """Anchors of the first cell.

    Args:
      stride: pixels per cell.
      sizes: square roots of the anchors' areas, about.
      ratios: heights over widths.

    Returns:
      float32 [len(ratios) * len(sizes), 4]; the sizes of a ratio follow each other. The last pixel
      of a box counts (see boxes).
    """
    width = np.round(np.sqrt(stride**2 / np.array(ratios, np.float64)))
    height = np.round(width * np.array(ratios, np.float64))
    scale = np.array(sizes, np.float64) / stride
    half = 0.5 * (np.stack([width, height], axis=-1)[:, None] * scale[:, None] - 1)
    center = 0.5 * (stride - 1)
    corners = np.concatenate([center - half, center + half], axis=-1)
    return corners.reshape(-1, 4).astype(np.float32)


def grid_anchors(cell: np.ndarray, height: int, width: int, stride: int) -> jax.Array:
    """The anchors of all cells: cell [A, 4] -> [height, width, A, 4]."""
    y = jnp.arange(height, dtype=jnp.float32)[:, None, None] * stride
    x = jnp.arange(width, dtype=jnp.float32)[None, :, None] * stride
    y, x = jnp.broadcast_arrays(y, x)
    return jnp.stack([x, y, x, y], axis=-1) + cell
