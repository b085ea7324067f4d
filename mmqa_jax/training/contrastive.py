"""Contrastive training of the dual encoder: CLIP's loss with mined hard negatives."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mmqa_jax.models.dual_encoder import DualEncoder, DualEncoderConfig


@dataclasses.dataclass(frozen=True)
class ContrastiveTask:
    """Questions against sources, one gold source each (CLIP, Radford et al. 2021, figure 3).

    Every question's negatives are its own hard ones and all sources of the other questions in
    the global batch. The reverse direction, source to question, runs over the gold sources.
    """

    config: DualEncoderConfig

    def init(self, key: jax.Array) -> nnx.Module:
        """A freshly initialised dual encoder."""
        return DualEncoder(self.config, rngs=nnx.Rngs(key))

    def loss(
        self, model: DualEncoder, batch: dict[str, jax.Array], dropout_key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Mean cross-entropy of both directions, and the in-batch accuracy.

        The batch is `pipelines.contrastive_batches`'s: B questions, and S = B * (1 + n) sources.
        """
        query_key, source_key = jax.random.split(dropout_key)
        queries = model.encode_text(  # [B, D]
            batch["query_ids"], batch["query_mask"], dropout_key=query_key
        )
        sources = model.encode_source(  # [S, D]
            batch["source_ids"],
            batch["source_mask"],
            batch["pixels"],
            batch["has_image"],
            dropout_key=source_key,
        )
        scale = model.temperature()
        rows, target = batch["source_rows"], batch["positive"]  # [S], [B]
        logits = scale * queries @ sources.T  # [B, S]
        # Other gold sources of a question, and copies of its target, are no negatives.
        gold = (rows[None, :, None] == batch["gold_rows"][:, None, :]).any(axis=2)  # [B, S]
        others = gold & (jnp.arange(rows.size)[None, :] != target[:, None])
        logits = jnp.where(others, -jnp.inf, logits)
        forward = optax.softmax_cross_entropy_with_integer_labels(logits, target)

        backward_logits = scale * sources[target] @ queries.T  # [B targets, B questions]
        shared = gold[:, target].T & ~jnp.eye(target.size, dtype=bool)
        backward = optax.softmax_cross_entropy_with_integer_labels(
            jnp.where(shared, -jnp.inf, backward_logits), jnp.arange(target.size)
        )
        accuracy = jnp.mean(logits.argmax(axis=1) == target)
        loss = (forward.mean() + backward.mean()) / 2
        return loss, {"accuracy": accuracy, "temperature": scale}
