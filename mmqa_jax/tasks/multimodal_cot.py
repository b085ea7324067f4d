"""Multimodal-CoT's training: one stage, the rationale or the answer, of a T5 that sees pictures.

As amazon-science/mm-cot main.py: the answer's stage learns from the rationales of the data, and
reads generated ones in use.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import at_least, changes_of
from mmqa_jax.data.batches.texts import TokenExample, seq2seq_batches
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.pictures.store import PictureVectors
from mmqa_jax.data.schema import Question
from mmqa_jax.inference.t5_readers import cut_tokens
from mmqa_jax.models.t5.config import MultimodalT5Config
from mmqa_jax.models.t5.network import PicturedTexts
from mmqa_jax.prompting.rationales import Format, source_text, target_text
from mmqa_jax.tasks import task as tasks
from mmqa_jax.tasks.base_llm import TextModelTask, base_loader, check_vocabulary, model_config
from mmqa_jax.tasks.seq2seq import MultimodalObjective, PairBatches


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultimodalSection:
    """The section `model`; `changes`: fields of MultimodalT5Config that differ from the base's;
    `features` where the base is a T5 without pictures, all sizes from scratch."""

    changes: Mapping[str, Any] = changes_of(MultimodalT5Config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VectorsSection:
    """The section `pictures`."""

    # file, names: see data.pictures.store.
    file: str
    names: str = ""
    # Of a picture, and `features` values of each; what the file has.
    vectors: int = at_least(1, 100)
    features: int = at_least(1, 256)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultimodalCoT(TextModelTask):
    """One stage of Multimodal-CoT (`init`: mm-cot's folder, any T5's, or scratch)."""

    name: ClassVar[str] = "multimodal_cot"
    product: ClassVar[str] = "T5 with pictures"
    architecture: ClassVar[str] = "multimodal_t5"

    data: tasks.DataSection
    model: MultimodalSection
    pictures: VectorsSection
    # Of its texts, see prompting.rationales: `QCM-LE` writes the rationale, `QCMG-A` answers with
    # one.
    format: Format
    captions: bool = False  # whether the picture's caption is read
    # `padded`, the authors': the loss is the mean over all `batches.targets` places of every text,
    # the pads behind it among them. `masked`: over the texts' tokens alone.
    labels: Literal["padded", "masked"] = "padded"
    batches: PairBatches
    inference: tasks.ServingSection

    def _check(self, files: bool) -> None:
        self.check_targets(self.batches.targets)
        self.check_trained()
        self.check_lengths(self.batches.lengths)
        if (
            features := model_config(self, tasks.ANY_VOCABULARY).features
        ) != self.pictures.features:
            raise UserError(
                f"config key pictures.features={self.pictures.features}: the model reads "
                f"{features} values a vector; change one of them (model.changes.features of a new "
                "fusion)."
            )

    def objective(self, vocab_size: int, mesh: Mesh | None = None) -> MultimodalObjective:
        mean = "places" if self.labels == "padded" else "tokens"
        return MultimodalObjective(model_config(self, vocab_size), PicturedTexts, mean)

    def batch(self) -> dict[str, Any]:
        rows, size = self.batches.batch_size, self.batches
        return {
            "input_ids": tasks.ints(rows, size.lengths[-1]),
            "prompt_lengths": tasks.ints(rows),
            "features": tasks.floats(rows, self.pictures.vectors, self.pictures.features),
            "target_ids": tasks.ints(rows, size.targets),
            "target_lengths": tasks.ints(rows),
        }

    def _recipe(self, corpus: Corpus, questions: list[Question], tokenizer: Any) -> tasks.Recipe:
        objective = self.objective(tokenizer.vocab_size)
        check_vocabulary(self, objective.config, tokenizer)
        solved = [
            q
            for q in self.data.chosen(questions, corpus)
            if q.answer_index is not None and q.choices
        ]
        if not solved:
            raise UserError(
                f"config key data.split={self.data.split}: {self.data.dir} holds no such questions "
                "with choices and a known answer; choose another split."
            )
        vectors = PictureVectors(self.pictures.file, self.pictures.names)
        if vectors.shape != (self.pictures.vectors, self.pictures.features):
            raise UserError(
                f"config section pictures: {self.pictures.file} has {vectors.shape[0]} vectors of "
                f"{vectors.shape[1]} values; set vectors and features so."
            )
        batches = seq2seq_batches(
            [[self._example(question, tokenizer)] for question in solved],
            [1.0],
            self.feed(),
            lengths=self.batches.lengths,
            targets=self.batches.targets,
            more=lambda rows: {"features": np.stack([vectors.of(solved[row]) for row in rows])},
        )
        return tasks.Recipe(
            objective, batches, base_loader(self), metadata=self.metadata(tokenizer)
        )

    def _example(self, question: Question, tokenizer: Any) -> TokenExample:
        """Both texts, each cut to its length with its end token."""
        read = source_text(question, self.format, captions=self.captions)
        before = cut_tokens(tokenizer, read, self.batches.lengths[-1])
        after = cut_tokens(tokenizer, target_text(question, self.format), self.batches.targets)
        return TokenExample(np.array([*before, *after], np.int32), len(before))
