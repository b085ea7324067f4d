"""Attention of one token per slot to its cached columns: a Pallas kernel for NVIDIA GPUs (Triton).

Flash decoding (Dao et al. 2023): a program for each slot and key head, and each part of the
columns where slots alone would not fill the device; it reads the slot's own columns in blocks, with
a running softmax, for all query heads of the key head at once. Scores never leave the chip. JAX's
own kernel, `jax.experimental.pallas.ops.gpu.decode_attention`, wants keys by token where this cache
has them transposed (a copy of all in each step), knows no int8, and rounds the parts' sums to
bfloat16 before they are added up.

A file of its own because Pallas takes half a second to import.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from mmqa_jax.decoding.cached_segments import Segment
from mmqa_jax.models.masked import MASKED

_BLOCK = 64  # columns: keys and values of three blocks, of heads of 128, take 96 KiB of 227
_ROWS = 16  # of a product on tensor cores, at least
_PROGRAMS = 512  # that fill a device: two at a time on each of an H100's 132 processors, twice


def ragged_attention(
    q: jax.Array, held: Segment, lengths: jax.Array, *, read: int, interpret: bool = False
) -> jax.Array:
    """One token of every slot, attending to the slot's first columns.

    Args:
      q: [S, 1, heads, D], D a power of two from 16 on, rotated.
      held: with the tokens' own keys and values; T is a multiple of 16.
      lengths: int32 [S], columns that each slot's token sees, one at least.
      read: columns of each slot that the kernel's stated costs are those of.
      interpret: run without a GPU, slowly, for tests.

    Returns:
      [S, 1, heads, D].
    """
    slots, _, heads, size = q.shape
    kv_heads, columns = held.value.shape[1:3]
    groups = heads // kv_heads
    block = min(_BLOCK, columns & -columns)  # of a power of two, which divides all
    count, parts = columns // block, 1
    while slots * kv_heads * parts < _PROGRAMS and 2 * parts <= count:
        parts *= 2
    arrays = [x for x in (held.key, held.value, held.key_scale, held.value_scale) if x is not None]

    def of_head(x: jax.Array) -> pl.BlockSpec:  # all of one slot and key head
        return pl.BlockSpec(
            (None, None, *x.shape[2:]), lambda s, h, _: (s, h, *(0,) * (x.ndim - 2))
        )

    rows = max(_ROWS, pl.next_power_of_2(groups))  # of which `groups` are there
    shape = (slots, kv_heads, parts, groups)
    of_part = pl.BlockSpec((None, None, None, rows), lambda s, h, n: (s, h, n, 0))
    out = pl.BlockSpec((None, None, None, rows, size), lambda s, h, n: (s, h, n, 0, 0))
    of_column = sum(x.nbytes for x in arrays) // columns
    cost = {
        "flops": 4 * slots * heads * size * read,
        "transcendentals": slots * heads * read,
        "bytes_accessed": of_column * read + q.nbytes + 4 * slots * heads * parts * (size + 2),
    }
    top, total, summed = pl.pallas_call(
        functools.partial(_kernel, groups=groups, block=block, blocks=pl.cdiv(count, parts)),
        grid=(slots, kv_heads, parts),
        in_specs=[
            pl.BlockSpec((None, None, rows, size), lambda s, h, _: (s, h, 0, 0)),
            pl.BlockSpec((None,), lambda s, *_: (s,)),
            *map(of_head, arrays),
        ],
        out_specs=[of_part, of_part, out],
        out_shape=[
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct((*shape, size), jnp.float32),
        ],
        cost_estimate=pl.CostEstimate(**cost),
        metadata={name: str(n) for name, n in cost.items()},  # a compiled program shows this alone
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="ragged_attention",
    )(q.reshape(slots, kv_heads, groups, size), lengths.astype(jnp.int32), *arrays)
    weights = jnp.exp(top - top.max(2, keepdims=True))  # [S, kv, parts, G]
    summed = (summed * weights[..., None]).sum(2) / (total * weights).sum(2)[..., None]
    return summed.astype(q.dtype).reshape(q.shape)


def _kernel(
    q_ref: Any, length_ref: Any, key_ref: Any, value_ref: Any, *refs: Any,
    groups: int, block: int, blocks: int,
):  # fmt: skip
    """One part: q [rows, D], `groups` of them real; keys [D, T], values [T, D], scales [T]."""
    scales, (top_ref, total_ref, out_ref) = refs[:-3], refs[-3:]
    rows, size = q_ref.shape
    length, first = length_ref[()], pl.program_id(2) * blocks
    own = jnp.arange(rows) < groups
    q = plgpu.load(q_ref, mask=own[:, None], other=0)
    dtype = q.dtype if scales else jnp.promote_types(q.dtype, key_ref.dtype)

    def one(n, carry):
        top, total, out = carry
        columns = pl.ds(n * block, block)
        scores = plgpu.dot(q.astype(dtype), key_ref[:, columns].astype(dtype)) * size**-0.5
        if scales:
            scores *= scales[0][columns][None]
        visible = n * block + jnp.arange(block) < length
        scores = jnp.where(visible[None], scores, MASKED)
        new_top = jnp.maximum(top, scores.max(1))
        weights, decay = jnp.exp(scores - new_top[:, None]), jnp.exp(top - new_top)
        total = total * decay + weights.sum(1)
        if scales:
            weights *= scales[1][columns][None]
        read = plgpu.dot(weights.astype(dtype), value_ref[columns, :].astype(dtype))
        return new_top, total, out * decay[:, None] + read

    none = jnp.zeros(rows, jnp.float32)
    carry = (none + MASKED, none, jnp.zeros((rows, size), jnp.float32))
    end = jnp.minimum((length + block - 1) // block, first + blocks)
    top, total, out = jax.lax.fori_loop(first, end, one, carry)
    plgpu.store(top_ref, top, mask=own)
    plgpu.store(total_ref, total, mask=own)
    plgpu.store(out_ref, out, mask=own[:, None])
