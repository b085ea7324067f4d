"""Pictures: from encoded bytes, or a tar of them, to RGB, square pixels, and patches with boxes.

What the pixels of each of Pillow's modes mean: one table, from a file's samples to 8 bits.

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
loads (decode.py:decode_upright). Pillow itself applies that of TIFF.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Literal

import numpy as np
from jaxtyping import UInt8
from PIL import ExifTags, Image, ImageFile

from mmqa_jax.core.errors import RunError, UserError, first_names
from mmqa_jax.data.pictures.bounds import PictureError, check_bytes, check_decoded
from mmqa_jax.data.pictures.resize import PictureShape, square

Alpha = Literal["white", "dropped"]


# EXIF's orientations beside 1, and those that exchange width and height.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_LYING = range(5, 9)

# Not decoded: PostScript and metafiles are programs, which Pillow has others run.
_PROGRAMS = ("EPS", "WMF")


class BrokenPictures:
    """Counts pictures that could not be decoded; above the limit the run fails.

    Args:
      total: how many pictures there are.
      limit: how many may be broken; default 1 % of `total`, at least 10.
      remedy: what the user can do about too many.
      problem: what is wrong with them, for the message.
    """

    def __init__(
        self,
        total: int,
        limit: int | None = None,
        remedy: str = "fetch the picture files again or raise --max_broken_pictures",
        problem: str = "cannot be decoded",
    ):
        self.limit = max(10, total // 100) if limit is None else limit
        self.remedy, self.problem = remedy, problem
        self.reasons: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        return list(self.reasons)

    @property
    def count(self) -> int:
        return len(self.reasons)

    def warn(self, what: str) -> None:
        """Says on stderr how many pictures there are of a kind, such as `pictures left out`."""
        if self.count:
            print(f"{what}: {self.count} ({first_names(self.names)}).", file=sys.stderr)

    def add(self, name: str, reason: str) -> None:
        """Counts picture `name` once; raises RunError with the names above the limit."""
        self.reasons.setdefault(name, reason)
        if self.count > self.limit:
            subject = f"{self.count} pictures {self.problem}"
            if self.count == 1:
                subject = f"1 picture {self.problem}".replace(" have ", " has ")
            raise RunError(
                f"{subject}, more than the {self.limit} allowed "
                f"({first_names(self.names, 20)}), the last because {reason.rstrip('.')}; "
                f"{self.remedy}."
            )


def decode(data: bytes, name: str = "picture") -> Image.Image:
    """Decodes an encoded picture (any format Pillow reads) to RGB, alpha composited on white.

    Truncated files are decoded as far as possible, as in the WebQA baseline. What the pixels of
    each mode mean: see the module; how large a picture may be: picture_bounds. Raises PictureError
    with `name` where the bytes are no picture.
    """
    return _opened(data, name, rgb_on_white)


def decoded(data: bytes, pixels: int, name: str = "picture") -> Image.Image:
    """A picture for a page: 8 bits a channel, alpha kept, sides of at most `pixels`.

    Raises PictureError with `name`.
    """

    def small(image: Image.Image) -> Image.Image:
        made = image.copy()
        made.thumbnail((pixels, pixels))
        return made

    return _opened(data, name, small, 2 * pixels)


def _opened(
    data: bytes,
    name: str,
    convert: Callable[[Image.Image], Image.Image],
    least: int | None = None,
    *,
    alpha: Alpha = "white",
) -> Image.Image:
    """The encoded picture, with 8 bits a channel, after `convert`.

    PictureError with `name` where that fails.

    `least`: a JPEG is decoded at the smallest of 1, 1/2, 1/4 and 1/8 of its size with sides of so
    many pixels or more; None: at its size.
    """
    # Pillow has no switch per call; the original systems set the same flag.
    ImageFile.LOAD_TRUNCATED_IMAGES = True
    check_bytes(len(data), name)
    try:
        with Image.open(io.BytesIO(data), formats=_formats()) as image:
            check_decoded(image, len(data), name)
            samples = samples_of(image)
            if least is not None:
                image.draft(None, (least, least))
            image.load()
            if alpha == "dropped" and image.mode != "P":
                image.info.pop("transparency", None)
            if needs_low_bytes(image, samples):
                return convert(with_key(image, _low_bytes(data)))
            return convert(eight_bits(image, samples))
    except PictureError:
        raise
    except UnknownRange as error:
        raise PictureError(f"{name}: {error}.") from error
    except Exception as error:  # decoders raise errors of many kinds
        raise PictureError(
            f"{name}: not a picture that can be decoded ({_reason(error)}); give a PNG, JPEG, "
            "GIF or WebP file."
        ) from error


def _low_bytes(data: bytes) -> Image.Image:
    """The low bytes of a PNG with 16 bits a channel, as RGB."""
    with Image.open(io.BytesIO(data)) as image:
        # The same bytes in the other order: what Pillow keeps is then the low one.
        image.tile = [tile._replace(args="RGB;16L") for tile in image.tile]
        image.load()
        return image.copy()


@functools.cache
def _formats() -> list[str]:
    """Pillow's formats, in the order in which it tries them."""
    Image.preinit()
    Image.init()
    return [form for form in Image.ID if form not in _PROGRAMS]


def decode_to_pixels(
    data: bytes,
    size: int,
    resize: PictureShape = "squash",
    *,
    alpha: Alpha,
    name: str = "picture",
    scaled: bool = False,
) -> UInt8[np.ndarray, "H W 3"]:
    """Decodes a picture and makes it square (see `to_pixels`), or fit for NaFlex or a Qwen-VL.

    Args:
      alpha: `white` lays the picture on white before it is resized; `dropped` resizes it in its
        own mode and then forgets its alpha, as CLIP's preprocessing does (openai/CLIP clip.py,
        _transform: Resize, CenterCrop, convert("RGB")). A palette's colors are then not mixed.
      scaled: a JPEG with sides of twice `size` or more is decoded at a fraction of its size, by
        libjpeg's scaled inverse transform: faster, and not quite CLIP's pixels.

    Raises:
      PictureError: with `name`, where the bytes are no picture.
    """

    def on_white(image: Image.Image) -> Image.Image:
        # What is RGB already is not copied.
        plain = is_plain(image)
        return square(image if plain else rgb_on_white(image), size, resize, name)

    def without_alpha(image: Image.Image) -> Image.Image:
        return square(image, size, resize, name).convert("RGB")

    convert = on_white if alpha == "white" else without_alpha
    return np.asarray(_opened(data, name, convert, size if scaled else None, alpha=alpha))


def verify(data: bytes, name: str = "picture") -> None:
    """Checks cheaply that `decode` will work: header and, in PNG, checksums.

    Only a picture that fails the cheap check is decoded in full, since the lenient
    decoder may still read it. Raises PictureError.
    """
    check_bytes(len(data), name)
    try:
        with Image.open(io.BytesIO(data), formats=_formats()) as image:
            check_decoded(image, len(data), name)
            # What these hold is known only once they are decoded.
            sure = image.mode not in ("I", "F") and image.format not in ("TIFF", "FITS")
            image.verify()
    except PictureError:
        raise
    except Exception:  # see decode
        sure = False
    if not sure:
        decode(data, name)


def size_of(data: bytes, name: str = "picture") -> tuple[int, int]:
    """Width and height of an encoded picture, by its header; raises PictureError with `name`."""
    check_bytes(len(data), name)
    try:
        with Image.open(io.BytesIO(data), formats=_formats()) as image:
            check_decoded(image, len(data), name)
            return image.size
    except PictureError:
        raise
    except Exception as error:  # decoders raise errors of many kinds
        raise PictureError(
            f"{name}: not a picture that can be decoded ({_reason(error)}); give a PNG, JPEG, "
            "GIF or WebP file."
        ) from error


def decode_upright(data: bytes, name: str = "picture") -> Image.Image:
    """`decode`, turned as EXIF says: what OpenCV's imread gives the detectors.

    Raises PictureError with `name`.
    """
    image, turn = decode(data, name), _TURNS.get(_orientation(data))
    return image if turn is None else image.transpose(turn)


def upright_size_of(data: bytes, name: str = "picture") -> tuple[int, int]:
    """`size_of` what `decode_upright` gives; raises PictureError with `name`."""
    width, height = size_of(data, name)
    return (height, width) if _orientation(data) in _LYING else (width, height)


def _orientation(data: bytes) -> int:
    """EXIF's orientation of an encoded picture, 1 to 8, as `decode` leaves it; 1 if unreadable."""
    try:
        with Image.open(io.BytesIO(data), formats=_formats()) as image:
            turned = image.format == "TIFF"  # by Pillow
            return 1 if turned else image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # EXIF is damaged in many ways, and OpenCV ignores it then too
        return 1


def read_picture_file(path: str | os.PathLike) -> bytes:
    """Encoded bytes of a picture file; UserError where it cannot be read or is too large."""
    try:
        with open(path, "rb") as file:
            check_bytes(os.fstat(file.fileno()).st_size, str(path))
            return file.read()
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such picture file; check the path.") from error
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); a picture file was expected."
        ) from error


def _reason(error: Exception) -> str:
    if isinstance(error, Image.UnidentifiedImageError):
        return "unknown format"
    return str(error) or type(error).__name__


_SAMPLE_FORMAT, _BITS, _PHOTOMETRIC = 339, 258, 262  # TIFF's tags
_SIGNED, _WHITE_IS_ZERO = 2, 0
_WITH_ALPHA = ("LA", "PA", "La", "RGBA", "RGBa")
# Modes that Pillow converts to RGB only by way of another one.
_DIVIDED = {"La": "LA", "RGBa": "RGBA"}


class UnknownRange(ValueError):
    """The samples do not say which values are black and white."""


@dataclasses.dataclass(frozen=True)
class Samples:
    """How a file holds its samples, which a loaded picture no longer tells."""

    form: str = ""  # the file's format, as Pillow names it
    raw: str = ""  # Pillow's raw mode of the first tile, such as `L;2`
    bits: int | None = None  # of a sample; None where Pillow alone knows
    signed: bool = False  # whether they may be negative (TIFF)
    inverted: bool = False  # whether Pillow leaves it to the reader that 0 is white


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

    Gray of more bits becomes L, or LA where it has a transparent color. Raises UnknownRange where
    its samples do not say which values are black and white.
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

    `high` and `low` are the bytes of its channels, RGB; `high` has the color in `info`.
    """
    key = np.array(high.info["transparency"])
    opaque = (np.asarray(high) != key >> 8) | (np.asarray(low) != (key & 255))
    image = high.copy()
    del image.info["transparency"]
    image.putalpha(Image.fromarray(np.where(opaque.any(axis=-1), 255, 0).astype(np.uint8)))
    return image


def _has_alpha(image: Image.Image) -> bool:
    if image.mode in _WITH_ALPHA or "transparency" in image.info:
        return True
    palette = image.palette if image.mode == "P" else None
    return palette is not None and palette.mode.endswith("A")


def _of_16_bits(image: Image.Image, values: np.ndarray, samples: Samples) -> Image.Image:
    """Returns L for integers in 0 to 65,535 (with 12 bits: 4,095), LA if one is transparent."""
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


# Pictures in an uncompressed tar file, read by their place in it; its headers are not believed.


class PictureTar:
    """A tar file's pictures by their path in it; `others` are links and sparse files, which hold
    none.
    """

    def __init__(self, path: Path):
        self._members: dict[str, tuple[int, int]] = {}  # path -> (offset, bytes)
        self.others: set[str] = set()
        try:
            listed = list(_members(path))
        # Damaged headers end in several kinds of error, endless chains of them in a RecursionError.
        except (tarfile.TarError, OSError, ValueError, OverflowError, RecursionError) as error:
            raise UserError(
                f"{path}: not an uncompressed tar file ({error}); write it with `tar cf`."
            ) from error
        for member in listed:
            # A sparse member's size is what it claims, not what the file holds.
            if member.isfile() and not member.issparse():
                self._members[plain_path(member.name)] = member.offset_data, member.size
            elif not member.isdir():
                self.others.add(plain_path(member.name))
        self.others -= set(self._members)
        self._file = open(path, "rb")  # noqa: SIM115 - open as long as the object lives

    def __iter__(self) -> Iterator[str]:
        """The paths of its pictures."""
        return iter(self._members)

    def __contains__(self, name: str) -> bool:
        return plain_path(name) in self._members

    def read(self, name: str) -> bytes:
        """A member's bytes; PictureError for too many, or fewer than its header says."""
        offset, size = self._members[plain_path(name)]
        check_bytes(size, name)
        data = os.pread(self._file.fileno(), size, offset)
        if len(data) < size:
            raise PictureError(f"{name}: the tar file ends within it; copy the file again.")
        return data


def plain_path(name: str) -> str:
    """A path without `./` and double slashes."""
    return str(PurePosixPath(name))


def _members(path: Path) -> Iterator[tarfile.TarInfo]:
    held = path.stat().st_size
    with open(path, "rb") as file, tarfile.open(fileobj=_Bounded(file, held), mode="r:") as tar:
        for member in tar:
            if member.size < 0:  # tarfile would read the same header again and again
                raise tarfile.ReadError(f"{member.name[:60]!r} has {member.size} bytes")
            yield member


class _Bounded:
    """A file; tarfile takes memory for as much as a header claims before it reads."""

    def __init__(self, file: BinaryIO, held: int):
        self._file, self._held = file, held
        self.seek, self.tell = file.seek, file.tell

    def read(self, count: int) -> bytes:
        if count > max(self._held, tarfile.RECORDSIZE):
            raise tarfile.ReadError(f"a header claims {count:,} bytes of the file's {self._held:,}")
        return self._file.read(count)
