"""The section `model` of a VQA run's config: the MCANs, by what they see of a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from mmqa_jax.core.typed import at_least, changes_of
from mmqa_jax.models.bert.network import BertConfig, trunk_config
from mmqa_jax.models.common.config_checks import check_known, with_fields
from mmqa_jax.models.mcan.network import FusionConfig, MCANConfig, MCANOpenVQAConfig
from mmqa_jax.models.mcan.patches import CaptionMCANConfig, PatchMCANConfig
from mmqa_jax.models.two_towers.config import VisionConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fused:
    """What the MCANs have in common.

    Attributes:
      image: what they see of a picture.
      fusion: fields of FusionConfig that differ.
    """

    kind: ClassVar[str]
    remat_keys: ClassVar[tuple[str, ...]] = ("model.changes.remat",)
    frozen_text: ClassVar[bool] = False
    answer_embeddings: ClassVar[bool] = False
    image: str
    fusion: Mapping[str, Any] = changes_of(FusionConfig)

    def fusion_config(self) -> FusionConfig:
        """The fusion's sizes."""
        return with_fields(FusionConfig(), self.fusion)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OnText(_Fused):
    """MCANs whose questions a BERT encodes, as VLPModel's `trunk` and `changes` say."""

    trunk: str
    changes: Mapping[str, Any] = changes_of(BertConfig)

    def _text(self, vocab_size: int) -> BertConfig:
        return trunk_config(self.trunk, self.changes, vocab_size, types=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridModel(_OnText):
    """Prophet's MCAN on CLIP's grid features.

    Attributes:
      grid: cells of a side.
      image_features: values of a cell.
    """

    kind: ClassVar[str] = "mcan"
    grid: int = at_least(1)
    image_features: int = at_least(1)

    def config(self, vocab_size: int, answers: int, new_answers: int = 0) -> MCANConfig:
        """The model's sizes.

        Args:
          vocab_size: of the tokenizer.
          answers: size of the answer vocabulary, that of the pretraining where it is extended.
          new_answers: by which it is extended.
        """
        return MCANConfig(
            self._text(vocab_size),
            self.fusion_config(),
            image_features=self.image_features,
            grid=self.grid,
            answers=answers,
            new_answers=new_answers,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegionsModel(_Fused):
    """openvqa's MCAN: GloVe words and a detector's regions, of `region_features` values each."""

    kind: ClassVar[str] = "mcan_openvqa"
    remat_keys: ClassVar[tuple[str, ...]] = ()
    word_features: int = at_least(1)
    region_features: int = at_least(1)

    def config(self, vocab_size: int, answers: int, new_answers: int = 0) -> MCANOpenVQAConfig:
        """The model's sizes; see GridModel. Its answers cannot be extended."""
        sizes = self.word_features, self.region_features
        return MCANOpenVQAConfig(vocab_size, self.fusion_config(), *sizes, answers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptionModel(_OnText):
    """Ours: a caption stands for the picture.

    Attributes:
      frozen_text: the question encoder is not trained.
      answer_embeddings: the head starts from the answers' embeddings.
    """

    kind: ClassVar[str] = "caption_mcan"
    frozen_text: bool = False
    answer_embeddings: bool = False

    def config(self, vocab_size: int, answers: int, new_answers: int = 0) -> CaptionMCANConfig:
        """The model's sizes; see GridModel. Its answers cannot be extended."""
        text = self._text(vocab_size)
        return CaptionMCANConfig(text, self.fusion_config(), answers, self.frozen_text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchesModel(_OnText):
    """Ours: an MCAN on the patches of pictures.

    Attributes:
      vision: fields of VisionConfig that differ.
      pictures: of a question at most.
      answer_embeddings: see CaptionModel.
    """

    kind: ClassVar[str] = "patch_mcan"
    remat_keys: ClassVar[tuple[str, ...]] = ("model.changes.remat", "model.vision.remat")
    pictures: int = at_least(1)
    vision: Mapping[str, Any] = changes_of(VisionConfig)
    answer_embeddings: bool = False

    def config(self, vocab_size: int, answers: int, new_answers: int = 0) -> PatchMCANConfig:
        """The model's sizes; see GridModel. Its answers cannot be extended."""
        vision = with_fields(VisionConfig(), self.vision)
        text = self._text(vocab_size)
        return PatchMCANConfig(text, vision, self.fusion_config(), answers, self.pictures)


VQAModelSection = GridModel | RegionsModel | CaptionModel | PatchesModel
_VQA = {
    "grid": GridModel,
    "regions": RegionsModel,
    "caption": CaptionModel,
    "patches": PatchesModel,
}


def vqa_model(section: Mapping[str, Any]) -> type[VQAModelSection]:
    """The dataclass of a VQA run's section `model`, by its `image`."""
    image = section.get("image")
    check_known("config key model.image", image, _VQA)
    return _VQA[image]
