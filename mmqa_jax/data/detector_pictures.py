"""Pictures as the detectors of VLP, VinVL and bottom-up attention read them.

Blue comes first, a mean is subtracted, and the short side is resized to a length unless the long
one then exceeds another. Detectron and Caffe resize floats by OpenCV's bilinear filter, which looks
at two pixels however small the result is; maskrcnn-benchmark resizes bytes by Pillow's.

Originals: detectron-vlp lib/utils/blob.py (`prep_im_for_blob`), bottom-up-attention
lib/fast_rcnn/test.py (`_get_image_blob`), scene_graph_benchmark data/transforms/transforms.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32
from PIL import Image

from mmqa_jax.data.pictures.bounds import check_made

BUCKET = 128  # sides of batches are multiples of it, so that few shapes are compiled


@dataclasses.dataclass(frozen=True)
class DetectorPictures:
    """How pictures are prepared.

    Attributes:
      shorter: length of the short side in pixels.
      longer: what the long side has at most.
      mean: of blue, green and red, subtracted.
      filter: `opencv` or `pillow` (see the module).
    """

    shorter: int
    longer: int
    mean: tuple[float, float, float] = (102.9801, 115.9465, 122.7717)
    filter: Literal["opencv", "pillow"] = "opencv"


VLP = DetectorPictures(800, 1333)
BOTTOM_UP = DetectorPictures(600, 1000)
VINVL = DetectorPictures(600, 1000, (103.530, 116.280, 123.675), "pillow")


class DetectorPicture(NamedTuple):
    """A picture prepared.

    Attributes:
      pixels: float32, blue first.
      original: height and width before.
      scale: by which it was resized.
    """

    pixels: Float32[np.ndarray, "H W 3"]
    original: tuple[int, int]
    scale: float


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
