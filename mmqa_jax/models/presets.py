"""Model configs from the `model` section of an experiment's config."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.models import bert, clip, vlp
from mmqa_jax.models.caption_mcan import CaptionMCANConfig
from mmqa_jax.models.config_checks import check_known
from mmqa_jax.models.dual_encoder import DualEncoderConfig
from mmqa_jax.models.mcan import MCANConfig
from mmqa_jax.models.mcan_layers import FusionConfig
from mmqa_jax.models.mcan_openvqa import MCANOpenVQAConfig
from mmqa_jax.models.patch_mcan import PatchMCANConfig
from mmqa_jax.models.text_classifier import TextClassifierConfig
from mmqa_jax.models.vlp_extensions import ExtendedVLPConfig, vlp_clip, vlp_patches

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


def vlp_from_config(section: Mapping[str, Any], vocab_size: int) -> ExtendedVLPConfig:
    """VLP as the config describes it.

    Args:
      section: `trunk` (a name of TRUNKS), `changes` (fields of BertConfig that differ),
        `frontend` (`patches`, `x101`, `vinvl` or `clip`); for clip those of `clip_vision` and
        `vision_layer` (-2, the last but one); and, for patches, `patch` (side in pixels),
        `visual_hidden` (sizes of further linears), `region_positions` (values of a patch's
        position, 6), `tags` (slots hold tokens), `copy_head` (whether it has one) and
        `written_words` (with a copy head: how many tokens are written, the first ones).
      vocab_size: of the tokenizer.

    Raises:
      UserError: an unknown name or field.
    """
    trunk = _trunk(section, vocab_size, types=6)
    frontend = section["frontend"]
    if frontend == "patches":
        return vlp_patches(
            section["patch"],
            bert=trunk,
            visual_hidden=section.get("visual_hidden", ()),
            region_positions=section.get("region_positions", 6),
            region_tags=section.get("tags", False),
            copy_head=section.get("copy_head", False),
            written_words=section.get("written_words"),
        )
    if frontend == "clip":
        return vlp_clip(
            clip_vision(section),
            bert=trunk,
            layer=section.get("vision_layer", -2),
            visual_hidden=section.get("visual_hidden", ()),
        )
    published = {"x101": vlp.vlp_base_x101(), "vinvl": vlp.vlp_base_vinvl()}
    if frontend not in published:
        raise UserError(
            f"config key model.frontend={frontend}: unknown; use patches, x101, vinvl or clip."
        )
    base = dataclasses.replace(published[frontend], bert=trunk)
    return ExtendedVLPConfig.of(base)


def dual_encoder_from_config(section: Mapping[str, Any], vocab_size: int) -> DualEncoderConfig:
    """The dual encoder as the config describes it.

    Args:
      section: either `clip` (a name of CLIPS; then CLIP itself) or the `trunk` of a BERT text
        tower; `changes` (fields of the text tower's config that differ) and `vision` (of
        VisionConfig; its embed_dim is the BERT tower's hidden size unless given); and
        `fusion`, `picture_gate`.
      vocab_size: of the tokenizer; CLIP has its own.

    Raises:
      UserError: an unknown name or field.
    """
    if section.get("clip"):
        text = _with(_clip(section["clip"]).text, section.get("changes", {}), "model.changes")
        vision = clip_vision(section)
    else:
        text = _trunk(section, vocab_size, types=2)
        vision = clip.VisionConfig(embed_dim=text.hidden)
        vision = _with(vision, section.get("vision", {}), "model.vision")
    return DualEncoderConfig(
        text, vision, fusion=section["fusion"], picture_gate=section["picture_gate"]
    )


def text_classifier_from_config(
    section: Mapping[str, Any], vocab_size: int, classes: int
) -> TextClassifierConfig:
    """The text classifier as the config describes it.

    Args:
      section: `trunk` (a name of TRUNKS), `changes` (fields of BertConfig that differ), `pooling`.
      vocab_size: of the tokenizer.

    Raises:
      UserError: an unknown name or field.
    """
    trunk = _trunk(section, vocab_size, types=2)
    return TextClassifierConfig(trunk, classes, section["pooling"])


def vqa_from_config(
    section: Mapping[str, Any], vocab_size: int, answers: int, new_answers: int = 0
) -> MCANConfig | MCANOpenVQAConfig | CaptionMCANConfig | PatchMCANConfig:
    """The MCAN as the config describes it.

    Args:
      section: `image` (`grid`: Prophet's, `regions`: openvqa's, `caption` and `patches`: ours) and
        `fusion` (fields of FusionConfig); the `trunk` of the question encoder and its `changes`,
        but for regions; for a grid `grid` and `image_features`, for regions `region_features` and
        `word_features`, for captions `frozen_text`, for patches `vision` (fields of VisionConfig)
        and `pictures`.
      vocab_size: of the tokenizer.
      answers: size of the answer vocabulary, that of the pretraining where it is extended.
      new_answers: by which a grid's is extended.

    Raises:
      UserError: an unknown name or field, or sizes that do not fit.
    """
    fusion = _with(FusionConfig(), section["fusion"], "model.fusion")
    check_known("model.image", section["image"], ("grid", "regions", "caption", "patches"))
    if section["image"] == "regions":
        sizes = section["word_features"], section["region_features"]
        return MCANOpenVQAConfig(vocab_size, fusion, *sizes, answers)
    text = _trunk(section, vocab_size, types=2)
    if section["image"] == "caption":
        return CaptionMCANConfig(text, fusion, answers, section.get("frozen_text", False))
    if section["image"] == "patches":
        vision = _with(clip.VisionConfig(), section["vision"], "model.vision")
        return PatchMCANConfig(text, vision, fusion, answers, section["pictures"])
    return MCANConfig(
        text,
        fusion,
        image_features=section["image_features"],
        grid=section["grid"],
        answers=answers,
        new_answers=new_answers,
    )


def clip_vision(section: Mapping[str, Any]) -> clip.VisionConfig:
    """The vision tower of a dual encoder that is a CLIP, or of VLP's frontend `clip`.

    Args:
      section: `clip` (a name of CLIPS) and `vision` (fields of VisionConfig that differ).

    Raises:
      UserError: an unknown name or field.
    """
    return _with(_clip(section["clip"]).vision, section.get("vision", {}), "model.vision")


def _clip(name: str) -> clip.CLIPConfig:
    if name not in CLIPS:
        raise UserError(f"config key model.clip={name}: unknown; use one of {', '.join(CLIPS)}.")
    return CLIPS[name]()


def _trunk(section: Mapping[str, Any], vocab_size: int, types: int) -> bert.BertConfig:
    name = section["trunk"]
    if name not in TRUNKS:
        raise UserError(f"config key model.trunk={name}: unknown; use one of {', '.join(TRUNKS)}.")
    changes = {"vocab_size": vocab_size, "types": types, **section.get("changes", {})}
    return _with(TRUNKS[name](), changes, "model.changes")


def _with(config: Any, changes: Mapping[str, Any], key: str) -> Any:
    known = [field.name for field in dataclasses.fields(config)]
    for name in changes:
        if name not in known:
            raise UserError(f"config key {key}.{name}: unknown; use one of {', '.join(known)}.")
    return dataclasses.replace(config, **changes)
