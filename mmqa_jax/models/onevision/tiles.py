"""LLaVA-OneVision's pictures as tiles, and its tokens as sums of states of these tiles.

A picture that is alone in its prompt is shown whole and in tiles, that is on a canvas of the best
of some resolutions (anyres). Of the canvas what lies on padding is left out, and where more is left
than `most_tiles` have, it is resized (bilinear); each row then ends in a vector of its own, the
newline. Several pictures in a prompt are shown whole, each with one newline. So every token is a
sum of up to four states with weights that follow from the picture's size: these are computed on the
host, and a tower has one program for each bucket of numbers of tiles, whatever pictures come.
Original: transformers models/llava_onevision/modeling_llava_onevision.py (`pack_image_features`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import flax.struct
import numpy as np
from jaxtyping import Float32, Int32, UInt8

if TYPE_CHECKING:
    import jax

_MORE = 1.1  # times the side of `most_tiles` before a picture is resized, as in the original
_TAPS = 4  # of a bilinear sum
_GROWTH = 4 / 3  # of each bucket over the one before, at least

Resolution = tuple[int, int]  # height and width


@dataclasses.dataclass(frozen=True)
class TiledPicture:
    """A picture as the engine takes it.

    Attributes:
      pixels: uint8 [tiles, S, S, 3]: the whole, then its tiles, if it has any.
      size: height and width of the picture as it was.
    """

    pixels: UInt8[np.ndarray, "tiles S S 3"]
    size: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(tiles, height, width, 3), of the picture as it was: what its tokens follow from."""
        return (len(self.pixels), *self.size, 3)

    @property
    def dtype(self) -> np.dtype:
        """The type of the pixels."""
        return self.pixels.dtype

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.pixels, dtype)


@flax.struct.dataclass
class TileBatch:
    """B pictures of one bucket of N tiles, with T tokens each; padding weighs nothing."""

    pixels: np.ndarray | jax.Array  # uint8 [B, N, S, S, 3]
    # Of each token, in [newline, states of tile 0, of tile 1, ...].
    rows: np.ndarray | jax.Array  # int32 [B, T, 4]
    weights: np.ndarray | jax.Array  # float32 [B, T, 4]


class TileSizes(NamedTuple):
    """What the tiles of pictures follow from.

    Attributes:
      image_size: side of a tile in pixels.
      side: the same in states of the tower.
      resolutions: of canvases, multiples of `image_size`.
      most: tiles whose states a picture may have before it is resized.
    """

    image_size: int
    side: int
    resolutions: tuple[Resolution, ...]
    most: int

    @property
    def states(self) -> int:
        """The number of a tile's states."""
        return self.side**2

    def grid(self, resolution: Resolution) -> tuple[int, int]:
        """Rows and columns of tiles of a canvas."""
        return resolution[0] // self.image_size, resolution[1] // self.image_size


def best_resolution(size: tuple[int, int], resolutions: Sequence[Resolution]) -> Resolution:
    """The canvas on which a picture of `size` (height, width) keeps the most pixels; of several the
    smallest, of these the first."""
    height, width = size

    def kept_and_spare(resolution: Resolution) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - resolution[0] * resolution[1]

    return max(resolutions, key=kept_and_spare)


def tokens_of(shape: Sequence[int], sizes: TileSizes) -> int:
    """Returns the tokens of a picture of `TiledPicture.shape`; 0: there is none of this shape."""
    if len(shape) != 4 or shape[3] != 3 or min(shape) < 1:
        return 0
    count, size = shape[0], (shape[1], shape[2])
    if count == 1:
        return sizes.states + 1
    rows, columns = sizes.grid(best_resolution(size, sizes.resolutions))
    if count != 1 + rows * columns:
        return 0
    place = _shown(size, sizes)
    return sizes.states + place.out_rows * (place.out_columns + 1)


def buckets(sizes: TileSizes) -> tuple[int, ...]:
    """Numbers of tiles for which there are programs."""
    counts = sorted({1 + math.prod(sizes.grid(one)) for one in sizes.resolutions})
    chosen = [counts[-1]]
    for count in reversed(counts):
        if count * _GROWTH <= chosen[-1]:
            chosen.append(count)
    return (1, *reversed(chosen))


def bucket_of(count: int, sizes: TileSizes) -> int:
    """The smallest bucket that holds a picture's tiles."""
    return next(bucket for bucket in buckets(sizes) if bucket >= count)


def most_tokens(bucket: int, sizes: TileSizes) -> int:
    """Returns an upper bound of the tokens of a bucket's pictures."""
    if bucket == 1:
        return sizes.states + 1
    grids = [sizes.grid(one) for one in sizes.resolutions]
    fitting = [(rows, columns) for rows, columns in grids if 1 + rows * columns <= bucket]
    most = int(_MORE**2 * sizes.most * sizes.states) + 1
    return sizes.states + max(
        min(rows * columns * sizes.states, most) + rows * sizes.side for rows, columns in fitting
    )


def lay_out(pictures: Sequence[TiledPicture], sizes: TileSizes, bucket: int) -> TileBatch:
    """Pictures, of which none has more than `bucket` tiles, as a batch."""
    length = most_tokens(bucket, sizes)
    side = sizes.image_size
    made = TileBatch(
        np.zeros((len(pictures), bucket, side, side, 3), np.uint8),
        np.zeros((len(pictures), length, _TAPS), np.int32),
        np.zeros((len(pictures), length, _TAPS), np.float32),
    )
    for number, picture in enumerate(pictures):
        rows, weights = mixture(picture.shape, sizes)
        made.pixels[number, : len(picture.pixels)] = picture.pixels
        made.rows[number, : len(rows)], made.weights[number, : len(rows)] = rows, weights
    return made


def mixture(
    shape: Sequence[int], sizes: TileSizes
) -> tuple[Int32[np.ndarray, "T 4"], Float32[np.ndarray, "T 4"]]:
    """Rows and weights of each token of a picture of `TiledPicture.shape`, see TileBatch."""
    whole = np.zeros((sizes.states, _TAPS), np.int32)
    whole[:, 0] = 1 + np.arange(sizes.states)
    once = np.array([1, 0, 0, 0], np.float32)
    if shape[0] == 1:
        rows = np.concatenate([whole, np.zeros((1, _TAPS), np.int32)])
        return rows, np.tile(once, (len(rows), 1))
    size = (shape[1], shape[2])
    columns_of_tiles = sizes.grid(best_resolution(size, sizes.resolutions))[1]
    place = _shown(size, sizes)
    down, of_down = _taps(place.top, place.rows, place.out_rows)  # [rows, 2]
    across, of_across = _taps(place.left, place.columns, place.out_columns)  # [columns, 2]
    row, column = down[:, None, :, None], across[None, :, None, :]
    tile = 1 + row // sizes.side * columns_of_tiles + column // sizes.side
    within = row % sizes.side * sizes.side + column % sizes.side
    without_newline = place.out_rows, place.out_columns
    shown = (place.out_rows, place.out_columns + 1, _TAPS)
    rows, weights = np.zeros(shown, np.int32), np.zeros(shown, np.float32)
    rows[:, :-1] = (1 + tile * sizes.states + within).reshape(*without_newline, _TAPS)
    weighed = of_down[:, None, :, None] * of_across[None, :, None, :]
    weights[:, :-1] = weighed.reshape(*without_newline, _TAPS)
    weights[:, -1] = once  # of the newline, row 0
    weights = np.concatenate([np.tile(once, (sizes.states, 1)), weights.reshape(-1, _TAPS)])
    return np.concatenate([whole, rows.reshape(-1, _TAPS)]), weights


class _Shown(NamedTuple):
    """Which states of a canvas show the picture, and how many are made of them."""

    top: int
    left: int
    rows: int
    columns: int
    out_rows: int
    out_columns: int


def _shown(size: tuple[int, int], sizes: TileSizes) -> _Shown:
    height, width = size
    grid = sizes.grid(best_resolution(size, sizes.resolutions))
    rows, columns = (count * sizes.side for count in grid)
    top = left = 0
    if width / height > columns / rows:
        top = (rows - int(round(height * (columns / width), 7))) // 2
    else:
        left = (columns - int(round(width * (rows / height), 7))) // 2
    rows, columns = rows - 2 * top, columns - 2 * left
    ratio = math.sqrt(rows * columns / (sizes.most * sizes.states))
    if ratio <= _MORE:
        return _Shown(top, left, rows, columns, rows, columns)
    return _Shown(top, left, rows, columns, int(rows // ratio), int(columns // ratio))


def _taps(
    first: int, count: int, out: int
) -> tuple[Int32[np.ndarray, "out 2"], Float32[np.ndarray, "out 2"]]:
    """Of `out` places the two of `count` from `first` on between which each lies, and weights; as
    torch's `interpolate`."""
    center = np.maximum((np.arange(out) + 0.5) * (count / max(out, 1)) - 0.5, 0)
    low = center.astype(np.int32)
    high = np.minimum(low + 1, count - 1)
    part = center - low
    return first + np.stack([low, high], 1), np.stack([1 - part, part], 1).astype(np.float32)
