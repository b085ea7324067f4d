"""The kernel that decodes over each slot's own columns, interpreted, against plain products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmqa_jax.decoding import scanned_cache
from mmqa_jax.decoding.kv_cache import quantize
from mmqa_jax.decoding.ragged_attention import attend_on, ragged_attention, work
from mmqa_jax.decoding.scanned_cache import ScannedCache
from mmqa_jax.models.llama.network import rotate

pytestmark = pytest.mark.slow

SLOTS, LAYER = 5, 1
QUANTIZED = jax.jit(quantize, static_argnums=1)


def arrays(heads: int, kv_heads: int, columns: int, size: int, int8: bool):
    """q [S, 1, heads, D], k and v [S, 1, kv_heads, D], and a cache of two layers."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)  # JAX's own would be programs

    held = (2, SLOTS, kv_heads, columns, size)
    key, value, scales = normal(*held), normal(*held), (None, None)
    if int8:
        (key, key_scale), (value, value_scale) = QUANTIZED(key, -1), QUANTIZED(value, -1)
        scales = (key_scale, value_scale)
    token = [normal(SLOTS, 1, count, size) for count in (heads, kv_heads, kv_heads)]
    return token, ScannedCache(key, value, *scales)


def reference(token, cache, positions, active, angles, cap=None):
    """By `_one_token` and `_write`, as where the kernel does not serve."""
    (q, k, v), angles = token, angles[:, None, None]
    q, k = (rotate(x, jnp.cos(angles), jnp.sin(angles)) for x in (q, k))
    held = cache.map(lambda x: scanned_cache._layer(x, LAYER, x.shape[3]))
    out = scanned_cache._one_token(q, k, v, held, positions, cap=cap)
    only = [jnp.zeros((2, *x.shape)).at[LAYER].set(x) for x in (k, v)]
    written = scanned_cache._write(cache, *only, None, active, positions, None)
    return out, written.map(lambda x, old: old.at[LAYER].set(x[LAYER]), cache)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "columns", "size", "cap", "int8"),
    [
        (4, 4, 384, 64, None, False),
        (8, 2, 256, 128, 1.5, False),
        (8, 2, 256, 128, 1.5, True),
        (3, 1, 2048, 64, None, False),
        (3, 1, 2048, 64, None, True),
    ],
)
def test_as_plain_products(heads, kv_heads, columns, size, cap, int8):
    """Slots without a column, with one, with a whole block, with one more, and almost full."""
    token, cache = arrays(heads, kv_heads, columns, size, int8)
    positions = np.array([0, 1, 128, 129, columns - 1], np.int32)
    active = np.array([True, True, True, False, True])
    angles = np.random.default_rng(1).normal(size=(SLOTS, size // 2)).astype(np.float32)
    options = {"cap": cap, "read": columns, "mesh": None, "specs": None, "interpret": True}

    @jax.jit
    def both(token, cache, positions, active, angles):
        attend = attend_on(cache, positions, active, angles, **options)
        plain = reference(token, cache, positions, active, angles, cap=cap)
        return attend(*token, cache, jnp.int32(LAYER)), plain

    found = jax.device_get(both(token, cache, positions, active, angles))
    (got, written), (want, want_written) = found
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)
    # A value halfway between two integers may be rounded to either.
    most = 1 if int8 else 1e-6
    np.testing.assert_allclose(written.key, want_written.key, rtol=0, atol=most)
    np.testing.assert_array_equal(written.value, want_written.value)
    if int8:
        assert (written.key != want_written.key).mean() < 1e-4
        np.testing.assert_allclose(written.key_scale, want_written.key_scale, rtol=1e-5)
        np.testing.assert_array_equal(written.value_scale, want_written.value_scale)


def test_no_column_behind_a_slots_own_is_read():
    """Blocks behind are not fetched: not even a NaN there shows."""
    columns, block = 512, 128
    token, cache = arrays(2, 2, columns, 64, False)
    positions = np.array([0, 1, 127, 128, 300], np.int32)
    listed = jax.jit(work, static_argnums=(2, 3))(positions, np.ones(SLOTS, bool), columns, block)
    assert listed.count.tolist() == [1 + 1 + 1 + 2 + 3]

    @jax.jit
    def attended(fill):
        return ragged_attention(
            *(x[:, 0] for x in token),
            jnp.ones((SLOTS, 2, 64)),
            cache.map(lambda x: jnp.asarray(x).at[:, :, :, 384:].set(fill)),
            jnp.int32(LAYER),
            listed,
            block=block,
            read=columns,
            interpret=True,
        )[0]

    want, got = map(attended, (0.0, np.nan))
    np.testing.assert_array_equal(got, want)
    assert np.isfinite(got).all()
