"""Training of the MCANs: visual question answering as classification over answers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mmqa_jax.models.caption_mcan import CaptionMCAN, CaptionMCANConfig
from mmqa_jax.models.mcan import MCAN, MCANConfig
from mmqa_jax.models.mcan_openvqa import MCANOpenVQA, MCANOpenVQAConfig
from mmqa_jax.models.patch_mcan import PatchMCAN, PatchMCANConfig

VQAConfig = MCANConfig | MCANOpenVQAConfig | CaptionMCANConfig | PatchMCANConfig

_MODELS: dict[type, type[nnx.Module]] = {
    MCANConfig: MCAN,
    MCANOpenVQAConfig: MCANOpenVQA,
    CaptionMCANConfig: CaptionMCAN,
    PatchMCANConfig: PatchMCAN,
}


@dataclasses.dataclass(frozen=True)
class VQATask:
    """Binary cross-entropy of every answer, summed over answers.

    Both originals sum over the batch too (BCEWithLogitsLoss, reduction `sum`; Prophet
    stage1/pretrain.py, openvqa utils/train_engine.py). Here it is the mean over the batch, so that
    `train.accumulate` changes nothing; with the originals' clipping and eps divided by their batch
    size an update is theirs.

    Attributes:
      config: the model's.
    """

    config: VQAConfig

    def init(self, key: jax.Array) -> nnx.Module:
        """A freshly initialized model."""
        return _MODELS[type(self.config)](self.config, rngs=nnx.Rngs(key))

    def loss(
        self, model: Any, batch: dict[str, jax.Array], dropout_key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Mean loss of a question of the batch of `data.batches.vqa`.

        `accuracy`: the mean target of the answers with the highest scores.
        """
        latent = model.latent(batch["question_ids"], batch["image"], dropout_key=dropout_key)
        logits, targets = model.answer_logits(latent), batch["targets"]  # [B, V]
        loss = optax.sigmoid_binary_cross_entropy(logits, targets).sum(axis=1).mean()
        best = logits.argmax(axis=1, keepdims=True)
        return loss, {"accuracy": jnp.take_along_axis(targets, best, axis=1).mean()}
