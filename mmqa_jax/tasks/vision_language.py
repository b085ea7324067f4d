"""A Qwen2.5-VL or Qwen3-VL learns to answer questions on their pictures (ours).

It is asked as the rows of RMR with `options.chat` and `options.pictures` ask it: the picture and
the prompt of a template are a user's message, and what completes the prompt is the model's. Of
conversations (data/chats.py) it learns the assistant's messages.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.typed import at_least, changes_of, mapping, spec_of
from mmqa_jax.data.batches.feed import BatchesSection
from mmqa_jax.data.batches.language_model import RowSize, TokenExample
from mmqa_jax.data.batches.one_a_row import example_batches
from mmqa_jax.data.chats import is_chat, shown_pictures
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.packing import Bucket, Packed
from mmqa_jax.data.schema import Question
from mmqa_jax.models.llama_config import LlamaConfig
from mmqa_jax.models.lora import LoraConfig
from mmqa_jax.models.qwen_vl import QwenVLConfig
from mmqa_jax.models.qwen_vl_vision import QwenVisionConfig
from mmqa_jax.prompting.picture_format import QwenFormat
from mmqa_jax.prompting.training_examples import chat_example, encode_conversation
from mmqa_jax.tasks.base_llm import base_loader, check_rows, model_config
from mmqa_jax.tasks.objectives import VisionLanguageObjective
from mmqa_jax.tasks.pictured_examples import (
    PicturedRows,
    TrainingPictures,
    largest_bucket,
    pictured_shapes,
)
from mmqa_jax.tasks.solved_questions import (
    EncodeChat,
    OptionLikelihood,
    Rows,
    Score,
    SolvedQuestions,
    row_scores,
)
from mmqa_jax.tasks.task import ANY_VOCABULARY, Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionLanguageSection:
    """The section `model`.

    Attributes:
      changes: fields of LlamaConfig that differ from the base's; from scratch, its sizes.
      vision: the same of the tower, QwenVisionConfig; `max_pixels` is what larger pictures are
        resized to, in training and in the trained model's use.
      lora: only these additions to the language model are trained; None: all of it.
      tower: whether the tower with its mergers is trained, too.
    """

    changes: Mapping[str, Any] = changes_of(LlamaConfig)
    vision: Mapping[str, Any] = mapping(spec_of(QwenVisionConfig, minimum=0, partial=True))
    lora: LoraConfig | None
    tower: Literal["frozen", "trained"] = "frozen"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShownPictures:
    """The section `pictures`.

    Attributes:
      max_broken: how many pictures of a split may be broken, whose questions are left out; None:
        see BrokenPictures.
      most: pictures of a conversation; those with more are left out.
    """

    max_broken: int | None = None
    most: int = at_least(1, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PicturedBatches(BatchesSection):
    """The section `batches`: an example's tokens beside its pictures' are at most `length`,
    `targets` of them learned. A batch has pictures of one bucket of sizes, or none."""

    length: int
    targets: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionLanguage(SolvedQuestions):
    """A Qwen-VL on solved questions with pictures, or without.

    Attributes:
      init: any Qwen2.5-VL or Qwen3-VL that `mmqa prompt --model` takes, or scratch.
    """

    name: ClassVar[str] = "vision_language"
    product: ClassVar[str] = "vision-language model"
    architecture: ClassVar[str] = "qwen_vl"
    length_key: ClassVar[str] = "batches.length"
    unsolved: ClassVar[str] = "a known answer"

    model: VisionLanguageSection
    batches: PicturedBatches
    pictures: ShownPictures = ShownPictures()

    @property
    def size(self) -> RowSize:
        return RowSize(self.batches.length, self.batches.targets)

    @property
    def row_length(self) -> int:
        """The tokens of a row without its pictures, whose tokens come in multiples of 32."""
        return self.batches.length

    @staticmethod
    def is_solved(question: Question) -> bool:
        return question.answer_index is not None or bool(question.answers) or is_chat(question)

    def remat_keys(self) -> tuple[str, ...]:
        return "model.changes.remat", "model.vision.remat"

    def _check(self, files: bool) -> None:
        self.check_trained()
        model_config(self, ANY_VOCABULARY)
        self.check_examples()
        self.check_learned()

    def objective(self, vocab_size: int, mesh: Mesh | None = None) -> VisionLanguageObjective:
        config = model_config(self, vocab_size)
        return VisionLanguageObjective(config, self.model.lora, self.model.tower == "trained")

    def batch(self) -> dict[str, Any]:
        vision = self.objective(ANY_VOCABULARY).config.vision
        bucket = largest_bucket(vision, self._slots)
        return dict(pictured_shapes(self.batches.batch_size, self.size, bucket, vision))

    @property
    def _slots(self) -> int:
        """Pictures of the largest batch's rows."""
        return 1 << (self.pictures.most - 1).bit_length()

    def _readable(
        self, pictures: TrainingPictures, questions: Sequence[Question], *, decode: bool = False
    ) -> list[Question]:
        """Returns examples whose pictures can be read and are few enough."""
        few = [q for q in questions if len(shown_pictures(q)) <= self.pictures.most]
        if len(few) < len(questions) and jax.process_index() == 0:
            print(
                f"{len(questions) - len(few)} conversations are left out, which show more than "
                f"{self.pictures.most} pictures (config key pictures.most).",
                file=sys.stderr,
            )
        return pictures.readable(few, decode=decode)

    def _encode_chat(self, tokenizer: Any, config: QwenVLConfig) -> EncodeChat:
        turns, token = self.examples.turns, config.image_token
        return lambda question: chat_example(tokenizer, question, turns, token)

    def _pictures(
        self, corpus: Corpus, tokenizer: Any, config: QwenVLConfig
    ) -> tuple[QwenFormat, TrainingPictures]:
        shown = QwenFormat(config, tokenizer)
        return shown, TrainingPictures(corpus, shown, config, self.pictures.max_broken)

    def _recipe(self, corpus: Corpus, questions: list[Question], tokenizer: Any) -> Recipe:
        objective = self.objective(tokenizer.vocab_size)
        config = objective.config
        check_rows(self, config.llama, tokenizer, self._slots * largest_bucket(config.vision).text)
        shown, pictures = self._pictures(corpus, tokenizer, config)
        examples = self.make_examples(
            corpus,
            self.data.chosen(questions, corpus),
            encode_conversation(tokenizer, shown),
            functools.partial(self._readable, pictures),
            self._encode_chat(tokenizer, config),
        )
        flat = [example for versions in examples.versions for example in versions]
        shapes = pictures.buckets(flat)
        batches = example_batches(
            examples.versions,
            examples.shares,
            self.feed(),
            shapes=shapes,
            bucket_of=lambda one: shapes.index(pictures.bucket(one)),
            make=PicturedRows(self.size, config, pictures).batch,
            broken=[pictures.broken],
            members=self.data.members(examples.questions),
        )
        return Recipe(
            objective,
            batches,
            base_loader(self),
            reader=pictures,
            finish=self.kept(objective),
            metadata=self.metadata(tokenizer),
        )

    def evaluation(
        self, corpus: Corpus, tokenizer: Any, model: nnx.Module
    ) -> Callable[[nnx.Module], Mapping[str, float]]:
        objective = self.objective(tokenizer.vocab_size)
        shown, pictures = self._pictures(corpus, tokenizer, objective.config)
        made = PicturedRows(self.size, objective.config, pictures)

        def make_score(examples: Sequence[TokenExample]) -> Score:
            buckets = list(map(pictures.bucket, examples))
            of_buckets = []
            for bucket in pictures.buckets(examples):
                members = np.flatnonzero([one == bucket for one in buckets])

                def pack(
                    rows: Rows, members: np.ndarray = members, bucket: Bucket = bucket
                ) -> tuple[Packed, np.ndarray]:
                    own = [examples[members[row[0]]] if row else None for row in rows]
                    batch = made.batch(own, bucket)
                    return batch, batch["target_segments"]

                rows = [[number] for number in range(len(members))]
                size = self.inference.batch_size
                of_buckets.append(
                    (members, row_scores(model, rows, size, pack, objective.log_probs))
                )

            def score(state: Any) -> np.ndarray:
                totals = np.zeros(len(examples))
                for members, of_bucket in of_buckets:
                    totals[members] = of_bucket(state)
                return totals

            return score

        encode = encode_conversation(tokenizer, shown)
        readable = functools.partial(self._readable, pictures, decode=True)
        encode_chat = self._encode_chat(tokenizer, objective.config)
        return OptionLikelihood(self, corpus, encode, make_score, readable, encode_chat)
