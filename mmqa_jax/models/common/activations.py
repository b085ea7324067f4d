"""Activation functions by their names in transformers' configs; CLIP's own are in clip.py."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from mmqa_jax.core.mesh import platform

Activation = Callable[[jax.Array], jax.Array]


def _gelu(x: jax.Array) -> jax.Array:
    """Exact GELU as PyTorch writes it; jax.nn.gelu's erfc is much slower on CPU."""
    return 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5))


def gated(name: str, limit: float | None = None) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """What a gated MLP makes of gate and up, act(gate) * up.

    limit: gpt-oss's (modeling_gpt_oss.py, `_apply_gate`): act(gate) * (up + 1), where gate is at
    most the limit, and up is within it on both sides.
    """
    if limit is None:
        return lambda gate, up: ACTIVATIONS[name](gate) * up
    return lambda gate, up: (
        ACTIVATIONS[name](jnp.minimum(gate, limit)) * (jnp.clip(up, -limit, limit) + 1)
    )


def by_platform(function: Activation) -> Activation:
    """The function computed in float32 on a CPU, whatever its input's type is, which it returns."""

    @functools.wraps(function)
    def activation(x: jax.Array) -> jax.Array:
        # XLA on CPU rounds every step of a bfloat16 function, which is slower.
        if platform() == "cpu":
            return function(x.astype(jnp.float32)).astype(x.dtype)
        return function(x)

    return activation


_TANH_GELU = by_platform(functools.partial(jax.nn.gelu, approximate=True))


def xielu(x: jax.Array, rising: jax.Array, falling: jax.Array) -> jax.Array:
    """xIELU (Huang and Schlag 2024, https://arxiv.org/abs/2411.13010), computed in float32.

    rising, falling: of a layer, [1], before softplus, which keeps them above 0.
    """
    beta, eps = 0.5, -1e-6
    x32 = x.astype(jnp.float32)
    above, below = jax.nn.softplus(rising), beta + jax.nn.softplus(falling)
    curve = jnp.where(x32 > 0, above * x32 * x32, below * (jnp.expm1(jnp.minimum(x32, eps)) - x32))
    return (curve + beta * x32).astype(x.dtype)


LEARNED = ("xielu",)  # activations with parameters of a layer's own
ACTIVATIONS: dict[str, Activation] = {
    "gelu": by_platform(_gelu),
    "gelu_new": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "quick_gelu": by_platform(lambda x: x * jax.nn.sigmoid(1.702 * x)),  # clip/model.py, QuickGELU
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": by_platform(jax.nn.silu),
}
