"""A cross-encoder: a BERT that reads two texts together, for their relevance or their class."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.models.bert.network import Bert, BertConfig
from mmqa_jax.models.common.layers import Linear, normal_init


class CrossEncoder(nnx.Module):
    """transformers' BERT and RoBERTa classifiers of sequences.

    Their heads are alike: a linear layer and tanh of the first token (BERT's pooler), then logits.

    Args:
      labels: 1: the relevance, as rerankers have it.
    """

    def __init__(self, config: BertConfig, labels: int = 1, *, rngs: nnx.Rngs):
        self.bert = Bert(dataclasses.replace(config, pooler=True), rngs=rngs)
        self.classifier = Linear(
            config.hidden,
            labels,
            ("embed", None),
            rngs=rngs,
            kernel_init=normal_init(config.init_stddev),
        )
        self.config = config

    def __call__(
        self, input_ids: jax.Array, attention_mask: jax.Array, token_type_ids: jax.Array
    ) -> jax.Array:
        """Pairs of right-padded texts, int or bool [B, L] each -> logits float32 [B].

        With several labels [B, labels].
        """
        positions = jnp.broadcast_to(jnp.arange(input_ids.shape[1]), input_ids.shape)
        embedded = self.bert.embeddings(input_ids, positions, token_type_ids)
        mask = attention_mask.astype(bool)[:, None, None, :]
        first = self.bert.encode_first(embedded, mask)  # [B, H]
        pooled = self.bert.pool(first[:, None])
        logits = self.classifier(pooled).astype(jnp.float32)
        return logits[:, 0] if logits.shape[1] == 1 else logits
