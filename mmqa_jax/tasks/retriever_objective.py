"""The objective of the task `retriever`: an encoder with one vector or many."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.typed import at_least
from mmqa_jax.models.encoders.trained import EncoderRecord
from mmqa_jax.models.encoders.trained_pictured import PicturedRecord
from mmqa_jax.models.llama.lora import LoraConfig
from mmqa_jax.tasks.contrastive_losses import (
    contrastive_loss,
    cosines,
    margin_mse,
    max_sims,
    mean_max_sims,
    own_scores,
    shortened,
    teacher_divergence,
)
from mmqa_jax.tasks.contrastive_objectives import ContrastiveObjective, links


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrieverLoss:
    """The section `loss`.

    Attributes:
      kind: `softmax`, cross-entropy over all sources of the global batch (InfoNCE); `margin_mse`
        and `divergence` learn a teacher's scores of a question's own sources.
      scale: factor on the scores; 1 / temperature.
      symmetric: `softmax` has the direction from sources to questions, too.
      margin: see contrastive_loss; None: every source is a negative.
      mean: scores of late interaction are divided by the number of a question's tokens
        (colpali_engine's ColbertLoss).
      matryoshka: the loss is a sum of those of the first so many values of every vector
        (Kusupati et al. 2022); empty: of the whole vectors.
      teacher_temperature: the teacher's scores are divided by it, of `divergence`.
    """

    kind: Literal["softmax", "margin_mse", "divergence"] = "softmax"
    scale: float = at_least(1e-6, 20.0)
    symmetric: bool = False
    margin: float | None = None
    mean: bool = False
    matryoshka: tuple[int, ...] = ()
    teacher_temperature: float = at_least(1e-6, 1.0)


@dataclasses.dataclass(frozen=True)
class RetrieverObjective(ContrastiveObjective):
    """A ContrastiveObjective of a published encoder, by sentence-transformers' losses.

    A batch is that of `data.batches.retriever`.

    Attributes:
      config: the encoder.
      losses: what is learned.
      lora: only these additions to a decoder are trained; None: everything.
      tower: the tower that sees pictures is trained, too.
    """

    config: EncoderRecord | PicturedRecord
    losses: RetrieverLoss = RetrieverLoss()
    lora: LoraConfig | None = None
    tower: bool = True

    def init(self, key: jax.Array | None) -> nnx.Module:
        """A freshly initialized encoder."""
        return self.config.build(rngs=nnx.Rngs(key), lora=self.lora)

    @property
    def trained(self) -> str | None:
        """Regular expression over the names of the parameters that are trained; None: all."""
        return self.config.trained(self.lora, self.tower)

    def finish(self, model: Any) -> Any:
        """The whole trained model, without additions."""
        return model if self.lora is None else self.config.finish(model)

    def vectors(
        self, model: Any, batch: dict[str, jax.Array], dropout_key: jax.Array | None
    ) -> tuple[Any, Any]:
        """See ContrastiveObjective; there is no dropout."""

        def encode(key: jax.Array, inputs: dict[str, jax.Array]) -> jax.Array:
            return self.config.encode(model, inputs)

        key = jax.random.key(0) if dropout_key is None else dropout_key

        def of_side(name: str) -> Any:
            inputs = {
                key.removeprefix(name): array
                for key, array in batch.items()
                if key.startswith(name) and key != "source_rows"
            }
            scored = inputs.pop("scored")
            vectors = self._in_parts(encode, key, inputs)
            return (vectors, scored) if vectors.ndim == 3 else vectors

        return of_side("query_"), of_side("source_")

    def _compare(
        self, model: Any, queries: Any, sources: Any, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The sum of the losses of all sizes of vectors; the accuracy is of the largest."""
        total, values = jnp.zeros(()), {}
        for dim in sorted(self.losses.matryoshka) or [None]:
            sides = queries, sources
            if dim is not None:
                sides = tuple(shortened(vectors, dim) for vectors in sides)
            loss, accuracy = self._loss(*sides, batch)
            total, values = total + loss, {"accuracy": accuracy}
        return total, values

    def _loss(
        self, queries: Any, sources: Any, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        losses = self.losses
        similarity: Any = cosines
        if self.config.vectors == "token":
            similarity = mean_max_sims if losses.mean else max_sims
        if losses.kind == "softmax":
            return contrastive_loss(
                queries,
                sources,
                losses.scale,
                *links(batch),
                similarity=similarity,
                symmetric=losses.symmetric,
                margin=losses.margin,
                mesh=self.mesh,
            )
        scores = losses.scale * own_scores(similarity, queries, sources)  # [B, G]
        teacher = batch["scores"]
        accuracy = (scores.argmax(axis=1) == teacher.argmax(axis=1)).astype(jnp.float32).mean()
        if losses.kind == "margin_mse":
            return margin_mse(scores, teacher), accuracy
        divergence = teacher_divergence(scores, teacher, losses.teacher_temperature)
        # As sentence-transformers' DistillKLDivLoss with the student's temperature 1 / scale.
        return divergence / losses.scale**2, accuracy
