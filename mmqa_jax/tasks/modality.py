"""The modality classifier: does a question need snippets or pictures?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.serving import RowCost
from mmqa_jax.data.batches.feed import BatchesSection
from mmqa_jax.data.batches.modality import modality_batches
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question
from mmqa_jax.inference.question_classifier import QuestionClassifier, make_probabilities
from mmqa_jax.models.encoders.heads import TextClassifier, TextClassifierConfig, TextClassifierModel
from mmqa_jax.retrieval.embedder import tower_bytes
from mmqa_jax.retrieval.modality import MODALITIES, labeled_questions
from mmqa_jax.tasks import task as tasks
from mmqa_jax.tasks.initial_weights import classifier_loader
from mmqa_jax.tasks.objectives import ModalityObjective


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModalityBatches(BatchesSection):
    """The section `batches`; `length`: tokens, [CLS] and [SEP] among them."""

    length: int


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
