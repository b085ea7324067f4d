"""BART, loaded straight onto a 2 x 2 x 2 mesh: log-probabilities as on one device."""

import functools

import jax
import numpy as np
from compare import LAYER, load_on_mesh
from flax import nnx
from random_weights import publish

from mmqa_jax.core.mesh import batch_sharding
from mmqa_jax.models.bart.network import BartConfig
from mmqa_jax.weights.published import load_published

CONFIG = BartConfig(
    vocab_size=102, hidden=48, encoder_layers=2, decoder_layers=2, encoder_heads=4, decoder_heads=6,
    encoder_mlp=56, decoder_mlp=72, positions=40, activation="gelu_new", scale_embedding=True, pad=3,
    start=5,
)  # fmt: skip


def test_log_probabilities(tmp_path):
    folder = publish("bart", CONFIG, tmp_path)
    mesh, spread, whole = load_on_mesh(functools.partial(load_published, "bart", folder, unroll=1))
    graphdef, state = nnx.split(spread)
    up = spread.decoder.layers.up.kernel[...]  # [layers, embed, mlp]
    layers, embed, mlp = up.shape
    assert up.addressable_shards[0].data.shape == (layers, embed // 2, mlp // 2)

    rng = np.random.default_rng(0)
    source, target = (rng.integers(6, spread.config.vocab_size, (4, n)) for n in (20, 12))
    source_mask, target_mask = (
        np.arange(ids.shape[1]) < np.array(lengths)[:, None]
        for ids, lengths in ((source, (20, 3, 17, 9)), (target, (5, 12, 1, 9)))
    )
    batch = (source, source_mask, np.where(target_mask, target, -100))

    def forward(state, *batch):
        return nnx.merge(graphdef, state).log_probs(*batch)

    want = jax.jit(forward)(nnx.state(whole), *batch)
    by_row = batch_sharding(mesh)
    got = jax.jit(forward, out_shardings=by_row)(state, *jax.device_put(batch, by_row))
    got, want = jax.device_get((got, want))
    np.testing.assert_allclose(got[target_mask], want[target_mask], **LAYER)
