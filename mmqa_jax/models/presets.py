"""The section `model` of an experiment's config: the published models, by name and what differs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.typed import at_least, changes_of, mapping, spec_of
from mmqa_jax.models.bert import network as bert
from mmqa_jax.models.bert.network import BertConfig
from mmqa_jax.models.common.config_checks import check_known
from mmqa_jax.models.encoders.dual_encoder import DualEncoderConfig, of_towers
from mmqa_jax.models.encoders.heads import TextClassifierConfig
from mmqa_jax.models.mcan.network import FusionConfig, MCANConfig, MCANOpenVQAConfig
from mmqa_jax.models.mcan.patches import CaptionMCANConfig, PatchMCANConfig
from mmqa_jax.models.two_towers import config as clip
from mmqa_jax.models.two_towers import config as siglip
from mmqa_jax.models.two_towers.config import (
    SiglipConfig,
    SiglipTextConfig,
    SiglipVisionConfig,
    TextConfig,
    VisionConfig,
)
from mmqa_jax.models.vlp import network as vlp
from mmqa_jax.models.vlp.network import VLPConfig, vlp_clip, vlp_patches

TRUNKS: dict[str, Callable[..., bert.BertConfig]] = {
    "bert_base_cased": bert.bert_base_cased,
    "bert_base_uncased": bert.bert_base_uncased,
    "bert_large_uncased": bert.bert_large_uncased,
    "minilm_l6": bert.minilm_l6,
}
CLIPS: dict[str, Callable[..., clip.CLIPConfig]] = {
    "vit_b_32": clip.vit_b_32,
    "vit_b_16": clip.vit_b_16,
    "vit_l_14": clip.vit_l_14,
    "vit_l_14_336": clip.vit_l_14_336,
}
_GEMMA = 256_000  # tokens of SigLIP 2
SIGLIPS: dict[str, Callable[..., siglip.SiglipConfig]] = {
    "base_16_224": siglip.siglip_base,
    "large_16_256": siglip.siglip_large,
    "so400m_14_384": siglip.siglip_so400m,
    "siglip2_base_16_224": functools.partial(siglip.siglip_base, vocab_size=_GEMMA),
    "siglip2_large_16_256": functools.partial(siglip.siglip_large, vocab_size=_GEMMA),
    "siglip2_so400m_14_384": functools.partial(siglip.siglip_so400m, vocab_size=_GEMMA),
    "siglip2_so400m_16_384": functools.partial(
        siglip.siglip_so400m, patch_size=16, vocab_size=_GEMMA
    ),
}
Frontend = Literal["patches", "x101", "vinvl", "clip"]


@dataclasses.dataclass(frozen=True)
class VLPModel:
    """VLP.

    Attributes:
      trunk: a name of TRUNKS.
      frontend: what a picture's regions are: `patches` of pixels (ours), a detector's (`x101`,
        `vinvl`), or the patch features of a CLIP.
      changes: fields of BertConfig that differ.
      clip, vision, vision_layer: of the frontend clip: a name of CLIPS, fields of VisionConfig that
        differ (unless given its dtype is the trunk's), and the layer whose features are taken (the
        last but one).
      patch: of the frontend patches: their side in pixels.
      visual_hidden: sizes of further linears between regions and trunk.
    """

    trunk: str
    frontend: Frontend
    changes: Mapping[str, Any] = changes_of(BertConfig)
    clip: str = ""
    vision: Mapping[str, Any] = changes_of(VisionConfig)
    vision_layer: int = -2
    patch: int | None = None
    visual_hidden: tuple[int, ...] = ()

    def __post_init__(self):
        for frontend, key in (("patches", "patch"), ("clip", "clip")):
            if self.frontend == frontend and not getattr(self, key):
                raise UserError(f"config key model.{key} is missing; add it.")

    def config(self, vocab_size: int, region_positions: int = 6) -> VLPConfig:
        """The model's sizes.

        Args:
          vocab_size: of the tokenizer.
          region_positions: values of a patch's position.
        """
        trunk = _trunk(self.trunk, self.changes, vocab_size, types=6)
        if self.frontend == "patches":
            assert self.patch is not None
            return vlp_patches(
                self.patch,
                bert=trunk,
                visual_hidden=self.visual_hidden,
                region_positions=region_positions,
            )
        if self.frontend == "clip":
            return vlp_clip(
                self.clip_vision(),
                bert=trunk,
                layer=self.vision_layer,
                visual_hidden=self.visual_hidden,
            )
        published = {"x101": vlp.vlp_base_x101, "vinvl": vlp.vlp_base_vinvl}[self.frontend]()
        return dataclasses.replace(published, bert=trunk)

    def clip_vision(self) -> VisionConfig:
        """The vision tower of the frontend clip."""
        dtype = self.changes.get("dtype", BertConfig.dtype)
        return clip_vision(self.clip, {"dtype": dtype, **self.vision})


def _text_changes(section: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = TextConfig if section.get("clip") else BertConfig
    kind = SiglipTextConfig if section.get("siglip") else kind
    return spec_of(kind, minimum=1, partial=True)


def _vision_changes(section: Mapping[str, Any]) -> Mapping[str, Any]:
    if section.get("siglip"):  # pictures of training have one size
        return spec_of(SiglipVisionConfig, "flexible", minimum=1, partial=True)
    return spec_of(VisionConfig, minimum=1, partial=True)


@dataclasses.dataclass(frozen=True)
class DualEncoderModel:
    """A text tower and a vision tower with one space of embeddings.

    Attributes:
      fusion, picture_gate: how a source's caption and picture become one vector (DualEncoder).
      clip, siglip: a name of CLIPS or SIGLIPS, then that model itself; or both "":
      trunk: of a BERT text tower, a name of TRUNKS.
      changes: fields of the text tower's config that differ.
      vision: fields of VisionConfig (of SigLIP its own) that differ; unless given its dtype is the
        text tower's, and its embed_dim a BERT tower's hidden size.
    """

    fusion: str
    picture_gate: float
    clip: str = ""
    siglip: str = ""
    trunk: str = ""
    changes: Mapping[str, Any] = mapping(_text_changes)
    vision: Mapping[str, Any] = mapping(_vision_changes)

    def __post_init__(self):
        if self.clip and self.siglip:
            raise UserError(
                f"config keys model.clip={self.clip} and model.siglip={self.siglip}: name one of "
                "the two."
            )
        if not self.published and not self.trunk:
            raise UserError("config key model.trunk is missing; add it.")

    @property
    def published(self) -> str:
        """`clip` or `siglip`, of which both towers are; "": the text tower is a BERT."""
        return "clip" if self.clip else "siglip" if self.siglip else ""

    def config(self, vocab_size: int) -> DualEncoderConfig:
        """The model's sizes.

        Args:
          vocab_size: of the tokenizer; CLIP and SigLIP have their own.
        """
        fusion = {"fusion": self.fusion, "picture_gate": self.picture_gate}
        if self.siglip:
            named = _siglip(self.siglip)
            text: Any = _with(named.text, self.changes)
        elif self.clip:
            text = _with(_clip(self.clip).text, self.changes)
        else:
            text = _trunk(self.trunk, self.changes, vocab_size, types=2)
        changes = {"dtype": text.dtype, **self.vision}
        if self.siglip:
            towers = SiglipConfig(_with(named.vision, changes), text)
            return of_towers(towers, **fusion)
        vision = _clip(self.clip).vision if self.clip else VisionConfig(embed_dim=text.hidden)
        return DualEncoderConfig(text, _with(vision, changes), **fusion)


@dataclasses.dataclass(frozen=True)
class TextClassifierModel:
    """A BERT with a linear layer.

    Attributes:
      trunk: a name of TRUNKS.
      pooling: see TextClassifierConfig.
      frozen: only the linear layer is trained.
      changes: fields of BertConfig that differ.
    """

    trunk: str
    pooling: str
    frozen: bool
    changes: Mapping[str, Any] = changes_of(BertConfig)

    def config(self, vocab_size: int, classes: int) -> TextClassifierConfig:
        """The model's sizes; `vocab_size`: of the tokenizer."""
        trunk = _trunk(self.trunk, self.changes, vocab_size, types=2)
        return TextClassifierConfig(trunk, classes, self.pooling)


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
        return _with(FusionConfig(), self.fusion)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OnText(_Fused):
    """MCANs whose questions a BERT encodes, as VLPModel's `trunk` and `changes` say."""

    trunk: str
    changes: Mapping[str, Any] = changes_of(BertConfig)

    def _text(self, vocab_size: int) -> BertConfig:
        return _trunk(self.trunk, self.changes, vocab_size, types=2)


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
        vision = _with(VisionConfig(), self.vision)
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


def clip_vision(name: str, changes: Mapping[str, Any]) -> VisionConfig:
    """The vision tower of a CLIP.

    Args:
      name: of CLIPS.
      changes: fields of VisionConfig that differ.
    """
    return _with(_clip(name).vision, changes)


def _clip(name: str) -> clip.CLIPConfig:
    if name not in CLIPS:
        raise UserError(f"config key model.clip={name}: unknown; use one of {', '.join(CLIPS)}.")
    return CLIPS[name]()


def _siglip(name: str) -> SiglipConfig:
    if name not in SIGLIPS:
        known = ", ".join(SIGLIPS)
        raise UserError(f"config key model.siglip={name}: unknown; use one of {known}.")
    return SIGLIPS[name]()


def _trunk(name: str, changes: Mapping[str, Any], vocab_size: int, types: int) -> bert.BertConfig:
    if name not in TRUNKS:
        raise UserError(f"config key model.trunk={name}: unknown; use one of {', '.join(TRUNKS)}.")
    sizes = {"vocab_size": vocab_size, "types": types, **changes}
    return _with(TRUNKS[name](), sizes)


def _with(config: Any, changes: Mapping[str, Any]) -> Any:
    # Read from a config file a tuple is a list, which is no part of a hash.
    given = {n: tuple(v) if isinstance(v, list) else v for n, v in changes.items()}
    return dataclasses.replace(config, **given)
