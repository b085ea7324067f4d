"""What the pixels of each of Pillow's modes mean: one table, from a file's samples to 8 bits.

    mode                      read as
    1 L LA P PA RGB RGBA      as they are; a palette's, gray's or RGB's transparent color (GIF, PNG
                              tRNS, of 1, 2, 4, 8 or 16 bits a sample) is alpha 0
    RGBX                      the fourth channel means nothing
    La RGBa                   colors multiplied by alpha: divided by it
    CMYK YCbCr LAB HSV        by Pillow's conversion to RGB (LAB: D50 to sRGB); CMYK JPEGs of Adobe,
                              which are inverted, are turned by Pillow
    I;16 I;16L I;16B I;16N    0 to 65,535: the high byte. 12 bits (TIFF): the high 8
    I                         PGM's: 0 to 65,535. Others hold 32 bits and say not which value is
                              white: read as 16 bits where all lie in 0 to 65,535 and some are above
                              255; all 0 is black
    F                         0 to 1: rounded to 0 to 255

TIFF's "white is zero" is turned where Pillow leaves it. What has no agreed black and white is a
broken picture, and no guess: signed samples of 8 and 16 bits, other ranges of I and F, NaN, and
FITS of more than 8 bits. Of several frames or pages (GIF, WebP, APNG, TIFF, MPO) the first is read.
A rotation in EXIF is not applied, as in the original systems, except where the original applies it:
for detectors, which read with OpenCV, and for vision-language models whose pictures transformers
loads (images.py:decode_upright). Pillow itself applies that of TIFF.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from PIL import Image

_SAMPLE_FORMAT, _BITS, _PHOTOMETRIC = 339, 258, 262  # TIFF's tags
_SIGNED, _WHITE_IS_ZERO = 2, 0
_WITH_ALPHA = ("LA", "PA", "La", "RGBA", "RGBa")
# Modes that Pillow converts to RGB only by way of another one.
_DIVIDED = {"La": "LA", "RGBa": "RGBA"}


class UnknownRange(ValueError):
    """The samples do not say which values are black and white."""


@dataclasses.dataclass(frozen=True)
class Samples:
    """How a file holds its samples, which a loaded picture no longer tells.

    Attributes:
      form: the file's format, as Pillow names it.
      raw: Pillow's raw mode of the first tile, such as `L;2`.
      bits: of a sample; None where Pillow alone knows.
      signed: whether they may be negative (TIFF).
      inverted: whether Pillow leaves it to the reader that 0 is white.
    """

    form: str = ""
    raw: str = ""
    bits: int | None = None
    signed: bool = False
    inverted: bool = False


def samples_of(image: Image.Image) -> Samples:
    """The samples of a picture that is opened and not loaded yet."""
    form = image.format or ""
    raw = ""
    if getattr(image, "tile", None):
        arguments = image.tile[0].args
        raw = arguments if isinstance(arguments, str) else next(iter(arguments or ()), "")
    if form == "TIFF":
        tags = image.tag_v2
        formats = tags.get(_SAMPLE_FORMAT, (1,))
        deep = image.mode in ("I", "F") or image.mode.startswith("I;16")
        return Samples(
            form,
            str(raw),
            tags.get(_BITS, (1,))[0],
            _SIGNED in (formats if isinstance(formats, tuple) else (formats,)),
            deep and tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO,
        )
    if form == "PNG":
        kind, _, depth = str(raw).partition(";")
        bits = int(depth.rstrip("B")) if depth else {"1": 1}.get(kind, 8)
        return Samples(form, str(raw), bits)
    return Samples(form, str(raw))


def eight_bits(image: Image.Image, samples: Samples = Samples()) -> Image.Image:
    """A loaded picture with 8 bits a channel, alpha kept.

    Gray of more bits becomes L, or LA where it has a transparent color.

    Raises:
      UnknownRange: its samples do not say which values are black and white.
    """
    if samples.signed and (samples.bits or 0) < 32:
        raise UnknownRange(
            f"its samples are signed numbers of {samples.bits} bits, whose black and white are "
            "not known; save it with 8 or 16 unsigned bits"
        )
    if samples.form == "FITS" and image.mode not in ("1", "L"):
        raise UnknownRange(
            "FITS with more than 8 bits does not say what is black and white; save it as PNG"
        )
    if image.mode in _DIVIDED:
        return image.convert(_DIVIDED[image.mode])
    if image.mode.startswith("I;16"):
        return _of_16_bits(image, np.asarray(image), samples)
    if image.mode == "I":
        return _of_16_bits(image, _in_16_bits(np.asarray(image), samples), samples)
    if image.mode == "F":
        return Image.fromarray(_of_floats(np.asarray(image), samples.inverted))
    key = image.info.get("transparency")
    if isinstance(key, int) and image.mode == "L" and samples.bits:
        # Pillow spreads 2 and 4 bits over 8, and leaves the transparent color as it was.
        most = (1 << samples.bits) - 1
        image.info["transparency"] = (key & most) * 255 // most
    elif isinstance(key, tuple) and samples.bits == 8:
        image.info["transparency"] = tuple(value & 255 for value in key)
    return image


def rgb_on_white(image: Image.Image) -> Image.Image:
    """A picture of 8 bits a channel as RGB, its alpha composited on white."""
    if _has_alpha(image):
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def is_plain(image: Image.Image) -> bool:
    """Whether `rgb_on_white` would only copy the picture."""
    return image.mode == "RGB" and "transparency" not in image.info


def needs_low_bytes(image: Image.Image, samples: Samples) -> bool:
    """Whether a transparent color of 16 bits a channel (PNG) decides over pixels of this picture.

    Pillow keeps the high bytes, in which several colors may be that one: see `with_key`.
    """
    key = image.info.get("transparency")
    if samples.bits != 16 or image.mode != "RGB" or not isinstance(key, tuple):
        return False
    high = np.array([value >> 8 for value in key])
    if (np.asarray(image) == high).all(axis=-1).any():
        return True
    del image.info["transparency"]
    return False


def with_key(high: Image.Image, low: Image.Image) -> Image.Image:
    """RGBA of a PNG of 16 bits a channel with a transparent color.

    Args:
      high: the high bytes of its channels, RGB, with the color in `info`.
      low: the low ones.
    """
    key = np.array(high.info["transparency"])
    shown = (np.asarray(high) != key >> 8) | (np.asarray(low) != (key & 255))
    image = high.copy()
    del image.info["transparency"]
    image.putalpha(Image.fromarray(np.where(shown.any(axis=-1), 255, 0).astype(np.uint8)))
    return image


def _has_alpha(image: Image.Image) -> bool:
    if image.mode in _WITH_ALPHA or "transparency" in image.info:
        return True
    palette = image.palette if image.mode == "P" else None
    return palette is not None and palette.mode.endswith("A")


def _of_16_bits(image: Image.Image, values: np.ndarray, samples: Samples) -> Image.Image:
    """L of integers in 0 to 65,535 (of 12 bits: 4,095); LA where one of them is transparent."""
    shift = 4 if samples.bits == 12 else 8
    made = (values >> shift).astype(np.uint8)
    if samples.inverted:
        made = 255 - made
    key = image.info.get("transparency")
    if not isinstance(key, int):
        return Image.fromarray(made)
    alpha = np.where(values == key, 0, 255).astype(np.uint8)
    return Image.merge("LA", (Image.fromarray(made), Image.fromarray(alpha)))


def _in_16_bits(values: np.ndarray, samples: Samples) -> np.ndarray:
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    if not 0 <= low <= high <= 65_535 or (0 < high <= 255 and samples.form != "PPM"):
        raise UnknownRange(
            f"its samples are integers of 32 bits from {low} to {high}, of which white is not "
            "known; save it with 8 or 16 bits"
        )
    return values


def _of_floats(values: np.ndarray, inverted: bool) -> np.ndarray:
    low, high = float(values.min(initial=0)), float(values.max(initial=0))
    if not 0 <= low <= high <= 1:  # NaN too
        raise UnknownRange(
            f"its samples are floats from {low:.4g} to {high:.4g}, where 0 (black) to 1 (white) "
            "was expected; save it with 8 or 16 bits"
        )
    made = np.round(values * 255).astype(np.uint8)
    return 255 - made if inverted else made
