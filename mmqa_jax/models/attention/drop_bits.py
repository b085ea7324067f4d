"""Random bits of dropout on a TPU, which are a function of the place alone.

JAX's default generator (threefry) takes about 115 operations an element, which XLA for TPUs repeats
in each fusion that reads the mask. Counters that are mixed twice take a fifth of that, in a kernel
as outside.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def drop_bits(row_seed: jax.Array, head_seed: jax.Array, length: int, columns: int) -> jax.Array:
    """int32 [..., Lq, Lk] in 0..65535, uniform: a weight of less than `kept` survives dropout.

    Counters mixed twice with a key of 64 bits, made of the two seeds (int32, of any shape that
    broadcasts against [..., Lq, Lk]): a function of the place alone, so that forward and backward
    pass, every mesh and every kind of device agree.
    """
    counter = jax.lax.broadcasted_iota(jnp.int32, (length, columns), 0) * columns
    counter = counter + jax.lax.broadcasted_iota(jnp.int32, (length, columns), 1)
    first = _mix(row_seed ^ _mix(head_seed))
    second = _mix(first + jnp.int32(0x5BD1E995))
    return jax.lax.shift_right_logical(_mix(_mix(counter ^ first) + second), 16)


def drop_bits_of(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`drop_bits` of an array of any shape: int32 of that shape, in 0..65535.

    Every row along the last axis has a seed of its own, so that no counter passes 32 bits.
    """
    first, second = jax.random.bits(key, (2,)).astype(jnp.int32)
    row = jnp.int32(0)
    for axis, size in enumerate(shape[:-1]):
        row = row * size + jax.lax.broadcasted_iota(jnp.int32, (*shape[:-1], 1), axis)
    return drop_bits(_mix(row + first), second, 1, shape[-1])


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of int32 each of whose bits depends on all bits (Wellons 2018, lowbias32)."""
    x = (x ^ jax.lax.shift_right_logical(x, 16)) * jnp.int32(0x7FEB352D)
    x = (x ^ jax.lax.shift_right_logical(x, 15)) * jnp.int32(0x846CA68B - 2**32)
    return x ^ jax.lax.shift_right_logical(x, 16)
