"""A searcher that sees (ours): a Qwen-VL learns by reward with the pictures of its episodes.

Results of its tools are shown with their pictures (tool_search.py), and a row of a batch holds an
episode with all that it showed, as `tasks.vision_language` lays them out. The tower is frozen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.data.batches.packing import Bucket
from mmqa_jax.data.batches.texts import TokenExample
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.extensions.search_rewards import METRICS
from mmqa_jax.extensions.searcher import Searcher, Searches, SearchGroups, engine_mesh
from mmqa_jax.models.qwen_vl.network import QwenVLConfig
from mmqa_jax.prompting.backends import Picture
from mmqa_jax.prompting.backends.policy import Transcript, picture_key
from mmqa_jax.prompting.picture_format import PictureFormat, Shown, picture_format
from mmqa_jax.prompting.text_tokenizer import TextTokenizer
from mmqa_jax.tasks.base_llm import check_rows, model_config
from mmqa_jax.tasks.policy import Arrays, PolicyObjective, batch_shapes
from mmqa_jax.tasks.task import ANY_VOCABULARY
from mmqa_jax.tasks.vision_language import (
    PicturedRows,
    ShownPictures,
    VisionLanguageObjective,
    VisionLanguageSection,
    layout_of,
    pictured_shapes,
)


@dataclasses.dataclass(frozen=True)
class PicturedPolicy(PolicyObjective, VisionLanguageObjective):
    """The PolicyObjective of a model that sees, at temperature 1."""

    def policy(
        self, model: Any, batch: dict[str, jax.Array], key: jax.Array | None = None
    ) -> jax.Array:
        """See PolicyObjective."""
        return self.log_probs(model, batch, key)


class EpisodePictures:
    """The pictures that the episodes of a batch showed, by `picture_key`.

    Args:
      pictures: how the model's prompts hold them.
    """

    def __init__(self, pictures: PictureFormat):
        self._format = pictures
        self._shown: dict[str, Picture] = {}

    def add(self, pictures: Sequence[Picture]) -> None:
        """Keeps pictures for the next batch."""
        self._shown |= {picture_key(picture): picture for picture in pictures}

    def clear(self) -> None:
        """Forgets them."""
        self._shown.clear()

    def look_ahead(self, names: Sequence[Sequence[str]]) -> None:
        """See TrainingPictures: all are there."""

    def pixels(self, name: str, alone: bool = True) -> Any:
        """The pixels that the model takes."""
        return self._format.read(Shown(self._shown[name], alone=alone))


class PicturedGroups(SearchGroups):
    """Draws groups of episodes with pictures.

    Args:
      parts, options: see SearchGroups.
      config: of the model.
      pictures: as its prompts hold them.
      bucket: pictures of a row, and the largest one's units.
    """

    def __init__(
        self,
        *parts: Any,
        config: QwenVLConfig,
        pictures: PictureFormat,
        bucket: Bucket,
        **options: Any,
    ):
        super().__init__(*parts, **options)
        self._config, self._bucket, self._shown = config, bucket, EpisodePictures(pictures)

    def _example(self, transcript: Transcript) -> TokenExample:
        """An episode as a row. One that drew the token of a picture itself teaches nothing: no
        picture stands there."""
        example = transcript.example()
        if (example.tokens == self._config.image_token).sum() != len(example.pictures):
            return TokenExample(np.zeros(1, np.int32), 1)
        self._shown.add(transcript.pictures)
        return example

    def _rows_of(self, examples: Sequence[TokenExample]) -> Arrays:
        made = PicturedRows(self._size, self._config, self._shown).batch(examples, self._bucket)
        self._shown.clear()
        return dict(made)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PicturedSearcher(Searcher):
    """A Qwen-VL learns to search, and to look at what it finds.

    Attributes:
      pictures: the most of an episode; `batches.length` counts tokens beside theirs.
    """

    name: ClassVar[str] = "pictured_searcher"
    product: ClassVar[str] = "pictured searcher"
    architecture: ClassVar[str] = "qwen_vl"

    model: VisionLanguageSection
    pictures: ShownPictures = dataclasses.field(default_factory=ShownPictures)

    def remat_keys(self) -> tuple[str, ...]:
        return "model.changes.remat", "model.vision.remat"

    def _check(self, files: bool) -> None:
        super()._check(files)
        wanted = {
            "episodes.template": (self.episodes.template, "tools"),
            "grpo.kl_weight": (self.grpo.kl_weight, 0),
            "grpo.updates": (self.grpo.updates, 1),
            "grpo.temperature": (self.grpo.temperature, 1),
            "model.tower": (self.model.tower, "frozen"),
            "exact": (self.exact, False),
        }
        for key, (value, only) in wanted.items():
            if value != only:
                raise UserError(
                    f"config key {key}={value}: with pictures only {only} is there; set it to that."
                )

    def config(self, vocab_size: int) -> QwenVLConfig:
        """The model's."""
        return model_config(self, vocab_size)

    def _bucket(self, config: QwenVLConfig) -> Bucket:
        slots = 1 << (self.pictures.most - 1).bit_length()
        return Bucket(slots, layout_of(config).largest)

    def _pictured_columns(self, config: QwenVLConfig) -> int:
        bucket = self._bucket(config)
        return bucket.pictures * layout_of(config).room(bucket.text)

    def objective(self, vocab_size: int, mesh: Mesh | None = None) -> PicturedPolicy:
        return PicturedPolicy(self.config(vocab_size), self.model.lora, options=self.grpo)

    def batch(self) -> dict[str, Any]:
        rows, config = self.batches.batch_size, self.config(ANY_VOCABULARY)
        policy = batch_shapes(self.grpo, self._size, rows, METRICS, drawn=True)
        names = ("advantages", "measured", "drawn_log_probs")
        shapes = pictured_shapes(rows, self._size, self._bucket(config), config)
        return {**shapes, **{name: policy[name] for name in names}}

    @property
    def _columns(self) -> int:
        return self.batches.length + self._pictured_columns(self.config(ANY_VOCABULARY))

    def _searches(self, corpus: Corpus, tokenizer: TextTokenizer) -> Searches:
        return Searches(
            corpus,
            self.data.retriever(corpus),
            tokenizer,
            self.episodes,
            self._engine,
            engine_mesh(make_mesh(self.mesh)),
            self.config(tokenizer.vocab_size),
            self.pictures.most,
        )

    def _check_model(self, config: QwenVLConfig, tokenizer: TextTokenizer) -> None:
        check_rows(self, config.llama, tokenizer, self._pictured_columns(config))

    def _make_batches(self, searches: Searches, *parts: Any, **options: Any) -> PicturedGroups:
        config = self.config(searches.backend.tokenizer.vocab_size)
        return PicturedGroups(
            searches,
            *parts,
            config=config,
            pictures=picture_format(config, searches.backend.tokenizer),
            bucket=self._bucket(config),
            **options,
        )
