"""Objectives of the tasks that train a dual encoder.

They need nothing but JAX, Flax, Optax and the models, and so run on a bare accelerator image.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.models.common.layers import split_key
from mmqa_jax.models.encoders.dual_encoder import DualEncoder, DualEncoderConfig
from mmqa_jax.tasks.contrastive_losses import (
    contrastive_loss,
    cosines,
    own_scores,
    sigmoid_loss,
    teacher_divergence,
)
from mmqa_jax.training.state import OfLayers


@dataclasses.dataclass(frozen=True)
class ContrastiveObjective(OfLayers):
    """Questions against sources, one gold source each (CLIP, Radford et al. 2021, figure 3).

    Every question's negatives are its own hard ones and all sources of the other questions in
    the global batch, snippets and pictures alike: one space in which modality need not be known.
    The reverse direction, source to question, runs over the gold sources.

    Attributes:
      mesh: over which the batch is split; None computes the loss on one device.
      tower_parts: the towers run over the batch in this many parts, whose activations are
        recomputed for the gradient, so that only one part's are in memory at a time. The loss is
        that of the whole batch, and so is its gradient (GradCache, Gao et al. 2021, section 3).
    """

    network: ClassVar[type[nnx.Module]] = DualEncoder

    config: DualEncoderConfig
    mesh: Mesh | None = None
    tower_parts: int = 1

    def loss(
        self, model: DualEncoder, batch: dict[str, jax.Array], dropout_key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of the global batch, and the in-batch accuracy.

        The batch is `data.batches.retriever`'s: B questions, and S = B * (1 + n) sources.
        """

        queries, sources = self.vectors(model, batch, dropout_key)
        return self._compare(model, queries, sources, batch)

    def vectors(
        self, model: DualEncoder, batch: dict[str, jax.Array], dropout_key: jax.Array
    ) -> tuple[Any, Any]:
        """Those of the questions and of the sources, as `contrastive_losses` has them."""

        def encode_queries(key: jax.Array, inputs: tuple[jax.Array, ...]) -> jax.Array:
            return model.encode_text(*inputs, dropout_key=key)

        def encode_sources(key: jax.Array, inputs: tuple[jax.Array, ...]) -> jax.Array:
            return model.encode_source(*inputs, dropout_key=key)

        query_key, source_key = jax.random.split(dropout_key)
        queries = batch["query_ids"], batch["query_mask"]
        sources = tuple(
            batch[name] for name in ("source_ids", "source_mask", "pixels", "has_image")
        )
        queries = self._in_parts(encode_queries, query_key, queries)
        return queries, self._in_parts(encode_sources, source_key, sources)

    def _compare(
        self, model: DualEncoder, queries: Any, sources: Any, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Mean cross-entropy of both directions."""
        scale = model.temperature()
        loss, accuracy = contrastive_loss(queries, sources, scale, *links(batch), mesh=self.mesh)
        return loss, {"accuracy": accuracy, "temperature": scale}

    def _in_parts(
        self, encode: Callable[[jax.Array, Any], jax.Array], key: jax.Array, inputs: Any
    ) -> jax.Array:
        """`encode(key, inputs)` -> [N, ...], `tower_parts` parts of the rows one after another."""
        if self.tower_parts == 1:
            return encode(key, inputs)

        # [N, ...] -> [k, N / k, ...]: part i is column i, so each device keeps its own rows.
        def columns(x: jax.Array) -> jax.Array:
            return x.reshape(-1, self.tower_parts, *x.shape[1:]).swapaxes(0, 1)

        keys = jax.random.split(key, self.tower_parts)
        encoded = jax.lax.map(
            jax.checkpoint(lambda part: encode(*part)), (keys, jax.tree.map(columns, inputs))
        )  # [k, N / k, ...]
        return encoded.swapaxes(0, 1).reshape(-1, *encoded.shape[2:])


class SigmoidObjective(ContrastiveObjective):
    """A ContrastiveObjective that decides each pair by itself (`sigmoid_loss`).

    The model has a learned bias (`dual_encoder.with_logit_bias`).
    """

    def _compare(
        self, model: DualEncoder, queries: Any, sources: Any, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Sum over the sources, mean over the questions."""
        scale, bias = model.temperature(), model.logit_bias[...]
        loss, accuracy = sigmoid_loss(queries, sources, scale, bias, *links(batch), mesh=self.mesh)
        return loss, {"accuracy": accuracy, "temperature": scale, "bias": bias}


def links(batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Who belongs to whom in a batch, as the losses take it."""
    return batch["positive"], batch["source_rows"], batch["gold_rows"]


@dataclasses.dataclass(frozen=True)
class DistillationObjective(OfLayers):
    """KL(Q || P) over a question's candidates (REPLUG LSR, Shi et al. 2023, section 4).

    P is the softmax of their cosines with the question, times the model's factor (`temperature`);
    Q the softmax of the language model's scores over `target_temperature`. REPLUG has KL(P || Q);
    with Q first the gradient is that of cross-entropy with soft targets.

    Attributes:
      config: the dual encoder's; its text tower embeds questions and examples alike.
      target_temperature: low trusts the most helpful candidate alone.
    """

    network: ClassVar[type[nnx.Module]] = DualEncoder

    config: DualEncoderConfig
    target_temperature: float = 1.0

    def loss(
        self, model: DualEncoder, batch: dict[str, jax.Array], dropout_key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Mean KL of a batch of `data.batches.example_retrieval`.

        `score_of_nearest` is the language model's mean score of the nearest candidate, `accuracy`
        how often that is the most helpful one.
        """
        length = batch["candidate_ids"].shape[-1]
        query_key, candidate_key = split_key(dropout_key, 2)
        queries = model.encode_text(batch["query_ids"], batch["query_mask"], dropout_key=query_key)
        flat = (batch[name].reshape(-1, length) for name in ("candidate_ids", "candidate_mask"))
        examples = model.encode_text(*flat, dropout_key=candidate_key)
        scores = own_scores(cosines, queries, examples)  # [B, m]
        scale = model.temperature()
        loss = teacher_divergence(scale * scores, batch["scores"], self.target_temperature)
        nearest = scores.argmax(axis=1)
        chosen = jnp.take_along_axis(batch["scores"], nearest[:, None], axis=1)
        best = batch["scores"].argmax(axis=1)
        return loss, {
            "score_of_nearest": chosen.mean(),
            "accuracy": (nearest == best).astype(jnp.float32).mean(),
            "temperature": scale,
        }
