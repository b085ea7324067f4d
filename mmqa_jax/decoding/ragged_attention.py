"""Attention of one token per slot to its cached columns: a Pallas kernel for TPU.

Each slot's own columns are read, in blocks, whatever the longest slot's length; blocks of all slots
form one list, so that the next one is fetched while this one is computed with (flash decoding's
running softmax, Dao et al. 2023, in the order of columns). JAX's own kernels for paged caches do
not serve: `paged_attention` takes scales of int8 keys repeated along the head, five bytes for each
that is stored, and gives no way to add a token that is not cached yet; `ragged_paged_attention`
wants keys and values interleaved, one scale for a whole cache and heads of 128.

A file of its own because Pallas takes half a second to import.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_MASKED = -1e30  # as in models.layers
_LANES = 128  # columns of a block are a multiple of this
_LARGEST = 1024  # columns of a block
_BLOCK_BYTES = 2**19  # of one block's keys; four such lie in VMEM, of keys and values, two each


@flax.struct.dataclass
class Work:
    """The blocks that are read, slot by slot; W is as many as there are.

    A slot without columns has one, too: all of it is masked.
    """

    slot: jax.Array  # int32 [W]
    block: jax.Array  # int32 [W], ascending in a slot
    count: jax.Array  # int32 [1]: how many of W count; [devices that split the slots] on a mesh
    columns: jax.Array  # int32 [S], of each slot


def attend_on(
    cache: Any,
    positions: jax.Array,
    *,
    read: int,
    mesh: Mesh | None,
    specs: Any,
    interpret: bool = False,
) -> Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]:
    """The attention of one token of every slot, for all layers.

    Args:
      cache: a `scanned_cache.ScannedCache`, [N, S, kv_heads, T, D], T a multiple
        of 128.
      positions: int32 [S], columns that each slot sees.
      read: columns of each slot that the kernel's stated costs are those of.
      mesh: where the cache lies; None is one device.
      specs: how it lies there, a PartitionSpec in the place of each array.
      interpret: run without a TPU, slowly, for tests.

    Returns:
      A function of q [S, 1, heads, D], k and v [S, 1, kv_heads, D], which the token sees as well,
      and the layer's number; it gives [S, 1, heads, D].
    """
    shape = cache.key.shape
    if mesh is not None:
        shape = NamedSharding(mesh, specs.key).shard_shape(shape)
    block = _block_columns(shape[3], shape[2] * shape[4] * cache.key.dtype.itemsize)

    def listing(lengths: jax.Array) -> Work:
        return work(lengths, shape[3], block)

    def attend(*arguments: Any) -> jax.Array:
        return ragged_attention(*arguments, block=block, read=read, interpret=interpret)

    if mesh is not None:  # XLA does not split a kernel by itself
        of_slots, of_heads = PartitionSpec(specs.key[1]), PartitionSpec(*specs.key[1:3])
        split = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
        listing = split(listing, in_specs=(of_slots,), out_specs=of_slots)
        arguments = (of_heads, of_heads, of_heads, specs, PartitionSpec(), of_slots)
        attend = split(attend, in_specs=arguments, out_specs=of_heads)
    listed = listing(positions)

    def of_layer(q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array) -> jax.Array:
        return attend(q[:, 0], k[:, 0], v[:, 0], cache, layer, listed)[:, None]

    return of_layer


def _block_columns(columns: int, column_bytes: int) -> int:
    """How many columns one block has, of `columns` with `column_bytes` of keys each."""
    most = max(_LANES, min(_LARGEST, _BLOCK_BYTES // column_bytes))
    sizes = range(_LANES, columns + 1, _LANES)
    return max(size for size in sizes if columns % size == 0 and size <= most)


def work(lengths: jax.Array, columns: int, block: int) -> Work:
    """The blocks of slots of int32 [S] `lengths`, of a cache of `columns`, on one device."""
    blocks = jnp.maximum(1, (lengths + block - 1) // block)  # [S]
    ends = jnp.cumsum(blocks)
    number = jnp.arange(len(lengths) * (columns // block))  # [W]
    slot = jnp.sum(number[:, None] >= ends, axis=1, dtype=jnp.int32)  # [W]
    slot = jnp.minimum(slot, len(lengths) - 1)
    of_slot = number - (ends - blocks)[slot]
    return Work(slot, of_slot.astype(jnp.int32), ends[-1:].astype(jnp.int32), lengths)


def ragged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: Any,
    layer: jax.Array,
    listed: Work,
    *,
    block: int,
    read: int,
    interpret: bool = False,
) -> jax.Array:
    """On one device: one token of every slot, attending to its columns and to itself.

    Args:
      q: [S, heads, D].
      k, v: [S, kv_heads, D], of the tokens themselves.
      cache: a `scanned_cache.ScannedCache`, [N, S, kv_heads, T, D].
      layer: int32 [], which of the N.
      listed: from `work`.
      block: columns of a block.
      read: columns of each slot that the kernel's stated costs are those of.
      interpret: run without a TPU, slowly, for tests.

    Returns:
      [S, heads, D].
    """
    slots, heads, size = q.shape
    kv_heads = k.shape[1]
    scaled = cache.key_scale is not None
    dtype = q.dtype if scaled else jnp.promote_types(q.dtype, cache.key.dtype)

    def of_slot(n, layer, slot, *_):
        return slot[n], 0, 0

    def of_block(n, layer, slot, block, *_):
        return layer[0], slot[n], 0, block[n], 0

    token = [pl.BlockSpec((None, count, size), of_slot) for count in (heads, kv_heads, kv_heads)]
    held = pl.BlockSpec((None, None, kv_heads, block, size), of_block)
    scale = pl.BlockSpec((None, None, kv_heads, block), lambda *at: of_block(*at)[:4])
    arrays = [cache.key, cache.value] + ([cache.key_scale, cache.value_scale] if scaled else [])
    column = sum(math.prod(x.shape[2:]) // x.shape[3] * x.dtype.itemsize for x in arrays)
    call = pl.pallas_call(
        functools.partial(_kernel, block=block, dtype=dtype),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(listed.count[0],),
            in_specs=[*token, held, held, *([scale, scale] if scaled else [])],
            out_specs=token[0],
            scratch_shapes=[
                pltpu.VMEM((heads, 1), jnp.float32),
                pltpu.VMEM((heads, 1), jnp.float32),
                pltpu.VMEM((heads, size), jnp.float32),
            ],
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * slots * heads * size * read,
            transcendentals=slots * heads * read,
            bytes_accessed=slots * read * column + 2 * q.nbytes + k.nbytes + v.nbytes,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="ragged_attention",
    )
    return call(layer[None], listed.slot, listed.block, listed.columns, q, k, v, *arrays)


def _kernel(
    layer_ref, slot_ref, block_ref, columns_ref, q_ref, k_ref, v_ref, key_ref, value_ref, *refs,
    block, dtype,
):  # fmt: skip
    """One block: q [heads, D]; k, v [kv, D]; key, value [kv, block, D]; scales [kv, block]."""
    *scales, out_ref, top_ref, total_ref, sum_ref = refs
    n = pl.program_id(0)
    columns, first = columns_ref[slot_ref[n]], block_ref[n] * block
    (heads, size), kv_heads = q_ref.shape, k_ref.shape[0]
    groups = heads // kv_heads

    def repeated(x: jax.Array) -> jax.Array:  # [kv, ...] -> [heads, ...]
        if groups == 1:
            return x
        parts = [jnp.broadcast_to(x[h : h + 1], (groups, x.shape[1])) for h in range(kv_heads)]
        return jnp.concatenate(parts, axis=0)

    def product(x: jax.Array, ref, over: int) -> jax.Array:
        """Every key head's rows of x [heads, K] times [block, D], along its axis `over`."""
        x, parts = x.astype(dtype), []
        for h in range(kv_heads):
            part, y = x[h * groups : (h + 1) * groups], ref[h].astype(dtype)
            numbers = (((1,), (over,)), ((), ()))
            parts.append(jax.lax.dot_general(part, y, numbers, preferred_element_type=jnp.float32))
        return jnp.concatenate(parts, axis=0)

    q = q_ref[...]

    @pl.when(first == 0)
    def _():  # the token itself
        k = repeated(k_ref[...].astype(jnp.float32))
        own = jnp.sum(q.astype(jnp.float32) * k, axis=1, keepdims=True)
        top_ref[...] = own * size**-0.5
        total_ref[...] = jnp.ones_like(total_ref)
        sum_ref[...] = repeated(v_ref[...].astype(jnp.float32))

    scores = product(q, key_ref, 1) * size**-0.5  # [heads, block]
    if scales:
        scores *= repeated(scales[0][...])
    column = first + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    scores = jnp.where(column < columns, scores, _MASKED)
    top = top_ref[...]
    new_top = jnp.maximum(top, scores.max(1, keepdims=True))
    weights, decay = jnp.exp(scores - new_top), jnp.exp(top - new_top)
    top_ref[...] = new_top
    total_ref[...] = total_ref[...] * decay + weights.sum(1, keepdims=True)
    if scales:
        weights *= repeated(scales[1][...])
    sum_ref[...] = sum_ref[...] * decay + product(weights, value_ref, 0)

    @pl.when(first + block >= columns)
    def _():
        out_ref[...] = (sum_ref[...] / total_ref[...]).astype(out_ref.dtype)
