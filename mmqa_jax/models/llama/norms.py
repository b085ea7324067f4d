"""Norms of a decoder's layers."""

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.models.common.layers import LayerNorm, ones_init, param, zeros_init
from mmqa_jax.models.llama.config import LlamaConfig


def unit_rms(x: jax.Array, eps: float) -> jax.Array:
    """x / its root mean square over the last axis; float32 inside, returned in x's dtype."""
    x32 = x.astype(jnp.float32)
    mean_square = jnp.square(x32).mean(-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(mean_square + eps)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / root mean square * scale over the last axis; float32 inside, returned in x's dtype.

    unit: it is multiplied by 1 + scale (Gemma).
    """

    def __init__(
        self,
        features: int,
        eps: float,
        *,
        rngs: nnx.Rngs,
        name: str = "embed",
        unit: bool = False,
    ):
        self.scale = param(rngs, zeros_init if unit else ones_init, (features,), (name,))
        self.eps, self.unit = eps, unit

    def __call__(self, x: jax.Array) -> jax.Array:
        y = unit_rms(x.astype(jnp.float32), self.eps)
        scale = self.scale[...].astype(jnp.float32)
        return (y * (scale + 1 if self.unit else scale)).astype(x.dtype)


def norm_of(
    config: LlamaConfig, features: int, *, rngs: nnx.Rngs, name: str = "embed"
) -> RMSNorm | LayerNorm:
    """A new norm of the config's kind."""
    kind, unit = config.norm_kind, config.unit_norms
    if kind == "rms":
        return RMSNorm(features, config.eps, rngs=rngs, name=name, unit=unit)
    biased = kind == "biased_layer"
    return LayerNorm(features, config.eps, rngs=rngs, name=name, use_bias=biased, unit=unit)
