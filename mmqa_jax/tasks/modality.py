"""The modality classifier: does a question need snippets or pictures?"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float32

from mmqa_jax.core.errors import UserError, check_several
from mmqa_jax.core.mesh import fetch
from mmqa_jax.core.serving import RowCost, ServedModel, tower_bytes
from mmqa_jax.data.batches.feed import (
    Batches,
    BatchesSection,
    FeedConfig,
    PlannedBatch,
    Table,
    feed_batches,
)
from mmqa_jax.data.batches.packing import Bucket, Packed
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Modality, Question
from mmqa_jax.data.tokenizers import Tokenizer, TokenTable, text_inputs
from mmqa_jax.models.encoders.heads import TextClassifier, TextClassifierConfig, TextClassifierModel
from mmqa_jax.retrieval.modality import MODALITIES, labeled_questions, without_quotes
from mmqa_jax.tasks import task as tasks
from mmqa_jax.tasks.initial_weights import classifier_loader
from mmqa_jax.training.state import OfLayers


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModalityBatches(BatchesSection):
    """The section `batches`; `length`: tokens, [CLS] and [SEP] among them."""

    length: int


@dataclasses.dataclass(frozen=True)
class ModalityObjective(OfLayers):
    """Cross-entropy over the two modalities (WebQA_Baseline bert_classifier.py:113,290)."""

    network: ClassVar[type[nnx.Module]] = TextClassifier

    config: TextClassifierConfig
    frozen: bool = False  # only the linear layer is trained

    def loss(
        self, model: TextClassifier, batch: dict[str, jax.Array], dropout_key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Mean cross-entropy of the batch of `data.batches.modality`, and its accuracy."""
        logits = model(
            batch["input_ids"], batch["mask"], frozen=self.frozen, dropout_key=dropout_key
        )  # [B, 2]
        labels = batch["label"]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, {"accuracy": (logits.argmax(axis=1) == labels).astype(jnp.float32).mean()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionModality(tasks.Task):
    """Questions and the modality of their gold sources."""

    name: ClassVar[str] = "modality"
    product: ClassVar[str] = "modality classifier"
    program: ClassVar[str] = "modality"
    limits: ClassVar[tuple[str, ...]] = ("batches.length",)

    data: tasks.DataSection
    model: TextClassifierModel
    batches: ModalityBatches
    inference: tasks.ServingSection

    def config(self, vocab_size: int) -> TextClassifierConfig:
        """The model's sizes."""
        return self.model.config(vocab_size, len(MODALITIES))

    def _check(self, files: bool) -> None:
        bert = self.config(tasks.ANY_VOCABULARY).bert
        if not 3 <= self.batches.length <= bert.positions:
            raise UserError(
                f"config key batches.length={self.batches.length}: 3 to {bert.positions} tokens "
                "were expected, which the model reads; change it."
            )
        optimizer = self.loop.optimizer
        if self.model.frozen and optimizer.name != "adam" and optimizer.weight_decay != 0:
            raise UserError(
                "config key model.frozen=True: weight decay would change the frozen BERT; set "
                "train.optimizer.weight_decay to 0.0."
            )

    def objective(self, vocab_size: int, mesh: Mesh | None = None) -> ModalityObjective:
        return ModalityObjective(self.config(vocab_size), self.model.frozen)

    def batch(self) -> dict[str, Any]:
        rows, length = self.batches.batch_size, self.batches.length
        return {
            "input_ids": tasks.ints(rows, length),
            "mask": tasks.bools(rows, length),
            "label": tasks.ints(rows),
        }

    def _recipe(self, corpus: Corpus, questions: list[Question], tokenizer: Any) -> tasks.Recipe:
        texts, modalities = labeled_questions(self.data.chosen(questions, corpus), corpus)
        labels = [MODALITIES.index(modality) for modality in modalities]
        length = self.batches.length
        batches = modality_batches(tokenizer, texts, labels, self.feed(), length=length)
        objective = self.objective(tokenizer.vocab_size)
        return tasks.Recipe(objective, batches, classifier_loader(self, tokenizer))

    def cost(self) -> RowCost:
        """The cost of a question."""
        bytes_each = tower_bytes(self.config(tasks.ANY_VOCABULARY).bert, self.batches.length)
        return RowCost("questions", 64, 512, bytes_each)

    def in_use(self) -> tasks.InUse:
        length, config = self.batches.length, self.config(self.vocabulary_size())

        def inputs(rows: int) -> tuple[tasks.Struct, tasks.Struct]:
            return tasks.ints(rows, length), tasks.bools(rows, length)

        def build() -> TextClassifier:
            return TextClassifier(config, rngs=nnx.Rngs())

        return tasks.InUse(self.cost(), make_probabilities, build, inputs)


def load_question_classifier(folder: str | Path) -> QuestionClassifier:
    """The trained classifier of a modality run."""
    task, tokenizer = tasks.read_run(folder, (QuestionModality,))
    config = task.config(tokenizer.vocab_size)
    mesh = task.serving_mesh()
    model = task.load(folder, TextClassifier, config, mesh)
    return QuestionClassifier(task, model, tokenizer)


# Training batches: questions and their labels.


def modality_batches(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    labels: Sequence[int],
    feed: FeedConfig,
    *,
    length: int,
) -> Batches:
    """Questions with the class of each.

    A batch: input_ids int32[B, length], mask bool[B, length], label int32[B]; index int32[B]:
    indices into `texts`; truncated int32[B]: tokens lost.

    `length`: tokens, [CLS] and [SEP] among them; longer texts lose their tail.
    """
    tokens, classes = TokenTable(tokenizer, texts), np.asarray(labels, np.int32)
    everything = {"index": np.arange(len(texts)), "bucket": np.zeros(len(texts), np.int64)}

    def make(planned: PlannedBatch, table: Table) -> Packed:
        rows = table["index"]
        ids, mask, lost = text_inputs([tokens[row] for row in rows], length, tokenizer)
        return {
            "input_ids": ids,
            "mask": mask,
            "label": classes[rows],
            "index": rows.astype(np.int32),
            "truncated": lost,
        }

    return feed_batches(lambda _: everything, [Bucket(0, length)], make, feed)


# The trained classifier in use.


@functools.lru_cache(maxsize=8)  # classifiers of one config share their programs
def make_probabilities(graphdef: nnx.GraphDef) -> jax.stages.Wrapped:
    """The jitted classifier: (state, ids, mask) -> float32 [B, classes]."""

    def probabilities(state: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
        return jax.nn.softmax(nnx.merge(graphdef, state)(ids, mask))

    return jax.jit(probabilities)


class QuestionClassifier(ServedModel):
    """Predicts the modality of the sources that a question needs.

    All batches have one size and one length, so that one program is compiled.

    Args:
      task: tasks.modality.QuestionModality, of the run.
      model: with the classes of MODALITIES.
      tokenizer: of the run.
    """

    def __init__(self, task: Any, model: TextClassifier, tokenizer: Tokenizer):
        self._tokenizer, self._length = tokenizer, task.batches.length
        super().__init__(model, task.inference.batch_size, task.cost())
        self._probabilities = make_probabilities(self._graphdef)

    def probabilities(self, texts: Sequence[str]) -> Float32[np.ndarray, "n 2"]:
        """The probability of each of MODALITIES."""
        check_several(texts, "the question classifier")
        tokens = self._tokenizer.encode_batch([without_quotes(text) for text in texts])
        results = np.zeros((len(tokens), len(MODALITIES)), np.float32)
        placement, size = self.serving.placement, self.serving.batch_size
        for start in range(0, len(tokens), size):
            chunk = tokens[start : start + size]
            padding = [[]] * (size - len(chunk))
            ids, mask, _ = text_inputs([*chunk, *padding], self._length, self._tokenizer)
            inputs = placement.put((ids, mask))
            batch = fetch(placement.call(self._probabilities, self._state, *inputs))
            results[start : start + len(chunk)] = batch[: len(chunk)]
        return results

    def predict(self, texts: Sequence[str]) -> list[Modality]:
        """The more likely modality of every question."""
        return [MODALITIES[best] for best in self.probabilities(texts).argmax(axis=1)]
