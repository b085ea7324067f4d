"""Pictures as LLaVA-1.5 reads them: whole, padded to a square with its tower's mean color.

Original: haotian-liu/LLaVA llava/mm_utils.py (`expand2square`, `process_images` with
`image_aspect_ratio` "pad", LLaVA-1.5's), then CLIP's image processor. transformers'
preprocessor_config of llava-hf/llava-1.5-*-hf does not pad: it crops the center, which is
`to_pixels(image, 336, "crop")` alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from mmqa_jax.data.exact_resize import resized_on_square
from mmqa_jax.data.images import to_pixels
from mmqa_jax.data.picture_bounds import FREE_PIXELS, check_made

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)  # of the pictures that CLIP was trained on


def pad_color(mean: Sequence[float]) -> tuple[int, ...]:
    """The color around a picture, of the tower's mean from 0 to 1."""
    return tuple(int(255 * value) for value in mean)


PAD_COLOR = pad_color(CLIP_MEAN)


def pad_to_square(image: Image.Image, color: tuple[int, ...] = PAD_COLOR) -> Image.Image:
    """Centers an RGB picture on a square of a color; an odd pixel of it goes right or below."""
    width, height = image.size
    if width == height:
        return image
    side = max(width, height)
    square = Image.new("RGB", (side, side), color)
    square.paste(image, ((side - width) // 2, (side - height) // 2))
    return square


def llava_pixels(
    image: Image.Image,
    size: int = 336,
    name: str = "picture",
    color: tuple[int, ...] = PAD_COLOR,
) -> UInt8[np.ndarray, "S S 3"]:
    """RGB picture of any shape -> pixels [size, size, 3], padded with a color.

    Raises:
      PictureError: with `name`, it is too long and thin (picture_bounds).
    """
    side = max(image.size)
    if side * side > FREE_PIXELS:
        check_made(size, side, name)
        return resized_on_square(image, size, color)
    return to_pixels(pad_to_square(image, color), size, "crop")
