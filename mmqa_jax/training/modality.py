"""Training of the modality classifier: does a question need snippets or pictures?"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mmqa_jax.models.text_classifier import TextClassifier, TextClassifierConfig


@dataclasses.dataclass(frozen=True)
class ModalityTask:
    """Cross-entropy over the two modalities (WebQA_Baseline bert_classifier.py:113,290).

    Attributes:
      config: the model's.
      frozen: only the linear layer is trained.
    """

    config: TextClassifierConfig
    frozen: bool = False

    def init(self, key: jax.Array) -> nnx.Module:
        """A freshly initialized classifier."""
        return TextClassifier(self.config, rngs=nnx.Rngs(key))

    def loss(
        self, model: TextClassifier, batch: dict[str, jax.Array], dropout_key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Mean cross-entropy of the batch of `data.batches.modality`, and its accuracy."""
        logits = model(
            batch["input_ids"], batch["mask"], frozen=self.frozen, dropout_key=dropout_key
        )  # [B, 2]
        labels = batch["label"]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, {"accuracy": (logits.argmax(axis=1) == labels).astype(jnp.float32).mean()}
