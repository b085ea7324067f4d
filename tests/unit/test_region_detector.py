"""A detector in use: few programs, the order of the pictures, whatever is beside them."""

import dataclasses

import jax
import numpy as np
import pytest
import scipy.special
from flax import nnx
from PIL import Image
from tiny_detectors import PRESETS, tiny

from mmqa_jax.data.pictures.decode import PictureError
from mmqa_jax.data.pictures.resize import (
    BOTTOM_UP,
    VINVL,
    VLP,
    bucket,
    detector_batch,
    detector_picture,
)
from mmqa_jax.inference.region_detector import RegionDetector, kind_of
from mmqa_jax.models.detection.faster_rcnn import FasterRCNN, Pictures
from tests.drawn_weights import drawn

pytestmark = pytest.mark.slow

# Odd sizes of two shapes, a line, and a single pixel, which has one, too.
SIZES = [(70, 41), (1, 1), (33, 260), (64, 64), (2, 61), (90, 50)]
SMALL = dataclasses.replace(VINVL, shorter=60, longer=150)


def picture(size: tuple[int, int], seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(values)


@pytest.fixture(scope="module")
def detector():
    model = drawn(lambda: FasterRCNN(tiny("maskrcnn"), rngs=nnx.Rngs()), 3)
    return RegionDetector(model, SMALL, batch_size=2), model


def test_each_picture_is_what_it_is_alone(detector):
    detect, _ = detector
    images = [picture(size, n) for n, size in enumerate(SIZES)]
    found = detect(images)
    assert detect._find._cache_size() == 2  # 128 x 128, and 256 x 128
    for size, image, got in zip(SIZES, images, found, strict=True):
        made = detector_picture(image, SMALL)
        # Twice, a batch as large as the detector's: one of another size rounds otherwise, by which
        # regions that score nearly the same may change places.
        batch = Pictures(*detector_batch([made] * 2, bucket(made.pixels.shape[:2])))
        want = jax.device_get(detect._find(detect._state, batch))
        count = int(want.valid[0].sum())
        assert got.size == size[::-1]
        assert len(got) == count >= 3  # `fewest` of tiny()
        for name in ("boxes", "features", "scores", "labels", "logits"):
            theirs = getattr(want, name)[0, :count]
            np.testing.assert_allclose(getattr(got, name), theirs, atol=1e-4, err_msg=name)
        told = scipy.special.softmax(want.attributes, axis=-1)[0, :count]
        np.testing.assert_allclose(got.attributes, told, atol=1e-4)
    np.testing.assert_allclose(found[0].probabilities.sum(axis=1), 1, rtol=1e-5)


def test_what_cannot_be_loaded_keeps_its_place(detector):
    detect, _ = detector
    images = [picture((70, 41), n) for n in range(5)]
    done = []

    def load(number: int):
        if number in (0, 3):
            raise PictureError(f"{number}: broken.")
        side = (300, 41) if number == 4 else images[number].size
        return detector_picture(images[number].resize(side), SMALL)

    found = detect.find([image.size for image in images], load, done.append)
    assert sum(done) == 5
    assert [isinstance(one, PictureError) for one in found] == [True, False, False, True, True]
    assert "another size than its header" in str(found[4])
    np.testing.assert_array_equal(found[1].boxes, detect(images[1:2])[0].boxes)
    assert detect.find([], load) == []


def test_fingerprints_tell_weights_rules_and_pictures(detector):
    detect, model = detector
    same = RegionDetector(nnx.clone(model), SMALL, batch_size=1)
    changed = nnx.clone(model)
    state = nnx.state(changed)
    *_, (_, last) = nnx.to_flat_state(state)
    last[...] = last[...] + 1e-3
    nnx.update(changed, state)
    other = RegionDetector(changed, SMALL)
    larger = RegionDetector(model, VINVL)
    assert same.fingerprint == detect.fingerprint
    assert len({detect.fingerprint, other.fingerprint, larger.fingerprint}) == 3


def test_kinds():
    pictures = {"detectron": VLP, "maskrcnn": VINVL, "detectron2": BOTTOM_UP}
    for kind, preset in PRESETS.items():
        found = kind_of(tiny(kind))
        assert (found.name, found.pictures) == (preset.__name__, pictures[kind])
