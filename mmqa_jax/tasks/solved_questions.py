"""Examples and validation by likelihood for tasks that teach a model solved questions.

Prompts are RMR's, with and without retrieved examples, by its templates and from its library.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import jax
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import fetch, placement_of
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.batches.packing import Packed
from mmqa_jax.data.batches.texts import PairSize, RowSize, TokenExample
from mmqa_jax.data.corpus import Corpus, evenly
from mmqa_jax.data.formats.chats import is_chat
from mmqa_jax.data.schema import Question
from mmqa_jax.decoding.requests import TooLong
from mmqa_jax.prompting.examples import training
from mmqa_jax.prompting.examples.library import ExampleLibrary
from mmqa_jax.prompting.few_shot import few_shot, load_template, majority_answer
from mmqa_jax.prompting.rationales import fields
from mmqa_jax.tasks.base_llm import TextModelTask, model_config
from mmqa_jax.tasks.library import LibrarySpec, check_similarity, open_library
from mmqa_jax.tasks.task import ANY_VOCABULARY, MixedData

# A model's parameters -> the summed log-probability of every example's targets, float64 [N].
Score = Callable[[Any], np.ndarray]
Readable = Callable[[Sequence[Question]], list[Question]]
MakeScore = Callable[[Sequence[TokenExample]], Score]
EncodeChat = Callable[[Question], TokenExample]
Rows = Sequence[Sequence[int]]  # examples of each row, by number


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationRows:
    """The section `inference`; `batch_size`: rows of a validation's batch."""

    batch_size: int = at_least(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidateOptions:
    """The section `validate`: multiple choice by likelihood."""

    # The questions', of those with choices and a known answer; where the task learns questions
    # without choices, the likelihood of their answers alone counts.
    split: str
    questions: int = at_least(0)  # how many, evenly over the split; 0: all
    shots: tuple[int, ...] = (0, 3)  # numbers of retrieved examples, each validated on its own
    template: str = "rmr.text"  # of the prompts, after which the options' texts are scored
    # Decides on the best step: the mean of the accuracies, or of the log-likelihoods per token of
    # the right options.
    metric: Literal["accuracy", "log_likelihood"] = "accuracy"

    def __post_init__(self):
        if min(self.shots, default=-1) < 0:
            raise UserError(
                f"config key validate.shots={self.shots}: numbers of examples from 0 were "
                "expected, such as (0, 3); change them."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SolvedQuestions(TextModelTask):
    """A language model learns the answers of solved questions behind their prompts."""

    product: ClassVar[str] = "language model"
    unit: ClassVar[str] = "rows"
    length_key: ClassVar[str]  # the config key that limits a row's tokens, for messages
    unsolved: ClassVar[str]  # what questions lack that cannot be learned, for messages

    data: MixedData
    examples: training.ExampleOptions  # how questions become prompts
    library: LibrarySpec  # where the retrieved examples come from
    inference: ValidationRows
    validate: ValidateOptions | None = None

    @property
    def title(self) -> str:
        return f"Fine-tuning the {self.product}"

    @property
    def size(self) -> RowSize | PairSize:
        """The size of a row."""
        raise NotImplementedError

    @staticmethod
    def is_solved(question: Question) -> bool:
        """Whether a question has a solution to learn."""
        raise NotImplementedError

    def _check(self, files: bool) -> None:
        self.check_trained()
        model_config(self, ANY_VOCABULARY)
        self.check_examples()

    def check_examples(self) -> None:
        """Refuses examples that the library cannot give."""
        if self.examples.shots:
            check_similarity(
                self.examples.similarity, self.library, key="examples.similarity", section="library"
            )

    def check_learned(self) -> None:
        """Refuses rows whose tokens are all learned, or none of them."""
        length, targets = self.size
        if not 0 < targets < length:
            raise UserError(
                f"config key batches.targets={targets}: 1 to batches.length - 1 = {length - 1} "
                "tokens of a row can be learned; change one of them."
            )

    def open_library(self, corpus: Corpus) -> ExampleLibrary:
        """The library of retrieved examples."""
        return open_library(corpus, self.library, "library")

    def make_examples(
        self,
        corpus: Corpus,
        questions: list[Question],
        encode: training.Encode,
        readable: Readable | None = None,
        encode_chat: EncodeChat | None = None,
    ) -> training.TrainingExamples:
        """Makes the training examples; prints how many questions were dropped.

        Args:
          questions: those without a known answer are left out.
          encode: makes the examples.
          encode_chat: makes those of conversations, of a task that learns them.
          readable: those of some questions that can be shown; None: all.
        """
        solved = [question for question in questions if self.is_solved(question)]
        if not solved:
            raise UserError(
                f"config key data.split={self.data.split}: {self.place} holds no such "
                f"questions with {self.unsolved}; choose another split."
            )
        usable = solved if readable is None else readable(solved)
        size = self.size
        asked = [question for question in usable if not is_chat(question)]
        examples = training.TrainingExamples([], [1.0], 0, 0, [])
        if asked:
            examples = training.training_examples(
                asked, self.open_library(corpus), fields, self.examples, encode, size
            )
        if encode_chat is not None and len(asked) < len(usable):
            chats = [encode_chat(question) for question in usable if is_chat(question)]
            fitting = [
                (question, example)
                for question, example in zip(filter(is_chat, usable), chats, strict=True)
                if size.holds(example)
            ]
            versions = [[example] * len(examples.shares) for _, example in fitting]
            examples = examples._replace(
                versions=[*examples.versions, *versions],
                dropped=examples.dropped + len(chats) - len(fitting),
                questions=[*examples.questions, *(question for question, _ in fitting)],
            )
        if not examples.versions:
            raise UserError(
                f"config key {self.length_key}={size.length}: no training example fits a row, even "
                f"without retrieved ones, with its {size.targets} learned tokens "
                "(batches.targets); raise them."
            )
        left_out = len(questions) - len(solved), examples.dropped, examples.dropped_shots
        if any(left_out) and jax.process_index() == 0:
            print(
                f"{len(examples.versions)} training examples; left out: {left_out[0]} questions "
                f"without {self.unsolved}, {left_out[1]} that fit no row of {size.length} tokens "
                f"({size.targets} learned), and {left_out[2]} retrieved examples for lack of room.",
                file=sys.stderr,
            )
        return examples


def row_scores(
    model: nnx.Module,
    rows: Rows,
    batch_size: int,
    pack: Callable[[Rows], tuple[Packed, np.ndarray]],
    log_probs: Callable[[Any, Packed], jax.Array],
) -> Score:
    """Scores examples in batches of rows.

    Args:
      model: of the run, possibly abstract.
      rows: all of them, each example in one.
      pack: rows -> a batch, and int[B, T]: which of its row's examples, from 1, a target is of; 0
        where there is none.
      log_probs: (model, batch) -> log-probability of every target, [B, T].
    """
    graphdef, _ = nnx.split(model)
    compiled = jax.jit(lambda state, batch: log_probs(nnx.merge(graphdef, state), batch))

    def score(state: Any) -> np.ndarray:
        totals = np.zeros(sum(map(len, rows)))
        placement = placement_of(state)
        size = placement.padded(batch_size)
        local = placement.rows(size)
        for start in range(0, len(rows), size):
            taken = rows[start : start + size]
            batch, numbers = pack([*taken, *[[]] * (size - len(taken))])
            # An array may have several entries a row: pictures.
            arrays = placement.put(
                {
                    name: np.reshape(array, (size, -1, *array.shape[1:]))[local].reshape(
                        -1, *array.shape[1:]
                    )
                    for name, array in batch.items()
                }
            )
            scores = fetch(compiled(state, arrays)).astype(np.float64)
            for row, values, of_examples in zip(taken, scores, numbers, strict=False):
                totals[list(row)] = np.bincount(of_examples, values, minlength=len(row) + 1)[1:]
        return totals

    return score


class OptionLikelihood:
    """Accuracy and log-likelihood of the right option, for each number of shots.

    The likelihood of an option's text is that of RMR's `choose_rmr`, not calibrated.
    Questions are shown as many of their shots as fit. One without choices has its most frequent
    answer as its only option, and no part in the accuracy.

    Args:
      task: of the run.
      encode: makes the examples.
      score: makes of all examples what gives their totals: see `Score`.
      readable: those of some questions that can be shown; None: all.
      encode_chat: makes the examples of conversations, whose answers' likelihood counts.
    """

    def __init__(
        self,
        task: SolvedQuestions,
        corpus: Corpus,
        encode: training.Encode,
        score: MakeScore,
        readable: Readable | None = None,
        encode_chat: EncodeChat | None = None,
    ):
        section = task.validate
        assert section is not None
        self._section, self._encode, self._encode_chat = section, encode, encode_chat
        self._size, self._length_key = task.size, task.length_key
        questions = evenly(
            [q for q in corpus.questions(section.split) if task.is_solved(q)], section.questions
        )
        if readable is not None:
            questions = readable(questions)
        if not questions:
            raise UserError(
                f"config key validate.split={section.split}: {task.place} holds no such "
                f"questions with {task.unsolved}; choose another split, or set "
                "train.evaluate_every to 0."
            )
        self._has_choices = np.array([q.answer_index is not None for q in questions])
        if section.metric == "accuracy" and not self._has_choices.any():
            raise UserError(
                f"config key validate.metric=accuracy: no question of {section.split} has choices; "
                "set it to log_likelihood."
            )
        self._answers = np.array([question.answer_index or 0 for question in questions])
        self._examples: list[TokenExample] = []
        # Rows of self._examples by (number of shots, question, option).
        self._rows: list[list[list[int]]] = []
        options, library = task.examples, None
        if not all(map(is_chat, questions)):
            library = task.open_library(corpus)
        for count in section.shots:
            chosen: Sequence[Any] = [()] * len(questions)
            if library is not None:
                chosen = library.select(questions, count, options.similarity)
            self._rows.append(
                [self._add(q, s, options) for q, s in zip(questions, chosen, strict=True)]
            )
        self._score = score(self._examples)

    def _add(self, question: Question, shots: Any, options: training.ExampleOptions) -> list[int]:
        """Adds a question with each of its options; their indices among the examples."""
        first = len(self._examples)
        if self._encode_chat is not None and is_chat(question):
            self._examples.append(self._encode_chat(question))
            if not self._size.holds(self._examples[-1]):
                raise self._too_long(question)
            return [first]
        template = load_template(self._section.template)

        def make(prompt: str) -> list[TokenExample]:
            known = question.answer_index is not None
            options = question.choices if known else (majority_answer(question),)
            return [
                self._encode(question, prompt, "", template.spaced(f" {option}"), ended=False)
                for option in options
            ]

        def check(examples: list[TokenExample]) -> None:
            if not all(map(self._size.holds, examples)):
                raise TooLong(question.id, len(examples[0].tokens), 0, self._size.length)

        fitted = few_shot(template, question, shots, fields, make, check, options.order)
        if fitted.query is None:
            raise self._too_long(question)
        self._examples += fitted.query
        return list(range(first, len(self._examples)))

    def _too_long(self, question: Question) -> UserError:
        return UserError(
            f"config section validate: question {question.id} does not fit a row of "
            f"{self._length_key}={self._size.length} tokens; raise it."
        )

    def __call__(self, model: nnx.Module) -> dict[str, float]:
        totals = self._score(nnx.state(model))
        lengths = np.array([example.targets for example in self._examples])
        values: dict[str, float] = {}
        for count, options in zip(self._section.shots, self._rows, strict=True):
            right = [of_question[a] for of_question, a in zip(options, self._answers, strict=True)]
            best = np.array([int(totals[of_question].argmax()) for of_question in options])
            if self._has_choices.any():
                right_ones = (best == self._answers)[self._has_choices]
                values[f"accuracy@k{count}"] = float(right_ones.mean())
            values[f"log_likelihood@k{count}"] = float(totals[right].sum() / lengths[right].sum())
        for name in ("accuracy", "log_likelihood"):
            each = [values.get(f"{name}@k{count}") for count in self._section.shots]
            if None not in each:
                values[name] = float(np.mean(each))
        return values
