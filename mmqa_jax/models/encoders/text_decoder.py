"""Decoders that read texts and write none: the state of every token, or a judgement of yes or no.

Qwen3-Embedding, E5-Mistral and EmbeddingGemma pool the states (`sentence_encoder.SentenceEncoder`);
Qwen3-Reranker is asked whether a text answers a question.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.network import Llama, last_token


class TextDecoder(Llama):
    """A decoder without its output head."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        super().__init__(dataclasses.replace(config, tied=True), rngs=rngs)

    def __call__(self, input_ids: jax.Array, mask: jax.Array) -> jax.Array:
        """Right-padded texts, int [B, L] -> normed states of the last layer [B, L, H].

        mask: bool [B, L], not used where no token sees the padding behind it.
        """
        return self.encode(self.embed(input_ids), mask if self.config.bidirectional else None)


class YesNoDecoder(Llama):
    """A decoder that says how much likelier yes is than no behind a prompt."""

    def __init__(self, config: LlamaConfig, yes: int, no: int, *, rngs: nnx.Rngs):
        """`yes` and `no`: the ids of the two tokens."""
        super().__init__(config, rngs=rngs)
        self.yes, self.no = yes, no

    def __call__(
        self, input_ids: jax.Array, attention_mask: jax.Array, token_type_ids: jax.Array
    ) -> jax.Array:
        """Right-padded prompts, int or bool [B, L] each -> log-odds of yes, float32 [B].

        `token_type_ids` are not used: there are none.
        """
        hidden = self.encode(self.embed(input_ids))  # [B, L, H]
        lengths = attention_mask.astype(jnp.int32).sum(1)
        logits = self.logits(last_token(hidden, lengths))  # [B, V]
        return logits[:, self.yes] - logits[:, self.no]
