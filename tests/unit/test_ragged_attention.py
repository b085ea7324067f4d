"""The kernel that decodes over each slot's own columns, interpreted, against plain products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmqa_jax.decoding import ragged_attention, scanned_cache
from mmqa_jax.decoding.kv_cache import quantize
from mmqa_jax.decoding.scanned_cache import ScannedCache

SLOTS, LAYER = 5, 1


def arrays(heads: int, kv_heads: int, columns: int, size: int, int8: bool):
    """q [S, 1, heads, D], k and v [S, 1, kv_heads, D], and a cache of two layers."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    held = (2, SLOTS, kv_heads, columns, size)
    key, value, scales = normal(*held), normal(*held), (None, None)
    if int8:
        (key, key_scale), (value, value_scale) = quantize(key, -1), quantize(value, -1)
        scales = (key_scale, value_scale)
    token = [normal(SLOTS, 1, count, size) for count in (heads, kv_heads, kv_heads)]
    return token, ScannedCache(key, value, *scales)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "columns", "size"),
    [(4, 4, 384, 64), (8, 2, 256, 128), (3, 1, 2048, 64)],
)
def test_as_plain_products(heads, kv_heads, columns, size, int8):
    """Slots without a column, with one, with a whole block, with one more, and with all."""
    token, cache = arrays(heads, kv_heads, columns, size, int8)
    seen = jnp.asarray([0, 1, 128, 129, columns], jnp.int32)
    held = cache.map(lambda x: scanned_cache._layer(x, LAYER, columns))
    want = scanned_cache._one_token(*token, held, seen)
    attend = ragged_attention.attend_on(
        cache, seen, read=columns, mesh=None, specs=None, interpret=True
    )
    got = jax.jit(attend)(*token, jnp.int32(LAYER))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_no_column_behind_a_slots_own_is_read():
    """Blocks behind are not fetched: not even a NaN there shows."""
    columns, block = 512, 128
    token, cache = arrays(2, 2, columns, 64, False)
    seen = jnp.asarray([0, 1, 128, 129, 300], jnp.int32)
    listed = ragged_attention.work(seen, columns, block)
    assert listed.count.tolist() == [1 + 1 + 1 + 2 + 3]
    want, got = (
        ragged_attention.ragged_attention(
            *(x[:, 0] for x in token),
            cache.map(lambda x, f=fill: x.at[:, :, :, 384:].set(f)),
            jnp.int32(LAYER),
            listed,
            block=block,
            read=columns,
            interpret=True,
        )
        for fill in (0.0, np.nan)
    )
    np.testing.assert_array_equal(got, want)
    assert np.isfinite(got).all()
