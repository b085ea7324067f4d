"""Activation functions by their names in transformers' configs."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

Activation = Callable[[jax.Array], jax.Array]


def _gelu(x: jax.Array) -> jax.Array:
    """Exact GELU as PyTorch writes it; with jax.nn.gelu's erfc it is 4 times slower on CPU."""
    return 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5))


def _quick_gelu(x: jax.Array) -> jax.Array:
    """OpenAI's CLIP (clip/model.py, QuickGELU)."""
    return x * jax.nn.sigmoid(1.702 * x)


def _by_platform(function: Activation) -> Activation:
    @functools.wraps(function)
    def activation(x: jax.Array) -> jax.Array:
        # XLA on CPU rounds every step of a bfloat16 function, 2 to 3 times slower.
        if jax.default_backend() == "cpu":
            return function(x.astype(jnp.float32)).astype(x.dtype)
        return function(x)

    return activation


ACTIVATIONS: dict[str, Activation] = {
    "gelu": _by_platform(_gelu),
    "gelu_new": _by_platform(functools.partial(jax.nn.gelu, approximate=True)),  # tanh
    "quick_gelu": _by_platform(_quick_gelu),
    "relu": jax.nn.relu,
    "silu": _by_platform(jax.nn.silu),
}
