"""The kernel that decodes over each slot's own columns, interpreted, against plain products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmqa_jax.decoding import kv_cache, ragged_attention, scanned_cache
from mmqa_jax.decoding.kv_cache import quantize
from mmqa_jax.decoding.ragged_attention import attend_on, turns_of
from mmqa_jax.decoding.scanned_cache import ScannedCache, token_width
from mmqa_jax.models.llama.network import rotate

pytestmark = pytest.mark.slow

SLOTS, LAYER = 5, 1
QUANTIZED = jax.jit(quantize, static_argnums=1)


def arrays(heads, kv_heads, columns, size, tokens, int8, rows=SLOTS):
    """q [S, L, heads, D], k and v [S, L, kv_heads, D], and a cache of two layers."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)  # JAX's own would be programs

    held = (2, rows, kv_heads, columns, size)
    key, value, scales = normal(*held), normal(*held), (None, None)
    if int8:
        (key, key_scale), (value, value_scale) = QUANTIZED(key, -1), QUANTIZED(value, -1)
        scales = (key_scale, value_scale)
    token = [normal(SLOTS, tokens, count, size) for count in (heads, kv_heads, kv_heads)]
    return token, ScannedCache(key, value, *scales)


def reference(token, cache, positions, angles, window=None, cap=None, sinks=None):
    """By `_one_token` and `write`, token by token, as where the kernel does not serve."""
    out = []
    for number in range(token[0].shape[1]):
        q, k, v = (x[:, number : number + 1] for x in token)
        cos, sin = (f(angles[:, number, None, None]) for f in (jnp.cos, jnp.sin))
        q, k, at = rotate(q, cos, sin), rotate(k, cos, sin), positions + number
        held = cache.map(lambda x: x[LAYER])
        out.append(scanned_cache._one_token(q, k, v, held, at, window, cap, sinks))
        only = [jnp.zeros((2, *x.shape)).at[LAYER].set(x) for x in (k, v)]
        written = scanned_cache.write(cache, *only, kv_cache.page_each(len(q)), at, None)
        cache = written.map(lambda x, old: old.at[LAYER].set(x[LAYER]), cache)
    return jnp.concatenate(out, axis=1), cache


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "page", "pages", "tokens", "window", "cap", "int8"),
    [
        (4, 4, 64, 384, 1, 1, None, None, False),
        (8, 2, 128, 128, 3, 1, None, 1.5, False),
        (8, 2, 128, 128, 3, 1, 131, 1.5, True),
        (3, 1, 64, 256, 8, 1, None, None, True),
        (3, 1, 96, 2048, 1, 1, 700, None, False),
        (4, 2, 64, 128, 9, 2, None, None, False),
        (4, 2, 64, 128, 9, 3, 200, None, True),
        (3, 1, 256, 128, 9, 1, 300, None, False),
        (4, 2, 512, 128, 9, 2, None, None, False),
    ],
)
def test_as_plain_products(
    heads, kv_heads, size, page, pages, tokens, window, cap, int8, monkeypatch
):
    """Slots without a column, with one, with a whole page, with one more, and almost full; blocks of
    several pages, of one, and of a part of one; several tokens a slot, then a slot a grid step. With
    a window there are sinks too, as of gpt-oss. Heads of 64 and 96 have values beside the keys."""
    if tokens > 1:
        monkeypatch.setattr(ragged_attention, "_ROWS", heads * tokens)
    columns = page * pages
    token, cache = arrays(heads, kv_heads, columns, size, tokens, int8)
    positions = np.array([0, 1, 128 - tokens // 2, 129, columns - tokens], np.int32)
    order = np.random.default_rng(2).permutation(SLOTS * pages).reshape(SLOTS, pages)
    table = order.astype(np.int32)
    angles = np.random.default_rng(1).normal(size=(SLOTS, tokens, size // 2)).astype(np.float32)
    window = None if window is None else np.int32(window)
    sinks = None if window is None else np.linspace(-1, 3, heads, dtype=np.float32)
    options = {"cap": cap, "read": columns, "mesh": None, "specs": None, "interpret": True}

    def paged(x):  # [N, S, kv, T, ...] -> [N, pages, kv, P, ...]
        parts = np.stack(np.split(np.asarray(x), pages, axis=3), axis=2)
        target = np.empty((2, SLOTS * pages, *parts.shape[3:]), parts.dtype)
        target[:, order] = parts
        return target

    def rows(x):
        return np.concatenate(list(np.moveaxis(np.asarray(x)[:, order], 2, 0)), axis=3)

    @jax.jit
    def both(token, cache, held, table, positions, angles):
        turns = turns_of(*(f(angles[:, :, None]) for f in (jnp.cos, jnp.sin)))
        attend = attend_on(table, positions, **options)
        plain = reference(token, cache, positions, angles, window, cap, sinks)
        return attend(*token, turns, held, jnp.int32(LAYER), window, sinks), plain

    held = cache.map(paged)
    held = held.beside(token_width(size)) if size % 128 else held
    found = both(token, cache, held, table, positions, angles)
    (got, written), (want, want_written) = jax.device_get(found)
    written = written.apart(size).map(rows)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)
    # A value halfway between two integers may be rounded to either.
    most = 1 if int8 else 1e-6
    np.testing.assert_allclose(written.key, want_written.key, rtol=0, atol=most)
    np.testing.assert_array_equal(written.value, want_written.value)
    if int8:
        assert (written.key != want_written.key).mean() < 1e-4
        np.testing.assert_allclose(written.key_scale, want_written.key_scale, rtol=1e-5)
        np.testing.assert_array_equal(written.value_scale, want_written.value_scale)


def test_no_page_that_a_slot_does_not_see_is_read():
    """Not even a NaN shows in pages behind a slot's tokens, or before its window's first block."""
    page, pages = 128, 24
    token, cache = arrays(2, 2, page, 64, 1, False, rows=SLOTS * pages)
    positions = np.array([0, 1, 127, 128, 2900], np.int32)
    table = np.arange(SLOTS * pages, dtype=np.int32).reshape(SLOTS, pages)
    turns = np.repeat(np.float32([1, 0]), 64).reshape(1, 1, 2, 64).repeat(SLOTS, 0)
    behind = table[np.arange(pages) * page > positions[:, None]]
    before = table[-1, :16]  # the window of 300 begins in the third block of 1,024

    @jax.jit
    def attended(fill):
        held = cache.map(lambda x: jnp.asarray(x).at[:, behind].set(fill).at[:, before].set(fill))
        held = held.beside(128)
        attend = attend_on(table, positions, read=300, mesh=None, specs=None, interpret=True)
        return attend(*token, turns, held, jnp.int32(LAYER), np.int32(300), None)[0]

    want, got = map(attended, (0.0, np.nan))
    np.testing.assert_array_equal(got, want)
    assert np.isfinite(got).all()
