"""The TPU's kernels, interpreted, on eight devices against one: equal to the bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.models.attention.fused import fused_attention, fused_prefix_attention

KEY = jax.random.key(0)


def drawn(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(jnp.bfloat16)


def gradient(q, k, v, mask):
    """Of a sum over heads and rows that are all different, with half of the weights dropped."""
    options = {"mask": mask, "dropout_rate": 0.5, "dropout_key": KEY, "interpret": True}
    attended, back = jax.vjp(functools.partial(fused_attention, **options), q, k, v)
    return attended, back(attended)


def beams(q, prefix, there, past, own, seen):
    caches = ((prefix, prefix + 1), there, (past, past + 1), (own, own))
    return fused_prefix_attention(jnp.array(1), q, *caches, seen, interpret=True)


def cases():
    """Name -> function and arguments."""
    q, k, v = (drawn(8, 8, 4, 64, seed=n) for n in range(3))
    one_mask = np.arange(8)[None, None, None] < 6
    masks = np.random.default_rng(5).random((8, 1, 8, 8)) < 0.6
    masks[..., 0] = True
    yield "encoder", gradient, (q, k, v, masks)
    yield "one_mask", gradient, (q, k, v, one_mask)
    past = drawn(2, 8, 6, 256, seed=4)
    seen = np.ones((8, 4, 10), bool)
    prefix = drawn(2, 8, 12, 256, seed=3), np.ones((8, 12), bool)
    yield "beams", beams, (q[:, :4], *prefix, past, k[:, :4], seen)


@pytest.mark.parametrize("name", ["encoder", "one_mask", "beams"])
def test_eight_devices_equal_one(name):
    ((function, arguments),) = [(run, given) for case, run, given in cases() if case == name]
    alone = jax.jit(function)(*arguments)
    with jax.set_mesh(make_mesh({"data": 2, "fsdp": 2, "tensor": 2})):
        split = jax.jit(function)(*arguments)
    assert np.std(np.asarray(jax.tree.leaves(alone)[0], np.float32)) > 0.1
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((split, alone)))
