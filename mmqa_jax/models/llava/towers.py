"""The towers of `LlavaConfig.vision`: their part of a config.json, and the names of their tensors.

An entry of `TOWERS` is a model type of `vision_config`. Most names here begin with
`vision_model.`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mmqa_jax.models.llava import gemma4_patches, gemma4_vision, intern_vit, llama4_vision, pixtral
from mmqa_jax.models.two_towers import keys as two_towers
from mmqa_jax.models.two_towers.config import SiglipVisionConfig, VisionConfig
from mmqa_jax.weights import layouts
from mmqa_jax.weights.keymap import Rule

NAFLEX = f"{two_towers.FLEXIBLE}_vision_model"
Vision = VisionConfig | SiglipVisionConfig
# Copies of what a processor's file says, and a switch of the authors' code.
_IDEFICS3_HARMLESS = ("max_image_size", "size", "use_base_siglip")
_IDEFICS3 = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 32,
}


class Tower(NamedTuple):
    """How transformers publishes a tower.

    Attributes:
      read: (vision_config, name of the file) -> our config; absent values are transformers'
        defaults.
      write: our config -> vision_config; one without a model type has the family's.
      rules: our config -> rules of its tensors.
    """

    read: Callable[[Mapping[str, Any], str], Any]
    write: Callable[[Any], dict[str, Any]]
    rules: Callable[[Any], list[Rule]]


def clip_or_siglip(published: Mapping[str, Any], where: str) -> Vision:
    """The tower from the config of a CLIPModel, a SiglipModel or a vision model alone."""
    kind = published.get("model_type")
    if kind in (two_towers.FIXED, f"{two_towers.FIXED}_vision_model"):
        sizes = published.get("vision_config") or {} if kind == two_towers.FIXED else published
        return two_towers.siglip_vision_config(sizes, where, may_lack_head=True)
    if kind == "clip_vision_model":
        sizes = {"vision_config": published}
        if "projection_dim" in published:
            sizes["projection_dim"] = published["projection_dim"]
        return two_towers.clip_config(sizes, where).vision
    towers = ("clip", "siglip")
    layouts.check_model_type(
        published, where, *towers, *(f"{tower}_vision_model" for tower in towers)
    )
    return two_towers.clip_config(published, where).vision


def _idefics3(published: Mapping[str, Any], where: str) -> SiglipVisionConfig:
    """A SigLIP without a head.

    transformers finds a patch's position by comparing fractions in float32, which for some sides of
    a grid (19, 25, 29, 31, ...) gives the position before; those of the published models, 26, 27
    and 32, are not among them. Here each patch has its own position.
    """
    layouts.check_model_type(published, where, "idefics3_vision", "smolvlm_vision")
    sizes = {key: value for key, value in published.items() if key not in _IDEFICS3_HARMLESS}
    sizes = {**_IDEFICS3, **sizes, "vision_use_head": False}
    return two_towers.siglip_vision_config(sizes, where, may_lack_head=True)


def _without_head(config: SiglipVisionConfig) -> dict[str, Any]:
    published = two_towers.vision_to_hf(config)
    del published["vision_use_head"], published["model_type"]
    return published


def _naflex(published: Mapping[str, Any], where: str) -> SiglipVisionConfig:
    """A SigLIP 2 of pictures of any size."""
    layouts.check_model_type(published, where, NAFLEX)
    return two_towers.siglip_vision_config(published, where, flexible=True, may_lack_head=True)


_CLIP_OR_SIGLIP = Tower(clip_or_siglip, two_towers.vision_to_hf, two_towers.vision_rules)
_OF_IDEFICS3 = Tower(_idefics3, _without_head, two_towers.vision_rules)
TOWERS: Mapping[str, Tower] = {
    **dict.fromkeys(("clip_vision_model", "siglip_vision_model"), _CLIP_OR_SIGLIP),
    **dict.fromkeys(("idefics3_vision", "smolvlm_vision"), _OF_IDEFICS3),
    NAFLEX: Tower(_naflex, two_towers.vision_to_hf, two_towers.vision_rules),
    llama4_vision.MODEL_TYPE: Tower(llama4_vision.read, llama4_vision.write, llama4_vision.rules),
    pixtral.MODEL_TYPE: Tower(pixtral.read, pixtral.write, pixtral.rules),
    gemma4_patches.MODEL_TYPE: Tower(
        gemma4_patches.read, gemma4_patches.write, gemma4_patches.rules
    ),
    gemma4_vision.MODEL_TYPE: Tower(gemma4_vision.read, gemma4_vision.write, gemma4_vision.rules),
    intern_vit.MODEL_TYPE: Tower(intern_vit.read, intern_vit.write, intern_vit.rules),
}
