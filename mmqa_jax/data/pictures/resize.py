"""Pictures resized as each family of models reads them, with Pillow's filters.

CLIP, SigLIP, Prophet: a square (`to_pixels`), cut into `patches`. SigLIP 2's NaFlex: a rectangle of
whole patches. Qwen2.5-VL and Qwen3-VL: whole, of any shape (transformers
models/qwen2_vl/image_processing_pil_qwen2_vl.py, `smart_resize`). LLaVA-1.5: whole, padded to a
square with its tower's mean color (haotian-liu/LLaVA llava/mm_utils.py, `expand2square` and
`process_images` with `image_aspect_ratio` "pad"), then CLIP's image processor; transformers'
preprocessor_config of llava-hf/llava-1.5-*-hf does not pad: it crops the center, which is
`to_pixels(image, 336, "crop")` alone. LLaVA-OneVision: whole, and alone in its prompt in tiles too
(transformers models/llava_onevision/image_processing_pil_llava_onevision.py). Idefics3, SmolVLM,
InternVL, LFM2-VL, Llama 4: in tiles, behind which it follows whole (`cut_tiles`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, NamedTuple, Protocol, get_args

import numpy as np
from jaxtyping import Float, Float32, Float64, Int32, Int64, UInt8
from PIL import Image

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.pictures.bounds import FREE_PIXELS, PictureError, check_made

BUCKET = 128  # sides of batches are multiples of it, so that few shapes are compiled


@dataclasses.dataclass(frozen=True)
class DetectorPictures:
    """How pictures are prepared."""

    shorter: int  # length of the short side in pixels
    longer: int  # what the long side has at most
    # Of blue, green and red, subtracted.
    mean: tuple[float, float, float] = (102.9801, 115.9465, 122.7717)
    filter: Literal["opencv", "pillow"] = "opencv"  # `opencv` or `pillow` (see the module)


VLP = DetectorPictures(800, 1333)
BOTTOM_UP = DetectorPictures(600, 1000)
VINVL = DetectorPictures(600, 1000, (103.530, 116.280, 123.675), "pillow")


class DetectorPicture(NamedTuple):
    """A picture prepared."""

    pixels: Float32[np.ndarray, "H W 3"]  # float32, blue first
    original: tuple[int, int]  # height and width before
    scale: float  # by which it was resized


class DetectorBatch(NamedTuple):
    """A batch, in the order of `models.detection.faster_rcnn.Pictures`: `Pictures(*batch)`."""

    pixels: Float32[np.ndarray, "B H W 3"]
    sizes: Int32[np.ndarray, "B 2"]
    originals: Int32[np.ndarray, "B 2"]
    scales: Float32[np.ndarray, " B"]


def detector_size(width: int, height: int, how: DetectorPictures) -> tuple[int, int, float]:
    """Width and height that a picture is resized to, and the scale.

    A side has a pixel at least; the originals fail where it would have none.
    """
    short, long = min(width, height), max(width, height)
    if how.filter == "pillow":
        target = how.shorter
        if long / short * target > how.longer:
            target = round(how.longer * short / long)
        if width < height:
            made = target, int(target * height / width)
        else:
            made = int(target * width / height), target
        return max(1, made[0]), max(1, made[1]), made[0] / width
    scale = how.shorter / short
    if np.round(scale * long) > how.longer:
        scale = how.longer / long
    # OpenCV rounds halves to even, as Python does.
    return max(1, round(width * scale)), max(1, round(height * scale)), scale


def detector_picture(
    image: Image.Image, how: DetectorPictures, name: str = "picture"
) -> DetectorPicture:
    """An RGB picture as a detector reads it.

    Raises:
      PictureError: with `name`, it would become too large.
    """
    width, height, scale = detector_size(*image.size, how)
    check_made(width, height, name)
    mean = np.array(how.mean, np.float32)
    if how.filter == "pillow":
        resized = image.resize((width, height), Image.Resampling.BILINEAR)
        pixels = np.asarray(resized)[:, :, ::-1].astype(np.float32) - mean
    else:
        pixels = np.asarray(image)[:, :, ::-1].astype(np.float32) - mean
        pixels = _two_taps(_two_taps(pixels, width, scale, axis=1), height, scale, axis=0)
    return DetectorPicture(pixels, image.size[::-1], scale)


def _two_taps(
    pixels: Float32[np.ndarray, "H W 3"], length: int, scale: float, axis: int
) -> Float32[np.ndarray, "h w 3"]:
    """OpenCV's bilinear filter along one side (modules/imgproc/src/resize.cpp, INTER_LINEAR)."""
    last = pixels.shape[axis] - 1
    at = ((np.arange(length) + 0.5) * (1.0 / scale) - 0.5).astype(np.float32)
    low = np.floor(at).astype(np.int64)
    weight = at - low.astype(np.float32)
    weight[(low < 0) | (low >= last)] = 0
    low = np.clip(low, 0, last)
    weight = weight[None, :, None] if axis else weight[:, None, None]
    first, second = (np.take(pixels, np.minimum(low + n, last), axis=axis) for n in (0, 1))
    return first * (1 - weight) + second * weight


def bucket(size: tuple[int, int]) -> tuple[int, int]:
    """Height and width of the batches in which a picture of that height and width goes."""
    height, width = (-(-side // BUCKET) * BUCKET for side in size)
    return height, width


def detector_batch(pictures: Sequence[DetectorPicture], size: tuple[int, int]) -> DetectorBatch:
    """Pictures in the upper left corners of zeros of `size`, the height and width of a `bucket`."""
    pixels = np.zeros((len(pictures), *size, 3), np.float32)
    for padded, picture in zip(pixels, pictures, strict=True):
        height, width = picture.pixels.shape[:2]
        padded[:height, :width] = picture.pixels
    return DetectorBatch(
        pixels,
        np.array([picture.pixels.shape[:2] for picture in pictures], np.int32),
        np.array([picture.original for picture in pictures], np.int32),
        np.array([picture.scale for picture in pictures], np.float32),
    )


Resize = Literal["squash", "squash_bilinear", "crop", "crop_openai", "sample"]
# Bounds of the scale of a picture for NaFlex, and where the search for it ends.
_LEAST_SCALE, _MOST_SCALE, _SCALE_STEP = 1e-6, 100.0, 1e-5
_FILTERS = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "lanczos": Image.Resampling.LANCZOS,
}
_SQUASHED = {
    "squash": Image.Resampling.BICUBIC,
    "squash_bilinear": Image.Resampling.BILINEAR,
    "sample": Image.Resampling.NEAREST,
}
_LONGEST = 200  # times the short side, as in the original
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)  # of the pictures that CLIP was trained on
_PRECISION = 22  # bits behind the point of a weight
_SUPPORT = 2.0  # of the bicubic kernel, in pixels
_BAND = 2**22  # input pixels that are resized at a time
# Pillow resizes colors multiplied by their alpha.
_PREMULTIPLIED = {"LA": "La", "RGBA": "RGBa"}


class PictureSizes(NamedTuple):
    """The sizes of resized pictures: sides that `unit` divides, from `least` to `most` pixels.

    grown: rounds the sides of a picture with one below `unit`, which is made larger before
      (`int`: GLM-4.xV, `round`: PaddleOCR-VL); None: it is not.
    """

    unit: int
    least: int
    most: int
    grown: Callable[[float], int] | None = None


@dataclasses.dataclass(frozen=True)
class NaFlex:
    """Pictures of any shape for SigLIP 2's NaFlex: scaled to as many whole patches as allowed."""

    patch: int  # side of a patch in pixels
    most: int  # patches of a picture
    resample: str = "bilinear"  # Pillow's filter, `bilinear` or `bicubic`

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of patches of a picture, its shape kept as well as these can.

        As transformers' get_image_size_for_max_num_patches, whose bisection of the scale ends at
        the same step.
        """

        def patches(scale: float, side: int) -> int:
            return max(1, math.ceil(side * scale / self.patch))

        low, high = _LEAST_SCALE, _MOST_SCALE
        while high - low >= _SCALE_STEP:
            scale = (low + high) / 2
            if patches(scale, width) * patches(scale, height) <= self.most:
                low = scale
            else:
                high = scale
        return patches(low, width), patches(low, height)


class TileSteps(Protocol):
    """How a picture becomes a canvas of whole tiles; see `models.llava.tiles.RowTiles`."""

    resample: ClassVar[str]

    def steps(self, width: int, height: int, side: int) -> list[tuple[int, int]]:
        """Widths and heights to which a picture is resized one after the other."""


@dataclasses.dataclass(frozen=True)
class Canvas:
    """Pictures scaled to canvases of whole tiles, which `tiles_of` cuts."""

    split: TileSteps  # how; the whole that follows the tiles is made of the canvas
    side: int  # of a tile in pixels

    def of(self, image: Image.Image, name: str = "picture") -> Image.Image:
        """The canvas of an RGB picture; PictureError for one that is too long and thin."""
        steps = self.split.steps(*image.size, self.side)
        return _in_steps(image, steps, self.split.resample, name)

    def tiles_of(self, pixels: UInt8[np.ndarray, "H W 3"]) -> UInt8[np.ndarray, "tiles S S 3"]:
        """The tiles of a canvas, row by row; several are followed by the whole."""
        canvas, side = Image.fromarray(pixels), self.side
        tiles = _cut(canvas, side, side)
        if len(tiles) == 1:
            return tiles
        whole = canvas.resize((side, side), _FILTERS[self.split.resample])
        return np.concatenate([tiles, np.asarray(whole)[None]])


class UnitBudget(NamedTuple):
    """Pictures of any shape within a number of units; see `budget_size`."""

    units: int
    patch: int
    merge: int


class PictureCut(Protocol):
    """How a picture is cut (`models.llava.tiles.Cut`): it is resized to the sizes `steps`, lies on
    `canvas`, which is cut into tiles, and follows them as a `whole`; sizes are widths and
    heights."""

    @property
    def steps(self) -> Sequence[tuple[int, int]]: ...

    @property
    def canvas(self) -> tuple[int, int]: ...

    @property
    def tile(self) -> tuple[int, int]: ...

    @property
    def whole(self) -> tuple[int, int] | None: ...


# What a picture is made: square in one of these ways, or of a shape near its own.
PictureShape = Resize | NaFlex | PictureSizes | Canvas | UnitBudget


def to_pixels(
    image: Image.Image, size: int, resize: PictureShape = "squash", name: str = "picture"
) -> UInt8[np.ndarray, "H W 3"]:
    """Makes a picture square, bicubic; of NaFlex, PictureSizes and UnitBudget a rectangle of whole
    patches, of Canvas one of whole tiles.

    Args:
      image: an RGB picture.
      size: S, side of the result in pixels.
      resize: `squash` scales both sides to S (Prophet, SigLIP); `squash_bilinear` does so with
        that filter (SigLIP 2); `crop` scales the short side to S
        and crops the center as transformers' CLIPImageProcessor does, whose half pixel goes to
        the right and below; `crop_openai` as OpenAI's code (torchvision's CenterCrop), which
        rounds it to the even; `sample`
        scales as `squash` but takes the nearest pixels, so that no colors are mixed: for
        flat drawings, in questions on colors.
      name: for errors.
    """
    return np.asarray(square(image, size, resize, name))


def square(
    image: Image.Image, size: int, resize: PictureShape, name: str = "picture"
) -> Image.Image:
    if isinstance(resize, NaFlex):
        columns, rows = resize.grid(*image.size)
        shape = columns * resize.patch, rows * resize.patch
        check_made(shape[0], max(image.height, shape[1]), name)
        return image.resize(shape, _FILTERS[resize.resample])
    if isinstance(resize, Canvas):
        return resize.of(image, name)
    if isinstance(resize, PictureSizes | UnitBudget):
        is_budget = isinstance(resize, UnitBudget)
        sides = budget_size(*image.size, *resize) if is_budget else None
        shape = sides or qwen_size(*image.size, resize, name)
        check_made(shape[0], max(image.height, shape[1]), name)
        return image.resize(shape, Image.Resampling.BICUBIC)
    if resize in _SQUASHED:
        check_made(size, max(image.size), name)  # Pillow resizes one side first
        return image.resize((size, size), _SQUASHED[resize])
    if resize not in ("crop", "crop_openai"):
        raise UserError(
            f"resize is {resize!r}: expected one of {', '.join(get_args(Resize))}; change the "
            "config."
        )
    width, height = image.size
    short = min(width, height)
    scaled = (int(size * width / short), int(size * height / short))
    margins = (scaled[0] - size, scaled[1] - size)
    left, top = (
        round(margin / 2) if resize == "crop_openai" else margin // 2 for margin in margins
    )
    return _cropped(image, scaled, (left, top, left + size, top + size), name)


def _cropped(
    image: Image.Image, scaled: tuple[int, int], box: tuple[int, int, int, int], name: str
) -> Image.Image:
    """The box of the picture scaled (bicubic) to that size."""
    large = scaled[0] * scaled[1] > max(FREE_PIXELS, image.width * image.height)
    if large and image.mode not in ("1", "P"):
        return resized_part(image, scaled, box)
    if large:  # without colors to mix, Pillow takes the nearest pixels
        check_made(*scaled, name)
    return image.resize(scaled, Image.Resampling.BICUBIC).crop(box)


def patches(pixels: np.ndarray, patch: int) -> Float[np.ndarray, "R D"]:
    """Cuts pixels [S, S, 3] into R = (S / patch)^2 patches of D = patch * patch * 3 values.

    Patches run row by row from the top left; a patch's values run by row, column, channel.
    """
    _patches_per_side(pixels.shape[0], patch)
    return np.ascontiguousarray(cut_patches(pixels, patch), dtype=np.float32)


def cut_patches(pixels: np.ndarray, patch: int) -> np.ndarray:
    """Cuts pixels of whole patches, in any shape [H, W, 3] and type, as `patches` does."""
    rows, columns = (side // patch for side in pixels.shape[:2])
    grid = pixels.reshape(rows, patch, columns, patch, 3)  # [row, y, column, x, channel]
    return grid.transpose(0, 2, 1, 3, 4).reshape(rows * columns, patch * patch * 3)


def patch_boxes(size: int, patch: int) -> Float[np.ndarray, "R 6"]:
    """Box of every patch of `patches`: x1, y1, x2, y2, area (relative), and 1."""
    side = _patches_per_side(size, patch)
    rows, columns = np.divmod(np.arange(side * side), side)  # [R], [R]
    edges = np.stack([columns, rows, columns + 1, rows + 1], axis=1) / side  # [R, 4]
    tail = np.broadcast_to([1.0 / (side * side), 1.0], (side * side, 2))  # area, score
    return np.concatenate([edges, tail], axis=1).astype(np.float32)


def _patches_per_side(size: int, patch: int) -> int:
    if patch <= 0 or size <= 0 or size % patch:
        raise UserError(
            f"picture side {size} is not a multiple of patch side {patch}; change one of "
            "them in the config."
        )
    return size // patch


def qwen_size(width: int, height: int, sizes: PictureSizes, name: str) -> tuple[int, int]:
    """Width and height that a picture is resized to; PictureError for one that is too long and
    thin.
    """
    if max(width, height) > _LONGEST * min(width, height):
        raise PictureError(
            f"{name}: {width} x {height} pixels, a side more than {_LONGEST} times the other; give "
            "a picture that is less long and thin."
        )
    unit, least, most, grown = sizes
    if grown and min(width, height) < unit:
        scale = unit / min(width, height)
        width, height = grown(width * scale), grown(height * scale)

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
    """RGB picture of any shape -> the pixels that `models.qwen_vl.network.lay_out` takes.

    Raises PictureError with `name` for one that is too long and thin.
    """
    size = qwen_size(*image.size, sizes, name)
    return np.asarray(image.resize(size, Image.Resampling.BICUBIC))


def within_size(width: int, height: int, longest: int, unit: int) -> tuple[int, int]:
    """Width and height of a picture whose sides are at most `longest` pixels, in whole units: they
    are scaled down where one is longer, then up to the next unit (Pixtral).

    Original: transformers models/pixtral/image_processing_pil_pixtral.py
    (`get_resize_output_image_size`).
    """
    ratio = max(height / longest, width / longest)
    if ratio > 1:
        width, height = (max(math.floor(side / ratio), 1) for side in (width, height))
    return math.ceil(width / unit) * unit, math.ceil(height / unit) * unit


def budget_size(width: int, height: int, units: int, patch: int, merge: int) -> tuple[int, int]:
    """Width and height of a picture in whole units of `merge` x `merge` patches, the most that keep
    its ratio of sides and are at most so many units; of a long and thin one, a row of units.

    Original: transformers models/gemma4/image_processing_pil_gemma4.py
    (`get_aspect_ratio_preserving_size`).
    """
    unit = patch * merge
    scale = math.sqrt(units * merge**2 * patch**2 / (height * width))
    high, wide = (math.floor(scale * side / unit) * unit for side in (height, width))
    if not high:
        high, wide = unit, min(width // height, units) * unit
    elif not wide:
        high, wide = min(height // width, units) * unit, unit
    return wide, high


def unit_pixels(
    image: Image.Image, size: tuple[int, int], name: str = "picture"
) -> UInt8[np.ndarray, "H W 3"]:
    """RGB picture of any shape -> the pixels that `models.qwen_vl.network.lay_out` takes, of the
    width and height of `within_size` or `budget_size`. Raises PictureError with `name` for one that
    is too long and thin."""
    check_made(size[0], max(image.height, size[1]), name)
    return np.asarray(image.resize(size, Image.Resampling.BICUBIC))


def pad_color(mean: Sequence[float]) -> tuple[int, ...]:
    """The color around a picture, of the tower's mean from 0 to 1."""
    return tuple(int(255 * value) for value in mean)


PAD_COLOR = pad_color(CLIP_MEAN)


def pad_to_square(image: Image.Image, color: tuple[int, ...] = PAD_COLOR) -> Image.Image:
    """Centers an RGB picture on a square of a color; an odd pixel goes right or below."""
    width, height = image.size
    if width == height:
        return image
    side = max(width, height)
    square = Image.new("RGB", (side, side), color)
    square.paste(image, ((side - width) // 2, (side - height) // 2))
    return square


def llava_pixels(
    image: Image.Image, size: int = 336, name: str = "picture", color: tuple[int, ...] = PAD_COLOR
) -> UInt8[np.ndarray, "S S 3"]:
    """RGB picture of any shape -> pixels [size, size, 3], padded with a color.

    Raises PictureError with `name` for one that is too long and thin (bounds.py).
    """
    side = max(image.size)
    if side * side > FREE_PIXELS:
        check_made(size, side, name)
        return resized_on_square(image, size, color)
    return to_pixels(pad_to_square(image, color), size, "crop")


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
    return np.concatenate([np.asarray(whole)[None], _cut(canvas, side, side)])


def _cut(canvas: Image.Image, wide: int, high: int) -> UInt8[np.ndarray, "tiles H W 3"]:
    """The tiles of a canvas, row by row."""
    width, height = canvas.size
    tiles = np.asarray(canvas).reshape(height // high, high, width // wide, wide, 3)
    return tiles.swapaxes(1, 2).reshape(-1, high, wide, 3)


def cut_tiles(
    image: Image.Image,
    cut: PictureCut,
    resample: str,
    *,
    whole_of_canvas: bool,
    name: str = "picture",
) -> list[UInt8[np.ndarray, "H W 3"]]:
    """Cuts the RGB picture in tiles, row by row, and the whole picture behind them.

    Args:
      image: of any shape.
      cut: the sizes of all.
      resample: Pillow's filter.
      whole_of_canvas: the whole is made of the canvas, not of the picture as it was.
      name: for errors.

    Raises:
      PictureError: it is too long and thin.
    """
    canvas = _in_steps(image, cut.steps, resample, name)
    if canvas.size != cut.canvas:
        check_made(*cut.canvas, name)
        canvas = canvas.crop((0, 0, *cut.canvas))  # black where there is no picture
    pieces = list(_cut(canvas, *cut.tile))
    if cut.whole is not None:
        check_made(cut.whole[0], max(image.height, cut.whole[1]), name)
        whole = (canvas if whole_of_canvas else image).resize(cut.whole, _FILTERS[resample])
        pieces.append(np.asarray(whole))
    return pieces


def _in_steps(
    image: Image.Image, steps: Sequence[tuple[int, int]], resample: str, name: str
) -> Image.Image:
    for size in steps:
        check_made(size[0], max(image.height, size[1]), name)  # Pillow resizes one side first
        image = image.resize(size, _FILTERS[resample])
    return image


# Parts of a resized picture, equal to Pillow's whole one bit by bit. A picture of 1 x 65,000 scaled
# to a short side of 224 has 3 billion pixels, of which CLIP's crop keeps 50,176; LLaVA's square
# around 2,000 x 20,000 has 400 million, most of them padding. Only what counts is computed here.
# Pillow's own `resize(box=...)` holds the box in single precision and gives other pixels (up to 22
# levels on noise).
#
# Pillow (src/libImaging/Resample.c) resizes the columns, rounds to 8 bits, then the rows. (Pillow
# 13 takes the rows first in some pictures that it makes smaller, hence `resized_part` enlarges
# only.)
# A pixel is a weighted sum with weights in fixed point, and sums of integers are exact in float64.


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
            resampled = values[:, :, first - left : first - left + len(taps)] @ taps  # [3, rows]
            out[:, column] = _rounded(resampled.T + beside * background)
    whole = Image.fromarray(across)
    return np.asarray(whole.resize((size, size), Image.Resampling.BICUBIC))


class _Weights:
    """Pillow's weights of the outputs `start` to `stop` of `outputs`, along one side of `inputs`,
    of which `low` to `high` count.
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
