"""The KV cache and the forward pass over it: written in place, read block by block.

Attention runs over blocks of columns with a running maximum (online softmax, Milakov and
Gimelshein 2018), and only over as many blocks as the longest row needs. A masked block adds
exactly zero, so a row's bits do not depend on how long its neighbors are.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from mmqa_jax.core.mesh import partition_spec
from mmqa_jax.models.llama import Llama, inverse_frequencies
from mmqa_jax.models.llama_config import LlamaConfig

_MASKED = -1e30  # as in models.layers: exp gives 0, and nothing becomes NaN
# Logical axes, for `core.mesh.partition_spec`.
_KEY_NAMES = ("batch", "heads", "head_dim", "positions")
_VALUE_NAMES = ("batch", "heads", "positions", "head_dim")
_SCALE_NAMES = ("batch", "heads", "positions")


@flax.struct.dataclass
class LayerCache:
    """One layer's keys and values: column t of a row is the token at position t.

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
        """T, the tokens that a row can hold."""
        return self.value.shape[2]

    def by_token(self) -> tuple[jax.Array, jax.Array]:
        """Keys and values as `models.layers.attention` takes them, [S, T, kv_heads, D] each."""
        return self.key.transpose(0, 3, 1, 2), self.value.swapaxes(1, 2)


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


KVCache = tuple[LayerCache, ...]  # not one stack: a donated cache is then updated in place


def empty(
    config: LlamaConfig,
    rows: int,
    columns: int,
    dtype: str,
    mesh: Mesh | None = None,
) -> KVCache:
    """Zeros for `rows` sequences of `columns` tokens; on a mesh, rows are sharded like the batch.

    dtype: of keys and values; "int8" adds scales.
    """
    head = (rows, config.kv_heads)
    shapes = {
        "key": ((*head, config.head_size, columns), dtype, _KEY_NAMES),
        "value": ((*head, columns, config.head_size), dtype, _VALUE_NAMES),
    }
    if dtype == "int8":
        shapes["key_scale"] = shapes["value_scale"] = ((*head, columns), "float32", _SCALE_NAMES)

    def zeros(part: str) -> jax.Array | None:
        if part not in shapes:
            return None
        shape, kind, names = shapes[part]
        if mesh is None:
            return jnp.zeros(shape, kind)
        sharding = NamedSharding(mesh, partition_spec(names, shape, mesh))
        return jnp.zeros(shape, kind, device=sharding)

    parts = ("key", "value", "key_scale", "value_scale")
    return tuple(LayerCache(*map(zeros, parts)) for _ in range(config.layers))


def forward(
    model: Llama,
    embedded: jax.Array,
    cache: KVCache,
    *,
    starts: jax.Array,
    ends: jax.Array,
    rows: jax.Array,
    block: int,
    all_rows: bool = False,
    branches: Branches | None = None,
) -> tuple[jax.Array, KVCache]:
    """Runs the decoder on tokens that follow what their rows hold, and caches keys and values.

    Args:
      model: best with unstacked layers.
      embedded: [R, L, H]; padding after a row's last real token is cached too, and overwritten
        before any token attends to it.
      cache: donate it.
      starts: int [R], column of each row's first token.
      ends: int [R], column after each row's last real token; nothing beyond is read.
      rows: int [R], their cache rows; a row index out of range is not written.
      block: columns read at a time; a divisor of the cache's columns.
      all_rows: the R rows are the cache's rows in order (`rows` then only says which are written).
      branches: of the tokens; None: every row is one sequence, position and column are the same.

    Returns:
      Normed hidden states [R, L, H] and the cache.
    """
    columns = starts[:, None] + jnp.arange(embedded.shape[1])  # [R, L]
    positions = columns if branches is None else branches.positions(columns)
    angles = positions[:, :, None, None] * inverse_frequencies(model.config)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    blocks = (ends.max() + block - 1) // block
    x, written = embedded, []
    for layer, held in zip(model.each_layer(), cache, strict=True):
        q, k, v = layer.project(x, cos, sin)
        held = write(held, k, v, rows, starts)
        attended = _attend(q, held, columns, branches, None if all_rows else rows, blocks, block)
        x = layer.finish(x, attended)
        written.append(held)
    return model.norm(x), tuple(written)


def copy(
    cache: KVCache, source: jax.Array, target: jax.Array, blocks: jax.Array, block: int
) -> KVCache:
    """Row `source`'s first `blocks` blocks of columns into row `target`; donate the cache."""

    def one(n: jax.Array, cache: KVCache) -> KVCache:
        def move(x: jax.Array, axis: int) -> jax.Array:
            part = _columns(x, axis, n * block, block, source[None])
            return _set(x, axis, part, target[None], (n * block)[None])

        return tuple(
            LayerCache(
                move(layer.key, 3),
                move(layer.value, 2),
                None if layer.key_scale is None else move(layer.key_scale, 2),
                None if layer.value_scale is None else move(layer.value_scale, 2),
            )
            for layer in cache
        )

    return jax.lax.fori_loop(0, blocks, one, cache)


def _attend(
    q: jax.Array,
    layer: LayerCache,
    columns: jax.Array,
    branches: Branches | None,
    rows: jax.Array | None,
    blocks: jax.Array,
    block: int,
) -> jax.Array:
    """Causal attention of q [R, L, heads, D], in columns [R, L], over its rows of the cache.

    The query heads of one key head become rows of one product. Returns [R, L, heads, D].
    """
    batch, length, heads, size = q.shape
    kv_heads = layer.key.shape[1]
    groups = heads // kv_heads
    grouped = q.reshape(batch, length, kv_heads, groups, size).transpose(0, 2, 3, 1, 4)
    dtype = q.dtype
    if layer.key_scale is None and block == layer.columns:
        # All columns at once are read in place: casting them to q's dtype would copy the cache.
        dtype = jnp.promote_types(q.dtype, layer.key.dtype)
    grouped = grouped.reshape(batch, kv_heads, groups * length, size)  # [R, kv, G * L, D]
    grouped = grouped.astype(dtype)

    def of_queries(x):  # [R, L] -> [R, 1, G * L, 1]
        return jnp.tile(x, (1, groups))[:, None, :, None]

    last = of_queries(columns)
    if branches is not None:
        trunk, begin = branches.trunk[:, None, None, None], of_queries(branches.begin)

    def one(n, carry):
        top, total, out = carry  # [R, kv, G * L, 1] twice, [R, kv, G * L, D]; float32
        start = n * block
        key = _columns(layer.key, 3, start, block, rows).astype(dtype)
        value = _columns(layer.value, 2, start, block, rows).astype(dtype)
        scores = jnp.matmul(grouped, key, preferred_element_type=jnp.float32) * size**-0.5
        if layer.key_scale is not None:
            scores *= _columns(layer.key_scale, 2, start, block, rows)[:, :, None]
        column = start + jnp.arange(block)
        visible = column <= last
        if branches is not None:
            visible &= (column < trunk) | (column >= begin)
        scores = jnp.where(visible, scores, _MASKED)
        new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
        weights, decay = jnp.exp(scores - new_top), jnp.exp(top - new_top)
        total = total * decay + weights.sum(-1, keepdims=True)
        if layer.value_scale is not None:
            weights *= _columns(layer.value_scale, 2, start, block, rows)[:, :, None]
        read = jnp.matmul(weights.astype(dtype), value, preferred_element_type=jnp.float32)
        return new_top, total, out * decay + read

    shape = grouped.shape[:3]
    carry = (
        jnp.full((*shape, 1), -jnp.inf),
        jnp.zeros((*shape, 1)),
        jnp.zeros((*shape, size)),
    )
    if block == layer.columns:  # one block: no loop, which costs a GPU a sync per block
        _, total, out = one(0, carry)
    else:
        _, total, out = jax.lax.fori_loop(0, blocks, one, carry)
    out = (out / total).astype(q.dtype).reshape(batch, kv_heads, groups, length, size)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, size)


def write(
    layer: LayerCache, k: jax.Array, v: jax.Array, rows: jax.Array, starts: jax.Array
) -> LayerCache:
    """k, v [R, L, kv_heads, D] into columns starts[r].. of rows[r]."""
    k, v = k.transpose(0, 2, 3, 1), v.swapaxes(1, 2)  # [R, kv, D, L], [R, kv, L, D]
    key_scale, value_scale = layer.key_scale, layer.value_scale
    if key_scale is not None:
        k, scale = _quantize(k, axis=2)
        key_scale = _set(key_scale, 2, scale, rows, starts)
        v, scale = _quantize(v, axis=3)
        value_scale = _set(value_scale, 2, scale, rows, starts)
    return LayerCache(
        _set(layer.key, 3, k.astype(layer.key.dtype), rows, starts),
        _set(layer.value, 2, v.astype(layer.value.dtype), rows, starts),
        key_scale,
        value_scale,
    )


def _quantize(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Rounded to -127..127 with one scale per vector along `axis`; the scales lack that axis."""
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(x).max(axis, keepdims=True), 1e-30) / 127
    return jnp.round(x / scale).astype(jnp.int8), scale.squeeze(axis)


def _columns(
    x: jax.Array, axis: int, start: jax.Array, size: int, rows: jax.Array | None
) -> jax.Array:
    """Columns start..start + size (along `axis`) of some rows, or of all: [R, ...]."""
    if rows is None:
        return jax.lax.dynamic_slice_in_dim(x, start, size, axis)
    window = (1, *x.shape[1:axis], size, *x.shape[axis + 1 :])

    def one(row):
        at = [row, *(0,) * (x.ndim - 1)]
        at[axis] = start
        return jax.lax.dynamic_slice(x, at, window)[0]

    return jax.vmap(one)(rows)


def _set(x: jax.Array, axis: int, new: jax.Array, rows: jax.Array, starts: jax.Array) -> jax.Array:
    """Writes new[r] ([R, ...], `axis` shorter) into row rows[r] from column starts[r] on.

    A scatter of whole windows: XLA keeps it in place and shards it over a mesh, and it drops
    rows out of range. A window must end within the columns, or it is dropped as well.
    """
    dimensions = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, x.ndim)),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0, axis),
    )
    return jax.lax.scatter(
        x,
        jnp.stack([rows, starts], axis=1),
        new,
        dimensions,
        mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
    )
