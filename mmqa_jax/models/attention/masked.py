"""Masks, windows, soft caps and sinks say which scores of a query count, and how much."""

from __future__ import annotations

import functools
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

# exp gives 0 of it, and a row that is masked entirely stays finite: the mean of the values.
MASKED = -1e30


def capped(x: jax.Array, cap: float | None) -> jax.Array:
    """x bent so that it stays within -cap..cap (Gemma 2); None is x itself."""
    return x if cap is None else jnp.tanh(x / cap) * cap


def sink_rows(sinks: jax.Array, kv_heads: int, length: int) -> jax.Array:
    """Sinks [heads] of `softmax` for scores whose rows are the query heads of one key head, each
    with its `length` queries: [kv_heads, groups * length, 1]."""
    return jnp.repeat(sinks.reshape(kv_heads, -1), length, axis=1)[..., None]


def softmax(scores: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
    """Softmax over the last axis. `sinks` (gpt-oss), broadcastable to [..., 1], are scores of one
    further column, which has a weight and no value; what is returned lacks it."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    top = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), sinks))
    weights = jnp.exp(scores - top)
    return weights / (weights.sum(-1, keepdims=True) + jnp.exp(sinks - top))


def last_of_pictures(pictures: jax.Array) -> jax.Array:
    """The last place that each token of a text sees where pictures are seen whole (Gemma 3).

    pictures: bool [B, L], of pictures' tokens, of which those in a row are one picture's. Returns
    int32 [B, L]: of these the last one in their row, of others their own place.
    """
    length = pictures.shape[1]
    others = jnp.where(pictures, length, jnp.arange(length, dtype=jnp.int32))
    return jax.lax.cummin(others, axis=1, reverse=True) - pictures


@flax.struct.dataclass
class Window:
    """How many tokens a query sees, itself included, in one layer of a stack (Gemma, Mistral).

    Without a causal mask it sees as many on either side.
    """

    size: jax.Array  # int32 [], traced: the stack is one compiled layer
    # The values that it may have, ascending; a kernel needs a program for each.
    sizes: tuple[int, ...] = flax.struct.field(pytree_node=False)

    def sees(
        self, queries: jax.Array | np.ndarray, keys: jax.Array | np.ndarray, *, is_causal: bool
    ) -> jax.Array:
        """Which keys the queries see, bool; columns of both, int, that broadcast."""
        distance = queries - keys
        return (distance if is_causal else jnp.abs(distance)) < self.size

    def mask(
        self, mask: jax.Array | None, length: int, columns: int, *, is_causal: bool
    ) -> jax.Array:
        """A mask, broadcastable to [B, heads, Lq, Lk], with the window; the last query has the last
        key's column. A query whose keys are all masked sees itself: kernels need a key for it."""
        queries, keys = jnp.arange(length)[:, None] + (columns - length), jnp.arange(columns)
        near = self.sees(queries, keys, is_causal=is_causal)[None, None]
        return near if mask is None else (mask & near) | (queries == keys)

    def choose(self, attend: Callable[[int | None], jax.Array], columns: int) -> jax.Array:
        """What `attend` gives for the window's size; None: it holds all `columns`."""
        branches = [
            functools.partial(attend, size if size < columns else None) for size in self.sizes
        ]
        smaller = sum((size < self.size).astype(jnp.int32) for size in self.sizes)
        return jax.lax.switch(smaller, branches)


# Which cached tokens each beam of a search continues, so that none of them is ever moved.


@flax.struct.dataclass
class Ancestry:
    """Where the tokens of K beams a prefix lie among the columns of a cache.

    Column t * K + s holds token t of the beam that was in slot s when it was written. Beams change
    slots in every step; the columns stay, and each beam knows which are its own.
    """

    slots: jax.Array  # [B, K, T] int: where each beam's token t was written

    @classmethod
    def empty(cls, prefixes: int, beams: int, most: int) -> Ancestry:
        """Makes the ancestry of beams without tokens, for at most `most` tokens."""
        return cls(jnp.zeros((prefixes, beams, most), jnp.int32))

    def select(self, rows: jax.Array) -> Ancestry:
        """Returns the ancestry of beams `rows` [B * K], after the beams were reordered."""
        size = self.slots.shape
        return Ancestry(self.slots.reshape(-1, size[-1])[rows].reshape(size))

    def visible(self, count: jax.Array) -> jax.Array:
        """bool [B, K, T * K]: the columns of each beam's first `count` tokens."""
        prefixes, beams, most = self.slots.shape
        is_of_beam = self.slots[..., None] == jnp.arange(beams)  # [B, K, T, K]
        written = jnp.arange(most)[:, None] < count
        return (is_of_beam & written).reshape(prefixes, beams, -1)

    def written(self, number: jax.Array) -> Ancestry:
        """After every beam's token `number` was written: into the slot that the beam is in."""
        prefixes, beams, _ = self.slots.shape
        slot = jnp.broadcast_to(jnp.arange(beams)[:, None], (prefixes, beams, 1))
        return Ancestry(jax.lax.dynamic_update_slice(self.slots, slot, (0, 0, number)))
