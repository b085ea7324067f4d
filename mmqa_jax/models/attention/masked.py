"""What a query of attention does not see: its scores, and windows; and soft caps of scores."""

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


@flax.struct.dataclass
class Window:
    """How many tokens a query sees, itself included, in one layer of a stack (Gemma, Mistral).

    Without a causal mask it sees as many on either side.

    Attributes:
      size: int32 [], traced: the stack is one compiled layer.
      sizes: the values that it may have, ascending; a kernel needs a program for each.
    """

    size: jax.Array
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
