"""The objective of the task `vision_language`: the answers of a model that sees."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.mesh import split_rows
from mmqa_jax.models.llama.lora import ADDED, add_lora, merge_lora
from mmqa_jax.models.llava.config import LlavaConfig
from mmqa_jax.models.llava.network import Llava
from mmqa_jax.models.onevision.network import Onevision, OnevisionConfig, TileBatch
from mmqa_jax.models.qwen_vl.network import PatchBatch, QwenVL, QwenVLConfig, spread
from mmqa_jax.tasks.language_model_objective import LanguageModelObjective, of_targets


@dataclasses.dataclass(frozen=True)
class VisionLanguageObjective(LanguageModelObjective):
    """The LanguageModelObjective of a model that sees: one example a row, with its pictures.

    A batch is that of `tasks.vision_language`; one without pictures lacks their arrays.

    Attributes:
      lora: additions to the language model, whose rest is frozen; None: all of it is trained.
      tower: the tower with its mergers, or projector, is trained, too.
    """

    config: QwenVLConfig | LlavaConfig
    tower: bool = False

    def init(self, key: jax.Array | None) -> nnx.Module:
        """A freshly initialized model."""
        rngs = nnx.Rngs(key)
        kinds: dict[type, type[nnx.Module]] = {QwenVLConfig: QwenVL, OnevisionConfig: Onevision}
        model: Any = kinds.get(type(self.config), Llava)(self.config, rngs=rngs)
        if self.lora is not None:
            add_lora(model.llama, self.lora, rngs=rngs)
        return model

    @property
    def trained(self) -> str | None:
        """See LanguageModelObjective."""
        names = "^llama/" if self.lora is None else ADDED
        if not self.tower:
            return names
        return None if self.lora is None else f"{names}|^vision/"

    def log_probs(
        self, model: Any, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """See LanguageModelObjective. What follows a row's example is seen by nothing in it."""
        ids = batch["input_ids"]
        picture = ids == self.config.image_token  # [B, L]
        words = jnp.where(picture, 0, ids)
        embedded, deepstack = model.llama.words_of(words), None
        if "rows" in batch:
            features = self._features(model, batch)  # [B * M, room of a picture, features]
            features = features.reshape(len(ids), -1, features.shape[-1])
            rows = jnp.maximum(batch["rows"], 0)[..., None]  # of a row's own pictures
            of_tokens = split_rows(jnp.take_along_axis(features, rows, axis=1))  # [B, L, features]
            embedded, deepstack = spread(embedded, of_tokens, picture)
        hidden = model.llama.encode(
            model.llama.with_side(embedded, words),
            None,
            batch.get("positions"),
            deepstack=deepstack,
            dropout_key=dropout_key,
        )
        return of_targets(model.llama, hidden, batch)

    def _features(self, model: Any, batch: dict[str, jax.Array]) -> jax.Array:
        if "patches" in batch:
            arrays = (batch[field.name] for field in dataclasses.fields(PatchBatch))
            return model.encode_images(PatchBatch(*arrays))
        if "tile_rows" in batch:
            arrays = (batch[name] for name in ("pixels", "tile_rows", "tile_weights"))
            return model.encode_images(TileBatch(*arrays))
        return model.encode_images(model.vision.normalize(batch["pixels"]))

    def finish(self, model: Any) -> Any:
        """Keeps the trained model without additions."""
        if self.lora is not None:
            model.llama = merge_lora(model.llama)
        return model
