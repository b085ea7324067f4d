"""What the tasks on dual encoders have in common: contrastive and example_retrieval."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.serving import RowCost
from mmqa_jax.data.clip_tokenizer import ClipTokenizer
from mmqa_jax.data.siglip_tokenizer import SiglipTokenizer
from mmqa_jax.data.tokenizers import WordPiece
from mmqa_jax.models.clip import TextConfig
from mmqa_jax.models.dual_encoder import DualEncoder, DualEncoderConfig
from mmqa_jax.models.presets import DualEncoderModel
from mmqa_jax.models.siglip import SiglipTextConfig
from mmqa_jax.retrieval.embedder import Embedder, dual_encoder_cost
from mmqa_jax.tasks.pretrained import check_two_towers_init
from mmqa_jax.tasks.task import ANY_VOCABULARY, PicturesSection, ServingSection, Task

DualEncoderTokenizer = WordPiece | ClipTokenizer | SiglipTokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderServing(ServingSection):
    """The encoder in use; `buckets`: lengths in tokens, increasing."""

    buckets: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DualEncoderTask(Task):
    """Texts and pictures in one space of embeddings.

    Attributes:
      pictures: of sources and questions.
    """

    model: DualEncoderModel
    pictures: PicturesSection
    inference: EncoderServing

    def lengths(self) -> Mapping[str, int]:
        """Config key -> the longest text in tokens."""
        return {"inference.buckets": max(self.inference.buckets, default=0)}

    def config(self, vocab_size: int) -> DualEncoderConfig:
        """The model's sizes; `vocab_size`: of the tokenizer."""
        return self.model.config(vocab_size)

    def tokenizer_kind(self) -> tuple[type, str]:
        if self.model.clip:
            return ClipTokenizer, "the folder of a converted CLIP"
        if self.model.siglip:
            return SiglipTokenizer, "the folder of a converted SigLIP"
        return super().tokenizer_kind()

    def _check(self, files: bool) -> None:
        dual_encoder = self.config(ANY_VOCABULARY)
        if self.model.published and files:
            check_two_towers_init(self, dual_encoder)
        text = dual_encoder.text
        if isinstance(text, SiglipTextConfig):
            self._check_padded(text.length)
        else:
            self._check_buckets()
            self._check_lengths(text.context if isinstance(text, TextConfig) else text.positions)
        side = dual_encoder.vision.image_size
        if self.pictures.size != side:
            raise UserError(
                f"config key pictures.size={self.pictures.size}: the vision tower takes {side}; "
                "set pictures.size and model.vision.image_size to the same number."
            )

    def _check_padded(self, length: int) -> None:
        """SigLIP sees the padding of its texts."""
        for key, found in (
            *self.lengths().items(),
            ("inference.buckets", *self.inference.buckets[:1]),
        ):
            if found != length:
                raise UserError(
                    f"config key {key}: {found} tokens, but this text tower reads texts padded to "
                    f"{length}; set it to that alone."
                )

    def _check_buckets(self) -> None:
        """Checks buckets as the embedder needs them: it would refuse them after the training."""
        buckets = self.inference.buckets
        if not buckets or buckets[0] < 3 or sorted(set(buckets)) != list(buckets):
            raise UserError(
                f"config key inference.buckets={buckets}: increasing numbers of tokens from 3 "
                "were expected, such as (16, 32, 64); change them."
            )

    def _check_lengths(self, most: int) -> None:
        for key, length in self.lengths().items():
            if length > most:
                raise UserError(
                    f"config key {key}: {length} tokens, but the text tower reads at most {most}; "
                    "use fewer."
                )

    def planned_config(self) -> DualEncoderConfig:
        """The model's sizes with `vocabulary_size`."""
        return self.config(self.vocabulary_size())

    def planned_model(self) -> DualEncoder:
        """The model with `vocabulary_size`, of whose weights the shapes are meant."""
        return DualEncoder(self.planned_config(), rngs=nnx.Rngs())

    def cost(self) -> RowCost:
        """The cost of a source, or a text."""
        return dual_encoder_cost(self.config(ANY_VOCABULARY), max(self.inference.buckets))

    def embedder(self, tokenizer: DualEncoderTokenizer, model: DualEncoder) -> Embedder:
        """The embedder of a run's model, which may be abstract (see Embedder.use)."""
        graphdef, state = nnx.split(model)
        return Embedder(
            graphdef,
            state,
            tokenizer,
            image_size=self.pictures.size,
            buckets=self.inference.buckets,
            batch_size=self.inference.batch_size,
            cost=self.cost(),
            text_of=self.data.text_of,
        )

    def in_one_shape(self) -> DualEncoderTask:
        """The task with each function traced and compiled once: see VLPTask.in_one_shape.

        Texts are encoded one by one.
        """
        serving = dataclasses.replace(
            self.inference, buckets=(max(self.inference.buckets),), batch_size=1
        )
        model = dataclasses.replace(self.model, changes={**self.model.changes, "unroll": 1})
        return dataclasses.replace(self, model=model, inference=serving)

    def open(
        self, folder: str | Path, tokenizer: DualEncoderTokenizer, *, one_shape: bool = False
    ) -> Embedder:
        """The trained embedder of the run in a folder."""
        config = self.config(tokenizer.vocab_size)
        mesh = None if one_shape else self.serving_mesh()
        model = self.load(folder, DualEncoder, config, mesh)
        return self.embedder(tokenizer, model)
