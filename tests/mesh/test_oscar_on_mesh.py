"""Oscar, loaded straight onto a 2 x 2 x 2 mesh: logits and captions as on one device."""

import functools

import jax
import numpy as np
from compare import LAYER, load_on_mesh
from flax import nnx
from random_weights import publish

from mmqa_jax.core.mesh import batch_sharding
from mmqa_jax.decoding.masked_lm import write_captions
from mmqa_jax.models.bert.network import BertConfig
from mmqa_jax.models.oscar.network import OscarConfig, OscarLayout
from mmqa_jax.weights.published import load_published

BERT = BertConfig(vocab_size=41, hidden=24, layers=2, heads=4, mlp=40, positions=48, types=2)
CONFIG = OscarConfig(BERT, region_features=10)
LAYOUT = OscarLayout(
    caption=9, text=16, regions=6, region_features=10, cls_id=1, sep_id=2, pad_id=0, mask_id=3
)


def test_logits_and_captions(tmp_path):
    folder = publish("oscar", CONFIG, tmp_path)
    mesh, spread, whole = load_on_mesh(functools.partial(load_published, "oscar", folder, unroll=1))
    graphdef, state = nnx.split(spread)
    plain = nnx.state(whole)
    up = spread.bert.layers.up.kernel[...]  # [layers, embed, mlp]
    layers, embed, mlp = up.shape
    assert up.addressable_shards[0].data.shape == (layers, embed // 2, mlp // 2)

    rng = np.random.default_rng(0)
    captions = [rng.integers(5, 41, n).tolist() for n in (5, 3, 12, 1)]
    labels = [rng.integers(5, 41, n).tolist() for n in (4, 0, 9, 1)]
    regions = [rng.normal(size=(n, 10)).astype("f4") for n in (6, 4, 8, 1)]
    inputs = LAYOUT.captioning(captions, labels, regions)
    by_row = batch_sharding(mesh)

    def forward(state, inputs):
        model = nnx.merge(graphdef, state)
        return model.token_logits(model.encode(inputs))

    want = jax.jit(forward)(plain, inputs)
    got = jax.jit(forward, out_shardings=by_row)(state, jax.device_put(inputs, by_row))
    text = np.asarray(inputs.context_mask) | np.asarray(inputs.caption_mask)
    held = np.concatenate([text, inputs.region_mask], axis=1)
    got, want = jax.device_get((got, want))
    np.testing.assert_allclose(got[held], want[held], **LAYER)

    prompt = LAYOUT.prompt(labels, regions)
    asked = {"mask_id": 3, "sep_id": 2, "pad_id": 0, "num_beams": 3, "max_new_tokens": 5}
    want = write_captions(graphdef, plain, prompt, **asked)
    got = write_captions(graphdef, state, jax.device_put(prompt, by_row), **asked)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.scores, want.scores, **LAYER)
    assert len({tuple(row.tolist()) for row in np.asarray(want.tokens)[:, 0]}) > 1
