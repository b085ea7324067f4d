"""The anchors of a region proposal network, as py-faster-rcnn lays them out.

An anchor has one of some sizes and one of some ratios of height to width, around the middle of the
first cell. Sides of the ratio are rounded to whole pixels of a box as large as the stride, and then
scaled (generate_anchors.py of py-faster-rcnn, Detectron and maskrcnn-benchmark); torchvision and
detectron2 scale first, and detectron2 does not round.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


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
