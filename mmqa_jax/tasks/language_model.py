"""Trainable RMR (ours): the limit that the paper names is that nothing of it is trained.

The language model learns rationale and answer behind the prompts that RMR gives it, with and
without retrieved triplets, by the same templates and from the same library.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import fetch, placement_of
from mmqa_jax.core.typed import at_least, changes_of
from mmqa_jax.data.batches.feed import BatchesSection
from mmqa_jax.data.batches.language_model import (
    RowSize,
    TokenExample,
    language_model_batches,
    pack_rows,
    packed_batch,
)
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question
from mmqa_jax.data.splits import evenly
from mmqa_jax.decoding.requests import TooLong
from mmqa_jax.models.llama_config import LlamaConfig
from mmqa_jax.models.lora import LoraConfig
from mmqa_jax.prompting import text_tokenizer
from mmqa_jax.prompting.few_shot import few_shot
from mmqa_jax.prompting.rmr_fields import fields
from mmqa_jax.prompting.shots import ExampleLibrary
from mmqa_jax.prompting.templates import load_template
from mmqa_jax.prompting.text_tokenizer import TextTokenizer
from mmqa_jax.prompting.training_examples import (
    ExampleOptions,
    TrainingExamples,
    token_example,
    training_examples,
)
from mmqa_jax.tasks.base_llm import (
    base_fingerprint,
    base_loader,
    check_rows,
    check_trainable,
    llama_of,
    make_text_tokenizer,
)
from mmqa_jax.tasks.library import LibrarySpec, check_similarity, open_library
from mmqa_jax.tasks.objectives import LanguageModelObjective, target_log_probs
from mmqa_jax.tasks.task import ANY_VOCABULARY, DataSection, Recipe, Task, ints


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationRows:
    """The section `inference`; `batch_size`: rows of a validation's batch."""

    batch_size: int = at_least(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidateLanguageModel:
    """The section `validate`: multiple choice by likelihood.

    Attributes:
      split: the questions', of those with choices and a known answer.
      questions: how many, evenly over the split; 0: all.
      shots: numbers of retrieved examples, each validated on its own.
      template: of the prompts, after which the options' texts are scored.
      metric: decides on the best step: the mean of the accuracies, or of the log-likelihoods per
        token of the right options.
    """

    split: str
    questions: int = at_least(0)
    shots: tuple[int, ...] = (0, 3)
    template: str = "rmr.text"
    metric: Literal["accuracy", "log_likelihood"] = "accuracy"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel(Task):
    """A LLaMA on solved questions.

    Attributes:
      init: any LLaMA that `mmqa prompt --model` takes, or scratch.
      tokenizer: "" for the base's own; see base_llm.make_text_tokenizer.
      examples: how questions become prompts.
      library: where the retrieved examples come from.
    """

    name: ClassVar[str] = "language_model"
    product: ClassVar[str] = "language model"
    unit: ClassVar[str] = "rows"

    data: DataSection
    model: LanguageModelSection
    examples: ExampleOptions
    library: LibrarySpec
    batches: RowBatches
    inference: ValidationRows
    validate: ValidateLanguageModel | None = None

    @property
    def title(self) -> str:
        return f"Fine-tuning the {self.product}"

    @property
    def size(self) -> RowSize:
        """What a row holds."""
        return RowSize(self.batches.length, self.batches.targets)

    def tokenizer_kind(self) -> tuple[type, str]:
        return TextTokenizer, "that of a language model"

    def make_tokenizer(self, corpus: Corpus, folder: Path) -> TextTokenizer:
        return make_text_tokenizer(self, corpus, folder)

    def open_tokenizer(self, folder: Path) -> TextTokenizer:
        return text_tokenizer.open_tokenizer(folder)

    def _check(self, files: bool) -> None:
        llama_of(self, ANY_VOCABULARY)
        check_trainable(self)
        examples = self.examples
        if examples.shots:
            check_similarity(
                examples.similarity, self.library, key="examples.similarity", section="library"
            )
        length, targets = self.batches.length, self.batches.targets
        if not 0 < targets < length:
            raise UserError(
                f"config key batches.targets={targets}: 1 to batches.length - 1 = {length - 1} "
                "tokens of a row can be learned; change one of them."
            )

    def objective(self, vocab_size: int, mesh: Mesh | None = None) -> LanguageModelObjective:
        return LanguageModelObjective(llama_of(self, vocab_size), self.model.lora)

    def batch(self) -> dict[str, Any]:
        batches = self.batches
        wide, few = (batches.batch_size, batches.length), (batches.batch_size, batches.targets)
        return {
            **{name: ints(*wide) for name in ("input_ids", "segments", "positions")},
            **{name: ints(*few) for name in ("target_positions", "target_ids", "target_segments")},
        }

    def _recipe(self, corpus: Corpus, questions: list[Question], tokenizer: Any) -> Recipe:
        objective = self.objective(tokenizer.vocab_size)
        check_rows(self, objective.config, tokenizer)
        examples = self.make_examples(corpus, self.data.chosen(questions, corpus), tokenizer)
        batches = language_model_batches(
            examples.versions,
            examples.shares,
            self.feed(),
            length=self.batches.length,
            targets=self.batches.targets,
        )
        return Recipe(
            objective,
            batches,
            base_loader(self),
            finish=objective.finish,
            metadata={
                "base": base_fingerprint(self),
                "token_ids": {"eos_token_id": list(tokenizer.end_ids)},
            },
        )

    def open_library(self, corpus: Corpus) -> ExampleLibrary:
        """The library of retrieved examples."""
        return open_library(corpus, self.library, "library")

    def make_examples(
        self, corpus: Corpus, questions: list[Question], tokenizer: Any
    ) -> TrainingExamples:
        """What a run is trained on; says how many questions were dropped.

        Raises:
          UserError: no question with an answer, or a library that cannot be opened.
        """
        answered = [question for question in questions if question.answer_index is not None]
        if not answered:
            raise UserError(
                f"config key data.split={self.data.split}: {self.data.dir} holds no such questions "
                "with choices and a known answer; choose another split."
            )
        size = self.size
        examples = training_examples(
            answered, self.open_library(corpus), fields, self.examples, tokenizer, size
        )
        if not examples.versions:
            raise UserError(
                f"config key batches.length={size.length}: no training example fits a row, even "
                f"without retrieved ones, with its {size.targets} learned tokens "
                "(batches.targets); raise them."
            )
        left_out = len(questions) - len(answered), examples.dropped, examples.dropped_shots
        if any(left_out) and jax.process_index() == 0:
            print(
                f"{len(examples.versions)} training examples; left out: {left_out[0]} questions "
                f"without a known choice, {left_out[1]} that fit no row of {size.length} tokens "
                f"({size.targets} learned), and {left_out[2]} retrieved examples for lack of room.",
                file=sys.stderr,
            )
        return examples

    def evaluation(
        self, corpus: Corpus, tokenizer: Any, model: nnx.Module
    ) -> Callable[[nnx.Module], Mapping[str, float]]:
        return OptionLikelihood(self, corpus, tokenizer, model)


class OptionLikelihood:
    """Accuracy and log-likelihood of the right option, for each number of shots.

    The likelihood of an option's text is that of RMR's `choose_rmr`, not calibrated.
    Questions are shown as many of their shots as fit.
    """

    def __init__(self, task: LanguageModel, corpus: Corpus, tokenizer: Any, model: nnx.Module):
        section = task.validate
        assert section is not None
        self._section, self._tokenizer = section, tokenizer
        self._size = task.size
        questions = [q for q in corpus.questions(section.split) if q.answer_index is not None]
        if not questions:
            raise UserError(
                f"config key validate.split={section.split}: {task.data.dir} holds no such "
                "questions with choices and a known answer; choose another split, or set "
                "train.evaluate_every to 0."
            )
        questions = evenly(questions, section.questions)
        self._answers = np.array([question.answer_index for question in questions])
        self._examples: list[TokenExample] = []
        # Rows of self._examples by (number of shots, question, option).
        self._rows: list[list[list[int]]] = []
        library, options = task.open_library(corpus), task.examples
        for count in section.shots:
            chosen = library.select(questions, count, options.similarity)
            self._rows.append(
                [self._add(q, s, options) for q, s in zip(questions, chosen, strict=True)]
            )
        sizes = np.array([(len(example.tokens), example.targets) for example in self._examples])
        self._packed = pack_rows(sizes, self._size)
        self._batch_size = task.inference.batch_size
        graphdef, _ = nnx.split(model)
        self._log_probs = jax.jit(
            lambda state, batch: target_log_probs(nnx.merge(graphdef, state), batch)
        )

    def _add(self, question: Question, shots: Any, options: ExampleOptions) -> list[int]:
        """Adds a question with each of its options; their indices among the examples."""
        template = load_template(self._section.template)

        def make(prompt: str) -> list[TokenExample]:
            return [
                token_example(self._tokenizer, prompt, template.spaced(f" {c}"))
                for c in question.choices
            ]

        def check(examples: list[TokenExample]) -> None:
            if not all(map(self._size.holds, examples)):
                raise TooLong(question.id, len(examples[0].tokens), 0, self._size.length)

        found = few_shot(template, question, shots, fields, make, check, options.order)
        if found.query is None:
            raise UserError(
                f"config section validate: question {question.id} does not fit a row of "
                f"batches.length={self._size.length} tokens; raise it."
            )
        first = len(self._examples)
        self._examples += found.query
        return list(range(first, len(self._examples)))

    def __call__(self, model: nnx.Module) -> dict[str, float]:
        totals = self._totals(nnx.state(model))
        lengths = np.array([example.targets for example in self._examples])
        values: dict[str, float] = {}
        for count, options in zip(self._section.shots, self._rows, strict=True):
            right = [own[a] for own, a in zip(options, self._answers, strict=True)]
            best = np.array([int(totals[own].argmax()) for own in options])
            values[f"accuracy@k{count}"] = float((best == self._answers).mean())
            values[f"log_likelihood@k{count}"] = float(totals[right].sum() / lengths[right].sum())
        for name in ("accuracy", "log_likelihood"):
            found = [values[f"{name}@k{count}"] for count in self._section.shots]
            values[name] = float(np.mean(found))
        return values

    def _totals(self, state: Any) -> np.ndarray:
        """Summed log-probability of every example's targets."""
        totals = np.zeros(len(self._examples))
        placement = placement_of(state)
        size = placement.padded(self._batch_size)
        own = placement.rows(size)
        for start in range(0, len(self._packed), size):
            rows = self._packed[start : start + size]
            filled = [*rows, *[[]] * (size - len(rows))]
            batch = packed_batch([[self._examples[i] for i in row] for row in filled], self._size)
            arrays = placement.put({name: array[own] for name, array in batch.items()})
            log_probs = fetch(self._log_probs(state, arrays)).astype(np.float64)
            for row, found, segments in zip(
                rows, log_probs, batch["target_segments"], strict=False
            ):
                sums = np.bincount(segments, found, minlength=len(row) + 1)
                totals[row] = sums[1:]
        return totals
