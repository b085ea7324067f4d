"""The families of models that are a tower, a connector and a decoder: one entry for each.

An entry says what transformers' config.json of a family calls our fields, what its code fixes
without a key, and how its tensors are named. To add a family: one entry here, its connector in
`connectors.py` and its tower in `keys.py` where they are new, presets in `config.py`, and one
case of `tests/equivalence/test_vlm_families.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mmqa_jax.models.llava.tiles import CanvasTiles, RatioTiles, RowTiles, Split, UnitTiles
from mmqa_jax.models.two_towers import config
from mmqa_jax.weights.config_json import kinds


def _none() -> Any:
    return dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Family:
    """One family."""

    title: str  # what people call it
    architecture: str  # its class in transformers
    tower: str  # model type of a vision_config that does not say it; a key of `towers.TOWERS`
    # Our fields -> their keys in config.json and transformers' defaults.
    keys: Mapping[str, tuple[str, Any]]
    # Kinds of its keys (`config_json.kinds`) beside those that every family has.
    kinds: Mapping[str, str]
    computes: Mapping[str, Any] = _none()  # our fields that its code fixes, and no key says
    fixed: Mapping[str, tuple[Any, ...]] = _none()  # keys that have only these values here
    harmless: tuple[str, ...] = ()  # keys that change nothing in inference
    # Of its text_config, what transformers takes for absent keys where that is not what the
    # decoder's own family takes.
    text: Mapping[str, Any] = _none()
    # text_fixed, text_harmless: of its text_config, as `fixed` and `harmless`; no decoder has them.
    text_fixed: Mapping[str, tuple[Any, ...]] = _none()
    text_harmless: tuple[str, ...] = ()
    # Whether the head is the embedding table where neither config.json nor the tensors say.
    tied: bool = False
    # Of its tensors' names -> the prefix of the rules' keys, which are LLaVA's.
    prefixes: Mapping[str, str] = _none()
    # The tower of a config.json without vision_config; None: what `tower` reads of {}.
    vision: config.VisionConfig | config.SiglipVisionConfig | None = None
    tower_harmless: tuple[str, ...] = ()  # keys of its vision_config that change nothing
    width_key: str = ""  # its key for the decoder's width, beside its text_config
    # Our fields whose keys, with a default, stand in its vision_config; of several keys all say the
    # same.
    of_tower: Mapping[str, tuple[str, int]] = _none()
    split: type[Split] | None = None  # how its pictures are cut; None: they are squares
    # The most tokens of a picture of any size, where its processor does not say it.
    budget: int | None = None
    length_key: str = ""  # its key for a square's tokens, which follow from other keys
    # What transformers takes where `length_key` is absent, if `merge` follows from it.
    length: int = 0
    # `LlamaConfig.picture_sight`, which its code fixes; "": its text_config says it.
    sight: str = "causal"
    seen_whole: str = "near"  # what it is where a text_config says "vision"
    is_capped: bool = False  # whether its head has the cap that its text_config says
    inverse: tuple[str, ...] = ()  # those of our fields whose key says 1 / value
    # Whether transformers' pixel_values are by prompt and picture, not by picture alone.
    nested: bool = False


LLAVA_KEYS = {
    "feature_layer": ("vision_feature_layer", -2),
    "select": ("vision_feature_select_strategy", "default"),
    "projector_activation": ("projector_hidden_act", "gelu"),
    "projector_bias": ("multimodal_projector_bias", True),
    "image_token": ("image_token_index", 32000),
}
LLAVA_KINDS = kinds(
    integer="image_token_index image_token_id",
    flag="multimodal_projector_bias",
    name="projector_hidden_act",
    any="vision_feature_layer vision_feature_select_strategy",
)
_IDEFICS3 = Family(
    title="Idefics3, granite-docling",
    architecture="Idefics3ForConditionalGeneration",
    tower="idefics3_vision",
    keys={"merge": ("scale_factor", 2), "image_token": ("image_token_id", 128257)},
    kinds=kinds(size="scale_factor", integer="image_token_id"),
    computes={
        "connector": "shuffle",
        "feature_layer": -1,
        "select": "full",
        "normed": True,
        "resize": "squash",
        "projector_bias": False,
    },
    harmless=("use_reentrant_checkpointing",),
    text={"model_type": "llama", "rms_norm_eps": 1e-5},
    # Of a resampler that the published models do not have.
    text_fixed={"use_resampler": (False,), "qk_layer_norms": (False,)},
    text_harmless=("perceiver_config", "pixel_shuffle_factor"),
    prefixes={
        "model.vision_model.": "vision_tower.vision_model.",
        "model.connector.modality_projection.": "multi_modal_projector.",
        "model.text_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
    },
    split=RowTiles,
    nested=True,
)
_INTERNVL = Family(
    title="InternVL 3, InternVL 3.5",
    architecture="InternVLForConditionalGeneration",
    tower="internvl_vision",
    keys={
        "feature_layer": ("vision_feature_layer", -1),
        "select": ("vision_feature_select_strategy", "default"),
        "projector_activation": ("projector_hidden_act", "gelu"),
        "image_token": ("image_token_id", 151667),
        "merge": ("downsample_ratio", 0.5),
    },
    kinds=kinds(
        integer="image_token_id",
        name="projector_hidden_act",
        number="downsample_ratio",
        any="vision_feature_layer vision_feature_select_strategy",
    ),
    computes={"connector": "normed_shuffle", "resize": "squash"},
    text={"model_type": "qwen2"},
    tied=True,
    prefixes={"vision_tower.": "vision_tower.vision_model."},
    split=RatioTiles,
    length_key="image_seq_length",
    inverse=("merge",),
)
_GEMMA3 = Family(
    title="Gemma 3, with its pictures",
    architecture="Gemma3ForConditionalGeneration",
    tower="siglip_vision_model",
    keys={
        "image_token": ("image_token_index", 262144),
        "before_token": ("boi_token_index", 255999),
        "after_token": ("eoi_token_index", 256000),
    },
    kinds=kinds(
        size="mm_tokens_per_image",
        integer="image_token_index image_token_id boi_token_index eoi_token_index",
    ),
    computes={
        "connector": "pooled",
        "feature_layer": -1,
        "select": "full",
        "normed": True,
        "resize": "squash_bilinear",
        "projector_bias": False,
    },
    text={"model_type": "gemma3_text"},
    tied=True,
    length_key="mm_tokens_per_image",
    length=256,
    sight="both",
)
_GEMMA4 = Family(
    title="Gemma 4, with its pictures",
    architecture="Gemma4ForConditionalGeneration",
    tower="gemma4_vision",
    keys={
        "image_token": ("image_token_id", 258880),
        "before_token": ("boi_token_id", 255999),
        "after_token": ("eoi_token_id", 258882),
    },
    kinds=kinds(integer="image_token_id boi_token_id eoi_token_id"),
    computes={
        "connector": "unit_pooled",
        "feature_layer": -1,
        "select": "full",
        "resize": "squash",
        "projector_bias": False,
    },
    # Of videos and sound; a copy of what a processor's file says.
    harmless=(
        *("video_token_id", "audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index"),
        *("audio_config", "vision_soft_tokens_per_image"),
    ),
    text={"model_type": "gemma4_text"},
    tied=True,
    prefixes={
        "model.language_model.": "language_model.model.",
        "model.vision_tower.encoder.": "vision_tower.vision_model.encoder.",
        "model.vision_tower.": "vision_tower.",
        "model.embed_vision.": "multi_modal_projector.",
        "lm_head.": "language_model.lm_head.",
    },
    of_tower={"merge": ("pooling_kernel_size", 3)},
    budget=280,
    sight="",
    is_capped=True,
)
_GEMMA4_UNIFIED = dataclasses.replace(
    _GEMMA4,
    title="Gemma 4's 12B, with its pictures",
    architecture="Gemma4UnifiedForConditionalGeneration",
    tower="gemma4_unified_vision",
    computes={**_GEMMA4.computes, "connector": "unit_normed"},
    text={"model_type": "gemma4_unified_text", "use_bidirectional_attention": "vision"},
    prefixes={
        "model.language_model.": "language_model.model.",
        "model.vision_embedder.": "vision_tower.",
        "model.embed_vision.": "multi_modal_projector.",
        "lm_head.": "language_model.lm_head.",
    },
    of_tower={},
    # As its class's forward and generate have it; with a static cache transformers has Gemma 4's.
    seen_whole="both",
)
_LFM2_VL = Family(
    title="LFM2-VL",
    architecture="Lfm2VlForConditionalGeneration",
    tower="siglip2_vision_model",
    keys={
        "image_token": ("image_token_id", 396),
        "projector_activation": ("projector_hidden_act", "gelu"),
        "projector_width": ("projector_hidden_size", 2560),
        "projector_bias": ("projector_bias", True),
        "projector_normed": ("projector_use_layernorm", True),
        "merge": ("downsample_factor", 2),
    },
    kinds=kinds(
        integer="image_token_id",
        name="projector_hidden_act",
        size="projector_hidden_size downsample_factor",
        flag="projector_bias projector_use_layernorm",
    ),
    computes={
        "connector": "units",
        "feature_layer": -1,
        "select": "full",
        "normed": True,
        "resize": "squash_bilinear",
    },
    # Copies of what a processor's file says; its class reads the tower's last layer.
    harmless=(
        *("do_image_splitting", "encoder_patch_size", "max_image_tokens", "max_num_patches"),
        *("max_pixels_tolerance", "max_tiles", "min_image_tokens", "min_tiles", "tile_size"),
        *("use_image_special_tokens", "use_thumbnail", "vision_feature_layer"),
        "vision_feature_select_strategy",
    ),
    fixed={"image_token_index": (396,), "tie_embedding": (True,)},
    text={"model_type": "lfm2"},
    tied=True,
    prefixes={
        **{
            f"model.vision_tower.{part}.": f"vision_tower.vision_model.{part}."
            for part in ("embeddings", "encoder", "post_layernorm", "head")
        },
        "model.multi_modal_projector.": "multi_modal_projector.",
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
    },
    split=UnitTiles,
)
_LLAMA4 = Family(
    title="Llama 4, with its pictures",
    architecture="Llama4ForConditionalGeneration",
    tower="llama4_vision_model",
    keys={
        "image_token": ("image_token_index", 200092),
        "before_token": ("boi_token_index", 200080),
        "after_token": ("eoi_token_index", 200081),
    },
    kinds=kinds(integer="image_token_index image_token_id boi_token_index eoi_token_index"),
    computes={
        "connector": "adapter",
        "feature_layer": -1,
        "select": "leading",
        "normed": True,
        "resize": "squash_bilinear",
        "projector_bias": False,
        "merge": 2,
    },
    text={"model_type": "llama4_text"},
    prefixes={"vision_model.": "vision_tower.vision_model."},
    of_tower={
        "projector_width": ("projector_output_dim projector_input_dim vision_output_dim", 4096)
    },
    split=CanvasTiles,
)
_PALIGEMMA = Family(
    title="PaliGemma, PaliGemma 2",
    architecture="PaliGemmaForConditionalGeneration",
    tower="siglip_vision_model",
    keys={"image_token": ("image_token_index", 256000)},
    kinds=kinds(integer="image_token_index image_token_id", size="projection_dim"),
    computes={
        "connector": "plain",
        "feature_layer": -1,
        "select": "full",
        "normed": True,
        "projector_bias": True,
    },
    text={"model_type": "gemma"},
    text_fixed={"use_bidirectional_attention": (True,)},
    text_harmless=("num_image_tokens",),
    tied=True,
    width_key="projection_dim",
    tower_harmless=("num_image_tokens", "projection_dim", "projector_hidden_act", "vocab_size"),
    sight="prompt",
    is_capped=True,
)
_LLAVA = Family(
    title="LLaVA-1.5",
    architecture="LlavaForConditionalGeneration",
    tower="clip_vision_model",
    keys=LLAVA_KEYS,
    kinds=LLAVA_KINDS,
    vision=config.vit_l_14_336().vision,
    length_key="image_seq_length",
)
FAMILIES: Mapping[str, Family] = {  # by model_type
    "llava": _LLAVA,
    "idefics3": _IDEFICS3,
    "smolvlm": dataclasses.replace(
        _IDEFICS3,
        title="SmolVLM, SmolVLM2",
        architecture="SmolVLMForConditionalGeneration",
        tower="smolvlm_vision",
    ),
    "internvl": _INTERNVL,
    "gemma3": _GEMMA3,
    "gemma4": _GEMMA4,
    "gemma4_unified": _GEMMA4_UNIFIED,
    "paligemma": _PALIGEMMA,
    "lfm2_vl": _LFM2_VL,
    "llama4": _LLAMA4,
}
# By `LlavaConfig.family`: OneVision and Mistral 3 read config.json and tensors as LLaVA does, and
# are models of their own (models/onevision, models/mistral3).
ALL: Mapping[str, Family] = {
    **FAMILIES,
    "embedding_gemma2": dataclasses.replace(  # models/encoders/pictured_gemma.py
        _GEMMA4,
        title="EmbeddingGemma 2",
        architecture="EmbeddingGemma2Model",
        prefixes={
            "language_model.": "language_model.model.",
            "vision_tower.encoder.": "vision_tower.vision_model.encoder.",
            "embed_vision.": "multi_modal_projector.",
        },
    ),
    "onevision": dataclasses.replace(
        _LLAVA,
        title="LLaVA-OneVision",
        architecture="LlavaOnevisionForConditionalGeneration",
        tower="siglip_vision_model",
        keys={
            **LLAVA_KEYS,
            "feature_layer": ("vision_feature_layer", -1),
            "select": ("vision_feature_select_strategy", "full"),
            "image_token": ("image_token_index", 151646),
        },
        fixed={"use_image_newline_parameter": (True,)},  # of old versions
        vision=dataclasses.replace(config.siglip_so400m().vision, layers=26, head=False),
        length_key="",
    ),
    "mistral3": Family(
        title="Mistral Small 3.1, Ministral 3",
        architecture="Mistral3ForConditionalGeneration",
        tower="pixtral",
        keys={
            "feature_layer": ("vision_feature_layer", -1),
            "projector_activation": ("projector_hidden_act", "gelu"),
            "projector_bias": ("multimodal_projector_bias", False),
            "merge": ("spatial_merge_size", 2),
            "image_token": ("image_token_index", 10),
        },
        kinds=kinds(
            integer="image_token_index image_token_id",
            flag="multimodal_projector_bias",
            name="projector_hidden_act",
            size="spatial_merge_size",
            any="vision_feature_layer",
        ),
        computes={"connector": "merger", "select": "full", "resize": "squash"},
        text={"model_type": "mistral", "head_dim": 128, "sliding_window": None},
        tied=True,
    ),
}
