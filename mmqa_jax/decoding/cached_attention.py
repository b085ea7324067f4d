"""Attention over a layer's cached keys and values, page by page or over all pages taken out."""

from __future__ import annotations

import functools
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

from mmqa_jax.models.attention.masked import MASKED, capped, sink_rows
from mmqa_jax.models.common.layers import attention


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def attend(
    q: jax.Array,
    held: LayerCache,
    columns: jax.Array,
    branches: Branches | None,
    table: jax.Array,
    end: jax.Array,
    window: jax.Array | None = None,
    cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of q [R, L, heads, D], in columns [R, L], over its rows' pages, one of each
    row at a time.

    The query heads of one key head become rows of one product. Gradients are those of
    `attend_to_rows`.

    Args:
      table: int32 [R, M], each row's pages.
      end: int [], no row reads this column or one behind it.
      window: int [R], of how many positions a token sees, its own included; None is all.
      cap, sinks: of `layers.attention`.

    Returns:
      [R, L, heads, D].
    """
    batch, length, heads, size = q.shape
    kv_heads, width = held.value.shape[1:3]
    groups = heads // kv_heads
    grouped = q.reshape(batch, length, kv_heads, groups, size).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(batch, kv_heads, groups * length, size)  # [R, kv, G * L, D]

    def of_queries(x):  # [R, L] -> [R, 1, G * L, 1]
        return jnp.tile(x, (1, groups))[:, None, :, None]

    last = of_queries(last_seen(columns, branches))
    if branches is not None:
        trunk = branches.trunk[:, None, None, None]
        of_branch = jax.tree.map(of_queries, (branches.begin, branches.hidden))
    if window is not None:
        first, in_trunk = (
            x if x is None else of_queries(x) for x in first_seen(columns, branches, window)
        )

    def visible(column: jax.Array) -> jax.Array:  # int [T] -> bool [R, 1, G * L, T]
        seen = column <= last
        if branches is not None:
            seen &= in_sight(column, column < trunk, *of_branch)
        if window is not None:
            seen &= column >= (
                first if branches is None else jnp.where(column < trunk, in_trunk, first)
            )
        return seen

    shape = grouped.shape[:3]
    nothing = (jnp.full((*shape, 1), -jnp.inf), jnp.zeros((*shape, 1)), jnp.zeros((*shape, size)))
    if sinks is not None:
        top = jnp.broadcast_to(sink_rows(sinks, kv_heads, length), (*shape, 1))
        nothing = (top, jnp.ones((*shape, 1)), nothing[2])

    def with_page(n: jax.Array, carry: Softmax) -> Softmax:
        page = held.map(lambda x: x[table[:, n]])
        return _add(grouped, page, visible(n * width + jnp.arange(width)), cap, carry)

    # One at least: rows without a column are padding, and must not write NaN into page 0.
    pages = jnp.clip((end + width - 1) // width, 1, table.shape[1])
    _, total, out = jax.lax.fori_loop(0, pages, with_page, nothing)
    out = (out / total).astype(q.dtype).reshape(batch, kv_heads, groups, length, size)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, size)


def _attended_forward(q, held, columns, branches, table, end, window, cap, sinks):
    out = attend(q, held, columns, branches, table, end, window, cap, sinks)
    return out, (q, held, columns, branches, table, window, sinks)


def _attended_backward(cap, inputs, gradient):
    q, held, columns, branches, table, window, sinks = inputs

    def of_rows(q: jax.Array, held: LayerCache, sinks: jax.Array | None) -> jax.Array:
        return attend_to_rows(q, held, columns, branches, table, "xla", window, cap, sinks)

    of_q, of_held, of_sinks = jax.vjp(of_rows, q, held, sinks)[1](gradient)
    return of_q, of_held, None, None, None, None, None, of_sinks


attend.defvjp(_attended_forward, _attended_backward)


def attend_to_rows(
    q: jax.Array,
    held: LayerCache,
    columns: jax.Array,
    branches: Branches | None,
    table: jax.Array,
    implementation: str,
    window: jax.Array | None = None,
    cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attends as `attend`, with all pages of the table side by side [R, T, kv_heads, D] in q's
    type."""

    def by_token(x: jax.Array, scale: jax.Array | None) -> jax.Array:  # x [R, M, P, kv, D]
        if scale is not None:
            x = x * scale[table].swapaxes(2, 3)[..., None]
        return x.astype(q.dtype).reshape(len(table), -1, *x.shape[3:])

    key = by_token(held.key[table].transpose(0, 1, 4, 2, 3), held.key_scale)
    value = by_token(held.value[table].swapaxes(2, 3), held.value_scale)
    column = jnp.arange(key.shape[1])
    mask = column <= last_seen(columns, branches)[:, :, None]  # [R, L, T]
    if branches is not None:
        of_trunk = column < branches.trunk[:, None, None]
        mask &= branches.in_sight(column, of_trunk)
    if window is not None:
        first, in_trunk = first_seen(columns, branches, window)
        first = first[:, :, None]
        if branches is not None:
            first = jnp.where(of_trunk, in_trunk[:, :, None], first)
        mask &= column >= first
    options = {"implementation": implementation, "cap": cap, "sinks": sinks}
    return attention(q, key, value, mask=mask[:, None], **options)


def last_seen(columns: jax.Array, branches: Branches | None) -> jax.Array:
    """Returns the last column that the tokens in `columns` [R, L] see, [R, L]."""
    return columns if branches is None or branches.last is None else branches.last


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
    in_trunk = branches.positions(columns) - window[:, None] + 1
    if branches.whole is not None:
        first, in_trunk = (jnp.where(branches.whole, 0, x) for x in (first, in_trunk))
    return first, in_trunk


Softmax = tuple[jax.Array, jax.Array, jax.Array]  # largest score, sum of weights, weighted values


def _add(
    q: jax.Array, page: LayerCache, visible: jax.Array, cap: float | None, carry: Softmax
) -> Softmax:
    """A page of each row added to the softmax so far.

    Args:
      q: [R, kv, Q, D].
      page: of R pages.
      visible: bool [R, 1, Q, P].
      cap: of `layers.attention`.
      carry: float32 [R, kv, Q, 1] twice and [R, kv, Q, D].
    """
    top, total, out = carry
    scaled = page.key_scale is not None
    dtype = q.dtype if scaled else jnp.promote_types(q.dtype, page.key.dtype)
    scores = _product(q.astype(dtype), page.key.astype(dtype)) * q.shape[-1] ** -0.5
    if scaled:
        scores *= page.key_scale[:, :, None]
    scores = jnp.where(visible, capped(scores, cap), MASKED)
    new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
    weights, decay = jnp.exp(scores - new_top), jnp.exp(top - new_top)
    total = total * decay + weights.sum(-1, keepdims=True)
    if scaled:
        weights *= page.value_scale[:, :, None]
    of_page = _product(weights.astype(dtype), page.value.astype(dtype))
    return new_top, total, out * decay + of_page


# XLA's products on a CPU (YNNPACK) sum in another order from 64 rows on, except into columns of
# whole multiples of this: so that a token has the same bits decoded alone and encoded in a chunk.
_COLUMNS = 64


def _product(rows: jax.Array, matrices: jax.Array) -> jax.Array:
    """[.., Q, K] times [.., K, N] -> float32 [.., Q, N], equal rows however many (two or more)."""
    columns = matrices.shape[-1]
    widths = [(0, 0)] * (matrices.ndim - 1) + [(0, -columns % _COLUMNS)]
    y = jnp.matmul(rows, jnp.pad(matrices, widths), preferred_element_type=jnp.float32)
    return y[..., :columns]


# What the KV cache of one layer consists of: pages of columns, and branches in them.


@flax.struct.dataclass
class LayerCache:
    """Pages of one layer: column t of a row is column t % P of the page t // P in its table.

    int8 caches hold round(x / scale) with one scale per head and token, so that 127 is the
    largest entry; other types hold x itself and no scales. Keys are transposed: on CPU the
    product with the queries reads them 1.5 times faster.
    """

    key: jax.Array  # [pages, kv_heads, D, P]
    value: jax.Array  # [pages, kv_heads, P, D]
    key_scale: jax.Array | None  # [pages, kv_heads, P] float32
    value_scale: jax.Array | None

    def map(self, function: Callable[..., jax.Array], *others: LayerCache) -> LayerCache:
        """The function of every array (and its counterparts in the others)."""
        return jax.tree.map(function, self, *others)


@flax.struct.dataclass
class Branches:
    """Continuations of one prompt side by side in the columns after it, as branches of a trunk.

    A token sees the trunk, but for what is hidden from it, and its own branch up to itself. All
    zeros: one sequence, every column up to the token's own, or up to `last` where that is not None.
    """

    trunk: jax.Array  # int32 [R]: columns below belong to the prompt
    begin: jax.Array  # int32 [R, L]: the column where the token's branch begins, 0 in the trunk
    last: jax.Array | None = None  # int32 [R, L]: the last column that a token sees
    whole: jax.Array | None = None  # bool [R, L]: whether a token has no window
    # int32 [R, L] twice: the first column that is hidden from a token, and the one behind the last.
    hidden: tuple[jax.Array, jax.Array] | None = None

    def in_sight(self, column: jax.Array, of_trunk: jax.Array) -> jax.Array:
        """Whether the tokens see columns int [T] or [R, 1, T] in front of them, bool [R, L, T];
        `of_trunk` says which belong to the trunk."""
        of_token = jax.tree.map(lambda x: x[:, :, None], (self.begin, self.hidden))
        return in_sight(column, of_trunk, *of_token)

    def positions(self, columns: jax.Array) -> jax.Array:
        """Positions of the tokens in `columns` [R, L]: a branch continues where the trunk ends."""
        after = self.trunk[:, None] + columns - self.begin
        return jnp.where(self.begin > 0, after, columns)


def in_sight(
    column: jax.Array,
    of_trunk: jax.Array,
    begin: jax.Array,
    hidden: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    """`Branches.in_sight` of arrays that are broadcast against each other."""
    seen = of_trunk | (column >= begin)
    return seen if hidden is None else seen & ((column < hidden[0]) | (column >= hidden[1]))
