"""Oscar on eight fake devices against one; called by test_oscar_captions.py with a folder."""

from __future__ import annotations

import functools
import sys

import jax
import numpy as np
from compare import LAYER, jit, load_on_mesh
from flax import nnx
from oscar_pair import LAYOUT, pictures, real
from oscar_torch import MASK, PAD, SEP

from mmqa_jax.core.mesh import batch_sharding
from mmqa_jax.decoding.oscar_caption import write_captions
from mmqa_jax.weights.published import load_published


def main(folder: str) -> None:
    mesh, spread, whole = load_on_mesh(functools.partial(load_published, "oscar", folder, unroll=1))
    graphdef, state = nnx.split(spread)
    plain = nnx.state(whole)
    up = spread.bert.layers.up.kernel[...]  # [layers, embed, mlp]
    layers, embed, mlp = up.shape
    assert up.addressable_shards[0].data.shape == (layers, embed // 2, mlp // 2)
    print("load")

    captions, labels, regions = pictures()
    inputs = LAYOUT.captioning(captions, labels, regions)
    by_row = batch_sharding(mesh)

    def forward(state, inputs):
        model = nnx.merge(graphdef, state)
        return model.token_logits(model.encode(inputs))

    want = jit(forward)(plain, inputs)
    got = jit(forward, out_shardings=by_row)(state, jax.device_put(inputs, by_row))
    rows = real(inputs)
    np.testing.assert_allclose(got[rows], want[rows], **LAYER)
    print("forward")

    prompt = LAYOUT.prompt(labels, regions)
    asked = {"mask_id": MASK, "sep_id": SEP, "pad_id": PAD, "num_beams": 3, "max_new_tokens": 5}
    want = write_captions(graphdef, plain, prompt, **asked)
    got = write_captions(graphdef, state, jax.device_put(prompt, by_row), **asked)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.scores, want.scores, **LAYER)
    print("generation")


if __name__ == "__main__":
    with jax.default_matmul_precision("highest"):
        main(sys.argv[1])
