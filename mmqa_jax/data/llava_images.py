"""Pictures as LLaVA-1.5 reads them: whole, padded to a square with CLIP's mean color.

Original: haotian-liu/LLaVA llava/mm_utils.py (`expand2square`, `process_images` with
`image_aspect_ratio` "pad", LLaVA-1.5's), then CLIP's image processor. transformers'
preprocessor_config of llava-hf/llava-1.5-*-hf does not pad: it crops the center, which is
`to_pixels(image, 336, "crop")` alone.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from mmqa_jax.data.exact_resize import resized_on_square
from mmqa_jax.data.images import to_pixels
from mmqa_jax.data.picture_bounds import FREE_PIXELS, check_made

PAD_COLOR = (122, 116, 104)  # int(255 * mean) of CLIP's training pictures


def pad_to_square(image: Image.Image) -> Image.Image:
    """Centers an RGB picture on a square; an odd pixel of padding goes to the right or bottom."""
    width, height = image.size
    if width == height:
        return image
    side = max(width, height)
    square = Image.new("RGB", (side, side), PAD_COLOR)
    square.paste(image, ((side - width) // 2, (side - height) // 2))
    return square


def llava_pixels(
    image: Image.Image, size: int = 336, name: str = "picture"
) -> UInt8[np.ndarray, "S S 3"]:
    """RGB picture of any shape -> pixels for `clip.normalize_pixels`.

    Raises:
      PictureError: with `name`, it is too long and thin (picture_bounds).
    """
    side = max(image.size)
    if side * side > FREE_PIXELS:
        check_made(size, side, name)
        return resized_on_square(image, size, PAD_COLOR)
    return to_pixels(pad_to_square(image), size, "crop")
