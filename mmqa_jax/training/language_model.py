"""Training of a language model on prompts and their completions: the completion's tokens alone."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mmqa_jax.models.llama import Llama
from mmqa_jax.models.llama_config import LlamaConfig
from mmqa_jax.models.lora import LoraConfig, add_lora, freeze_base, merge_lora


@dataclasses.dataclass(frozen=True)
class LanguageModelTask:
    """Cross-entropy of the next token, the mean over the target tokens of the global batch.

    Attributes:
      config: the model's.
      lora: only these additions are trained; None: everything.
    """

    config: LlamaConfig
    lora: LoraConfig | None = None

    def init(self, key: jax.Array) -> nnx.Module:
        """A freshly initialized LLaMA."""
        rngs = nnx.Rngs(key)
        model = Llama(self.config, rngs=rngs)
        if self.lora is not None:
            add_lora(model, self.lora, rngs=rngs)
        return model

    def loss(
        self, model: Llama, batch: dict[str, jax.Array], dropout_key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Mean loss of a batch of `data.batches.language_model`, and its number of targets.

        Of a part of a batch (see `whole`): its share of the batch's mean loss times the number of
        parts, so that the mean over the parts is the batch's.
        """
        if self.lora is not None:
            model = freeze_base(model)
        batch = batch if "batch_targets" in batch else self.whole(batch)
        log_probs = target_log_probs(model, batch, dropout_key)  # [B, T]
        is_target = batch["target_segments"] > 0
        of_rows = -jnp.where(is_target, log_probs, 0.0).sum(axis=1)  # [B]
        loss = (of_rows * batch["batch_rows"] / batch["batch_targets"]).mean()
        return loss, {"targets": batch["batch_targets"].mean()}

    def whole(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The batch with what its parts have to know of all of it, float32 [B], the same in all
        rows: batch_targets, its number of targets, and batch_rows, that of its rows.
        """
        count = (batch["target_segments"] > 0).sum().astype(jnp.float32)
        rows = len(batch["target_segments"])
        ones = jnp.ones(rows, jnp.float32)
        return {**batch, "batch_targets": ones * count, "batch_rows": ones * rows}

    def finish(self, model: Llama) -> Llama:
        """What is kept of the trained model: a plain LLaMA."""
        return model if self.lora is None else merge_lora(model)


def target_log_probs(
    model: Llama, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None
) -> jax.Array:
    """Log-probability of every target of a packed batch, float32 [B, T].

    A token sees those before it in its own example; the output head runs on the targets alone.
    """
    segments = batch["segments"]
    same = segments[:, :, None] == segments[:, None, :]  # [B, L, L]
    hidden = model.encode(
        model.embed(batch["input_ids"]), same, batch["positions"], dropout_key=dropout_key
    )  # [B, L, H]
    before = jnp.take_along_axis(hidden, batch["target_positions"][:, :, None], axis=1)  # [B, T, H]
    return -optax.softmax_cross_entropy_with_integer_labels(
        model.logits(before), batch["target_ids"]
    )
