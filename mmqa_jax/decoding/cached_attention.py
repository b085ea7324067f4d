"""Attention over a layer's cached keys and values, segment by segment and block by block."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import flax.struct
import jax
import jax.numpy as jnp

from mmqa_jax.models.attention.masked import MASKED, capped
from mmqa_jax.models.common.layers import attention


def count_blocks(end: jax.Array, start: int, segment: Segment, block: int) -> jax.Array:
    """How many blocks of a segment that begins at column `start` lie below column `end`."""
    return jnp.clip((end - start + block - 1) // block, 0, segment.columns // block)


def attend(
    q: jax.Array,
    segments: Sequence[tuple[int, Segment]],
    columns: jax.Array,
    branches: Branches | None,
    rows: jax.Array | None,
    *,
    block: int,
    end: jax.Array,
    window: jax.Array | None = None,
    cap: float | None = None,
) -> jax.Array:
    """Causal attention of q [R, L, heads, D], in columns [R, L], over its rows of the segments.

    The query heads of one key head become rows of one product. window: int [R], of how many
    positions a token sees, its own included; None is all. cap: of `layers.attention`. Returns
    [R, L, heads, D].
    """
    batch, length, heads, size = q.shape
    kv_heads = segments[0][1].key.shape[1]
    groups = heads // kv_heads
    grouped = q.reshape(batch, length, kv_heads, groups, size).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(batch, kv_heads, groups * length, size)  # [R, kv, G * L, D]

    def of_queries(x):  # [R, L] -> [R, 1, G * L, 1]
        return jnp.tile(x, (1, groups))[:, None, :, None]

    last = of_queries(columns)
    if branches is not None:
        trunk, begin = branches.trunk[:, None, None, None], of_queries(branches.begin)
    if window is not None:
        first, in_trunk = (
            x if x is None else of_queries(x) for x in first_seen(columns, branches, window)
        )

    def visible(column: jax.Array) -> jax.Array:  # int [T] -> bool [R, 1, G * L, T]
        seen = column <= last
        if branches is not None:
            seen &= (column < trunk) | (column >= begin)
        if window is not None:
            seen &= column >= (
                first if branches is None else jnp.where(column < trunk, in_trunk, first)
            )
        return seen

    shape = grouped.shape[:3]
    carry = (jnp.full((*shape, 1), -jnp.inf), jnp.zeros((*shape, 1)), jnp.zeros((*shape, size)))
    for start, segment in segments:
        read = functools.partial(_read, grouped, segment, start, rows, visible, cap)
        if block >= segment.columns:  # no loop, which costs a GPU a synchronization per block
            carry = read(segment.columns, 0, carry)
        else:
            blocks = count_blocks(end, start, segment, block)
            carry = jax.lax.fori_loop(0, blocks, functools.partial(read, block), carry)
    _, total, out = carry
    out = (out / total).astype(q.dtype).reshape(batch, kv_heads, groups, length, size)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, size)


def attend_to_rows(
    q: jax.Array,
    segments: Sequence[tuple[int, Segment]],
    columns: jax.Array,
    branches: Branches | None,
    rows: jax.Array | None,
    implementation: str,
    limit: int | None = None,
    window: jax.Array | None = None,
    cap: float | None = None,
) -> jax.Array:
    """Attends as `attend`, with the rows' segments side by side [R, T, kv_heads, D] in q's type.

    limit: columns from this one on are not read.
    """

    def taken(x: jax.Array, scale: jax.Array | None, axis: int, count: int) -> jax.Array:
        x = read_columns(x, axis, 0, count, rows)
        x = x.swapaxes(2, 3) if axis == 3 else x  # [R, kv, T, D]
        if scale is not None:
            x = x * read_columns(scale, 2, 0, count, rows)[..., None]
        return x.astype(q.dtype).swapaxes(1, 2)  # [R, T, kv, D]

    held = [(s, s.columns if limit is None else min(s.columns, limit - n)) for n, s in segments]
    key = jnp.concatenate([taken(s.key, s.key_scale, 3, count) for s, count in held], axis=1)
    value = jnp.concatenate([taken(s.value, s.value_scale, 2, count) for s, count in held], axis=1)
    column = jnp.arange(key.shape[1])
    mask = column <= columns[:, :, None]  # [R, L, T]
    if branches is not None:
        of_trunk = column < branches.trunk[:, None, None]
        mask &= of_trunk | (column >= branches.begin[:, :, None])
    if window is not None:
        first, in_trunk = first_seen(columns, branches, window)
        first = first[:, :, None]
        if branches is not None:
            first = jnp.where(of_trunk, in_trunk[:, :, None], first)
        mask &= column >= first
    return attention(q, key, value, mask=mask[:, None], implementation=implementation, cap=cap)


def first_seen(
    columns: jax.Array, branches: Branches | None, window: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """The first column that the tokens in `columns` [R, L] see, by a `window` int [R].

    Returns:
      [R, L], and the first of the trunk, by the tokens' positions; None without branches.
    """
    first = columns - window[:, None] + 1
    if branches is None:
        return first, None
    return first, branches.positions(columns) - window[:, None] + 1


Softmax = tuple[jax.Array, jax.Array, jax.Array]  # largest score, sum of weights, weighted values


def _read(
    q: jax.Array,
    segment: Segment,
    start: int,
    rows: jax.Array | None,
    visible: Callable[[jax.Array], jax.Array],
    cap: float | None,
    block: int,
    n: jax.Array | int,
    carry: Softmax,
) -> Softmax:
    """The n-th block of a segment, which begins at column `start`, added to the softmax so far.

    q [R, kv, Q, D]; the carry float32 [R, kv, Q, 1] twice and [R, kv, Q, D].
    """
    dtype = q.dtype
    if segment.key_scale is None and block == segment.columns:
        # Whole segments are read in place: casting them to q's dtype would copy the cache.
        dtype = jnp.promote_types(q.dtype, segment.key.dtype)
    top, total, out = carry
    first = n * block
    key = read_columns(segment.key, 3, first, block, rows).astype(dtype)
    value = read_columns(segment.value, 2, first, block, rows).astype(dtype)
    scores = jnp.matmul(q.astype(dtype), key, preferred_element_type=jnp.float32)
    scores *= q.shape[-1] ** -0.5
    if segment.key_scale is not None:
        scores *= read_columns(segment.key_scale, 2, first, block, rows)[:, :, None]
    scores = capped(scores, cap)
    scores = jnp.where(visible(start + first + jnp.arange(block)), scores, MASKED)
    new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
    weights, decay = jnp.exp(scores - new_top), jnp.exp(top - new_top)
    total = total * decay + weights.sum(-1, keepdims=True)
    if segment.value_scale is not None:
        weights *= read_columns(segment.value_scale, 2, first, block, rows)[:, :, None]
    of_block = jnp.matmul(weights.astype(dtype), value, preferred_element_type=jnp.float32)
    return new_top, total, out * decay + of_block


def read_columns(
    x: jax.Array, axis: int, start: jax.Array, size: int, rows: jax.Array | None
) -> jax.Array:
    """Columns start..start + size (along `axis`) of some rows, or of all: [R, ...]."""
    if rows is None:
        if size == x.shape[axis]:
            return x
        return jax.lax.dynamic_slice_in_dim(x, start, size, axis)
    window = (1, *x.shape[1:axis], size, *x.shape[axis + 1 :])

    def one(row):
        at = [row, *(0,) * (x.ndim - 1)]
        at[axis] = start
        return jax.lax.dynamic_slice(x, at, window)[0]

    return jax.vmap(one)(rows)


# What the KV cache of one layer consists of: segments of columns, and branches in them.


@flax.struct.dataclass
class Segment:
    """Consecutive columns of one layer.

    int8 caches hold round(x / scale) with one scale per head and token, so that 127 is the
    largest entry; other types hold x itself and no scales. Keys are transposed: on CPU the
    product with the queries reads them 1.5 times faster.
    """

    key: jax.Array  # [S, kv_heads, D, T]
    value: jax.Array  # [S, kv_heads, T, D]
    key_scale: jax.Array | None  # [S, kv_heads, T] float32
    value_scale: jax.Array | None

    @property
    def columns(self) -> int:
        """T, how many columns these are."""
        return self.value.shape[2]


@flax.struct.dataclass
class LayerCache:
    """One layer's keys and values in segments of columns: column t of a row is its token t."""

    segments: tuple[Segment, ...]

    @property
    def columns(self) -> int:
        """The tokens that a row can hold."""
        return sum(segment.columns for segment in self.segments)

    def by_token(self) -> tuple[jax.Array, jax.Array]:
        """Keys and values as `layers.attention` takes them, [S, T, kv_heads, D] each."""
        keys = [segment.key.transpose(0, 3, 1, 2) for segment in self.segments]
        values = [segment.value.swapaxes(1, 2) for segment in self.segments]
        return jnp.concatenate(keys, axis=1), jnp.concatenate(values, axis=1)

    def within(self, limit: int | None) -> list[tuple[int, Segment]]:
        """Every segment that begins below column `limit` (None: all), after its first column."""
        starts = itertools.accumulate((segment.columns for segment in self.segments), initial=0)
        pairs = zip(starts, self.segments, strict=False)
        return [pair for pair in pairs if limit is None or pair[0] < limit]


@flax.struct.dataclass
class Branches:
    """Continuations of one prompt side by side in the columns after it, as branches of a trunk.

    A token sees the trunk and its own branch up to itself. All zeros: one sequence, every column
    up to the token's own.
    """

    trunk: jax.Array  # int32 [R]: columns below belong to the prompt
    begin: jax.Array  # int32 [R, L]: the column where the token's branch begins, 0 in the trunk

    def positions(self, columns: jax.Array) -> jax.Array:
        """Positions of the tokens in `columns` [R, L]: a branch continues where the trunk ends."""
        after = self.trunk[:, None] + columns - self.begin
        return jnp.where(self.begin > 0, after, columns)
