"""Trainable RMR (ours), since the paper names as its limit that it trains nothing.

The language model learns rationale and answer behind the prompts that RMR gives it, with and
without retrieved triplets, by the same templates and from the same library. Of conversations
(data/formats/chats.py) it learns the assistant's messages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.typed import changes_of
from mmqa_jax.data.batches import texts
from mmqa_jax.data.batches.feed import BatchesSection
from mmqa_jax.data.batches.packing import Packed
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.formats.chats import is_chat
from mmqa_jax.data.schema import Question
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.lora import LoraConfig
from mmqa_jax.prompting.examples.training import chat_example, encode_text
from mmqa_jax.tasks import solved_questions
from mmqa_jax.tasks.base_llm import base_loader, check_rows, model_config
from mmqa_jax.tasks.language_model_objective import LanguageModelObjective, target_log_probs
from mmqa_jax.tasks.task import Recipe, ints


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelSection:
    """The section `model`.

    Attributes:
      changes: fields of LlamaConfig that differ from the base's; from scratch, its sizes.
      lora: only these additions are trained; None: everything.
    """

    changes: Mapping[str, Any] = changes_of(LlamaConfig)
    lora: LoraConfig | None


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
