"""Multimodal-CoT's T5 (Zhang et al., 2023): a picture's features are fused into the encoded text.

Original: amazon-science/mm-cot model.py (JointEncoder, T5ForMultimodalGeneration).
"""

from __future__ import annotations

import dataclasses
from typing import Annotated  # noqa: F401  of T5Config's fields, whose annotations are read here

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.typed import AtLeast  # noqa: F401  as Annotated
from mmqa_jax.models.common.layers import Linear, torch_linear, uniform_init
from mmqa_jax.models.t5.config import FREE, T5Config
from mmqa_jax.models.t5.network import T5
from mmqa_jax.weights.registry import Base


@dataclasses.dataclass(frozen=True)
class MultimodalT5Config(T5Config):
    """A T5's, and `features`: the values of each of a picture's vectors (DETR's have 256)."""

    features: int = 256


class PictureFusion(nnx.Module):
    """(1 - gate) * text + gate * picture, where each token attends over the picture's vectors."""

    def __init__(self, config: MultimodalT5Config, *, rngs: nnx.Rngs):
        size = config.hidden
        self.picture = torch_linear(config.features, size, (None, "embed"), rngs=rngs)
        # Queries of the text, keys and values of the picture, in this order. Both start as those of
        # torch's MultiheadAttention, whose biases are 0.
        xavier, uniform = jax.nn.initializers.xavier_uniform(), uniform_init(size**-0.5)
        self.attention = Linear(size, 3 * size, ("embed", None), rngs=rngs, kernel_init=xavier)
        self.out = Linear(size, size, (None, "embed"), rngs=rngs, kernel_init=uniform)
        self.gate = torch_linear(2 * size, size, (None, "embed"), rngs=rngs)

    def __call__(self, text: jax.Array, features: jax.Array) -> jax.Array:
        """text [B, L, H], features [B, P, D] -> [B, L, H]."""
        picture = self.picture(features.astype(text.dtype))
        queries = jnp.split(self.attention(text), 3, axis=-1)[0]
        _, keys, values = jnp.split(self.attention(picture), 3, axis=-1)
        seen = jax.nn.dot_product_attention(  # one head
            queries[:, :, None], keys[:, :, None], values[:, :, None]
        )[:, :, 0]
        seen = self.out(seen)
        gate = jax.nn.sigmoid(self.gate(jnp.concatenate([text, seen], axis=-1)))
        return (1 - gate) * text + gate * seen


class MultimodalT5(T5):
    """A T5 whose encoder sees a picture."""

    def __init__(self, config: MultimodalT5Config, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.fusion = PictureFusion(config, rngs=rngs)

    def encode_pictured(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        features: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The encoded source, with what each token draws from its picture.

        input_ids, attention_mask [B, S] as of `encode`; features [B, P, D], zeros where there is
        no picture. Returns [B, S, H].
        """
        text = self.encode(input_ids, attention_mask, dropout_key=dropout_key)
        return self.fusion(text, features)


# Wide as the pictures are where the base is a T5 without any.
BASE = Base(
    "Multimodal-CoT or T5",
    "a published folder or ORG/NAME",
    MultimodalT5Config,
    {"changes": (*FREE, "features")},
    published_as="t5",
)
