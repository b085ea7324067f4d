"""A picture of any size as its patches in one of a few sizes, for Qwen's vision towers.

A picture's sides are multiples of `unit` pixels; a unit is what becomes one token of the language
model: 2 x 2 patches. Units lie window by window (Qwen2.5-VL: 4 x 4 units, fewer at the right and
the bottom), each window padded to its whole size, and the whole padded to a bucket: a tower has
one program for each bucket, whatever pictures come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import flax.struct
import numpy as np

from mmqa_jax.models.qwen_vl.vision import QwenVisionConfig

if TYPE_CHECKING:
    import jax
    from jaxtyping import Int32, UInt8

_LEAST = 64  # units of the smallest bucket; each next one is a third to a half larger


@flax.struct.dataclass
class PatchBatch:
    """Pictures of one bucket of U units, with N = U * merge^2 patches; padding is at -1."""

    patches: np.ndarray | jax.Array  # uint8 [B, N, patch * patch * 3], as (row, column, channel)
    places: np.ndarray | jax.Array  # int32 [B, N, 2], row and column of each patch
    grid: np.ndarray | jax.Array  # int32 [B, 2], rows and columns of patches
    order: np.ndarray | jax.Array  # int32 [B, U]: where the units lie, row by row of the picture


class Grid(NamedTuple):
    """Rows and columns of units of a picture."""

    rows: int
    columns: int

    @property
    def units(self) -> int:
        """Tokens of the language model."""
        return self.rows * self.columns


def grid_of(shape: Sequence[int], config: QwenVisionConfig) -> Grid:
    """The grid of pixels [H, W, 3] whose sides are multiples of `config.unit`."""
    height, width = shape[:2]
    assert height % config.unit == width % config.unit == 0, (height, width, config.unit)
    return Grid(height // config.unit, width // config.unit)


def bucket_of(grid: Grid, config: QwenVisionConfig) -> int:
    """Units of the smallest bucket that holds a picture with the padding of its windows."""
    side = config.window_units
    window = side**2
    needed = -(-grid.rows // side) * -(-grid.columns // side) * window
    size = _LEAST
    while size < needed:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return -(-size // window) * window


def unit_order(grid: Grid, config: QwenVisionConfig) -> Int32[np.ndarray, " n"]:
    """Numbers of the units (row by row of the picture) window by window; -1 is padding."""
    side = config.window_units
    rows, columns = (-(-count // side) * side for count in grid)
    numbers = np.full((rows, columns), -1, np.int32)
    numbers[: grid.rows, : grid.columns] = np.arange(grid.units).reshape(grid)
    windows = numbers.reshape(rows // side, side, columns // side, side)
    return windows.swapaxes(1, 2).reshape(-1)


def lay_out(
    pictures: Sequence[UInt8[np.ndarray, "H W 3"]], config: QwenVisionConfig, bucket: int
) -> PatchBatch:
    """Pictures, of which none has more than `bucket` units (`bucket_of`), as a batch of one."""
    made = [_one(picture, config, bucket) for picture in pictures]
    return PatchBatch(*(np.stack(arrays) for arrays in zip(*made, strict=True)))


def _one(picture: np.ndarray, config: QwenVisionConfig, bucket: int) -> tuple[np.ndarray, ...]:
    grid, merge, patch = grid_of(picture.shape, config), config.merge, config.patch
    units = unit_order(grid, config)
    units = np.pad(units, (0, bucket - len(units)), constant_values=-1)  # [U]
    real = units >= 0

    def by_unit(x: np.ndarray) -> np.ndarray:  # [rows, columns, ...] of patches -> [U, m * m, ...]
        x = x.reshape(grid.rows, merge, grid.columns, merge, *x.shape[2:]).swapaxes(1, 2)
        return x.reshape(grid.units, merge**2, *x.shape[4:])[units]

    rows, columns = grid.rows * merge, grid.columns * merge
    patches = picture.reshape(rows, patch, columns, patch, 3).swapaxes(1, 2)
    patches = by_unit(patches.reshape(rows, columns, -1))
    patches[~real] = 0
    places = by_unit(np.stack(np.indices((rows, columns), np.int32), axis=-1))
    places[~real] = -1
    order = np.zeros(bucket, np.int32)
    order[units[real]] = np.flatnonzero(real)
    return (
        patches.reshape(bucket * merge**2, -1),
        places.reshape(-1, 2),
        np.array([rows, columns], np.int32),
        order,
    )
