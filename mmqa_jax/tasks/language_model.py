"""Trainable RMR (ours), since the paper names as its limit that it trains nothing.

The language model learns rationale and answer behind the prompts that RMR gives it, with and
without retrieved triplets, by the same templates and from the same library. Of conversations
(data/formats/chats.py) it learns the assistant's messages. The objective is that of all tasks that
train a language model on targets in packed rows.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from mmqa_jax.core.mesh import SEQUENCE, batch_axes, column_shards, share_words, split_rows
from mmqa_jax.core.typed import changes_of
from mmqa_jax.data.batches import texts
from mmqa_jax.data.batches.feed import BatchesSection
from mmqa_jax.data.batches.packing import Packed
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.formats.chats import is_chat
from mmqa_jax.data.schema import Question
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.lora import ADDED, LoraConfig, add_lora, merge_lora
from mmqa_jax.models.llama.network import Llama
from mmqa_jax.prompting.examples.training import chat_example, encode_text
from mmqa_jax.tasks import solved_questions
from mmqa_jax.tasks.base_llm import base_loader, check_rows, model_config
from mmqa_jax.tasks.task import Recipe, ints
from mmqa_jax.training.state import WEIGHT, OfLayers

_LOGITS_BYTES = 2**28  # of a device, from which on logits are made in parts


@dataclasses.dataclass(frozen=True)
class LanguageModelObjective(OfLayers):
    """Cross-entropy of the next token, the mean over the target tokens of the global batch."""

    config: LlamaConfig
    lora: LoraConfig | None = None  # only these additions are trained; None: everything

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelSection:
    """The section `model`."""

    # Fields of LlamaConfig that differ from the base's; from scratch, its sizes.
    changes: Mapping[str, Any] = changes_of(LlamaConfig)
    lora: LoraConfig | None  # only these additions are trained; None: everything


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowBatches(BatchesSection):
    """The section `batches`: rows of `length` tokens, `targets` of them learned."""

    length: int
    targets: int

    @property
    def arrays(self) -> dict[str, Any]:
        """Shapes of a batch of `data.batches.texts`."""
        wide, few = (self.batch_size, self.length), (self.batch_size, self.targets)
        return {
            **{name: ints(*wide) for name in ("input_ids", "segments", "positions")},
            **{name: ints(*few) for name in ("target_positions", "target_ids", "target_segments")},
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel(solved_questions.SolvedQuestions):
    """A LLaMA on solved questions; it begins at any that `mmqa prompt --model` takes, or at
    scratch.
    """

    name: ClassVar[str] = "language_model"
    architecture: ClassVar[str] = "llama"
    length_key: ClassVar[str] = "batches.length"
    unsolved: ClassVar[str] = "choices and a known answer, or a conversation"

    model: LanguageModelSection
    batches: RowBatches

    @property
    def size(self) -> texts.RowSize:
        return texts.RowSize(self.batches.length, self.batches.targets)

    @property
    def row_length(self) -> int:
        return self.batches.length

    @staticmethod
    def is_solved(question: Question) -> bool:
        return question.answer_index is not None or is_chat(question)

    def _check(self, files: bool) -> None:
        super()._check(files)
        self.check_learned()

    def objective(self, vocab_size: int, mesh: Mesh | None = None) -> LanguageModelObjective:
        return LanguageModelObjective(model_config(self, vocab_size), self.model.lora)

    def batch(self) -> dict[str, Any]:
        return self.batches.arrays

    def _encode_chat(self, tokenizer: Any) -> solved_questions.EncodeChat:
        return lambda question: chat_example(tokenizer, question, self.examples.turns)

    def _recipe(self, corpus: Corpus, questions: list[Question], tokenizer: Any) -> Recipe:
        objective = self.objective(tokenizer.vocab_size)
        check_rows(self, objective.config, tokenizer)
        examples = self.make_examples(
            corpus,
            self.data.chosen(questions, corpus),
            encode_text(tokenizer),
            encode_chat=self._encode_chat(tokenizer),
        )
        batches = texts.language_model_batches(
            examples.versions,
            examples.shares,
            self.feed(),
            length=self.batches.length,
            targets=self.batches.targets,
            members=self.data.members(examples.questions),
        )
        return Recipe(
            objective,
            batches,
            base_loader(self),
            finish=self.finisher(objective),
            metadata=self.metadata(tokenizer),
        )

    def evaluation(
        self, corpus: Corpus, tokenizer: Any, model: nnx.Module
    ) -> Callable[[nnx.Module], Mapping[str, float]]:
        def make_score(examples: Sequence[texts.TokenExample]) -> solved_questions.Score:
            sizes = np.array([(len(example.tokens), example.targets) for example in examples])

            def pack(rows: solved_questions.Rows) -> tuple[Packed, np.ndarray]:
                batch = texts.packed_batch([[examples[i] for i in row] for row in rows], self.size)
                return batch, batch["target_segments"]

            rows = texts.pack_rows(sizes, self.size)
            return solved_questions.row_scores(
                model, rows, self.inference.batch_size, pack, target_log_probs
            )

        return solved_questions.OptionLikelihood(
            self,
            corpus,
            encode_text(tokenizer),
            make_score,
            encode_chat=self._encode_chat(tokenizer),
        )
