"""Scores of attention: that of a column that a query does not see, and soft caps."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# exp gives 0 of it, and a row that is masked entirely stays finite: the mean of the values.
MASKED = -1e30


def capped(x: jax.Array, cap: float | None) -> jax.Array:
    """x bent so that it stays within -cap..cap (Gemma 2); None is x itself."""
    return x if cap is None else jnp.tanh(x / cap) * cap
