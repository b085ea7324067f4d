"""Attention with linear memory against the plain one."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from mmqa_jax.core.errors import UserError
from mmqa_jax.models import flash
from mmqa_jax.models.layers import attention

RNG = np.random.default_rng(0)


def inputs(length, columns, heads=4, kv_heads=2, size=16):
    shapes = ((2, length, heads, size), *((2, columns, kv_heads, size),) * 2)
    return [RNG.normal(size=shape).astype(np.float32) for shape in shapes]


def plain(q, k, v, mask=None, *, is_causal=True):
    """By `layers.attention` with repeated heads; a causal mask is aligned with the last key."""
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    seen = np.ones((1, 1, q.shape[1], k.shape[1]), bool) if mask is None else mask
    if is_causal:
        seen = seen & np.tri(q.shape[1], k.shape[1], k.shape[1] - q.shape[1], bool)
    return attention(q, k, v, mask=seen)


@pytest.mark.parametrize(("length", "columns"), [(7, 7), (7, 30), (1, 30)])
@pytest.mark.parametrize("of_queries", [False, True])
def test_blocks(length, columns, of_queries):
    q, k, v = inputs(length, columns)
    mask = RNG.random((2, 1, length if of_queries else 1, columns)) < 0.6
    mask[..., columns - length] = True  # every query sees a key
    for is_causal in (True, False):
        blocks = functools.partial(flash.block_attention, is_causal=is_causal, block=8)
        got = jax.jit(blocks)(q, k, v, mask=mask)
        want = plain(q, k, v, mask, is_causal=is_causal)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("columns", [128, 384])
def test_splash_in_interpret_mode(columns):
    """The kernel that a TPU runs, with keys that are not there yet in front of the queries."""
    q, k, v = inputs(128, columns, size=32)
    seen = np.arange(columns) < np.array([[40], [0]])
    seen |= np.arange(columns) >= columns - 128
    got = flash.splash_attention(q, k, v, key_mask=seen, is_causal=True, mesh=None, interpret=True)
    np.testing.assert_allclose(got, plain(q, k, v, seen[:, None, None]), rtol=0, atol=1e-5)


def test_no_array_has_the_size_of_all_scores():
    """The memory of a long prompt is linear: 16 times the length takes about 16 times as much."""

    def temporaries(length):
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(length, length)]
        attend = functools.partial(attention, is_causal=True, implementation="blocks")
        memory = jax.jit(attend).lower(*shapes).compile().memory_analysis()
        return memory.temp_size_in_bytes

    assert temporaries(16384) < 20 * temporaries(1024)


def test_an_unknown_implementation_is_named():
    q, k, v = inputs(2, 2, kv_heads=4)
    with pytest.raises(UserError, match="attention implementation is 'flash': expected one of"):
        attention(q, k, v, implementation="flash")
