"""The kernel that decodes on NVIDIA GPUs, interpreted, against plain products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmqa_jax.decoding.cached_attention import attend
from mmqa_jax.decoding.cached_segments import Segment
from mmqa_jax.decoding.kv_cache import quantize
from mmqa_jax.decoding.ragged_triton import ragged_attention

SLOTS = 5


def arrays(heads, kv_heads, columns, size, dtype, cache):
    """q [S, 1, heads, D] and one segment of `columns`."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    q, scales = normal(SLOTS, 1, heads, size), (None, None)
    key, value = normal(SLOTS, kv_heads, size, columns), normal(SLOTS, kv_heads, columns, size)
    if cache == "int8":
        (key, key_scale), (value, value_scale) = quantize(key, 2), quantize(value, 3)
        scales = (key_scale, value_scale)
    return q, Segment(key, value, *scales)


def plain(q, held, lengths):
    """As where the kernel does not serve."""
    columns = lengths[:, None] - 1
    whole = {"block": held.columns, "end": lengths.max()}
    return attend(q, [(0, held)], columns, None, None, **whole)


@pytest.mark.parametrize("cache", ["same", "int8"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "columns", "size"),
    [(2, 2, 256, 128), (8, 2, 192, 64), (8, 1, 48, 16), (20, 1, 128, 32)],
)
@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_as_plain_products(heads, kv_heads, columns, size, cache, dtype, most):
    """Sequences of one token, up to a block's end, one further, and as long as the cache; shared
    key heads by 1, 4, 8 and 20 queries, and parts of the columns that a sequence does not reach."""
    q, held = arrays(heads, kv_heads, columns, size, dtype, cache)
    lengths = jnp.asarray([1, 16, columns // 2, columns // 2 + 1, columns], jnp.int32)
    got = jax.jit(lambda *x: ragged_attention(*x, read=columns, interpret=True))(q, held, lengths)
    want = plain(q, held, lengths)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=0, atol=most)


def test_no_column_behind_a_sequences_last_block_is_read():
    """Not even a NaN there shows; nor does what other sequences hold."""
    q, held = arrays(4, 2, 256, 32, "float32", "same")
    lengths = jnp.asarray([1, 2, 64, 65, 128], jnp.int32)

    def of(fill, lengths):
        other = Segment(
            held.key.at[..., 128:].set(fill), held.value.at[:, :, 128:].set(fill), None, None
        )
        return ragged_attention(q, other, lengths, read=256, interpret=True)

    want, got = of(0.0, lengths), of(np.nan, lengths)
    np.testing.assert_array_equal(got, want)
    assert np.isfinite(got).all()
    longest = of(0.0, jnp.asarray([1, 2, 64, 65, 256], jnp.int32))
    np.testing.assert_array_equal(longest[:4], want[:4])
