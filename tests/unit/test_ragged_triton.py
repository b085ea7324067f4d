"""The kernels that attend to the cache on NVIDIA GPUs, against plain products.

Interpreted where there is no such GPU; launch/device_check.sh runs this file on one.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmqa_jax.core.mesh import platform
from mmqa_jax.decoding.cached_attention import Branches, LayerCache, attend
from mmqa_jax.decoding.kv_cache import quantize
from mmqa_jax.decoding.ragged_triton import attend_in_place, attend_to_own

pytestmark = pytest.mark.slow


def interpret() -> bool:
    return platform() != "gpu"


SLOTS = 5
QUANTIZED = jax.jit(quantize, static_argnums=1)
PAGES = 3  # of a row, in any order; page 0 is no row's
TABLE = 1 + np.random.default_rng(0).permutation(SLOTS * PAGES).reshape(SLOTS, PAGES).astype(
    "int32"
)
# Heads, key heads (shared by 1, 4, 8 and 20 queries), columns of three pages and their size.
SHAPES = [(2, 2, 384, 128), (8, 2, 192, 64), (8, 1, 48, 16), (20, 1, 96, 32)]
CACHES = [("float32", "same", 1e-5), ("bfloat16", "same", 1e-2), ("float32", "int8", 1e-5)]


def normal(dtype, *shape):
    values = np.random.default_rng(sum(shape)).normal(size=shape)
    return jax.device_put(values.astype(jnp.dtype(dtype)))  # a cast on the device is a program


def pages(kv_heads, columns, size, dtype, cache):
    """The pages of SLOTS rows of so many columns."""
    count, width = 1 + SLOTS * PAGES, columns // PAGES
    key = normal(dtype, count, kv_heads, size, width)
    value = normal(dtype, count, kv_heads, width, size)
    if cache == "same":
        return LayerCache(key, value, None, None)
    (key, key_scale), (value, value_scale) = QUANTIZED(key, 2), QUANTIZED(value, 3)
    return LayerCache(key, value, key_scale, value_scale)


@functools.partial(jax.jit, static_argnames="cap")
def plainly(q, held, own, branches, table, end, window=None, cap=None, sinks=None):
    """By products over all columns."""
    return attend(q, held, own, branches, table, end=end, window=window, cap=cap, sinks=sinks)


def sinks_of(heads, cap):
    """Sinks where there is a cap."""
    return None if cap is None else np.linspace(-1, 3, heads, dtype=np.float32)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "columns", "size", "dtype", "cache", "most", "window", "cap"),
    [
        *[(*shape, *CACHES[0], None, None) for shape in SHAPES],
        *[(*SHAPES[1], *cache, None, None) for cache in CACHES[1:]],
        (*SHAPES[1], *CACHES[0], 70, 1.5),
    ],
)
def test_a_step_as_plain_products(heads, kv_heads, columns, size, dtype, cache, most, window, cap):
    """Sequences of one token, up to a block's end, one further, and as long as the cache, which is
    read in parts that the others do not reach."""
    held = pages(kv_heads, columns, size, dtype, cache)
    q = normal(dtype, SLOTS, 1, heads, size)
    lengths = np.array([1, 16, columns // 2, columns // 2 + 1, columns], np.int32)
    window = None if window is None else np.full(SLOTS, window, np.int32)
    sinks = sinks_of(heads, cap)

    def attended(*arguments):
        options = {"cap": cap, "read": columns, "interpret": interpret()}
        return attend_to_own(*arguments, window=window, sinks=sinks, **options)

    got = jax.jit(attended)(q, held, TABLE, lengths)
    own = lengths[:, None] - 1
    want = plainly(q, held, own, None, TABLE, lengths.max(), window, cap, sinks)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(*(np.float32(x) for x in (got, want)), rtol=0, atol=most)


@pytest.mark.parametrize(
    ("dtype", "cache", "most", "window", "cap"),
    [*[(*cache, None, None) for cache in CACHES], (*CACHES[0], 25, 1.5)],
)
@pytest.mark.parametrize("branched", [False, True])
def test_prompts_as_plain_products(branched, dtype, cache, most, window, cap):
    """Chunks of 48 tokens in blocks of 16, at the start, in the middle and at the end of rows in
    another order; with branches, which do not see each other; a row without pages."""
    heads, kv_heads, columns, size, length = 4, 2, 192, 32, 48
    held = pages(kv_heads, columns, size, dtype, cache)
    q = normal(dtype, 4, length, heads, size)
    table = np.array([TABLE[3], TABLE[0], TABLE[4], 0 * TABLE[0]])
    starts = np.array([0, 70, columns - length, 5], np.int32)
    own = starts[:, None] + np.arange(length, dtype=np.int32)
    branches = None
    if branched:  # of 20 tokens, behind trunks of 10, 80, and all
        begin = np.zeros_like(own)
        for row, trunk in ((0, 10), (1, 80)):
            place = own[row]
            begin[row] = np.where(place >= trunk, place - (place - trunk) % 20, 0)
        branches = Branches(np.array([10, 80, columns, 0], np.int32), begin)

    window = None if window is None else np.full(4, window, np.int32)
    sinks = sinks_of(heads, cap)

    def attended(*arguments):
        options = {"cap": cap, "read": columns, "interpret": interpret()}
        return attend_in_place(*arguments, window=window, sinks=sinks, **options)

    got = jax.jit(attended)(q, held, table, starts, branches)
    want = plainly(q, held, own, branches, table, own.max() + 1, window, cap, sinks)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(*(np.float32(x)[:3] for x in (got, want)), rtol=0, atol=most)


def test_no_column_behind_a_sequences_last_block_is_read():
    """Not even a NaN there shows; nor does how long other sequences are."""
    held, q = pages(2, 3 * 256, 32, "float32", "same"), normal("float32", SLOTS, 1, 4, 32)
    chunk, starts = normal("float32", SLOTS, 64, 4, 32), np.array([0, 1, 32, 63, 64], np.int32)

    @jax.jit
    def read(fill, lengths):
        key, value = held.key.at[..., 128:].set(fill), held.value.at[:, :, 128:].set(fill)
        others = TABLE[:, 1:]
        key, value = key.at[others].set(fill), value.at[others].set(fill)
        other = LayerCache(key, value, None, None)
        options = {"read": 256, "interpret": interpret()}
        step = attend_to_own(q, other, TABLE, lengths, **options)
        return step, attend_in_place(chunk, other, TABLE, starts, None, **options)

    def of(fill, *lengths):
        return jax.device_get(read(fill, np.array(lengths, np.int32)))

    want, got = of(0.0, 1, 2, 64, 65, 128), of(np.nan, 1, 2, 64, 65, 128)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.isfinite(one).all()
    longer, _ = of(0.0, 1, 2, 64, 65, 256)
    np.testing.assert_array_equal(longer[:4], want[0][:4])
