"""Training of the retriever of examples by what helped a language model."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.models.dual_encoder import DualEncoder, DualEncoderConfig
from mmqa_jax.models.layers import split_key


@dataclasses.dataclass(frozen=True)
class DistillationTask:
    """KL(Q || P) over a question's candidates (REPLUG LSR, Shi et al. 2023, section 4).

    P is the softmax of their cosines with the question, times the model's factor (`temperature`);
    Q the softmax of the language model's scores over `target_temperature`. REPLUG has KL(P || Q);
    with Q first the gradient is that of cross-entropy with soft targets.

    Attributes:
      config: the dual encoder's; its text tower embeds questions and examples alike.
      target_temperature: low trusts the most helpful candidate alone.
    """

    config: DualEncoderConfig
    target_temperature: float = 1.0

    def init(self, key: jax.Array) -> nnx.Module:
        """A freshly initialized dual encoder."""
        return DualEncoder(self.config, rngs=nnx.Rngs(key))

    def loss(
        self, model: DualEncoder, batch: dict[str, jax.Array], dropout_key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Mean KL of a batch of `data.batches.example_retrieval`.

        `score_of_nearest` is the language model's mean score of the nearest candidate, `accuracy`
        how often that is the most helpful one.
        """
        count, candidates, length = batch["candidate_ids"].shape
        query_key, candidate_key = split_key(dropout_key, 2)
        queries = model.encode_text(batch["query_ids"], batch["query_mask"], dropout_key=query_key)
        flat = (batch[name].reshape(-1, length) for name in ("candidate_ids", "candidate_mask"))
        examples = model.encode_text(*flat, dropout_key=candidate_key)
        examples = examples.reshape(count, candidates, -1)  # [B, m, D]
        cosines = jnp.einsum("bd,bmd->bm", queries, examples, precision=jax.lax.Precision.HIGHEST)
        scale = model.temperature()
        targets = jax.nn.log_softmax(batch["scores"] / self.target_temperature)  # [B, m]
        found = jax.nn.log_softmax(scale * cosines)
        loss = (jnp.exp(targets) * (targets - found)).sum(axis=1).mean()
        nearest = cosines.argmax(axis=1)
        chosen = jnp.take_along_axis(batch["scores"], nearest[:, None], axis=1)
        best = batch["scores"].argmax(axis=1)
        return loss, {
            "score_of_nearest": chosen.mean(),
            "accuracy": (nearest == best).astype(jnp.float32).mean(),
            "temperature": scale,
        }
