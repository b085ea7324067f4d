"""Attention over latents (DeepSeek), and within chunks of a text (Llama 4).

Latents (DeepSeek-V2, section 2.1, and V3; transformers models/deepseek_v3): keys and values of all
heads are linear in one small vector of a token, its latent, beside which one rotated key serves all
heads. Here a query is multiplied by its head's part of the keys' matrix, so that it asks the latent
itself, and what it gets by its part of the values'. So one key head, as wide as the latent and the
rotated key, is all that attention, caches and kernels see: 1,152 numbers of a token and layer of
DeepSeek-V3, keys and values, in the place of 40,960.

Llama 4 (transformers modeling_llama4.py): layers that rotate see no further than their own chunk of
a text's tokens. In the others, which see all, queries grow with their position, so that attention
does not flatten (Nakanishi 2025, Scalable-Softmax). Shorter texts are those of a LLaMA.
"""

import functools
from collections.abc import Iterator

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.models.common.layers import Linear, normal_init, param, split_heads
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.norms import RMSNorm


@flax.struct.dataclass
class FarTokens:
    """Of the tokens of texts, None where the config has no such thing."""

    chunk: jax.Array | None = None  # int32 [B or 1, L], its number in the text
    growth: jax.Array | None = None  # float32 [B or 1, L, 1, 1], what queries are multiplied by

    def segments(
        self, segments: jax.Array | None, rotated: jax.Array | None, shape: tuple[int, int]
    ) -> jax.Array | None:
        """The `segments` of `layers.attention` in a layer.

        Args:
          segments: int [B, L], of the texts; None is one text a row.
          rotated: of `LayerTraits`.
          shape: (B, L).
        """
        if self.chunk is None:
            return segments
        whole = jnp.zeros(shape, jnp.int32) if segments is None else segments
        parts = whole * shape[1] + self.chunk  # no text of a row has as many chunks
        return parts if rotated is None else jnp.where(rotated, parts, whole)

    def grown(self, q: jax.Array, rotated: jax.Array | None) -> jax.Array:
        """The queries [B, L, heads, D] of a layer."""
        if self.growth is None or rotated is None:
            return q
        return (q * jnp.where(rotated, 1, self.growth)).astype(q.dtype)


def far_tokens(config: LlamaConfig, positions: jax.Array, length: int | None) -> FarTokens:
    """Computes the chunks, and the growth of queries, of tokens at positions [B or 1, L].

    length: of the longest text, if it is known.
    """
    chunk = growth = None
    if config.chunk and (length is None or length > config.chunk):
        chunk = (positions // config.chunk).astype(jnp.int32)
    if config.growth and (length is None or length >= config.growth[1]):
        by, tokens = config.growth
        growth = 1 + by * jnp.log1p(jnp.floor((positions.astype(jnp.float32) + 1) / tokens))
        growth = growth[:, :, None, None]
    return FarTokens(chunk, growth)


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
