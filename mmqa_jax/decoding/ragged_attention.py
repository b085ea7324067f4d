"""Attention of new tokens of every slot to the slot's pages of the cache: a Pallas kernel for TPU.

Each slot's own columns are read, in blocks, whatever the longest slot's length, and no more of them
than a window reaches (flash decoding's running softmax, Dao et al. 2023, in the order of columns).
The kernel starts its copies by itself, several blocks ahead and across slots: Pallas' own pipeline
takes 650 instructions a block. Other kernels for paged caches do not serve (PROGRAMS.md).

A file of its own because Pallas takes half a second to import.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

from mmqa_jax.decoding.kv_cache import quantize
from mmqa_jax.models.attention.masked import MASKED, capped

_LANES = 128  # columns of a block are a multiple of this
_LARGEST = 1024  # columns of a block
_BLOCK_BYTES, _INT8_BYTES = 2**19, 2**20  # of one block's keys; int8 ones take more instructions
_AHEAD_BYTES = 3 * 2**20  # of the blocks that lie in VMEM, of which all but one are on their way
_ROWS = 4096  # of queries that lie in VMEM at once
_WRITES = 4  # tiles that are on their way to the cache


def attend_on(
    table: jax.Array,
    positions: jax.Array,
    *,
    cap: float | None = None,
    read: int,
    mesh: Mesh | None,
    specs: Any,
    interpret: bool = False,
) -> Callable[..., tuple[jax.Array, Any]]:
    """The attention of L tokens of every slot, for all layers whose caches are split alike.

    Args:
      table: int32 [S, most], the pages of each slot in the order of their columns, as the device
        that holds the slot counts them; those behind its last token are not read.
      positions: int32 [S], the column of each slot's first token: all see those before.
      cap: of `layers.attention`.
      read: columns of each slot that the kernel's stated costs are those of.
      mesh: where the cache lies; None is one device.
      specs: how it lies there, a PartitionSpec in the place of each array.
      interpret: run without a TPU, slowly, for tests.

    Returns:
      A function of q [S, L, heads, D], k and v [S, L, kv_heads, D], q and k not rotated, which each
      token and those after it see as well, their rotation (see `turns_of`), a
      `scanned_cache.ScannedCache` [N, pages, kv_heads, P, ..] whose P is a multiple of 128, the
      layer's number of N, its window (int32 [] or None), and `sinks` of `layers.attention`. It
      gives [S, L, heads, D] and the cache with the tokens of each slot in their columns, in place.
    """

    cores = 1 if mesh is None else getattr(mesh.devices.flat[0], "num_cores", 1)
    options = {"read": read, "cap": cap, "cores": cores, "interpret": interpret}

    def attend(*arguments: Any) -> tuple[jax.Array, Any]:
        return ragged_attention(*arguments, **options)

    if mesh is not None:  # XLA does not split a kernel by itself
        of_slots, of_all = PartitionSpec(specs.key[1]), PartitionSpec()
        of_heads = PartitionSpec(specs.key[1], None, specs.key[2])
        attend = jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(
                *(*[of_heads] * 3, of_slots, specs, of_all, of_all),
                *(PartitionSpec(specs.key[2]), of_slots, of_slots),
            ),
            out_specs=(of_heads, specs),
            check_vma=False,
        )
    return lambda *of_layer: attend(*of_layer, table, positions)


def turns_of(cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Cosines and sines of tokens' angles, [S, L, 1, D / 2] each, as the kernel takes them: beside
    each other, for both halves of a head, [S, L, 2, D]."""
    turns = jnp.concatenate([cos, sin], axis=2)
    return jnp.concatenate([turns, turns], axis=3)


def _block_columns(page: int, most: int, fitting: int) -> int:
    """How many columns one block has, of `most` pages, where so many fit: several pages, or a part
    of one."""
    largest = max(_LANES, min(_LARGEST, fitting))
    if page <= largest:
        return page * min(most, largest // page)
    return max(n for n in range(_LANES, largest + 1, _LANES) if page % n == 0)


def ragged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    turns: jax.Array,
    cache: Any,
    layer: jax.Array,
    window: jax.Array | None,
    sinks: jax.Array | None,
    table: jax.Array,
    positions: jax.Array,
    *,
    read: int,
    cap: float | None = None,
    cores: int = 1,
    interpret: bool = False,
) -> tuple[jax.Array, Any]:
    """Attends, on one device, from L tokens of every slot to its columns and to each other.

    Args:
      q: [S, L, heads, D].
      k, v: [S, L, kv_heads, D], of the tokens themselves; q and k are not rotated.
      turns: float32 [S, L, 2, D], cosines and sines of their rotation, see `turns_of`.
      cache: a `scanned_cache.ScannedCache`, [N, pages, kv_heads, P, ..]; donate it.
      layer: int32 [], which of the N.
      window: int32 [], how many tokens each sees, itself included; None is all.
      sinks: of `layers.attention`.
      table, positions: see `attend_on`.
      read: columns of each slot that the kernel's stated costs are those of.
      cap: of `layers.attention`.
      cores: of the device, which share the slots: 2 of a v5p.
      interpret: run without a TPU, slowly, for tests.

    Returns:
      [S, L, heads, D], and the cache with the tokens.
    """
    slots, length, heads, size = q.shape
    kv_heads = k.shape[2]
    arrays, structure = jax.tree.flatten(cache)
    page, most = arrays[0].shape[3], table.shape[1]
    item = arrays[0].dtype.itemsize
    of_keys = _INT8_BYTES if item == 1 else _BLOCK_BYTES
    block = _block_columns(page, most, of_keys // (kv_heads * size * item))
    of_column = [kv_heads * math.prod(x.shape[4:]) * x.dtype.itemsize for x in arrays]
    depth = max(2, min(8, _AHEAD_BYTES // (block * sum(of_column))))
    fitting = min(slots // cores, _ROWS // (length * heads))
    of_grid = max(n for n in range(1, max(1, fitting) + 1) if slots % n == 0)

    def tile(x: jax.Array) -> int:  # the fewest columns that are written
        return _LANES if x.ndim == 4 else 32 // x.dtype.itemsize

    def of_tokens(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((of_grid, length, *shape), lambda n, *_: (n, 0, 0, 0))

    def buffers(count: int, width: Callable[[jax.Array], int]) -> list[Any]:
        return [pltpu.VMEM((count, kv_heads, width(x), *x.shape[4:]), x.dtype) for x in arrays]

    of_rows = []  # a sink for each row of queries, in the order of `_kernel`
    if sinks is not None:
        of_rows = [jnp.tile(sinks.reshape(kv_heads, -1), (1, length)).reshape(-1, 1)]
    anywhere = [pl.BlockSpec(memory_space=pl.ANY)] * len(arrays)
    tokens = [of_tokens(count, size) for count in (heads, kv_heads, kv_heads, 2)]
    moved = sum(n * (read + tile(x)) for n, x in zip(of_column, arrays, strict=True))
    call = pl.pallas_call(
        functools.partial(
            _kernel,
            count=len(arrays),
            block=block,
            windowed=window is not None,
            cap=cap,
            has_sinks=sinks is not None,
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, *arrays)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(slots // of_grid,),
            in_specs=[*tokens, *[pl.BlockSpec(memory_space=pltpu.VMEM)] * len(of_rows), *anywhere],
            out_specs=[tokens[0], *anywhere],
            scratch_shapes=[
                *buffers(depth, lambda _: block),
                *buffers(_WRITES, tile),
                pltpu.VMEM((heads * length, arrays[0].shape[4]), q.dtype),
                pltpu.VMEM((length, kv_heads, size), k.dtype),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((depth,)),
                pltpu.SemaphoreType.DMA((_WRITES,)),
            ],
        ),
        input_output_aliases={8 + len(of_rows) + n: 1 + n for n in range(len(arrays))},
        cost_estimate=pl.CostEstimate(
            flops=4 * q.size * read,
            transcendentals=slots * length * heads * read,
            bytes_accessed=slots * moved + 2 * q.nbytes + k.nbytes + v.nbytes + turns.nbytes,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), disable_bounds_checks=True
        ),
        interpret=interpret,
        name="ragged_attention",
    )
    size_of_window = jnp.full(1, 0 if window is None else window, jnp.int32)
    prefetched = (layer[None], size_of_window, positions, table.reshape(-1))
    out, *arrays = call(*prefetched, q, k, v, turns, *of_rows, *arrays)
    return out, jax.tree.unflatten(structure, arrays)


def _kernel(
    layer_ref, window_ref, position_ref, table_ref,
    q_ref, k_ref, v_ref, turns_ref, *refs, count, block, windowed, cap, has_sinks,
):  # fmt: skip
    """Some slots: q [slots, L, heads, D]; k, v [slots, L, kv, D]; sinks [heads * L, 1] if there are
    some; the cache's arrays in place."""
    sink_ref, *refs = refs if has_sinks else (None, *refs)
    out_ref, cache = refs[count], refs[count + 1 : 2 * count + 1]
    buffers, tiles = refs[2 * count + 1 : 3 * count + 1], refs[3 * count + 1 : 4 * count + 1]
    query_ref, new_ref, written_ref, read_done, write_done = refs[4 * count + 1 :]
    slots, length, heads, size = q_ref.shape
    kv_heads, page = k_ref.shape[2], cache[0].shape[3]
    groups, depth, layer = heads // kv_heads, buffers[0].shape[0], layer_ref[0]
    rows = length * groups  # of queries of one key head
    # Where values are beside the keys, a query has zeros for them, and is wide as a sum of values.
    scaled, beside, width = count > 2, count % 2 == 1, query_ref.shape[1]
    values = buffers[0 if beside else 1]
    most = table_ref.shape[0] // position_ref.shape[0]
    begin = pl.program_id(0) * slots
    dtype = q_ref.dtype if scaled else jnp.promote_types(q_ref.dtype, cache[0].dtype)

    def block_of(column: jax.Array) -> jax.Array:
        return jax.lax.div(column, block)

    def first_block(slot: jax.Array) -> jax.Array:
        if not windowed:
            return jnp.int32(0)
        return block_of(jnp.maximum(position_ref[slot] - window_ref[0] + 1, 0))

    def copies(slot: jax.Array, number: jax.Array, place: jax.Array, act: str, exist=True) -> None:
        """Starts, or waits for, the pages of a slot's block, which come to `place`."""
        for i in range(max(1, block // page)):
            column = number * block + i * page  # a block is pages, or a part of one
            inside = pl.ds(jax.lax.rem(column, page) if block < page else 0, min(block, page))

            @pl.when(exist & (column < position_ref[slot] + length))
            def _(i=i, column=column, inside=inside):
                of_slot = table_ref[slot * most + jax.lax.div(column, page)]
                for array, buffer in zip(cache, buffers, strict=True):
                    source = array.at[layer, of_slot, :, inside]
                    target = buffer.at[place, :, pl.ds(i * page, min(block, page))]
                    getattr(pltpu.make_async_copy(source, target, read_done.at[place]), act)()

    def start(at: tuple[jax.Array, jax.Array], place: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Starts the block `at` a slot and a number, if there is one; gives the next."""
        slot, number = at
        last = begin + slots - 1
        some = jnp.minimum(slot, last)  # the slot, if there is one
        copies(some, number, place, "start", slot <= last)
        ends = number == block_of(position_ref[some] + length - 1)
        after = first_block(jnp.minimum(slot + 1, last))
        return jnp.where(ends, slot + 1, slot), jnp.where(ends, after, number + 1)

    def repeated(x: jax.Array) -> jax.Array:  # [kv, ...] -> [heads * L, ...]
        if rows == 1:
            return x
        parts = [jnp.broadcast_to(x[h : h + 1], (rows, x.shape[1])) for h in range(kv_heads)]
        return jnp.concatenate(parts, axis=0)

    def product(x: jax.Array, ref: Any, over: int) -> jax.Array:
        """Every key head's rows of x [heads * L, K] times [block, D], along its axis `over`."""
        x, parts = x.astype(dtype), []
        for h in range(kv_heads):
            part, y = x[h * rows : (h + 1) * rows], ref[h].astype(dtype)
            numbers = (((1,), (over,)), ((), ()))
            parts.append(jax.lax.dot_general(part, y, numbers, preferred_element_type=jnp.float32))
        return jnp.concatenate(parts, axis=0)

    # Of each row, which of the slot's new tokens it is.
    of_row = jax.lax.broadcasted_iota(jnp.int32, (heads * length, 1), 0) % rows // groups

    def of_new(n: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The softmax of a slot's new tokens alone, which are rotated."""
        for t in range(length):
            cos, sin = turns_ref[n, t, 0:1], turns_ref[n, t, 1:2]
            turned = _rotated(q_ref[n, t], cos, sin)
            new_ref[t] = _rotated(k_ref[n, t], cos, sin)
            for h in range(kv_heads):
                first = h * rows + t * groups
                query_ref[first : first + groups, :size] = turned[h * groups : (h + 1) * groups]
        query = query_ref[:, :size].astype(jnp.float32)
        scores, of_tokens = [], []
        for t in range(length):
            key, value = (seen(x[...], t) for x in (new_ref.at[t], v_ref.at[n, t]))
            score = capped(jnp.sum(query * key, axis=1, keepdims=True) * size**-0.5, cap)
            visible = of_row >= t
            if windowed:
                visible &= of_row - t < window_ref[0]
            scores.append(score if length == 1 else jnp.where(visible, score, MASKED))
            of_tokens.append(of_width(jnp.zeros_like(value), value) if beside else value)
        top, total = functools.reduce(jnp.maximum, scores), 0.0
        if has_sinks:
            top = jnp.maximum(top, sink_ref[...])
            total = jnp.exp(sink_ref[...] - top)
        weights = [jnp.exp(score - top) for score in scores]
        return (
            top,
            total + sum(weights),
            sum(x * y for x, y in zip(weights, of_tokens, strict=True)),
        )

    def of_width(key: jax.Array, value: jax.Array) -> jax.Array:
        """[n, D] each, beside each other as in the cache: [n, width]."""
        rest = [jnp.zeros((len(key), width - 2 * size), key.dtype)] if width > 2 * size else []
        return jnp.concatenate([key, value, *rest], axis=1)

    def seen(x: jax.Array, t: int) -> jax.Array:
        """New token `t`'s key or value [kv, D] by row: those after it see it as it is cached."""
        exact = repeated(x.astype(jnp.float32))
        if not scaled or length == 1:
            return exact
        x, scale = quantize(x, axis=1)
        return jnp.where(of_row > t, repeated(x.astype(jnp.float32) * scale[:, None]), exact)

    def add(slot: jax.Array, number: jax.Array, place: jax.Array, softmax: Any) -> Any:
        """The softmax with a block's columns."""
        top, total, summed = softmax
        position, first = position_ref[slot], number * block
        scores = product(query_ref[...], buffers[0].at[place], 1)  # [heads * L, block]
        if scaled:
            scores *= repeated(buffers[-2][place] * size**-0.5)
        else:
            scores *= size**-0.5
        column = first + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        visible = column < position
        if windowed:
            visible &= column > position + of_row - window_ref[0]
        scores = jnp.where(visible, capped(scores, cap), MASKED)
        new_top = jnp.maximum(top, scores.max(1, keepdims=True))
        weights, decay = jnp.exp(scores - new_top), jnp.exp(top - new_top)
        total = total * decay + weights.sum(1, keepdims=True)
        if scaled:
            weights *= repeated(buffers[-1][place])
        return new_top, total, summed * decay + product(weights, values.at[place], 0)

    def write(slot: jax.Array, number: jax.Array, place: jax.Array) -> None:
        """The tiles of a block that hold the slot's new tokens, into the cache."""
        new = [[new_ref[t], v_ref[slot - begin, t]] for t in range(length)]  # [kv, D] each
        if scaled:
            quantized = [[quantize(x, axis=1) for x in pair] for pair in new]
            new = [[x for x, _ in pairs] + [scale for _, scale in pairs] for pairs in quantized]
        if beside:
            new = [[of_width(*of_token[:2]), *of_token[2:]] for of_token in new]
        position = position_ref[slot] - number * block  # in the block
        column = jnp.maximum(position, 0)
        put(slot, number, place, new, position, column)
        if length > 1:
            last = jnp.minimum(position + length - 1, block - 1)
            smallest = min(x.shape[2] for x in tiles)
            other = jax.lax.div(column, smallest) != jax.lax.div(last, smallest)
            pl.when(other)(lambda: put(slot, number, place, new, position, last))

    def put(slot, number, place, new, position, column) -> None:
        """The tiles with a column of the block, in which the tokens follow `position`."""
        turn = jax.lax.rem(written_ref[0], _WRITES)
        pl.when(written_ref[0] >= _WRITES)(lambda: wait(turn))
        of_slot = table_ref[slot * most + jax.lax.div(number * block + column, page)]
        for n, (buffer, ring, array) in enumerate(zip(buffers, tiles, cache, strict=True)):
            tile = ring.shape[2]
            first = pl.multiple_of(column & -tile, tile)
            old = buffer[place, :, pl.ds(first, tile)]
            # 8 bits are not selected by a mask of 32.
            wide = jnp.int32 if old.dtype == jnp.int8 else old.dtype
            columns = first + jax.lax.broadcasted_iota(jnp.int32, old.shape, 1)
            whole = old.astype(wide)
            for t, of_token in enumerate(new):
                x = of_token[n].astype(wide)[:, None]
                whole = jnp.where(columns == position + t, x, whole)
            ring[turn] = whole.astype(ring.dtype)
            inside = pl.multiple_of(jax.lax.rem(number * block + first, page), tile)
            target = array.at[layer, of_slot, :, pl.ds(inside, tile)]
            pltpu.make_async_copy(ring.at[turn], target, write_done.at[turn]).start()
        written_ref[0] += 1

    def wait(turn: jax.Array) -> None:
        for ring, array in zip(tiles, cache, strict=True):
            target = array.at[0, 0, :, pl.ds(0, ring.shape[2])]
            pltpu.make_async_copy(ring.at[turn], target, write_done.at[turn]).wait()

    if block > page:  # what no copy has reached is multiplied by zero
        for buffer in buffers[0 if beside else 1 :: 2]:
            buffer[...] = jnp.zeros_like(buffer)
    if beside:
        query_ref[...] = jnp.zeros_like(query_ref)
    written_ref[0] = 0
    ahead = (begin, first_block(begin))
    ahead = jax.lax.fori_loop(0, depth, lambda place, ahead: start(ahead, place), ahead)

    def of_slot(index: jax.Array, carry: Any) -> Any:
        slot = begin + index
        end = block_of(position_ref[slot] + length - 1) + 1

        def of_block(number: jax.Array, carry: Any) -> Any:
            place, ahead, softmax = carry
            copies(slot, number, place, "wait")
            ends = (number + 1) * block > position_ref[slot]
            pl.when(ends)(lambda: write(slot, number, place))
            softmax = add(slot, number, place, softmax)
            ahead = start(ahead, place)
            return jnp.where(place + 1 == depth, 0, place + 1), ahead, softmax

        place, ahead, (_, total, summed) = jax.lax.fori_loop(
            first_block(slot), end, of_block, (*carry, of_new(index))
        )
        if beside:
            summed = summed[:, size : 2 * size]
        attended = (summed / total).astype(out_ref.dtype)
        for t in range(length):
            for h in range(kv_heads):
                first = h * rows + t * groups
                out_ref[index, t, h * groups : (h + 1) * groups] = attended[first : first + groups]
        return place, ahead

    jax.lax.fori_loop(0, slots, of_slot, (jnp.int32(0), ahead))
    for n in range(_WRITES):
        pl.when(written_ref[0] > n)(lambda n=n: wait(n))


def _rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """`llama.network.rotate` of [heads, D]."""
    return (x.astype(jnp.float32) * cos + _swapped(x) * sin).astype(x.dtype)


def _swapped(x: jax.Array) -> jax.Array:
    """The halves of each head exchanged, the second one negative, in float32."""
    size = x.shape[1]
    if size // 2 % _LANES == 0:
        x = x.astype(jnp.float32)
        return jnp.concatenate([-x[:, size // 2 :], x[:, : size // 2]], axis=1)
    # By a product, which is exact: halves of whole lanes alone change places for nothing.
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    swap = jnp.where(column == row + size // 2, 1.0, 0.0)
    swap = jnp.where(column == row - size // 2, -1.0, swap).astype(x.dtype)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, swap, preferred_element_type=jnp.float32, precision=precision)
