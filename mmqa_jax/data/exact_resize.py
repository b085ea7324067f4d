"""Parts of a resized picture, equal to Pillow's whole one bit by bit.

A picture of 1 x 65,000 scaled to a short side of 224 has 3 billion pixels, of which CLIP's crop
keeps 50,176; LLaVA's square around 2,000 x 20,000 has 400 million, most of them padding. Only what
counts is computed here. Pillow's own `resize(box=...)` holds the box in single precision and gives
other pixels (up to 22 levels on noise).

Pillow (src/libImaging/Resample.c) resizes the columns, rounds to 8 bits, then the rows. (Pillow 13
takes the rows first in some pictures that it makes smaller, hence `resized_part` enlarges only.) A
pixel is a weighted sum with weights in fixed point, and sums of integers are exact in float64.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64, UInt8
from PIL import Image

_PRECISION = 22  # bits behind the point of a weight
_SUPPORT = 2.0  # of the bicubic kernel, in pixels
_BAND = 2**22  # input pixels that are resized at a time
# Pillow resizes colors multiplied by their alpha.
_PREMULTIPLIED = {"LA": "La", "RGBA": "RGBa"}


def resized_part(
    image: Image.Image, size: tuple[int, int], box: tuple[int, int, int, int]
) -> Image.Image:
    """`image.resize(size, BICUBIC).crop(box)`, for a box within it and a size above the image's.

    Args:
      image: of a mode with 8 bits a channel; no palette.
      size: width, height; neither is below the image's.
      box: left, top, right, bottom in the resized picture.
    """
    if image.mode in _PREMULTIPLIED:
        multiplied = image.convert(_PREMULTIPLIED[image.mode])
        return resized_part(multiplied, size, box).convert(image.mode)
    left, top, right, bottom = box
    columns = _Weights(image.width, size[0], left, right)
    rows = _Weights(image.height, size[1], top, bottom)
    needed = image.crop((columns.low, rows.low, columns.high, rows.high))
    bands = []
    for band in needed.split():
        across = _rounded(np.asarray(band).astype(np.float64) @ columns.matrix().T)
        bands.append(Image.fromarray(_rounded(rows.matrix() @ across.astype(np.float64))))
    return Image.merge(image.mode, bands)


def resized_on_square(
    image: Image.Image, size: int, color: tuple[int, int, int]
) -> UInt8[np.ndarray, "S S 3"]:
    """The RGB picture in the center of a square of `color`, resized (bicubic) to `size`.

    An odd pixel of padding is at the right or bottom.
    """
    side = max(image.size)
    left, top = (side - image.width) // 2, (side - image.height) // 2
    weights = _Weights(side, size, 0, size)
    background = np.array(color, np.float64)
    # The rows of the square, resized across: [side, size, 3].
    across = np.empty((side, size, 3), np.uint8)
    across[:] = _rounded(weights.sums()[:, None] * background)
    step = max(1, _BAND // image.width)
    for start in range(0, image.height, step):
        band = image.crop((0, start, image.width, min(start + step, image.height)))
        out = across[top + start : top + start + band.height]
        if image.width == side:
            out[:] = np.asarray(band.resize((size, band.height), Image.Resampling.BICUBIC))
            continue
        values = np.asarray(band).transpose(2, 0, 1).astype(np.float64)  # [3, rows, width]
        for column in range(size):
            first, taps = weights.taps_within(column, left, left + image.width)
            beside = weights.sums()[column] - taps.sum()
            shown = values[:, :, first - left : first - left + len(taps)] @ taps  # [3, rows]
            out[:, column] = _rounded(shown.T + beside * background)
    whole = Image.fromarray(across)
    return np.asarray(whole.resize((size, size), Image.Resampling.BICUBIC))


class _Weights:
    """Pillow's weights of the outputs `start` to `stop` of `outputs`, along one side of `inputs`.

    Attributes:
      low, high: the inputs that count are `low` to `high`.
    """

    def __init__(self, inputs: int, outputs: int, start: int, stop: int):
        scale = float(np.float32(inputs)) / outputs
        wide = max(scale, 1.0)
        center = (np.arange(start, stop) + 0.5) * scale  # [outputs]
        first = np.maximum((center - _SUPPORT * wide + 0.5).astype(np.int64), 0)
        end = np.minimum((center + _SUPPORT * wide + 0.5).astype(np.int64), inputs)
        place = np.arange(int((end - first).max()))  # [taps]
        values = _bicubic((place + first[:, None] - center[:, None] + 0.5) * (1.0 / wide))
        values[place >= (end - first)[:, None]] = 0.0
        values /= np.cumsum(values, axis=1)[:, -1:]  # summed one by one, as in C
        self._first: Int64[np.ndarray, " outputs"] = first
        self._taps: Float64[np.ndarray, "outputs taps"] = np.trunc(
            values * 2**_PRECISION + np.copysign(0.5, values)
        )
        self._taps[place >= (end - first)[:, None]] = 0.0
        self.low, self.high = int(first.min()), int(end.max())

    def matrix(self) -> Float64[np.ndarray, "outputs inputs"]:
        """The weights of the inputs that count."""
        made = np.zeros((len(self._first), self.high - self.low))
        row, tap = np.nonzero(self._taps)
        made[row, self._first[row] + tap - self.low] = self._taps[row, tap]
        return made

    def sums(self) -> Float64[np.ndarray, " outputs"]:
        """The sum of each output's weights."""
        return self._taps.sum(axis=1)

    def taps_within(self, output: int, low: int, high: int) -> tuple[int, np.ndarray]:
        """The first of the inputs `low` to `high` that an output reads, and their weights."""
        first, taps = int(self._first[output]), self._taps[output]
        start, stop = max(first, low), min(first + len(taps), high)
        return (start, taps[start - first : stop - first]) if start < stop else (low, taps[:0])


def _bicubic(x: np.ndarray) -> np.ndarray:
    a, x = -0.5, np.abs(x)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _rounded(sums: np.ndarray) -> UInt8[np.ndarray, ...]:
    """Sums of weighted values as 8 bits."""
    rounded = (sums.astype(np.int64) + (1 << (_PRECISION - 1))) >> _PRECISION
    return np.clip(rounded, 0, 255).astype(np.uint8)
