"""The objective of the tasks that train a language model on targets in packed rows.

It needs nothing but JAX, Flax, Optax and the models, and so runs on a bare accelerator image.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from mmqa_jax.core.mesh import SEQUENCE, batch_axes, column_shards, share_words, split_rows
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.lora import ADDED, LoraConfig, add_lora, merge_lora
from mmqa_jax.models.llama.network import Llama
from mmqa_jax.training.state import WEIGHT, OfLayers

_LOGITS_BYTES = 2**28  # of a device, from which on logits are made in parts


@dataclasses.dataclass(frozen=True)
class LanguageModelObjective(OfLayers):
    """Cross-entropy of the next token, the mean over the target tokens of the global batch.

    Attributes:
      lora: only these additions are trained; None: everything.
    """

    config: LlamaConfig
    lora: LoraConfig | None = None

    def init(self, key: jax.Array | None) -> nnx.Module:
        """A freshly initialized LLaMA."""
        rngs = nnx.Rngs(key)
        model = Llama(self.config, rngs=rngs)
        if self.lora is not None:
            add_lora(model, self.lora, rngs=rngs)
        return model

    def loss(
        self, model: Llama, batch: dict[str, jax.Array], dropout_key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Mean loss of a batch of `data.batches.texts`, and its number of targets."""
        log_probs = self.log_probs(model, batch, dropout_key)  # [B, T]
        return mean_over_targets(log_probs, batch["target_segments"] > 0)

    @property
    def trained(self) -> str | None:
        """Regular expression over the names of the parameters that are trained; None: all."""
        return None if self.lora is None else ADDED

    def log_probs(
        self, model: Any, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """Log-probability of every target, float32 [B, T]."""
        return target_log_probs(model, batch, dropout_key)

    def finish(self, model: Llama) -> Llama:
        """Keeps a plain LLaMA of the trained model."""
        return model if self.lora is None else merge_lora(model)


def mean_over_targets(
    log_probs: jax.Array, is_target: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss and metrics of log-probabilities [B, T]; the loss of no target (all pictures of a batch
    are broken) is 0."""
    count = is_target.sum().astype(jnp.float32)
    loss = -jnp.where(is_target, log_probs, 0.0).sum() / jnp.maximum(count, 1)
    return loss, {"targets": count, WEIGHT: count}


def target_log_probs(
    model: Llama,
    batch: dict[str, jax.Array],
    dropout_key: jax.Array | None = None,
    temperature: float = 1.0,
) -> jax.Array:
    """Log-probability of every target of a packed batch, float32 [B, T].

    A token sees those before it in its own example; the output head runs on the targets alone.
    With a temperature other than 1 it is that of softmax(logits / temperature).
    """
    hidden = model.encode(
        model.embed(batch["input_ids"]),
        positions=batch["positions"],
        segments=batch["segments"],
        dropout_key=dropout_key,
    )  # [B, L, H]
    return of_targets(model, hidden, batch, temperature)


def of_targets(
    model: Llama, hidden: jax.Array, batch: dict[str, jax.Array], temperature: float = 1.0
) -> jax.Array:
    """Log-probability of every target, float32 [B, T], of the last states [B, L, H].

    Where a device's share of the logits exceeds _LOGITS_BYTES, they are made for some targets of
    each row after another, and again in the backward pass: never for all at once.
    """
    before = states_at(hidden, batch["target_positions"])  # [B, T, H]
    ids = batch["target_ids"]

    def log_probs(states: jax.Array, ids: jax.Array, words: jax.Array | None = None) -> jax.Array:
        logits = model.logits(states, words)
        logits = logits if temperature == 1 else logits / temperature
        return -optax.softmax_cross_entropy_with_integer_labels(logits, ids)

    rows, targets = ids.shape
    mesh = jax.sharding.get_abstract_mesh()
    share = 4 * rows * targets * model.config.vocab_size // max(math.prod(mesh.shape.values()), 1)
    parts = min(-(-share // _LOGITS_BYTES), targets)
    if parts <= 1:
        return log_probs(before, ids)
    padding = -targets % (parts * mesh.shape.get(SEQUENCE, 1))

    # A part has every so manieth target, so that it has some of each device's.
    def apart(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [parts, B, T / parts, ...]
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(rows, -1, parts, *x.shape[2:]), 2, 0)

    words, split = share_words(*model.words, rows, (targets + padding) // parts)
    part = jax.checkpoint(lambda pair: split_rows(log_probs(split(pair[0]), pair[1], words)))
    made = jax.lax.map(part, (apart(before), apart(ids)))  # [parts, B, T / parts]
    return jnp.moveaxis(made, 0, 2).reshape(rows, -1)[:, :targets]


def states_at(hidden: jax.Array, positions: jax.Array) -> jax.Array:
    """States [B, L, H] at some columns of each row, int [B, T]: [B, T, H].

    Where `sequence` splits the columns, and divides T, a device sends the states that it has to
    those that have these targets.
    """
    shards = column_shards(hidden.shape[1])
    if shards == 1 or positions.shape[1] % shards:
        return jnp.take_along_axis(hidden, positions[:, :, None], axis=1)

    def of_device(hidden: jax.Array, positions: jax.Array) -> jax.Array:
        columns = hidden.shape[1]
        column = positions - jax.lax.axis_index(SEQUENCE) * columns
        states = jnp.take_along_axis(hidden, jnp.clip(column, 0, columns - 1)[:, :, None], axis=1)
        states = jnp.where(((column >= 0) & (column < columns))[:, :, None], states, 0)
        return jax.lax.psum_scatter(states, SEQUENCE, scatter_dimension=1, tiled=True)

    rows = batch_axes(jax.sharding.get_abstract_mesh(), len(hidden))
    split = PartitionSpec(rows, SEQUENCE)
    return jax.shard_map(
        of_device, in_specs=(split, PartitionSpec(rows)), out_specs=split, check_vma=False
    )(hidden, positions)
