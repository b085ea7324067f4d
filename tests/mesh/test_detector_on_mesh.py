"""A detector on eight devices, a copy on each: the regions of one device."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from flax import nnx
from PIL import Image
from tiny_detectors import tiny

from mmqa_jax.core.mesh import MESH_AXES
from mmqa_jax.inference.region_detector import DetectorChoice, open_detector
from mmqa_jax.models.detection.faster_rcnn import FasterRCNN
from mmqa_jax.weights.folder import save_trained
from tests.drawn_weights import drawn


def test_regions_of_a_batch_over_all_devices(tmp_path):
    model = drawn(lambda: FasterRCNN(tiny("detectron2"), rngs=nnx.Rngs()), 3)
    for deltas in (model.rpn.deltas, model.deltas):  # boxes near their anchors: several remain
        deltas.kernel.set_value(0.05 * np.asarray(deltas.kernel[...]))
    save_trained(tmp_path, model, nnx.state(model), {})
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (60 + n, 90, 3), np.uint8)) for n in range(11)]
    choice = DetectorChoice(str(tmp_path), sides=(60, 120))
    spread = open_detector(choice, batch_size=8)
    assert spread.serving.to_json()["mesh"] == dict(zip(MESH_AXES, (8, 1, 1), strict=True))
    # As beside training: one device, in a thread, while the run's own have a mesh.
    one = open_detector(choice, batch_size=4, beside_training=True)
    assert one.serving.to_json()["devices"] == 1
    with jax.set_mesh(spread.serving.placement.mesh), ThreadPoolExecutor(1) as pool:
        want = pool.submit(one, images).result()
    found = spread(images)
    assert min(map(len, want)) >= 3
    for got, one_picture in zip(found, want, strict=True):
        assert len(got) == len(one_picture)
        for name in ("boxes", "features", "scores", "labels", "logits", "attributes"):
            np.testing.assert_allclose(
                getattr(got, name), getattr(one_picture, name), atol=1e-4, err_msg=name
            )
