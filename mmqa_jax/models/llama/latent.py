"""Attention over latents (DeepSeek-V2, section 2.1, and V3; transformers models/deepseek_v3).

Keys and values of all heads are linear in one small vector of a token, its latent, beside which one
rotated key serves all heads. Here a query is multiplied by its head's part of the keys' matrix, so
that it asks the latent itself, and what it gets by its part of the values'. So one key head, as
wide as the latent and the rotated key, is all that attention, caches and kernels see: 1,152 numbers
of a token and layer of DeepSeek-V3, keys and values, in the place of 40,960.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.models.common.layers import Linear, normal_init, param, split_heads
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.norms import RMSNorm

_EPS = 1e-6  # of the latents' norms, whatever the config's is


class Latent(nnx.Module):
    """The projections of a layer's attention but for its output's.

    Heads lie so that their rotated numbers are pairs across their halves, as `rotate` takes them.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        sizes, init = config.latent, normal_init(config.init_stddev)
        linear = functools.partial(Linear, rngs=rngs, kernel_init=init, use_bias=False)
        if sizes.query_rank:
            self.q_down = linear(config.hidden, sizes.query_rank, ("embed", None))
            self.q_norm = RMSNorm(sizes.query_rank, _EPS, rngs=rngs, name="head_dim")
        width = config.heads * (sizes.resting + sizes.turning)
        self.q = linear(sizes.query_rank or config.hidden, width, ("embed", "heads"))
        self.down = linear(config.hidden, sizes.rank + sizes.turning, ("embed", None))
        self.norm = RMSNorm(sizes.rank, _EPS, rngs=rngs, name="head_dim")
        of_heads = ("heads", None, None)
        self.key_up = param(rngs, init, (config.heads, sizes.resting, sizes.rank), of_heads)
        self.value_up = param(rngs, init, (config.heads, sizes.rank, sizes.value), of_heads)
        self.config = config

    def each_linear(self) -> Iterator[tuple[nnx.Module, str]]:
        """What holds each linear, and its name there."""
        names = ("q_down", "q", "down") if self.config.latent.query_rank else ("q", "down")
        yield from ((self, name) for name in names)

    def products(self, x: jax.Array, kv_heads: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [B, L, H] -> queries [B, L, heads, D], and keys and values [B, L, kv_heads, D], not
        rotated, where D is the latent's rank and the width of the rotated key together.

        kv_heads: how often the one key head is there, for caches that a mesh splits.
        """
        sizes = self.config.latent
        asked = self.q(self.q_norm(self.q_down(x)) if sizes.query_rank else x)
        asked = split_heads(asked, self.config.heads)
        resting = _of_heads("...hd,hdr->...hr", asked[..., : sizes.resting], self.key_up)
        q = _laid(asked[..., sizes.resting :], resting)
        down = self.down(x)
        k = _laid(down[..., sizes.rank :], self.norm(down[..., : sizes.rank]))
        k = jnp.broadcast_to(k[..., None, :], (*k.shape[:-1], kv_heads, k.shape[-1]))
        return q, k, k

    def values(self, attended: jax.Array) -> jax.Array:
        """What attention gives of latents [B, L, heads, D] -> values [B, L, heads, value]."""
        halves = jnp.split(attended, 2, axis=-1)
        of_latent = [half[..., self.config.latent.turning // 2 :] for half in halves]
        return _of_heads("...hr,hrv->...hv", jnp.concatenate(of_latent, axis=-1), self.value_up)


def _laid(turning: jax.Array, resting: jax.Array) -> jax.Array:
    """[..., T] and [..., R] -> [..., T + R], in whose halves the pairs that turn are first."""
    halves = zip(jnp.split(turning, 2, axis=-1), jnp.split(resting, 2, axis=-1), strict=True)
    return jnp.concatenate([part for half in halves for part in half], axis=-1)


def _of_heads(axes: str, x: jax.Array, kernels: nnx.Param) -> jax.Array:
    """A product with a matrix of each head, in x's type."""
    kernels = kernels[...].astype(x.dtype)
    return jnp.einsum(axes, x, kernels, preferred_element_type=jnp.float32).astype(x.dtype)
