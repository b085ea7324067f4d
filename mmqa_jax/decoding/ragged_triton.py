"""Attention to the cache in place: Pallas kernels for NVIDIA GPUs (Triton), of steps and prompts.

Each program reads the columns that its own sequence has, in blocks, with a running softmax (flash
attention, Dao 2023); scores never leave the chip, and no row is taken out of the cache. JAX's own
`jax.experimental.pallas.ops.gpu.decode_attention` wants keys by token, where this cache has them
transposed (a copy of all in each step), knows no int8, and rounds the parts' sums to bfloat16
before they are added up. cuDNN's paged attention, as JAX offers it, takes no cache with more rows
than the queries have.

A file of its own because Pallas takes half a second to import.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from mmqa_jax.decoding.cached_attention import Branches, LayerCache
from mmqa_jax.models.attention.masked import MASKED, capped

_BLOCK = 64  # columns: keys and values of three blocks, of heads of 128, take 96 KiB of 227
_ROWS = 16  # of a product on tensor cores, at least
_MOST_ROWS = 128
_PROGRAMS = 512  # that fill a device: two at a time on each of an H100's 132 processors, twice


def attend_to_own(
    q: jax.Array,
    held: LayerCache,
    table: jax.Array,
    lengths: jax.Array,
    *,
    window: jax.Array | None = None,
    cap: float | None = None,
    sinks: jax.Array | None = None,
    read: int,
    interpret: bool = False,
) -> jax.Array:
    """One token of every slot, attending to the slot's first columns.

    A program for each slot and key head, and for each part of the columns where these alone would
    not fill the device (flash decoding, Dao et al. 2023), of all query heads of the key head.

    Args:
      q: [S, 1, heads, D], D a power of two from 16 on, rotated.
      held: with the tokens' own keys and values; P is a multiple of 16.
      table: int32 [S, M], each slot's pages.
      lengths: int32 [S], columns up to each slot's token, one at least.
      window: int32 [S], how many of them it sees; no block before is read. None is all.
      cap, sinks: of `layers.attention`.
      read: columns of each slot that the kernel's stated costs are those of.
      interpret: run without a GPU, slowly, for tests.

    Returns:
      [S, 1, heads, D].
    """
    slots, _, heads, size = q.shape
    kv_heads, page = held.value.shape[1:3]
    groups, block = heads // kv_heads, _block(page)
    count, parts = table.shape[1] * page // block, 1
    while slots * kv_heads * parts < _PROGRAMS and 2 * parts <= count:
        parts *= 2
    rows = max(_ROWS, pl.next_power_of_2(groups))  # of which `groups` are there
    shape = (slots, kv_heads, parts, groups)
    of_part = pl.BlockSpec((None, None, None, rows), lambda s, h, n: (s, h, n, 0))
    arrays, of_slot = jax.tree.leaves(held), pl.BlockSpec((None,), lambda s, *_: (s,))
    windows = [] if window is None else [window.astype(jnp.int32)]
    options = {"windowed": window is not None, "cap": cap, "block": block}
    top, total, summed = pl.pallas_call(
        functools.partial(_token, groups=groups, blocks=pl.cdiv(count, parts), **options),
        grid=(slots, kv_heads, parts),
        in_specs=[
            pl.BlockSpec((None, None, rows, size), lambda s, h, _: (s, h, 0, 0)),
            of_slot,
            pl.BlockSpec((None, table.shape[1]), lambda s, *_: (s, 0)),
            *[of_slot] * len(windows),
            *[_of_head(x, lambda s, h, _: h) for x in arrays],
        ],
        out_specs=[
            of_part,
            of_part,
            pl.BlockSpec((None, None, None, rows, size), lambda s, h, n: (s, h, n, 0, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct((*shape, size), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="attend_to_own",
        **_stated(q, arrays, slots, read, 4 * slots * heads * parts * (size + 2)),
    )(q.reshape(slots, kv_heads, groups, size), lengths.astype(jnp.int32), table, *windows, *arrays)
    if sinks is not None:  # as one part more, which has no values
        top, total = (
            jnp.concatenate([x, jnp.broadcast_to(last, (slots, kv_heads, 1, groups))], axis=2)
            for x, last in ((top, sinks.reshape(kv_heads, 1, groups)), (total, 1.0))
        )
        summed = jnp.pad(summed, ((0, 0), (0, 0), (0, 1), (0, 0), (0, 0)))
    weights = jnp.exp(top - top.max(2, keepdims=True))  # [S, kv, parts, G]
    summed = (summed * weights[..., None]).sum(2) / (total * weights).sum(2)[..., None]
    return summed.astype(q.dtype).reshape(q.shape)


def attend_in_place(
    q: jax.Array,
    held: LayerCache,
    table: jax.Array,
    starts: jax.Array,
    branches: Branches | None,
    *,
    window: jax.Array | None = None,
    cap: float | None = None,
    sinks: jax.Array | None = None,
    read: int,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of tokens to what their rows of the cache hold.

    Args:
      q: [R, L, heads, D], D a power of two from 16 on, rotated; L is a multiple of 16.
      held: with the tokens' own keys and values; P is a multiple of 16.
      table: int32 [R, M], each row's pages.
      starts: int [R], column of each row's first token.
      branches: of the tokens.
      window: int32 [R], how many positions a token sees, its own included; no block before those of
        the first token is read. None is all.
      cap, sinks: of `layers.attention`.
      read: columns of each row that the kernel's stated costs are those of.
      interpret: run without a GPU, slowly, for tests.

    Returns:
      [R, L, heads, D].
    """
    count, length, heads, size = q.shape
    kv_heads, page = held.value.shape[1:3]
    groups, tokens = heads // kv_heads, min(_MOST_ROWS, length & -length)
    if branches is None:
        branches = Branches(jnp.zeros_like(starts), jnp.zeros((count, length), jnp.int32))
    arrays = jax.tree.leaves(held)
    windows = [] if window is None else [window.astype(jnp.int32)]
    of_heads = [] if sinks is None else [sinks.astype(jnp.float32)]
    options = {"windowed": window is not None, "cap": cap, "block": _block(page)}
    options["has_sinks"] = sinks is not None
    of_tokens = pl.BlockSpec((None, tokens, None, size), lambda n, h, r: (r, n, h, 0))
    of_row = pl.BlockSpec((None,), lambda n, h, r: (r,))

    return pl.pallas_call(
        functools.partial(_tokens, **options),
        grid=(length // tokens, heads, count),  # those that read the same columns one after another
        in_specs=[
            of_tokens,
            pl.BlockSpec((None, table.shape[1]), lambda n, h, r: (r, 0)),
            *[of_row] * 2,
            pl.BlockSpec((None, tokens), lambda n, h, r: (r, n)),
            *[of_row] * len(windows),
            *[pl.BlockSpec((None,), lambda n, h, r: (h,))] * len(of_heads),
            *[_of_head(x, lambda n, h, r: h // groups) for x in arrays],
        ],
        out_specs=of_tokens,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=8 if tokens == 128 else 4, num_stages=2),
        interpret=interpret,
        name="attend_in_place",
        **_stated(q, arrays, count, read, q.nbytes),
    )(
        q, table, starts.astype(jnp.int32), branches.trunk, branches.begin,
        *windows, *of_heads, *arrays,
    )  # fmt: skip


def _block(page: int) -> int:
    """Columns that are read at a time: of a power of two, which divides a page."""
    return min(_BLOCK, page & -page)


def _of_head(x: jax.Array, head: Callable[..., Any]) -> pl.BlockSpec:
    """All pages of one key head: Triton prefetches none."""
    rest = x.shape[2:]
    return pl.BlockSpec((x.shape[0], None, *rest), lambda *ids: (0, head(*ids), *(0,) * len(rest)))


def _stated(
    q: jax.Array, arrays: Sequence[jax.Array], rows: int, read: int, written: int
) -> dict[str, Any]:
    """What a kernel says of itself: of `rows` of the cache's arrays the first `read` columns."""
    pages, columns = arrays[1].shape[0], arrays[1].shape[2]
    cost = {
        "flops": 4 * q.size * read,
        "transcendentals": q.size // q.shape[-1] * read,
        "bytes_accessed": sum(x.nbytes for x in arrays) * rows * read // (pages * columns)
        + q.nbytes
        + written,
    }
    # Of a compiled program the metadata alone are seen.
    stated = {name: str(n) for name, n in cost.items()}
    return {"cost_estimate": pl.CostEstimate(**cost), "metadata": stated}


def _token(
    q_ref: Any, length_ref: Any, table_ref: Any, *refs: Any,
    groups: int, block: int, blocks: int, windowed: bool, cap: float | None,
):  # fmt: skip
    """One part: q [rows, D], `groups` of them real; table [M]; keys [pages, D, P], values
    [pages, P, D], scales [pages, P]."""
    window_ref, *refs = refs if windowed else (None, *refs)
    held, (top_ref, total_ref, out_ref) = refs[:-3], refs[-3:]
    rows = q_ref.shape[0]
    length, first = length_ref[()], pl.program_id(2) * blocks
    real = jnp.arange(rows) < groups
    q = plgpu.load(q_ref, mask=real[:, None], other=0)
    end = jnp.minimum((length + block - 1) // block, first + blocks)
    if windowed:
        near = jnp.maximum(length - window_ref[()], 0)  # the first column that is seen
        first = jnp.maximum(first, near // block)

    def with_block(n, carry):
        column = n * block + jnp.arange(block)
        visible = (column < length) & (column >= near) if windowed else column < length
        return _add(q, _columns(held, table_ref, n, block), visible[None], carry, cap)

    top, total, out = jax.lax.fori_loop(first, end, with_block, _nothing(q))
    plgpu.store(top_ref, top, mask=real)
    plgpu.store(total_ref, total, mask=real)
    plgpu.store(out_ref, out, mask=real[:, None])


def _tokens(
    q_ref: Any, table_ref: Any, start_ref: Any, trunk_ref: Any, begin_ref: Any, *refs: Any,
    block: int, windowed: bool, has_sinks: bool, cap: float | None,
):  # fmt: skip
    """Tokens of one head: q [L, D]; table [M]; keys [pages, D, P], values [pages, P, D], scales
    [pages, P]."""
    window_ref, *refs = refs if windowed else (None, *refs)
    sink_ref, *refs = refs if has_sinks else (None, *refs)
    *held, out_ref = refs
    tokens, trunk = q_ref.shape[0], trunk_ref[()]
    first = start_ref[()] + pl.program_id(0) * tokens
    q, begin = q_ref[...], begin_ref[...][:, None]
    columns, earliest = (first + jnp.arange(tokens))[:, None], 0
    if windowed:  # the first columns seen: of a token's branch, and of the trunk by its position
        near = columns - window_ref[()] + 1
        of_trunk = jnp.where(begin > 0, trunk - begin, 0) + near
        earliest = jnp.maximum(of_trunk.min(), 0) // block

    def with_block(n, carry):
        column = (n * block + jnp.arange(block))[None]
        visible = (column <= columns) & ((column < trunk) | (column >= begin))  # as `Branches` says
        if windowed:
            visible &= column >= jnp.where(column < trunk, of_trunk, near)
        return _add(q, _columns(held, table_ref, n, block), visible, carry, cap)

    blocks = (first + tokens + block - 1) // block
    _, total, out = jax.lax.fori_loop(earliest, blocks, with_block, _nothing(q, sink_ref))
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)


def _columns(held: Sequence[Any], table_ref: Any, n: Any, block: int) -> list[jax.Array]:
    """The n-th block: keys [D, block], values [block, D], and scales [block] if there are some."""
    key, value, *scales = held
    of_page = value.shape[1] // block
    page = table_ref[jax.lax.div(n, of_page)]  # Triton has no `%` of JAX's
    columns = pl.ds(jax.lax.rem(n, of_page) * block, block)
    return [key[page, :, columns], value[page, columns, :], *(x[page, columns] for x in scales)]


def _nothing(q: jax.Array, sink_ref: Any = None) -> tuple[jax.Array, ...]:
    """Largest score and sum of weights [rows], and weighted values [rows, D], of no column, or of
    the sink alone."""
    none = jnp.zeros(q.shape[0], jnp.float32)
    if sink_ref is not None:
        return none + sink_ref[()], none + 1, jnp.zeros(q.shape, jnp.float32)
    return none + MASKED, none, jnp.zeros(q.shape, jnp.float32)


def _add(
    q: jax.Array,
    held: Sequence[jax.Array],
    visible: jax.Array,
    carry: tuple[jax.Array, ...],
    cap: float | None,
) -> tuple[jax.Array, ...]:
    """A block added to the softmax so far; visible bool [rows or 1, block]."""
    (key, value, *scales), (top, total, out) = held, carry
    dtype = q.dtype if scales else jnp.promote_types(q.dtype, key.dtype)
    scores = plgpu.dot(q.astype(dtype), key.astype(dtype)) * q.shape[1] ** -0.5
    if scales:
        scores *= scales[0][None]
    scores = jnp.where(visible, capped(scores, cap), MASKED)
    new_top = jnp.maximum(top, scores.max(1))
    weights, decay = jnp.exp(scores - new_top[:, None]), jnp.exp(top - new_top)
    total = total * decay + weights.sum(1)
    if scales:
        weights *= scales[1][None]
    read = plgpu.dot(weights.astype(dtype), value.astype(dtype))
    return new_top, total, out * decay[:, None] + read
