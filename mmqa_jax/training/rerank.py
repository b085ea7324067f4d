"""Training of VLP's source head: is this source relevant to the question?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.sequences import PackingConfig
from mmqa_jax.models.two_sided_vlp import TwoSidedVLP, TwoSides
from mmqa_jax.models.vlp import VLP, VLPConfig, VLPInputs


@dataclasses.dataclass(frozen=True)
class RerankTask:
    """WebQA equation 3 as the original computes it (modeling.py:1088): -log p(class), class 0
    for relevant sources, averaged over a question's choices and then over questions.

    Batches hold (question, source) pairs of one modality; `weights` carries the 1 / choices.

    Attributes:
      sides: the model reads question and source apart (TwoSidedVLP); None: VLP itself.
    """

    config: VLPConfig
    sides: TwoSides | None = None

    def init(self, key: jax.Array) -> nnx.Module:
        """A freshly initialised VLP."""
        if self.sides is not None:
            return TwoSidedVLP(self.config, self.sides, rngs=nnx.Rngs(key))
        return VLP(self.config, rngs=nnx.Rngs(key))

    def loss(
        self, model: VLP, batch: dict, dropout_key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Weighted mean cross-entropy over the pairs, and how many are classified rightly."""
        inputs: VLPInputs = batch["inputs"]
        logits = model.source_logits(inputs, dropout_key=dropout_key)  # [B, 2]
        relevant = batch["labels"]  # [B] 1 = relevant
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, 1 - relevant)
        weights = batch["weights"]
        total = weights.sum() + 1e-8
        right = (logits.argmax(axis=1) == 1 - relevant).astype(jnp.float32)
        return (losses * weights).sum() / total, {"accuracy": (right * weights).sum() / total}


def two_sides(
    model: Mapping[str, Any], packing: PackingConfig, config: VLPConfig
) -> TwoSides | None:
    """How the config's model reads question and source apart; None: it does not.

    Args:
      model: its section `model`; `joint_layers` and `match_type` are read here.
      packing, config: made from the same config.

    Raises:
      UserError: no such layers or token types, or sequences whose sources depend on the question.
    """
    if model.get("joint_layers") is None:
        if model.get("match_type") is not None:
            raise UserError(
                f"config key model.match_type={model['match_type']}: marks the question's words "
                "where model.joint_layers is set; set it too, or use packing.match_types."
            )
        return None
    if packing.match_types:
        raise UserError(
            f"config key packing.match_types={packing.match_types}: marks words of the source that "
            "stand in the question, so that a source could not be read without its question; use "
            "model.match_type instead."
        )
    first, second = packing.segments
    if second in ((first, 2, 3) if packing.per_source else (first,)):
        raise UserError(
            f"config key packing.segments={packing.segments}: sources have tokens of type {second} "
            "too, but the question was expected to be told by its type; use (4, 5)."
        )
    sides = TwoSides(model["joint_layers"], second, model.get("match_type"))
    sides.check(config)
    return sides
