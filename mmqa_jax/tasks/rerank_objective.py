"""The objective of source selection: VLP's source head and its loss."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mmqa_jax.models.vlp.network import VLP, VLPConfig, VLPInputs
from mmqa_jax.models.vlp.two_sided import TwoSidedVLP, TwoSides


@dataclasses.dataclass(frozen=True)
class RerankObjective:
    """WebQA equation 3 as the original computes it (modeling.py:1088): -log p(class), class 0
    for relevant sources, averaged over a question's choices and then over questions.

    Batches hold pairs (question, source) of many questions. `weights` makes every question count
    alike: it is proportional to 1 / choices and 1 in the mean over an epoch. The loss is divided
    by the number of pairs, not by the batch's own weights: then a pair would count for more or
    less by what it happens to be drawn with.

    Attributes:
      sides: the model reads question and source apart (TwoSidedVLP); None: VLP itself.
    """

    config: VLPConfig
    sides: TwoSides | None = None

    def init(self, key: jax.Array | None) -> nnx.Module:
        """A freshly initialized VLP."""
        if self.sides is not None:
            return TwoSidedVLP(self.config, self.sides, rngs=nnx.Rngs(key))
        return self.config.build(rngs=nnx.Rngs(key))

    def outline(self) -> nnx.Module:
        """The model of zeros; no initializer is traced."""
        return self.init(None)

    def loss(
        self, model: VLP, batch: dict, dropout_key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Mean over the pairs of the weighted cross-entropy, and the weighted accuracy."""
        inputs: VLPInputs = batch["inputs"]
        logits = model.source_logits(inputs, dropout_key=dropout_key)  # [B, 2]
        relevant = batch["labels"]  # [B] 1 = relevant
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, 1 - relevant)
        weights = batch["weights"]
        correct = (logits.argmax(axis=1) == 1 - relevant).astype(jnp.float32)
        accuracy = (correct * weights).sum() / (weights.sum() + 1e-8)
        return (losses * weights).mean(), {"accuracy": accuracy}
