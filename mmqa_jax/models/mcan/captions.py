"""MCAN without a picture: the picture's caption is what the decoder guides (ours).

Where a benchmark's pictures are not at hand, a caption stands for them. One BERT reads question
and caption as a pair; the question's states go to MCAN's encoder, the caption's take the place of
the grid in its decoder, without rotary positions, since BERT's states have theirs. Fusion, pooling
and head are those of models.mcan.network.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.models.bert.network import Bert, BertConfig
from mmqa_jax.models.common.layers import split_key, torch_linear
from mmqa_jax.models.mcan.network import PAD, Fusion, FusionConfig


@dataclasses.dataclass(frozen=True)
class CaptionMCANConfig:
    """Text encoder, fusion and answers.

    Attributes:
      text: reads the pair of question and caption.
      fusion: encoder, decoder, pooling.
      answers: size of the answer vocabulary.
      frozen_text: no gradient reaches the text encoder, which has no dropout then.
    """

    text: BertConfig
    fusion: FusionConfig
    answers: int
    frozen_text: bool = False


class CaptionMCAN(nnx.Module):
    """Answers a question on a caption by classification."""

    def __init__(self, config: CaptionMCANConfig, *, rngs: nnx.Rngs):
        fusion, size = config.fusion, config.text.hidden
        self.bert = Bert(config.text, rngs=rngs)
        self.text_adapter = torch_linear(size, fusion.hidden, ("proj", "embed"), rngs=rngs)
        self.image_adapter = torch_linear(size, fusion.hidden, ("proj", "embed"), rngs=rngs)
        self.fusion = Fusion(fusion, rngs=rngs)
        self.head = torch_linear(fusion.flat_out, config.answers, ("proj", "vocab"), rngs=rngs)
        self.config = config

    def latent(
        self,
        question_ids: jax.Array,
        image: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The fused feature.

        Args:
          question_ids: [B, L] int, `[CLS] question [SEP] caption [SEP]`, 0 = padding.
          image: bool [B, L], the caption's tokens and its [SEP].

        Returns:
          [B, flat_out] float32.
        """
        text_key, fusion_key = split_key(dropout_key, 2)
        real = question_ids != PAD
        if self.config.frozen_text:
            states = jax.lax.stop_gradient(self.bert(question_ids, real))
        else:
            states = self.bert(question_ids, real, dropout_key=text_key)  # [B, L, bert hidden]
        return self.fusion(
            jnp.tanh(self.text_adapter(states)),
            jnp.tanh(self.image_adapter(states)),
            real & ~image,
            image,
            dropout_key=fusion_key,
        )

    def answer_logits(self, latent: jax.Array) -> jax.Array:
        """latent [B, flat_out] -> [B, answers] float32; a sigmoid gives scores."""
        return self.head(latent)
