"""Pictures as LLaVA-OneVision reads them: whole, and alone in its prompt in tiles too.

Original: transformers models/llava_onevision/image_processing_pil_llava_onevision.py, with Pillow's
bicubic filter.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from mmqa_jax.data.picture_bounds import check_made


def tiled_pixels(
    image: Image.Image, resolution: tuple[int, int], side: int, name: str = "picture"
) -> UInt8[np.ndarray, "tiles S S 3"]:
    """The RGB picture scaled to a square, then in tiles, row by row.

    For the tiles it is scaled until it touches a canvas, and centered on it on black.

    Args:
      image: of any shape.
      resolution: height and width of the canvas, multiples of `side`.
      side: S.
      name: for errors.

    Raises:
      PictureError: it is too long and thin.
    """
    height, width = resolution
    across, down = width / image.width, height / image.height
    if across < down:
        size = width, min(math.ceil(image.height * across), height)
    else:
        size = min(math.ceil(image.width * down), width), height
    check_made(max(size[0], side), image.height, name)  # Pillow resizes one side first
    canvas = Image.new("RGB", (width, height))
    place = (width - size[0]) // 2, (height - size[1]) // 2
    canvas.paste(image.resize(size, Image.Resampling.BICUBIC), place)
    whole = image.resize((side, side), Image.Resampling.BICUBIC)
    tiles = np.asarray(canvas).reshape(height // side, side, width // side, side, 3)
    tiles = tiles.swapaxes(1, 2).reshape(-1, side, side, 3)
    return np.concatenate([np.asarray(whole)[None], tiles])
