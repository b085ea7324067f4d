"""A detector on eight devices, a copy on each: the regions of one device."""

from __future__ import annotations

import numpy as np
from flax import nnx
from PIL import Image
from tiny_detectors import tiny

from mmqa_jax.core.mesh import MESH_AXES
from mmqa_jax.inference.opened_detector import DetectorChoice, open_detector
from mmqa_jax.inference.region_detector import RegionDetector
from mmqa_jax.models.detection.faster_rcnn import FasterRCNN
from mmqa_jax.weights.folder import save_trained


def test_regions_of_a_batch_over_all_devices(tmp_path):
    model = FasterRCNN(tiny("detectron2"), rngs=nnx.Rngs(3))
    save_trained(tmp_path, model, nnx.state(model), {})
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (60 + n, 90, 3), np.uint8)) for n in range(11)]
    spread = open_detector(DetectorChoice(str(tmp_path), sides=(60, 120)), batch_size=8)
    assert spread.serving.to_json()["mesh"] == dict(zip(MESH_AXES, (8, 1, 1), strict=True))
    one = RegionDetector(model, spread.pictures, batch_size=4)
    found, want = spread(images), one(images)
    assert min(map(len, want)) >= 3
    for got, one_picture in zip(found, want, strict=True):
        assert len(got) == len(one_picture)
        for name in ("boxes", "features", "scores", "labels", "logits", "attributes"):
            np.testing.assert_allclose(
                getattr(got, name), getattr(one_picture, name), atol=1e-4, err_msg=name
            )
