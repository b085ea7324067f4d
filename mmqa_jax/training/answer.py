"""Training of VLP's answers: masked-LM prediction of the answer's tokens."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.models.vlp_extensions import Context, ExtendedVLP, ExtendedVLPConfig, said_before


@dataclasses.dataclass(frozen=True)
class AnswerTask:
    """Cross-entropy over the masked answer tokens (VLP, equation 2; WebQA section 5.2).

    Normalized as in the original (modeling.py:1162-1190): summed over its micro-batch, divided by
    the number of masked tokens + 1e-5; where tokens have weights (MaskingConfig.keyword_weight),
    by their sum. Then the mean over the micro-batches of an update.

    Attributes:
      questions_per_mean: questions of such a micro-batch, a divisor of the batch; None: the batch.
    """

    config: ExtendedVLPConfig
    questions_per_mean: int | None = None

    def init(self, key: jax.Array) -> nnx.Module:
        """A freshly initialised VLP."""
        return ExtendedVLP(self.config, rngs=nnx.Rngs(key))

    def loss(
        self, model: ExtendedVLP, batch: dict, dropout_key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Mean loss per masked token, and the share of them with a probability above one half.

        Both weighted by the tokens' weights, the loss within `questions_per_mean` questions.
        """
        inputs = batch["inputs"]
        hidden = model.encode(inputs, dropout_key=dropout_key)  # [B, L, H]
        positions = batch["masked_positions"]  # [B, P]
        at_masks = jnp.take_along_axis(hidden, positions[:, :, None], axis=1)  # [B, P, H]
        context = Context(hidden, inputs.input_ids, inputs.context_mask)
        said = said_before(inputs, positions)  # [B, P, L]
        log_probs = model.log_probs_of(at_masks, context, said, batch["masked_ids"])  # [B, P]
        # A model that only copies names cannot produce a name that is in no source.
        weights = batch["masked_weights"] * model.sayable(context, batch["masked_ids"])
        rows, masks = weights.shape

        def sums(x: jax.Array) -> jax.Array:  # [B, P] -> [groups of questions]
            return x.reshape(-1, (self.questions_per_mean or rows) * masks).sum(axis=1)

        loss = -(sums(log_probs * weights) / (sums(weights) + 1e-5)).mean()
        correct = (log_probs > jnp.log(0.5)).astype(jnp.float32)
        return loss, {"accuracy": (correct * weights).sum() / (weights.sum() + 1e-5)}
