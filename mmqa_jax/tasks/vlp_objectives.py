"""Objectives of the tasks that train VLP.

They need nothing but JAX, Flax, Optax and the models, and so run on a bare accelerator image.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mmqa_jax.models.vlp.network import VLP, VLPConfig, VLPInputs
from mmqa_jax.models.vlp.two_sided import TwoSidedVLP, TwoSides
from mmqa_jax.training.state import WEIGHT, OfLayers


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


@dataclasses.dataclass(frozen=True)
class AnswerObjective(OfLayers):
    """Cross-entropy over the masked answer tokens (VLP, equation 2; WebQA section 5.2).

    Normalized as in the original (modeling.py:1162-1190): summed over its micro-batch, divided by
    the number of masked tokens + 1e-5; where tokens have weights (MaskingConfig.weights),
    by their sum. Then the mean over the micro-batches of an update.

    Attributes:
      questions_per_mean: questions of such a micro-batch, a divisor of the batch; None: the batch.
    """

    config: VLPConfig
    questions_per_mean: int | None = None

    def init(self, key: jax.Array | None) -> nnx.Module:
        """A freshly initialized VLP."""
        return self.config.build(rngs=nnx.Rngs(key))

    def loss(
        self, model: VLP, batch: dict, dropout_key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the mean loss per masked token, and the share of tokens with a probability above
        0.5.

        Both weighted by the tokens' weights, the loss within `questions_per_mean` questions.
        """
        positions, ids = batch["masked_positions"], batch["masked_ids"]  # [B, P]
        log_probs, sayable = model.answer_log_probs(
            batch["inputs"], positions, ids, dropout_key=dropout_key
        )  # [B, P]
        # A model that only copies names cannot produce a name that is in no source.
        weights = batch["masked_weights"] * sayable
        rows, masks = weights.shape

        def sums(x: jax.Array) -> jax.Array:  # [B, P] -> [groups of questions]
            return x.reshape(-1, (self.questions_per_mean or rows) * masks).sum(axis=1)

        loss = -(sums(log_probs * weights) / (sums(weights) + 1e-5)).mean()
        correct = (log_probs > jnp.log(0.5)).astype(jnp.float32)
        metrics = {"accuracy": (correct * weights).sum() / (weights.sum() + 1e-5)}
        if self.questions_per_mean is None:
            metrics[WEIGHT] = weights.sum()
        return loss, metrics
