"""What the KV cache of one layer consists of: segments of columns, and branches in them."""

from __future__ import annotations

import itertools

import flax.struct
import jax
import jax.numpy as jnp


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
        """Keys and values as `models.layers.attention` takes them, [S, T, kv_heads, D] each."""
        keys = [segment.key.transpose(0, 3, 1, 2) for segment in self.segments]
        values = [segment.value.swapaxes(1, 2) for segment in self.segments]
        return jnp.concatenate(keys, axis=1), jnp.concatenate(values, axis=1)

    def within(self, limit: int | None) -> list[tuple[int, Segment]]:
        """Every segment that begins below column `limit` (None: all), after its first column."""
        starts = itertools.accumulate((one.columns for one in self.segments), initial=0)
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
