"""Llama 4 computes texts longer than a chunk otherwise (transformers modeling_llama4.py).

Layers that rotate see no further than their own chunk of a text's tokens. In the others, which see
all, queries grow with their position, so that attention does not flatten (Nakanishi 2025,
Scalable-Softmax). Shorter texts are those of a LLaMA.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from mmqa_jax.models.llama.config import LlamaConfig


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
