"""A region's features on a small grid: ROIAlign (He et al. 2017) and ROIPool (Girshick 2015).

Both are separable here. ROIAlign's samples of a bin are a grid of points, and a bilinear sample is
a weight of rows times one of columns; so a region's grid is two small matrices around the feature
map, exact for any number of samples, and products instead of a gather. Of a pyramid's large maps
CPUs and GPUs gather the few cells that a bin reads: products with all cells take longer there, and
on GPUs write a region's rows of all levels to memory. TPUs, where gathers are slow, multiply.
ROIPool's maximum over a bin is one over rows and one over columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mmqa_jax.core.mesh import platform

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
