"""Trainable RMR (ours): the limit that the paper names is that nothing of it is trained.

The language model learns rationale and answer behind the prompts that RMR gives it, with and
without retrieved triplets, by the same templates and from the same library (systems/rmr.py).
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from mmqa_jax.core.config import check_section
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import fetch, placement_of
from mmqa_jax.data.batches.language_model import (
    RowSize,
    TokenExample,
    pack_rows,
    packed_batch,
)
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question
from mmqa_jax.data.splits import evenly
from mmqa_jax.decoding.requests import TooLong
from mmqa_jax.prompting.few_shot import few_shot
from mmqa_jax.prompting.shots import ExampleLibrary
from mmqa_jax.prompting.templates import load_template
from mmqa_jax.prompting.training_examples import (
    ExampleOptions,
    TrainingExamples,
    token_example,
    training_examples,
)
from mmqa_jax.systems.prompted_parts import LIBRARY, LibrarySpec, check_similarity, open_library
from mmqa_jax.systems.rmr import fields
from mmqa_jax.training.language_model import target_log_probs
from mmqa_jax.training.validation import ValidateLanguageModel


def make_examples(
    config: ConfigDict,
    corpus: Corpus,
    questions: list[Question],
    tokenizer: Any,
    size: RowSize,
) -> TrainingExamples:
    """What a language-model run is trained on; says how many questions were dropped.

    Raises:
      UserError: no question with an answer, or a library that cannot be opened.
    """
    answered = [question for question in questions if question.answer_index is not None]
    if not answered:
        raise UserError(
            f"config key data.split={config.data.split}: {config.data.dir} holds no such questions "
            "with choices and a known answer; choose another split."
        )
    options = ExampleOptions(**config.examples.to_dict())
    examples = training_examples(
        answered, _library(config, corpus), fields, options, tokenizer, size
    )
    if not examples.versions:
        raise UserError(
            f"config key batches.length={size.length}: no training example fits a row, even "
            f"without retrieved ones, with its {size.targets} learned tokens (batches.targets); "
            "raise them."
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


def _library(config: ConfigDict, corpus: Corpus) -> ExampleLibrary:
    section = config.library.to_dict()
    check_section(section, "library", LIBRARY)
    options = ExampleOptions(**config.examples.to_dict())
    if options.shots:
        check_similarity(options.similarity, section, key="examples.similarity", section="library")
    return open_library(corpus, LibrarySpec(**section), "library")


class LanguageModelValidation:
    """Accuracy and log-likelihood of the right option, for each number of shots.

    The likelihood of an option's text is that of systems/rmr.py's `choose_rmr`, not calibrated.
    Questions are shown as many of their shots as fit.
    """

    def __init__(
        self,
        section: ValidateLanguageModel,
        config: ConfigDict,
        corpus: Corpus,
        tokenizer: Any,
        model: nnx.Module,
    ):
        self._section, self._tokenizer = section, tokenizer
        self._size = RowSize(config.batches.length, config.batches.targets)
        questions = [q for q in corpus.questions(section.split) if q.answer_index is not None]
        if not questions:
            raise UserError(
                f"config key validate.split={section.split}: {config.data.dir} holds no such "
                "questions with choices and a known answer; choose another split, or set "
                "train.evaluate_every to 0."
            )
        questions = evenly(questions, section.questions)
        self._answers = np.array([question.answer_index for question in questions])
        self._examples: list[TokenExample] = []
        # Rows of self._examples by (number of shots, question, option).
        self._rows: list[list[list[int]]] = []
        library, options = _library(config, corpus), ExampleOptions(**config.examples.to_dict())
        for count in section.shots:
            chosen = library.select(questions, count, options.similarity)
            self._rows.append(
                [self._add(q, s, options) for q, s in zip(questions, chosen, strict=True)]
            )
        sizes = np.array([(len(example.tokens), example.targets) for example in self._examples])
        self._packed = pack_rows(sizes, self._size)
        self._batch_size = config.inference.batch_size
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
