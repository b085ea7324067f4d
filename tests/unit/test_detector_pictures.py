"""Pictures for detectors: sizes as the originals' rules, pixels as OpenCV's and Pillow's."""

import numpy as np
import pytest
import torch
from PIL import Image

from mmqa_jax.data.pictures.resize import (
    BOTTOM_UP,
    VINVL,
    VLP,
    DetectorPictures,
    bucket,
    detector_batch,
    detector_picture,
    detector_size,
)


def noise(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


@pytest.mark.parametrize(
    ("how", "size", "wanted"),
    [
        (VLP, (640, 480), (1067, 800)),
        (VLP, (2000, 600), (1333, 400)),
        (BOTTOM_UP, (480, 640), (600, 800)),
        (BOTTOM_UP, (1, 1), (600, 600)),
        (BOTTOM_UP, (5000, 1), (1000, 1)),
        (VINVL, (640, 481), (798, 600)),  # the long side is cut, not rounded
        (VINVL, (2000, 603), (1001, 302)),  # the short side is rounded: the long one exceeds 1000
        (VINVL, (1, 9000), (1, 1000)),
    ],
)
def test_sizes(how, size, wanted):
    made = detector_size(*size, how)
    if how is VINVL and min(size) == 1:
        assert min(made[:2]) == 1
        return
    assert made[:2] == wanted
    assert made[2] == pytest.approx(made[0] / size[0], rel=2e-3)


@pytest.mark.parametrize("size", [(70, 50), (31, 90), (1, 7), (1, 1)])
@pytest.mark.parametrize("shorter", [24, 61])
def test_pixels_as_opencv_resizes_floats(size, shorter):
    """torch's interpolation without antialias has the same two taps, by the same scale."""
    how = DetectorPictures(shorter, 160)
    image = noise(*size)
    got = detector_picture(image, how)
    values = np.asarray(image)[:, :, ::-1].astype("f4") - np.array(how.mean, "f4")
    height, width = got.pixels.shape[:2]
    assert (width, height, got.scale) == detector_size(*size, how)
    # One more cell than torch would make, cut off again.
    planes = torch.from_numpy(values.transpose(2, 0, 1).copy())[None]
    planes = torch.nn.functional.pad(planes, (0, 2, 0, 2), mode="replicate")
    want = torch.nn.functional.interpolate(
        planes, scale_factor=got.scale, mode="bilinear", recompute_scale_factor=False
    )[0, :, :height, :width]
    np.testing.assert_allclose(got.pixels.transpose(2, 0, 1), want, atol=2e-2)
    assert got.original == size[::-1]


def test_pixels_as_pillow_resizes_bytes():
    how = DetectorPictures(20, 50, (1.0, 2.0, 3.0), "pillow")
    image = noise(33, 41)
    got = detector_picture(image, how)
    want = np.asarray(image.resize((20, 24), Image.Resampling.BILINEAR)).astype("f4")
    np.testing.assert_array_equal(got.pixels, want[:, :, ::-1] - np.array([1, 2, 3], "f4"))


def test_batches():
    pictures = [detector_picture(noise(w, h), BOTTOM_UP) for w, h in ((64, 48), (90, 70))]
    sizes = [picture.pixels.shape[:2] for picture in pictures]
    assert [bucket(size) for size in sizes] == [(640, 896), (640, 896)]
    batch = detector_batch(pictures, (640, 896))
    assert batch.pixels.shape == (2, 640, 896, 3)
    assert batch.sizes.tolist() == [list(size) for size in sizes]
    assert batch.originals.tolist() == [[48, 64], [70, 90]]
    for padded, picture in zip(batch.pixels, pictures, strict=True):
        height, width = picture.pixels.shape[:2]
        np.testing.assert_array_equal(padded[:height, :width], picture.pixels)
        assert not padded[height:].any()
        assert not padded[:, width:].any()
