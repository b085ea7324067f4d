"""Published sizes of LLaVA and its like."""

from __future__ import annotations

import dataclasses
from typing import Any

from mmqa_jax.models.llama.config import (
    FREE,
    RELATIVES,
    LlamaConfig,
    llama2_7b,
    llama2_13b,
    smollm2_135m,
)
from mmqa_jax.models.llava.config import LlavaConfig
from mmqa_jax.models.llava.gemma4_patches import Gemma4PatchesConfig
from mmqa_jax.models.llava.gemma4_vision import Gemma4VisionConfig
from mmqa_jax.models.llava.intern_vit import InternVisionConfig
from mmqa_jax.models.llava.llama4_vision import Llama4VisionConfig
from mmqa_jax.models.llava.tiles import CanvasTiles, RatioTiles, RowTiles, UnitTiles
from mmqa_jax.models.two_towers.config import (
    SiglipVisionConfig,
    siglip_base,
    siglip_so400m,
    vit_l_14_336,
)
from mmqa_jax.weights.registry import Base


def llava_1_5_7b(**changes) -> LlavaConfig:
    """llava-hf/llava-1.5-7b-hf: Vicuna-1.5 7B with the tokens 32,000 `<image>` and 32,001 `<pad>`.

    The embedding table is padded to 32,064 rows. The original, liuhaotian/llava-v1.5-7b, has
    32,000 rows and `ORIGINAL_IMAGE_TOKEN`; see `models.llava.keys`.
    """
    sizes = LlavaConfig(vit_l_14_336().vision, llama2_7b(vocab_size=32064))
    return dataclasses.replace(sizes, **changes)


def llava_1_5_13b(**changes) -> LlavaConfig:
    """llava-hf/llava-1.5-13b-hf: as the 7B, on Vicuna-1.5 13B."""
    sizes = LlavaConfig(vit_l_14_336().vision, llama2_13b(vocab_size=32064))
    return dataclasses.replace(sizes, **changes)


def _smolvlm(vision: SiglipVisionConfig, llama: LlamaConfig, merge: int, token: int) -> LlavaConfig:
    return LlavaConfig(
        vision,
        dataclasses.replace(llama, tied=False),
        feature_layer=-1,
        select="full",
        resize="squash",
        projector_bias=False,
        image_token=token,
        family="smolvlm",
        connector="shuffle",
        merge=merge,
        normed=True,
        split=RowTiles(longest=4 * vision.image_size),
    )


_BASE_512 = dataclasses.replace(siglip_base(512).vision, head=False)
_SO400M = dataclasses.replace(siglip_so400m().vision, head=False)


def smolvlm2_256m(**changes) -> LlavaConfig:
    """HuggingFaceTB/SmolVLM2-256M-Video-Instruct."""
    llama = smollm2_135m(vocab_size=49280)
    return dataclasses.replace(_smolvlm(_BASE_512, llama, 4, 49190), **changes)


def smolvlm2_500m(**changes) -> LlavaConfig:
    """HuggingFaceTB/SmolVLM2-500M-Video-Instruct."""
    llama = RELATIVES["smollm2_360m"](vocab_size=49280)
    return dataclasses.replace(_smolvlm(_BASE_512, llama, 4, 49190), **changes)


def smolvlm2_22b(**changes) -> LlavaConfig:
    """HuggingFaceTB/SmolVLM2-2.2B-Instruct; the rotary base is SmolLM2-1.7B's."""
    llama = RELATIVES["smollm2_17b"](vocab_size=49280)
    return dataclasses.replace(_smolvlm(_SO400M, llama, 3, 49190), **changes)


def granite_docling_258m(**changes) -> LlavaConfig:
    """ibm-granite/granite-docling-258M."""
    sizes = _smolvlm(_BASE_512, smollm2_135m(vocab_size=100352), 4, 100270)
    sizes = dataclasses.replace(
        sizes, family="idefics3", llama=dataclasses.replace(sizes.llama, tied=True)
    )
    return dataclasses.replace(sizes, **changes)


def _internvl(decoder: str, token: int, **changes: Any) -> LlavaConfig:
    sizes = LlavaConfig(
        InternVisionConfig(),
        RELATIVES[decoder](),
        feature_layer=-1,
        resize="squash",
        image_token=token,
        family="internvl",
        connector="normed_shuffle",
        merge=2,
        split=RatioTiles(),
    )
    return dataclasses.replace(sizes, **changes)


def internvl35_1b(**changes) -> LlavaConfig:
    """OpenGVLab/InternVL3_5-1B-HF."""
    return _internvl("qwen3_06b", 151671, **changes)


def internvl35_2b(**changes) -> LlavaConfig:
    """OpenGVLab/InternVL3_5-2B-HF."""
    return _internvl("qwen3_17b", 151671, **changes)


def internvl35_4b(**changes) -> LlavaConfig:
    """OpenGVLab/InternVL3_5-4B-HF."""
    return _internvl("qwen3_4b", 151671, **changes)


def internvl35_8b(**changes) -> LlavaConfig:
    """OpenGVLab/InternVL3_5-8B-HF."""
    return _internvl("qwen3_8b", 151671, **changes)


def _gemma3(decoder: str, **changes: Any) -> LlavaConfig:
    vision = dataclasses.replace(siglip_so400m().vision, image_size=896, head=False)
    sizes = LlavaConfig(
        vision,
        dataclasses.replace(RELATIVES[decoder](), picture_sight="both"),
        feature_layer=-1,
        select="full",
        resize="squash_bilinear",
        projector_bias=False,
        image_token=262144,
        family="gemma3",
        connector="pooled",
        merge=4,
        normed=True,
        before_token=255999,
        after_token=256000,
    )
    return dataclasses.replace(sizes, **changes)


def gemma3_4b_vl(**changes) -> LlavaConfig:
    """google/gemma-3-4b-it."""
    return _gemma3("gemma3_4b", **changes)


def gemma3_12b_vl(**changes) -> LlavaConfig:
    """google/gemma-3-12b-it."""
    return _gemma3("gemma3_12b", **changes)


def gemma3_27b_vl(**changes) -> LlavaConfig:
    """google/gemma-3-27b-it."""
    return _gemma3("gemma3_27b", **changes)


def _gemma4(decoder: str, **changes: Any) -> LlavaConfig:
    sizes = LlavaConfig(
        Gemma4VisionConfig(),
        dataclasses.replace(RELATIVES[decoder](), picture_sight="near"),
        feature_layer=-1,
        select="full",
        resize="squash",
        projector_bias=False,
        image_token=258880,
        family="gemma4",
        connector="unit_pooled",
        merge=3,
        before_token=255999,
        after_token=258882,
        budget=280,
    )
    return dataclasses.replace(sizes, **changes)


def gemma4_31b_vl(**changes) -> LlavaConfig:
    """google/gemma-4-31B-it."""
    return _gemma4("gemma4_31b", **changes)


def _gemma4_small(decoder: str, **changes: Any) -> LlavaConfig:
    vision = Gemma4VisionConfig(
        width=768, layers=16, heads=12, head_dim=64, mlp_width=3072, clipped=True, standardize=False
    )
    sizes = _gemma4(decoder, vision=vision)
    llama = dataclasses.replace(sizes.llama, picture_sight="causal")
    return dataclasses.replace(sizes, llama=llama, **changes)


def gemma4_e2b_vl(**changes) -> LlavaConfig:
    """google/gemma-4-E2B-it, without what it hears by."""
    return _gemma4_small("gemma4_e2b", **changes)


def gemma4_e4b_vl(**changes) -> LlavaConfig:
    """google/gemma-4-E4B-it, without what it hears by."""
    return _gemma4_small("gemma4_e4b", **changes)


def gemma4_12b_vl(**changes) -> LlavaConfig:
    """google/gemma-4-12B-it, without what it hears by."""
    sizes = _gemma4("gemma4_12b", vision=Gemma4PatchesConfig(), family="gemma4_unified")
    llama = dataclasses.replace(sizes.llama, picture_sight="both")
    return dataclasses.replace(sizes, llama=llama, connector="unit_normed", **changes)


def gemma4_26b_a4b_vl(**changes) -> LlavaConfig:
    """google/gemma-4-26B-A4B-it."""
    return _gemma4("gemma4_26b_a4b", **changes)


def _paligemma2(decoder: str, side: int, **changes: Any) -> LlavaConfig:
    vision = dataclasses.replace(siglip_so400m().vision, image_size=side, head=False)
    sizes = LlavaConfig(
        vision,
        RELATIVES[decoder](vocab_size=257216, picture_sight="prompt"),
        feature_layer=-1,
        select="full",
        resize="squash",
        image_token=257152,
        family="paligemma",
        connector="plain",
        normed=True,
    )
    return dataclasses.replace(sizes, **changes)


def paligemma2_3b(**changes) -> LlavaConfig:
    """google/paligemma2-3b-mix-448."""
    return _paligemma2("gemma2_2b", 448, **changes)


def paligemma2_10b(**changes) -> LlavaConfig:
    """google/paligemma2-10b-mix-448."""
    return _paligemma2("gemma2_9b", 448, **changes)


def paligemma2_28b(**changes) -> LlavaConfig:
    """google/paligemma2-28b-mix-448."""
    return _paligemma2("gemma2_27b", 448, **changes)


def _lfm2_vl(decoder: str, vision: SiglipVisionConfig, **changes: Any) -> LlavaConfig:
    sizes = LlavaConfig(
        dataclasses.replace(vision, flexible=True, head=False),
        RELATIVES[decoder](),
        feature_layer=-1,
        select="full",
        resize="squash_bilinear",
        projector_width=2560,
        projector_normed=True,
        image_token=396,
        family="lfm2_vl",
        connector="units",
        merge=2,
        normed=True,
        split=UnitTiles(),
    )
    return dataclasses.replace(sizes, **changes)


def lfm2_vl_450m(**changes) -> LlavaConfig:
    """LiquidAI/LFM2-VL-450M."""
    return _lfm2_vl("lfm2_350m", siglip_base(256).vision, **changes)


def lfm2_vl_16b(**changes) -> LlavaConfig:
    """LiquidAI/LFM2-VL-1.6B."""
    vision = dataclasses.replace(siglip_so400m(256, patch_size=16).vision, layers=26)
    return _lfm2_vl("lfm2_12b", vision, **changes)


def _llama4(decoder: str, **changes: Any) -> LlavaConfig:
    sizes = LlavaConfig(
        Llama4VisionConfig(),
        RELATIVES[decoder](),
        feature_layer=-1,
        select="leading",
        resize="squash_bilinear",
        projector_width=4096,
        projector_bias=False,
        image_token=200092,
        family="llama4",
        connector="adapter",
        merge=2,
        normed=True,
        split=CanvasTiles(),
        before_token=200080,
        after_token=200081,
    )
    return dataclasses.replace(sizes, **changes)


def llama4_scout_vl(**changes) -> LlavaConfig:
    """meta-llama/Llama-4-Scout-17B-16E-Instruct."""
    return _llama4("llama4_scout", **changes)


def llama4_maverick_vl(**changes) -> LlavaConfig:
    """meta-llama/Llama-4-Maverick-17B-128E-Instruct."""
    return _llama4("llama4_maverick", **changes)


PRESETS = {
    "lfm2_vl_450m": lfm2_vl_450m,
    "lfm2_vl_16b": lfm2_vl_16b,
    "llama4_scout_vl": llama4_scout_vl,
    "llama4_maverick_vl": llama4_maverick_vl,
    "paligemma2_3b": paligemma2_3b,
    "paligemma2_10b": paligemma2_10b,
    "paligemma2_28b": paligemma2_28b,
    "gemma4_e2b_vl": gemma4_e2b_vl,
    "gemma4_e4b_vl": gemma4_e4b_vl,
    "gemma4_12b_vl": gemma4_12b_vl,
    "gemma4_31b_vl": gemma4_31b_vl,
    "gemma4_26b_a4b_vl": gemma4_26b_a4b_vl,
    "gemma3_4b_vl": gemma3_4b_vl,
    "gemma3_12b_vl": gemma3_12b_vl,
    "gemma3_27b_vl": gemma3_27b_vl,
    "llava15_7b": llava_1_5_7b,
    "llava15_13b": llava_1_5_13b,
    "smolvlm2_256m": smolvlm2_256m,
    "smolvlm2_500m": smolvlm2_500m,
    "smolvlm2_22b": smolvlm2_22b,
    "granite_docling_258m": granite_docling_258m,
    "internvl35_1b": internvl35_1b,
    "internvl35_2b": internvl35_2b,
    "internvl35_4b": internvl35_4b,
    "internvl35_8b": internvl35_8b,
}

_FREE_OF_TOWER = ("dtype", "remat", "unroll")


def base(title: str, example: str, config: type[LlavaConfig]) -> Base:
    """How a run fine-tunes a model of a tower and a decoder; none is trained from scratch."""
    free = {"changes": FREE, "vision": _FREE_OF_TOWER}
    parts = {"changes": "llama", "vision": "vision"}
    return Base(title, f"a folder or ORG/NAME, such as {example}", config, free, parts)


BASE = base("LLaVA", "llava-hf/llava-1.5-7b-hf", LlavaConfig)
