"""One vector of a text by an encoder of tokens, as sentence-transformers makes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.models.common.layers import Linear
from mmqa_jax.models.encoders.dual_encoder import mean_pool
from mmqa_jax.models.two_towers.network import l2_normalize


def first_token(hidden: jax.Array, attention_mask: jax.Array) -> jax.Array:
    """State of the first token, [CLS]: [B, L, D], [B, L] -> [B, D] in float32."""
    return hidden[:, 0].astype(jnp.float32)


def last_token(hidden: jax.Array, attention_mask: jax.Array) -> jax.Array:
    """State of the last real token of right-padded texts: [B, L, D], [B, L] -> [B, D]."""
    last = jnp.maximum(attention_mask.astype(jnp.int32).sum(1) - 1, 0)  # [B]
    return jnp.take_along_axis(hidden, last[:, None, None], 1)[:, 0].astype(jnp.float32)


# By the names of sentence-transformers.
POOLINGS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "mean": mean_pool,
    "cls": first_token,
    "lasttoken": last_token,
}


# Behind a linear layer over pooled states, by torch's names.
DENSE_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Tanh": jnp.tanh,
}


class Dense(nnx.Module):
    """sentence-transformers' layer Dense: [B, in] -> [B, out], with one of DENSE_ACTIVATIONS."""

    def __init__(self, linear: Linear, activation: str):
        self.linear, self.activation = linear, activation

    def __call__(self, x: jax.Array) -> jax.Array:
        return DENSE_ACTIVATIONS[self.activation](self.linear(x))


class SentenceEncoder(nnx.Module):
    """An encoder of tokens with a pooling over its last layer.

    Args:
      bert: the encoder: a Bert, MPNet, ModernBert or TextDecoder, (ids, mask) -> states.
      pooling: one of POOLINGS.
      truncate_dim: the first so many values are kept (Matryoshka); None: all.
      dense: layers over what is pooled, in order.
    """

    def __init__(
        self,
        bert: nnx.Module,
        pooling: str = "mean",
        truncate_dim: int | None = None,
        dense: Sequence[Dense] = (),
    ):
        self.bert, self.dense = bert, nnx.List(dense)
        self.pooling, self.truncate_dim = pooling, truncate_dim

    def encode_text(self, input_ids: jax.Array, attention_mask: jax.Array) -> jax.Array:
        """Texts, input_ids int[B, L] and attention_mask bool[B, L] -> float32 [B, D], of length 1.

        They are right-padded; a row has at least one token.
        """
        hidden = self.bert(input_ids, attention_mask)  # [B, L, H]
        pooled = POOLINGS[self.pooling](hidden, attention_mask)
        for layer in self.dense:
            pooled = layer(pooled)
        return l2_normalize(pooled[:, : self.truncate_dim])
