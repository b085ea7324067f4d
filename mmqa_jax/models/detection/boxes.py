"""Boxes as (left, top, right, bottom) in pixels; their proposal, and features pooled from them.

Caffe, Detectron and maskrcnn-benchmark count the last pixel as part of a box: a box from 3 to 5 is
3 wide. torchvision and detectron2 do not. `last_pixel` is 1 or 0 accordingly.

Region proposal network (Ren et al. 2015, section 3.1): a small convolution says of each cell's
anchors how much an object they look like and how to move them. The best are clipped to the picture
and suppressed, level by level; of a pyramid's levels the best of all are then taken together. How
the originals differ is in the configuration.

A region's features on a small grid are ROIAlign's (He et al. 2017) or ROIPool's (Girshick 2015).
Both are separable here. ROIAlign's samples of a bin are a grid of points, and a bilinear sample is
a weight of rows times one of columns; so a region's grid is two small matrices around the feature
map, exact for any number of samples, and products instead of a gather. Of a pyramid's large maps
CPUs and GPUs gather the few cells that a bin reads: products with all cells take longer there, and
on GPUs write a region's rows of all levels to memory. TPUs, where gathers are slow, multiply.
ROIPool's maximum over a bin is one over rows and one over columns.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import platform
from mmqa_jax.models.common.layers import Linear
from mmqa_jax.models.detection.resnext import Conv, cells_within, within

# Boxes [R, 4] and the level [R] int32 that each is read from -> their grids [R, size, size, C].
PyramidPooling = Callable[[jax.Array, jax.Array], jax.Array]


def roi_align(
    features: jax.Array,
    boxes: jax.Array,
    *,
    size: int,
    scale: float,
    samples: int,
    aligned: bool,
    extent: jax.Array | None = None,
) -> jax.Array:
    """Means of bilinear samples (Caffe2's RoIAlign, torchvision's roi_align).

    Args:
      features: [H, W, C].
      boxes: [R, 4] in pixels, within the picture.
      size: bins of a side.
      scale: cells per pixel.
      samples: points of a bin along a side; 0: a bin's cells, rounded up, for each region by
        itself.
      aligned: whether half a cell is taken off first (detectron2's ROIAlignV2). Regions of less
        than a cell count as one cell where it is not.
      extent: [2], the rows and columns of the picture, where the map is padded.

    Returns:
      [R, size, size, C] in the features' dtype.
    """
    height, width = features.shape[:2]
    rows, columns = (height, width) if extent is None else (extent[0], extent[1])
    offset = 0.5 if aligned else 0.0
    left, top, right, bottom = jnp.moveaxis(boxes.astype(jnp.float32) * scale - offset, -1, 0)
    options = {"size": size, "samples": samples, "aligned": aligned}
    across = _sample_weights(left, right, columns, width, **options).astype(features.dtype)
    down = _sample_weights(top, bottom, rows, height, **options).astype(features.dtype)
    partial = jnp.einsum("rph,hwc->rpwc", down, features)
    return jnp.einsum("rqw,rpwc->rpqc", across, partial)


def _sample_weights(
    start: jax.Array,
    end: jax.Array,
    cells: jax.Array | int,
    held: int,
    *,
    size: int,
    samples: int,
    aligned: bool,
) -> jax.Array:
    """Weights of a line of cells in each bin: start and end [R] in cells -> [R, size, held].

    cells: of the picture, of the `held` ones of the map.
    """
    most = samples or -(-(held + 1) // size)
    options = {"size": size, "samples": samples, "aligned": aligned}
    low, high_weight, counted, count = _samples(start, end, cells, most, **options)
    cell = jnp.arange(held)
    weights = jnp.where(cell == low[..., None], 1 - high_weight[..., None], 0.0)
    weights += jnp.where(cell == low[..., None] + 1, high_weight[..., None], 0.0)
    total = jnp.sum(jnp.where(counted[..., None], weights, 0.0), axis=2)  # [R, size, held]
    return total / count[:, None, None]


def _samples(
    start: jax.Array,
    end: jax.Array,
    cells: jax.Array | int,
    most: int,
    *,
    size: int,
    samples: int,
    aligned: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Where the samples of each bin lie on a line: start and end [R], `most` samples of a bin.

    cells: of the picture, one number or [R].

    Returns:
      The cell before each sample [R, size, most] int32, the weight of the cell after it, which of
      the samples count, and the number of samples of a bin [R], at least 1.
    """
    length = end - start
    if not aligned:
        length = jnp.maximum(length, 1.0)
    # Behind the barrier XLA divides; by a constant it would multiply by the inverse, and whole
    # numbers of cells would be rounded up to one more.
    bin_length = length / jax.lax.optimization_barrier(jnp.float32(size))
    count = jnp.full_like(start, samples) if samples else jnp.ceil(bin_length)
    cells = jnp.broadcast_to(cells, start.shape)[:, None, None]
    point = jnp.arange(most)  # [most]
    # As in the original's float32: start + bin * length + (sample + 0.5) * length / samples.
    bin_start = start[:, None] + jnp.arange(size) * bin_length[:, None]  # [R, size]
    step = (point + 0.5) * bin_length[:, None] / jnp.maximum(count, 1)[:, None]  # [R, most]
    at = bin_start[:, :, None] + step[:, None, :]  # [R, size, most]
    counted = (point < count[:, None])[:, None] & (at >= -1.0) & (at <= cells)
    at = jnp.maximum(at, 0.0)
    low = jnp.floor(at).astype(jnp.int32)
    beyond = low >= cells - 1
    low = jnp.where(beyond, cells - 1, low)
    return low, jnp.where(beyond, 0.0, at - low), counted, jnp.maximum(count, 1)


def pyramid_align(
    maps: Sequence[jax.Array],
    extents: Sequence[jax.Array],
    scales: Sequence[float],
    *,
    size: int,
    samples: int,
) -> PyramidPooling:
    """ROIAlign, not aligned, that reads each box from one level of a pyramid.

    Args:
      maps: [H, W, C] of each level.
      extents: [2] of each level, the rows and columns of the picture.
      scales: cells per pixel of each level.
      size, samples: see roi_align; samples are of a fixed number.
    """
    options = {"size": size, "samples": samples, "aligned": False}
    if platform() != "tpu":
        return _gathering(maps, extents, scales, options)

    def of_products(boxes: jax.Array, level: jax.Array) -> jax.Array:
        pooled = 0.0
        for index, (x, extent) in enumerate(zip(maps, extents, strict=True)):
            grid = roi_align(x, boxes, scale=scales[index], extent=extent, **options)
            pooled += jnp.where((level == index)[:, None, None, None], grid, 0)
        return pooled

    return of_products


def _gathering(
    maps: Sequence[jax.Array],
    extents: Sequence[jax.Array],
    scales: Sequence[float],
    options: dict,
) -> PyramidPooling:
    """`pyramid_align` by the cells that are read, of all levels in one list."""
    cells = jnp.concatenate([x.reshape(-1, x.shape[-1]) for x in maps])
    sizes = [x.shape[0] * x.shape[1] for x in maps]
    firsts = jnp.asarray(np.cumsum([0, *sizes[:-1]]), jnp.int32)
    widths = jnp.asarray([x.shape[1] for x in maps], jnp.int32)
    scale_of, extent_of = jnp.asarray(scales, jnp.float32), jnp.stack(extents)

    def of_cells(boxes: jax.Array, level: jax.Array) -> jax.Array:
        scaled = boxes.astype(jnp.float32) * scale_of[level][:, None]
        left, top, right, bottom = jnp.moveaxis(scaled, -1, 0)
        rows, columns = jnp.moveaxis(extent_of[level], -1, 0)
        row, down = _read_cells(top, bottom, rows, **options)
        column, across = _read_cells(left, right, columns, **options)
        first, width = firsts[level][:, None], widths[level][:, None]
        reads = []
        for i in range(row.shape[-1]):
            start = first + row[:, :, i] * width  # [R, size]
            for j in range(column.shape[-1]):
                place = start[:, :, None] + column[:, None, :, j]
                reads.append((place, down[:, :, None, i] * across[:, None, :, j]))
        if platform() == "gpu":  # places are worked out once, not for each channel
            reads = jax.lax.optimization_barrier(reads)
        pooled = 0.0
        # One cell of all bins at a time: in one sum XLA gathers without writing cells down.
        for place, weight in reads:
            read = cells.at[place].get(mode="clip")  # [R, size, size, C]
            pooled += read.astype(jnp.float32) * weight[..., None]
        return pooled.astype(cells.dtype)

    return of_cells


def _read_cells(
    start: jax.Array, end: jax.Array, cells: jax.Array, **options
) -> tuple[jax.Array, jax.Array]:
    """The cells of a line that each bin reads and their weights: [R, size, 2 samples] each."""
    line = _samples(start, end, cells, options["samples"], **options)
    low, high_weight, counted, count = line
    high = jnp.minimum(low + 1, cells[:, None, None] - 1)
    share = jnp.where(counted, 1 / count[:, None, None], 0.0)
    weights = jnp.concatenate([(1 - high_weight) * share, high_weight * share], axis=-1)
    return jnp.concatenate([low, high], axis=-1), weights


def roi_pool(
    features: jax.Array,
    boxes: jax.Array,
    *,
    size: int,
    scale: float,
    extent: jax.Array | None = None,
) -> jax.Array:
    """Maxima of whole cells (Caffe's ROIPooling, torchvision's roi_pool).

    A box's edges are rounded to cells, halves away from zero, and its last cell counts. A bin
    without cells is 0.

    Args:
      features, boxes, scale, extent: as `roi_align`.
      size: bins of a side.

    Returns:
      [R, size, size, C] in the features' dtype.
    """
    height, width = features.shape[:2]
    rows, columns = (height, width) if extent is None else (extent[0], extent[1])
    left, top, right, bottom = jnp.moveaxis(_rounded(boxes.astype(jnp.float32) * scale), -1, 0)
    row, row_count = _bins(top, bottom, rows, height, size)
    column, column_count = _bins(left, right, columns, width, size)
    lowest = jnp.finfo(features.dtype).min
    most = -(-(height + 1) // size) + 1
    down = jnp.full((boxes.shape[0], size, *features.shape[1:]), lowest, features.dtype)
    for step in range(most):
        cells = features[jnp.minimum(row + step, height - 1)]  # [R, size, W, C]
        inside = (step < row_count)[:, :, None, None]
        down = jnp.maximum(down, jnp.where(inside, cells, lowest))
    most = -(-(width + 1) // size) + 1
    pooled = jnp.full((boxes.shape[0], size, size, features.shape[2]), lowest, features.dtype)
    for step in range(most):
        at = jnp.minimum(column + step, width - 1)[:, None, :, None]
        cells = jnp.take_along_axis(down, at, axis=2)  # [R, size, size, C]
        inside = (step < column_count)[:, None, :, None]
        pooled = jnp.maximum(pooled, jnp.where(inside, cells, lowest))
    there = (row_count[:, :, None] > 0) & (column_count[:, None, :] > 0)
    return jnp.where(there[..., None], pooled, 0)


def _rounded(x: jax.Array) -> jax.Array:
    """C's round: halves away from zero."""
    whole = jnp.trunc(x)
    return whole + jnp.where(jnp.abs(x - whole) >= 0.5, jnp.sign(x), 0.0)


def _bins(
    start: jax.Array, end: jax.Array, cells: jax.Array | int, held: int, size: int
) -> tuple[jax.Array, jax.Array]:
    """First cell and number of cells of each bin: start and end [R] -> two int32 [R, size].

    cells: of the picture, of the `held` ones of the map.
    """
    # Edges of bins are rounded products in float32, which decide about whole cells: numpy computes
    # them as C does; XLA would multiply by the inverse of `size`.
    lengths = np.maximum(np.arange(held + 2), 1).astype(np.float32)[:, None]
    bin_length = lengths / np.float32(size)
    place = np.arange(size, dtype=np.float32)
    edges = np.stack([np.floor(place * bin_length), np.ceil((place + 1) * bin_length)])
    length = jnp.clip((end - start).astype(jnp.int32) + 1, 0, held + 1)
    first, last = jnp.asarray(edges.astype(np.int32))[:, length]  # [R, size] each
    origin = start.astype(jnp.int32)[:, None]
    first, last = (jnp.clip(edge + origin, 0, cells) for edge in (first, last))
    return first, last - first


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
    """When two boxes are of one object."""

    threshold: float  # intersection over union
    # Whether the threshold itself is too much: Detectron's and py-faster-rcnn's CPU code;
    # torchvision and the CUDA code ask for more.
    inclusive: bool
    last_pixel: int  # see the module

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
    """How a regression's four values move and scale a box (Girshick 2014, appendix C)."""

    # What the regressed x, y, width and height are divided by.
    weights: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)
    last_pixel: int = 1  # whether a box's width counts its last pixel (see the module)
    # What is taken off the right and bottom edge of a decoded box: 1 in Detectron and
    # maskrcnn-benchmark; py-faster-rcnn forgets it, as Detectron notes.
    end_pixel: int = 1
    bounded: bool = True  # whether growth is limited to 1000 / 16; py-faster-rcnn does not

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


@dataclasses.dataclass(frozen=True)
class RPNConfig:
    """Sizes and rules; the defaults are maskrcnn-benchmark's for one level."""

    strides: tuple[int, ...] = (16,)  # pixels per cell of each level
    # Of the anchors of each level (see anchors).
    sizes: tuple[tuple[int, ...], ...] = ((32, 64, 128, 256, 512),)
    ratios: tuple[float, ...] = (0.5, 1.0, 2.0)  # heights over widths
    hidden: int = 1024  # channels of the convolution
    # Whether an anchor has two scores, for nothing and for an object, the ones of nothing of all
    # anchors first (Caffe), or one.
    paired: bool = False
    before: int = 6000  # how many anchors of a level are looked at, the best
    after: int = 300  # how many of them are left after suppression, and of all levels together
    threshold: float = 0.7  # intersection over union of the suppression
    inclusive: bool = False  # see Overlap
    smallest: int = 0  # shortest side of a proposal, in pixels of the original picture
    # Whether small ones are taken out before the best are counted (Caffe), or after.
    small_first: bool = False
    # end_pixel, bounded: see BoxCoder.
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
