"""The objective of the tasks that train a T5.

It needs nothing but JAX, Flax, Optax and the models, and so runs on a bare accelerator image.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mmqa_jax.models.common.layers import split_key
from mmqa_jax.models.t5.config import MultimodalT5Config, T5Config
from mmqa_jax.models.t5.network import T5, MultimodalT5, Texts
from mmqa_jax.tasks.language_model_objective import mean_over_targets
from mmqa_jax.training.state import OfLayers


@dataclasses.dataclass(frozen=True)
class Seq2SeqObjective(OfLayers):
    """Cross-entropy of an answer behind its prompt, as a mean over the global batch.

    Attributes:
      inputs: of its encoder: Texts, Passages or PicturedTexts.
      mean: what the mean is over. `tokens`: the tokens of all answers. `questions`: each question's
        mean over the tokens of its answer; so it is where every GPU has one question and
        DistributedDataParallel averages their gradients (FiD train_reader.py:52-62 and 194, KAT
        train_KAT.py:50-60 and 213). `places`: the tokens of all answers and the padding behind
        them, where labels hold the pad's id (mm-cot utils_data.py:222-230, model.py:458).
    """

    network: ClassVar[type[nnx.Module]] = T5

    config: T5Config
    inputs: type[Texts] = Texts
    mean: Literal["tokens", "questions", "places"] = "tokens"

    def loss(
        self, model: T5, batch: dict[str, jax.Array], dropout_key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Mean loss of a batch of `data.batches.texts`, and its number of targets."""
        log_probs = answer_log_probs(model, batch, dropout_key, self.inputs)  # [B, T]
        targets = self._targets(batch)
        loss, metrics = mean_over_targets(log_probs, targets)
        if self.mean != "questions":
            return loss, metrics
        loss = -log_probs.mean(axis=1, where=targets).mean()  # over the rows: a part counts by them
        return loss, {"targets": metrics["targets"]}

    def _targets(self, batch: dict[str, jax.Array]) -> jax.Array:
        """Marks the places of `target_ids` that are learned: bool [B, T]."""
        places = jnp.arange(batch["target_ids"].shape[1])
        learned = places < batch["target_lengths"][:, None]
        return jnp.ones_like(learned) if self.mean == "places" else learned


@dataclasses.dataclass(frozen=True)
class MultimodalObjective(Seq2SeqObjective):
    """The objective of a T5 that sees pictures."""

    network: ClassVar[type[nnx.Module]] = MultimodalT5

    config: MultimodalT5Config


def answer_log_probs(
    model: T5,
    batch: dict[str, jax.Array],
    dropout_key: jax.Array | None = None,
    inputs: type[Texts] = Texts,
) -> jax.Array:
    """Log-probability of every answer's tokens, float32 [B, T]; what lies behind means nothing."""
    first, second = split_key(dropout_key, 2)
    source, targets = inputs.of(batch).encode(model, first), batch["target_ids"]
    logits = model.encoded_target_logits(*source, targets, dropout_key=second)
    return -optax.softmax_cross_entropy_with_integer_labels(logits, batch["target_ids"])
