"""LLaMA on eight fake devices against one; called by test_llama.py with a checkpoint's folder."""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from compare import LAYER, jit, load_on_mesh
from flax import nnx
from jax.sharding import NamedSharding

from mmqa_jax.core.mesh import batch_sharding, partition_spec, state_shardings
from mmqa_jax.models.llama import KEY_NAMES, VALUE_NAMES, KVCache, unstack_layers
from mmqa_jax.weights.llama import load_llama


def main(folder: str) -> None:
    mesh, spread, whole = load_on_mesh(functools.partial(load_llama, folder, unroll=1))
    graphdef, state = nnx.split(spread)
    plain = nnx.state(whole)
    up = spread.layers.up.kernel[...]  # [layers, embed, mlp]
    layers, embed, mlp = up.shape
    assert up.addressable_shards[0].data.shape == (layers, embed // 2, mlp // 2)
    print("load")

    ids = np.random.default_rng(0).integers(0, spread.config.vocab_size, (4, 24))
    mask = np.arange(24) < np.array([24, 3, 17, 9])[:, None]
    batch = jax.device_put((ids, mask), batch_sharding(mesh))

    def forward(state, ids, mask):
        return nnx.merge(graphdef, state)(ids, mask)

    want = jit(forward)(plain, ids, mask)
    got = jit(forward)(state, *batch)
    np.testing.assert_allclose(got, want, **LAYER)
    print("forward")

    def loss(state, ids, mask):
        log_probs = jax.nn.log_softmax(forward(state, ids, mask)[:, :-1])
        picked = jnp.take_along_axis(log_probs, ids[:, 1:, None], axis=-1)[..., 0]
        return -jnp.sum(picked * mask[:, 1:]) / mask[:, 1:].sum()

    expected = jit(jax.grad(loss))(plain, ids, mask)
    gradient = jit(jax.grad(loss), out_shardings=state_shardings(state, mesh))(state, *batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **LAYER), gradient, expected)
    print("gradient")

    unstack_layers(spread)
    q = spread.layers[0].q.kernel[...]
    assert q.sharding.is_equivalent_to(
        NamedSharding(mesh, partition_spec(("heads", "embed"), q.shape, mesh)), q.ndim
    )
    graphdef, state = nnx.split(spread)

    def place(leaves, names):
        spec = partition_spec(names, leaves[0].shape, mesh)
        return jax.device_put(leaves, NamedSharding(mesh, spec))

    empty = spread.empty_cache(4, 32)
    cache = KVCache(place(empty.key, KEY_NAMES), place(empty.value, VALUE_NAMES))
    heads = spread.config.kv_heads // (2 if spread.config.kv_heads % 2 == 0 else 1)
    assert cache.key[0].addressable_shards[0].data.shape[:2] == (1, heads)
    where = jax.tree.map(lambda x: x.sharding, cache)
    by_row = batch_sharding(mesh)

    @functools.partial(jit, donate_argnums=2, out_shardings=(by_row, where))
    def prefill(state, ids, cache):
        model = nnx.merge(graphdef, state)
        hidden, filled = model.prefill(model.embed(ids))
        return model.logits(hidden), cache.insert(jnp.arange(4), filled)

    @functools.partial(jit, donate_argnums=3, out_shardings=(by_row, where))
    def step(state, token, position, cache):
        return nnx.merge(graphdef, state).decode_step(token, position, cache)

    logits, cache = prefill(state, jax.device_put(ids[:, :10], by_row), cache)
    np.testing.assert_allclose(logits[mask[:, :10]], want[:, :10][mask[:, :10]], **LAYER)
    full = np.asarray(jit(lambda s, i: nnx.merge(nnx.graphdef(whole), s)(i))(plain, ids))
    at = np.array([10, 3, 10, 9])  # rows of several lengths
    for _ in range(3):
        token, position = jax.device_put((ids[np.arange(4), at], at), by_row)
        logits, cache = step(state, token, position, cache)
        np.testing.assert_allclose(logits, full[np.arange(4), at], **LAYER)
        at = at + 1  # a new array: JAX may still read, or alias, the one it was given
    print("generation")


if __name__ == "__main__":
    with jax.default_matmul_precision("highest"):
        main(sys.argv[1])
