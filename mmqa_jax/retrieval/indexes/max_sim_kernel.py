"""A TPU's kernel for MaxSim: products of tokens are reduced where they are made.

XLA writes the products of all tokens to memory before it looks for the largest; here a block of
them stays in the core's own memory.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import BFloat16, Float32

COLUMNS = 512  # tokens of queries that are multiplied at once


def largest_products(
    queries: BFloat16[jax.Array, "C D"],
    sources: BFloat16[jax.Array, "B L D"],
    *,
    interpret: bool = False,
) -> Float32[jax.Array, "B C"]:
    """The largest product of each query's token with any token of each source.

    Args:
      queries: vectors of tokens, as many as COLUMNS divides.
      sources: vectors of the sources' tokens; a shorter source repeats one of its own.
      interpret: whether Python runs the kernel, on any device.
    """
    (count, dim), (rows, length, _) = queries.shape, sources.shape
    best = pl.pallas_call(
        _kernel,
        grid=(rows, count // COLUMNS),  # a source's tokens stay while all queries pass
        in_specs=[
            pl.BlockSpec((COLUMNS, dim), lambda row, column: (column, 0)),
            pl.BlockSpec((1, length, dim), lambda row, column: (row, 0, 0)),
        ],
        out_specs=pl.BlockSpec((1, 1, COLUMNS), lambda row, column: (row, 0, column)),
        out_shape=jax.ShapeDtypeStruct((rows, 1, count), jnp.float32),
        interpret=interpret,
    )(queries, sources)
    return best[:, 0]


def _kernel(queries: jax.Array, source: jax.Array, best: jax.Array) -> None:
    over_values = (((1,), (1,)), ((), ()))
    products = jax.lax.dot_general(
        source[0], queries[...], over_values, preferred_element_type=jnp.float32
    )  # [L, COLUMNS]
    best[0] = products.max(0, keepdims=True)
