"""Which pictures the engine encodes together."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from flax import nnx

from mmqa_jax.decoding import image_features
from mmqa_jax.decoding.requests import Throughput

SMALL, LARGE = np.zeros((1, 1, 3), np.uint8), np.zeros((2, 2, 3), np.uint8)


def test_pictures_of_a_kind_share_full_batches(monkeypatch):
    """Six small pictures are needed and two that follow fill their second batch of four; of large ones
    too few are there, which are encoded one by one. No batch of several is padded."""
    calls = []

    def encode(state, inputs):
        calls.append(inputs)
        return inputs[0]

    programs = SimpleNamespace(
        batches=(1, 4),
        parameters=None,
        kind=lambda pixels: pixels.shape,
        inputs=lambda pictures, size: ([x.shape for x in pictures], size),
        encode=encode,
    )
    monkeypatch.setattr(image_features, "tower_programs_of", lambda *_: programs)
    config = SimpleNamespace(image_token=0, llama=SimpleNamespace(picture_sight="before"))
    model, throughput = SimpleNamespace(tower=nnx.Dict, config=config), Throughput()
    features = image_features.PictureFeatures(model, 16, None, lambda _: 0, throughput)
    following = {7: LARGE, 8: SMALL, 9: SMALL, 10: SMALL}
    features._following = lambda: iter(following.items())
    features._encode({**dict.fromkeys(range(6), SMALL), 6: LARGE})
    sizes = [(shapes[0], len(shapes), size) for shapes, size in calls]
    assert sizes == [(SMALL.shape, 4, 4)] * 2 + [(LARGE.shape, 1, 1)] * 2
    assert set(features._resident) == {*range(10)}
    assert throughput.pictures == 10
