"""Pictures as files hold them, of noise or of one color."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def encoded(picture: Image.Image | np.ndarray, form: str = "PNG", **options: object) -> bytes:
    """The bytes of a file in a format of Pillow's."""
    if isinstance(picture, np.ndarray):
        picture = Image.fromarray(picture)
    file = io.BytesIO()
    picture.save(file, form, **options)
    return file.getvalue()


def plain(color: tuple[int, int, int], size: tuple[int, int] = (3, 3)) -> bytes:
    """A PNG of one color; size: width, height."""
    return encoded(Image.new("RGB", size, color))


def smooth(size: tuple[int, int], seed: int) -> Image.Image:
    """Noise of few pixels, drawn large, so that resampling changes it little; size: width, height."""
    noise = np.random.default_rng(seed).integers(0, 256, (9, 7, 3), np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BILINEAR)
