"""BERT with a linear classifier over its first position: WebQA's modality classifier.

WebQA_Baseline vlp/CLIP_retrieval_experiments/bert_classifier.py:26-45: BertModel's pooled output
(a tanh layer over [CLS]), then Linear(768, 2), without dropout in between.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.models.bert.network import Bert, BertConfig
from mmqa_jax.models.common.config_checks import check_known
from mmqa_jax.models.common.layers import Linear, normal_init

POOLINGS = ("pooler", "cls")


@dataclasses.dataclass(frozen=True)
class TextClassifierConfig:
    """Sizes of the classifier.

    Attributes:
      bert: the encoder; `with_pooler` says whether it has a pooler.
      classes: how many.
      pooling: `pooler` is BERT's pooled output, as in the original; `cls` the last hidden state of
        [CLS] itself, for encoders whose pooler was never trained (MiniLM).
    """

    bert: BertConfig
    classes: int = 2
    pooling: str = "pooler"

    def __post_init__(self):
        check_known("model.pooling", self.pooling, POOLINGS)

    @property
    def with_pooler(self) -> BertConfig:
        """The encoder with a pooler, or without one where it is not used."""
        return dataclasses.replace(self.bert, pooler=self.pooling == "pooler")


class TextClassifier(nnx.Module):
    """Classifies texts."""

    def __init__(self, config: TextClassifierConfig, *, rngs: nnx.Rngs):
        self.bert = Bert(config.with_pooler, rngs=rngs)
        init = normal_init(config.bert.init_stddev)
        size = config.bert.hidden
        self.head = Linear(size, config.classes, ("embed", None), rngs=rngs, kernel_init=init)
        self.config = config

    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        *,
        frozen: bool = False,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Texts -> logits [B, classes] in float32.

        Args:
          input_ids: [B, L] int, `[CLS] text [SEP]`, right-padded.
          attention_mask: [B, L], true at real tokens.
          frozen: no gradient reaches BERT.
          dropout_key: of BERT's dropout; None for none.
        """
        hidden = self.bert(input_ids, attention_mask, dropout_key=dropout_key)  # [B, L, H]
        pooled = self.bert.pool(hidden) if self.config.pooling == "pooler" else hidden[:, 0]
        if frozen:
            pooled = jax.lax.stop_gradient(pooled)  # [B, H]
        return self.head(pooled).astype(jnp.float32)
