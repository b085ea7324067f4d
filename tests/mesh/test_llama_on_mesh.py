"""LLaMA, loaded straight onto a 2 x 2 x 2 mesh: logits, gradients, generation as on one device."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cached import decode, prefill
from compare import LAYER, load_on_mesh
from flax import nnx
from jax.sharding import NamedSharding
from random_weights import publish

from mmqa_jax.core.mesh import (
    batch_sharding,
    make_mesh,
    partition_spec,
    split_rows,
    state_shardings,
)
from mmqa_jax.decoding import kv_cache
from mmqa_jax.models.common.layers import Embedding
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.network import unstack_layers
from mmqa_jax.weights.published import load_published

CONFIG = LlamaConfig(
    vocab_size=97, hidden=48, layers=2, heads=6, kv_heads=2, mlp=80, positions=640, eps=3e-4,
    rope_theta=1234.5, tied=True,
)  # fmt: skip


@pytest.mark.parametrize("shape", [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "sequence": 4}])
def test_a_lookup_copies_no_embeddings_to_all_devices(shape, capfd):
    """On a mesh with two axes that split a table; forward and backward, as on one device."""
    mesh = make_mesh(shape)
    embedding = Embedding(256, 16, ("vocab", "embed"), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 256, (16, 12))
    weights = rng.normal(size=(16, 12, 16)).astype(np.float32)
    graphdef, state = nnx.split(embedding)
    shardings = state_shardings(state, mesh)

    def loss(state, ids, weights):
        return jnp.sum(jnp.tanh(split_rows(nnx.merge(graphdef, state)(ids))) * weights)

    gradient = jax.jit(jax.value_and_grad(loss), out_shardings=(None, shardings))
    want = jax.jit(jax.value_and_grad(loss))(state, ids, weights)
    capfd.readouterr()
    with jax.set_mesh(mesh):
        batch = jax.device_put((ids, weights), batch_sharding(mesh))
        compiled = gradient.lower(jax.device_put(state, shardings), *batch).compile()
        got = compiled(jax.device_put(state, shardings), *batch)
    assert "full rematerialization" not in capfd.readouterr().err
    assert not re.search(r"f32\[16,12,16\]", compiled.as_text())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)


def test_logits_gradients_and_generation(tmp_path):
    folder = publish("llama", CONFIG, tmp_path)
    mesh, spread, whole = load_on_mesh(functools.partial(load_published, "llama", folder, unroll=1))
    graphdef, state = nnx.split(spread)
    plain = nnx.state(whole)
    up = spread.layers.up.kernel[...]  # [layers, embed, mlp]
    layers, embed, mlp = up.shape
    assert up.addressable_shards[0].data.shape == (layers, embed // 2, mlp // 2)

    ids = np.random.default_rng(0).integers(0, spread.config.vocab_size, (4, 24))
    mask = np.arange(24) < np.array([24, 6, 17, 12])[:, None]
    batch = jax.device_put((ids, mask), batch_sharding(mesh))

    def loss(state, ids, mask):
        logits = nnx.merge(graphdef, state)(ids, mask)
        log_probs = jax.nn.log_softmax(logits[:, :-1])
        picked = jnp.take_along_axis(log_probs, ids[:, 1:, None], axis=-1)[..., 0]
        return -jnp.sum(picked * mask[:, 1:]) / mask[:, 1:].sum(), logits

    gradients, shardings = jax.grad(loss, has_aux=True), state_shardings(state, mesh)
    expected, want = jax.jit(gradients)(plain, ids, mask)
    gradient, got = jax.jit(gradients, out_shardings=(shardings, None))(state, *batch)
    np.testing.assert_allclose(got, want, **LAYER)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **LAYER), gradient, expected)
    want = np.asarray(want)

    unstack_layers(spread)
    q = spread.layers[0].q.kernel[...]
    assert q.sharding.is_equivalent_to(
        NamedSharding(mesh, partition_spec(("heads", "embed"), q.shape, mesh)), q.ndim
    )
    graphdef, state = nnx.split(spread)

    cache = kv_cache.empty(spread.config, 4, 32, "float32", mesh)
    heads = spread.config.kv_heads // (2 if spread.config.kv_heads % 2 == 0 else 1)
    assert cache[0].key.addressable_shards[0].data.shape[:2] == (1, heads)
    where = jax.tree.map(lambda x: x.sharding, cache)
    by_row = batch_sharding(mesh)

    @functools.partial(jax.jit, donate_argnums=3, out_shardings=(by_row, where))
    def begin(state, ids, lengths, cache):
        model = nnx.merge(graphdef, state)
        return prefill(model, model.embed(ids), lengths, cache)

    @functools.partial(jax.jit, donate_argnums=3, out_shardings=(by_row, where))
    def step(state, token, position, cache):
        return decode(nnx.merge(graphdef, state), token, position, cache)

    lengths = np.array([10, 3, 10, 9])
    logits, cache = begin(state, *jax.device_put((ids[:, :10], lengths), by_row), cache)
    np.testing.assert_allclose(logits, want[np.arange(4), lengths - 1], **LAYER)
    at = lengths
    for _ in range(3):
        token, position = jax.device_put((ids[np.arange(4), at], at), by_row)
        logits, cache = step(state, token, position, cache)
        np.testing.assert_allclose(logits, want[np.arange(4), at], **LAYER)
        at = at + 1  # a new array: JAX may still read, or alias, the one it was given
