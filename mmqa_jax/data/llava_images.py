"""Pictures as LLaVA-1.5 sees them: whole, on a square of CLIP's mean color.

Original: haotian-liu/LLaVA llava/mm_utils.py (`expand2square`, `process_images` with
`image_aspect_ratio` "pad", LLaVA-1.5's), then CLIP's image processor. transformers'
preprocessor_config of llava-hf/llava-1.5-*-hf does not pad: it cuts the centre out, which is
`to_pixels(image, 336, "crop")` alone.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from mmqa_jax.data.images import CLIP_MEAN, to_pixels

PAD_COLOR = tuple(int(255 * mean) for mean in CLIP_MEAN)  # (122, 116, 104)


def pad_to_square(image: Image.Image) -> Image.Image:
    """Puts an RGB picture in the middle of a square; an odd rest goes to the right or bottom."""
    width, height = image.size
    if width == height:
        return image
    side = max(width, height)
    square = Image.new("RGB", (side, side), PAD_COLOR)
    square.paste(image, ((side - width) // 2, (side - height) // 2))
    return square


def llava_pixels(image: Image.Image, size: int = 336) -> UInt8[np.ndarray, "S S 3"]:
    """RGB picture of any shape -> pixels; `images.normalise` or `clip.normalize_pixels` follow."""
    return to_pixels(pad_to_square(image), size, "crop")
