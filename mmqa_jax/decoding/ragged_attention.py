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

from mmqa_jax.decoding.kv_cache import quantize
from mmqa_jax.models.attention.masked import MASKED, capped
from mmqa_jax.models.llama.network import NO_TRAITS, LayerTraits

_LANES = 128  # columns of a block are a multiple of this
_LARGEST = 1024  # columns of a block
_BLOCK_BYTES = 2**19  # of one block's keys; four such lie in VMEM, of keys and values, two each


@flax.struct.dataclass
class Work:
    """The blocks that are read, slot by slot; W is as many as there are.

    The last of a slot holds the column where its token goes: all of a slot without columns is
    masked.
    """

    slot: jax.Array  # int32 [W]
    block: jax.Array  # int32 [W], ascending in a slot
    count: jax.Array  # int32 [1]: how many of W count; [devices that split the slots] on a mesh
    columns: jax.Array  # int32 [S], of each slot
    active: jax.Array  # int32 [S]: 1 where the token is written


def attend_on(
    cache: Any,
    positions: jax.Array,
    active: jax.Array,
    angles: jax.Array,
    *,
    factor: Any = None,
    cap: float | None = None,
    read: int,
    mesh: Mesh | None,
    specs: Any,
    interpret: bool = False,
) -> Callable[..., tuple[jax.Array, Any]]:
    """The attention of one token of every slot, for all layers.

    Args:
      cache: a `scanned_cache.ScannedCache`, [N, S, kv_heads, T, D], T a multiple of 128.
      positions: int32 [S], the column of each slot's token: it sees those before.
      active: bool [S], slots whose token is written.
      angles: float32 [S, D / 2], by which each slot's query and key are rotated; [S, D] where some
        layers are local, see `LayerTraits.turned`.
      factor: float32, as many, by which the rotation of each pair is multiplied; None is 1.
      cap: of `layers.attention`.
      read: columns of each slot that the kernel's stated costs are those of.
      mesh: where the cache lies; None is one device.
      specs: how it lies there, a PartitionSpec in the place of each array.
      interpret: run without a TPU, slowly, for tests.

    Returns:
      A function of q [S, 1, heads, D], k and v [S, 1, kv_heads, D], which the token sees as well
      (q and k before their rotation), the cache, the layer's number and its traits; it gives
      [S, 1, heads, D] and the cache with the token of each slot in its column, in place.
    """
    shape = cache.key.shape
    if mesh is not None:
        shape = NamedSharding(mesh, specs.key).shard_shape(shape)
    block = _block_columns(shape[3], shape[2] * shape[4] * cache.key.dtype.itemsize)

    def listing(lengths: jax.Array, active: jax.Array) -> Work:
        return work(lengths, active, shape[3], block)

    def attend(*arguments: Any) -> tuple[jax.Array, Any]:
        return ragged_attention(*arguments, block=block, read=read, cap=cap, interpret=interpret)

    if mesh is not None:  # XLA does not split a kernel by itself
        of_slots, of_heads = PartitionSpec(specs.key[1]), PartitionSpec(*specs.key[1:3])
        split = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
        listing = split(listing, in_specs=(of_slots, of_slots), out_specs=of_slots)
        arguments = (*[of_heads] * 3, of_slots, specs, PartitionSpec(), of_slots)
        attend = split(attend, in_specs=arguments, out_specs=(of_heads, specs))
    listed = listing(positions, active)
    turns = jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1)  # [S, 2, D / 2]
    turns = turns if factor is None else turns * factor
    whole = jnp.concatenate([turns, turns], axis=2)  # [S, 2, D], for both halves of a head

    def of_layer(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: Any,
        layer: jax.Array,
        traits: LayerTraits = NO_TRAITS,
    ) -> tuple[jax.Array, Any]:
        own = whole
        if traits.rotated is not None or traits.local is not None:
            own = jnp.stack(traits.turned(turns[:, 0], turns[:, 1]), axis=1)
            own = jnp.concatenate([own, own], axis=2)
        out, cache = attend(q[:, 0], k[:, 0], v[:, 0], own, cache, layer, listed)
        return out[:, None], cache

    return of_layer


def _block_columns(columns: int, column_bytes: int) -> int:
    """How many columns one block has, of `columns` with `column_bytes` of keys each."""
    most = max(_LANES, min(_LARGEST, _BLOCK_BYTES // column_bytes))
    sizes = range(_LANES, columns + 1, _LANES)
    return max(size for size in sizes if columns % size == 0 and size <= most)


def work(lengths: jax.Array, active: jax.Array, columns: int, block: int) -> Work:
    """The blocks of slots of int32 [S] `lengths`, of a cache of `columns`, on one device."""
    blocks = lengths // block + 1  # [S]
    ends = jnp.cumsum(blocks)
    number = jnp.arange(len(lengths) * (columns // block))  # [W]
    slot = jnp.sum(number[:, None] >= ends, axis=1, dtype=jnp.int32)  # [W]
    slot = jnp.minimum(slot, len(lengths) - 1)
    of_slot = number - (ends - blocks)[slot]
    count = ends[-1:].astype(jnp.int32)
    return Work(slot, of_slot.astype(jnp.int32), count, lengths, active.astype(jnp.int32))


def ragged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    turns: jax.Array,
    cache: Any,
    layer: jax.Array,
    listed: Work,
    *,
    block: int,
    read: int,
    cap: float | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, Any]:
    """Attends, on one device, from one token of every slot to its columns and to itself.

    Args:
      q: [S, heads, D].
      k, v: [S, kv_heads, D], of the tokens themselves; q and k are not rotated.
      turns: float32 [S, 2, D], cosines and sines of their rotation (`models.llama.network.rotate`).
      cache: a `scanned_cache.ScannedCache`, [N, S, kv_heads, T, D]; donate it.
      layer: int32 [], which of the N.
      listed: from `work`.
      block: columns of a block.
      read: columns of each slot that the kernel's stated costs are those of.
      cap: of `layers.attention`.
      interpret: run without a TPU, slowly, for tests.

    Returns:
      [S, heads, D], and the cache with the tokens of active slots.
    """
    slots, heads, size = q.shape
    kv_heads = k.shape[1]
    arrays, structure = jax.tree.flatten(cache)
    scaled = cache.key_scale is not None

    def of_slot(n, layer, slot, *_):
        return slot[n], 0, 0

    def columns_of(x: jax.Array, width: int, number: Callable[..., Any]) -> pl.BlockSpec:
        """`width` columns of one slot, the `number`-th such."""

        def at(n, layer, slot, *rest):
            return layer[0], slot[n], 0, number(n, slot, *rest), *(0,) * (x.ndim - 4)

        return pl.BlockSpec((None, None, kv_heads, width, *x.shape[4:]), at)

    def tile(x: jax.Array) -> int:  # the fewest columns that are written
        return _LANES if x.ndim == 4 else 32 // x.dtype.itemsize

    counts = (heads, kv_heads, kv_heads, 2)
    token = [pl.BlockSpec((None, count, size), of_slot) for count in counts]
    read_ = [columns_of(x, block, lambda n, slot, block, *_: block[n]) for x in arrays]

    def written(x: jax.Array) -> pl.BlockSpec:
        width = tile(x)
        return columns_of(x, width, lambda n, slot, _, columns, *__: columns[slot[n]] // width)

    of_column = [kv_heads * math.prod(x.shape[4:]) * x.dtype.itemsize for x in arrays]
    moved = sum(n * (read + tile(x)) for n, x in zip(of_column, arrays, strict=True))
    call = pl.pallas_call(
        functools.partial(_kernel, block=block, scaled=scaled, cap=cap),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, *arrays)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(listed.count[0],),
            in_specs=[*token, *read_],
            out_specs=[token[0], *map(written, arrays)],
            scratch_shapes=[
                pltpu.VMEM((heads, size), q.dtype),
                pltpu.VMEM((kv_heads, size), k.dtype),
                pltpu.VMEM((heads, 1), jnp.float32),
                pltpu.VMEM((heads, 1), jnp.float32),
                pltpu.VMEM((heads, size), jnp.float32),
            ],
        ),
        input_output_aliases={9 + n: 1 + n for n in range(len(arrays))},
        cost_estimate=pl.CostEstimate(
            flops=4 * slots * heads * size * read,
            transcendentals=slots * heads * read,
            bytes_accessed=slots * moved + 2 * q.nbytes + k.nbytes + v.nbytes + turns.nbytes,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="ragged_attention",
    )
    prefetched = (layer[None], listed.slot, listed.block, listed.columns, listed.active)
    out, *arrays = call(*prefetched, q, k, v, turns, *arrays)
    return out, jax.tree.unflatten(structure, arrays)


def _kernel(
    _, slot_ref, block_ref, columns_ref, active_ref, q_ref, k_ref, v_ref, turns_ref, *refs,
    block, scaled, cap,
):  # fmt: skip
    """One block: q [heads, D]; k, v [kv, D]; keys, values [kv, block, D]; scales [kv, block].

    Of each of the latter a tile is written back, the one with the token's column.
    """
    *refs, query_ref, new_ref, top_ref, total_ref, sum_ref = refs
    held, (out_ref, *written) = refs[: len(refs) // 2], refs[len(refs) // 2 :]
    n = pl.program_id(0)
    slot, first = slot_ref[n], block_ref[n] * block
    columns = columns_ref[slot]
    (heads, size), kv_heads = q_ref.shape, k_ref.shape[0]
    groups = heads // kv_heads
    dtype = q_ref.dtype if scaled else jnp.promote_types(q_ref.dtype, held[0].dtype)

    def repeated(x: jax.Array) -> jax.Array:  # [kv, ...] -> [heads, ...]
        if groups == 1:
            return x
        parts = [jnp.broadcast_to(x[h : h + 1], (groups, x.shape[1])) for h in range(kv_heads)]
        return jnp.concatenate(parts, axis=0)

    def product(x: jax.Array, ref: Any, over: int) -> jax.Array:
        """Every key head's rows of x [heads, K] times [block, D], along its axis `over`."""
        x, parts = x.astype(dtype), []
        for h in range(kv_heads):
            part, y = x[h * groups : (h + 1) * groups], ref[h].astype(dtype)
            numbers = (((1,), (over,)), ((), ()))
            parts.append(jax.lax.dot_general(part, y, numbers, preferred_element_type=jnp.float32))
        return jnp.concatenate(parts, axis=0)

    @pl.when(first == 0)
    def _():  # the token itself
        query_ref[...], new_ref[...] = _rotated(q_ref, turns_ref), _rotated(k_ref, turns_ref)
        k = repeated(new_ref[...].astype(jnp.float32))
        own = jnp.sum(query_ref[...].astype(jnp.float32) * k, axis=1, keepdims=True)
        top_ref[...] = capped(own * size**-0.5, cap)
        total_ref[...] = jnp.ones_like(total_ref)
        sum_ref[...] = repeated(v_ref[...].astype(jnp.float32))

    scores = product(query_ref[...], held[0], 1) * size**-0.5  # [heads, block]
    if scaled:
        scores *= repeated(held[2][...])
    column = first + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    scores = jnp.where(column < columns, capped(scores, cap), MASKED)
    top = top_ref[...]
    new_top = jnp.maximum(top, scores.max(1, keepdims=True))
    weights, decay = jnp.exp(scores - new_top), jnp.exp(top - new_top)
    top_ref[...] = new_top
    total_ref[...] = total_ref[...] * decay + weights.sum(1, keepdims=True)
    if scaled:
        weights *= repeated(held[3][...])
    sum_ref[...] = sum_ref[...] * decay + product(weights, held[1], 0)

    @pl.when(first + block > columns)  # the slot's last block
    def _():
        out_ref[...] = (sum_ref[...] / total_ref[...]).astype(out_ref.dtype)
        new = [new_ref[...], v_ref[...]]  # [kv, D]
        if scaled:
            pairs = [quantize(x, axis=1) for x in new]
            new = [x for x, _ in pairs] + [scale for _, scale in pairs]
        for x, source, target in zip(new, held, written, strict=True):
            _put(x, source, target, columns - first, active_ref[slot] > 0)


def _rotated(ref: Any, turns_ref: Any) -> jax.Array:
    """`llama.network.rotate` of [heads, D]; a product, which is exact, exchanges the halves."""
    x, size = ref[...], ref.shape[1]
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    swap = jnp.where(column == row + size // 2, 1.0, 0.0)
    swap = jnp.where(column == row - size // 2, -1.0, swap).astype(x.dtype)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    swapped = jnp.dot(x, swap, preferred_element_type=jnp.float32, precision=precision)
    cos, sin = turns_ref[0:1], turns_ref[1:2]
    return (x.astype(jnp.float32) * cos + swapped * sin).astype(x.dtype)


def _put(x: jax.Array, source: Any, target: Any, column: jax.Array, active: jax.Array) -> None:
    """target [kv, tile, ...]: the tile of source [kv, block, ...] with x [kv, ...] in `column`."""
    tile = target.shape[1]
    first = pl.multiple_of(column // tile * tile, tile)
    old = source[:, pl.ds(first, tile)]
    own = jax.lax.broadcasted_iota(jnp.int32, old.shape, 1) == column - first
    # 8 bits are not selected by a mask of 32.
    wide = jnp.int32 if old.dtype == jnp.int8 else old.dtype
    new = jnp.where(own & active, x.astype(wide)[:, None], old.astype(wide))
    target[...] = new.astype(target.dtype)
