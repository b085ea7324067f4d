"""Pictures as Qwen2.5-VL and Qwen3-VL read them: whole, of any shape, resized to whole units.

Original: transformers models/qwen2_vl/image_processing_pil_qwen2_vl.py (`smart_resize`), with
Pillow's bicubic filter.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from mmqa_jax.data.picture_bounds import PictureError

_LONGEST = 200  # times the short side, as in the original


class PictureSizes(NamedTuple):
    """What pictures are resized to: sides of multiples of `unit`, from `least` to `most` pixels."""

    unit: int
    least: int
    most: int


def qwen_size(width: int, height: int, sizes: PictureSizes, name: str) -> tuple[int, int]:
    """Width and height that a picture is resized to.

    Raises:
      PictureError: with `name`, it is too long and thin.
    """
    if max(width, height) > _LONGEST * min(width, height):
        raise PictureError(
            f"{name}: {width} x {height} pixels, a side more than {_LONGEST} times the other; give "
            "a picture that is less long and thin."
        )
    unit, least, most = sizes

    def whole(side: float, rounded) -> int:
        return rounded(side / unit) * unit

    high, wide = whole(height, round), whole(width, round)
    if high * wide > most:
        shrunk = math.sqrt(height * width / most)
        high = max(unit, math.floor(height / shrunk / unit) * unit)
        wide = max(unit, math.floor(width / shrunk / unit) * unit)
    elif high * wide < least:
        grown = math.sqrt(least / (height * width))
        high = math.ceil(height * grown / unit) * unit
        wide = math.ceil(width * grown / unit) * unit
    return wide, high


def qwen_pixels(
    image: Image.Image, sizes: PictureSizes, name: str = "picture"
) -> UInt8[np.ndarray, "H W 3"]:
    """RGB picture of any shape -> the pixels that `models.qwen_vl.layout.lay_out` takes.

    Raises:
      PictureError: with `name`, it is too long and thin.
    """
    size = qwen_size(*image.size, sizes, name)
    return np.asarray(image.resize(size, Image.Resampling.BICUBIC))
