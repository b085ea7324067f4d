"""Oscar, loaded straight onto a 2 x 2 x 2 mesh: logits and captions as on one device."""

from __future__ import annotations

import functools

import jax
import numpy as np
from compare import LAYER, load_on_mesh
from flax import nnx
from oscar_pair import LAYOUT, make_pair, pictures, real
from oscar_torch import MASK, PAD, SEP

from mmqa_jax.core.mesh import batch_sharding
from mmqa_jax.decoding.oscar_caption import write_captions
from mmqa_jax.weights.published import load_published


def test_logits_and_captions(tmp_path):
    folder = make_pair(tmp_path).folder
    mesh, spread, whole = load_on_mesh(functools.partial(load_published, "oscar", folder, unroll=1))
    graphdef, state = nnx.split(spread)
    plain = nnx.state(whole)
    up = spread.bert.layers.up.kernel[...]  # [layers, embed, mlp]
    layers, embed, mlp = up.shape
    assert up.addressable_shards[0].data.shape == (layers, embed // 2, mlp // 2)

    captions, labels, regions = pictures()
    inputs = LAYOUT.captioning(captions, labels, regions)
    by_row = batch_sharding(mesh)

    def forward(state, inputs):
        model = nnx.merge(graphdef, state)
        return model.token_logits(model.encode(inputs))

    want = jax.jit(forward)(plain, inputs)
    got = jax.jit(forward, out_shardings=by_row)(state, jax.device_put(inputs, by_row))
    rows = real(inputs)
    np.testing.assert_allclose(got[rows], want[rows], **LAYER)

    prompt = LAYOUT.prompt(labels, regions)
    asked = {"mask_id": MASK, "sep_id": SEP, "pad_id": PAD, "num_beams": 3, "max_new_tokens": 5}
    want = write_captions(graphdef, plain, prompt, **asked)
    got = write_captions(graphdef, state, jax.device_put(prompt, by_row), **asked)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.scores, want.scores, **LAYER)
