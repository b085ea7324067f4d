"""CLIP checkpoints as open_clip publishes them: LAION's, DataComp's, MetaCLIP's, DFN's and others.

The tensors are laid out as OpenAI's (clip.py). `open_clip_config.json` beside them says
what no tensor shows, the heads and the activation: open_clip/model.py CLIPVisionCfg and
CLIPTextCfg, whose defaults absent keys have. A folder of the hub has the tensors in
`open_clip_model.safetensors` or `open_clip_pytorch_model.bin`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.models.clip.network import PIXEL_MEAN, PIXEL_STD, CLIPConfig, TextConfig, VisionConfig
from mmqa_jax.weights.config_json import check_keys, kinds
from mmqa_jax.weights.layouts import OPEN_CLIP_CONFIG, OPEN_CLIP_WEIGHTS

# What a text or image tower may do otherwise, and how CLIP does it.
_BLOCKS: Mapping[str, tuple[Any, ...]] = {
    "ls_init_value": (),
    "final_ln_after_pool": (False,),
    "block_type": ("default",),
    "qk_norm": (False,),
    "scaled_cosine_attn": (False,),
    "scale_heads": (False,),
    "scale_attn_inner": (False,),
    "scale_attn": (False,),
    "scale_fc": (False,),
    "act_kwargs": ({},),
}
_VISION: Mapping[str, tuple[Any, ...]] = _BLOCKS | {
    "attentional_pool": (False,),
    "no_ln_pre": (False,),
    "pos_embed_type": ("learnable",),
    "pool_type": ("tok",),
    "global_average_pool": (False,),
    "input_patchnorm": (False,),
    "timm_model_name": (),
}
_TEXT: Mapping[str, tuple[Any, ...]] = _BLOCKS | {
    "embed_cls": (False,),
    "no_causal_mask": (False,),
    "pool_type": ("argmax",),
    "proj_type": ("linear",),
    "proj_bias": (False,),
    "hf_model_name": (),
    "hf_tokenizer_name": (),
    "tokenizer_mode": ("clip",),
    "tokenizer_kwargs": ({}, {"clean": "lower"}),
}
_HARMLESS = ("output_tokens", "patch_dropout", "attn_pooler_queries", "attn_pooler_heads")
_UNUSED_ENDS = ("timm_", "hf_")  # of a tower that is not open_clip's own, which a name switches on
_PREPROCESSING: Mapping[str, tuple[Any, ...]] = {
    "interpolation": ("bicubic",),
    "resize_mode": ("shortest", "squash"),
    "mode": ("RGB",),
}


def open_clip_file(path: Path) -> Path | None:
    """The tensors of a folder as open_clip publishes it; None where it is none of these."""
    if not (path / OPEN_CLIP_CONFIG).is_file():
        return None
    return next((path / name for name in OPEN_CLIP_WEIGHTS if (path / name).is_file()), None)


def open_clip_config(folder: Path) -> CLIPConfig | None:
    """The config in a folder's `open_clip_config.json`; None if there is none."""
    file = folder / OPEN_CLIP_CONFIG
    if not file.is_file():
        return None
    content = read_json(file)
    model = content.get("model_cfg") if isinstance(content, dict) else None
    towers = [model.get(key) for key in ("vision_cfg", "text_cfg")] if _is_object(model) else [None]
    if not all(map(_is_object, towers)) or not isinstance(model.get("embed_dim"), int):
        raise UserError(
            f"{file}: has no `model_cfg` with embed_dim, vision_cfg and text_cfg; fetch the file "
            "that open_clip published with the checkpoint."
        )
    vision, text = towers
    if "siglip" in str(vision.get("timm_model_name")) and not text.get("hf_model_name"):
        raise UserError(
            f"{file}: a SigLIP in timm's layout; convert the same weights as google publishes them "
            "(google/siglip-..., google/siglip2-...) with --model=siglip."
        )
    check_keys(
        model,
        f"{file}, model_cfg",
        read=kinds(size="embed_dim", object="vision_cfg text_cfg", flag="quick_gelu"),
        harmless=("init_logit_scale", "cast_dtype", "output_dict"),
        fixed={
            "custom_text": (False,),
            "multimodal_cfg": (),
            "init_logit_bias": (),
            "nonscalar_logit_scale": (False,),
        },
    )
    if isinstance(vision.get("layers"), list):
        raise UserError(
            f"{file}, vision_cfg: the image tower is a ResNet; only that tower can be converted, "
            "with --model=modified_resnet."
        )
    both = kinds(size="layers width", number="mlp_ratio", object_or_null="norm_kwargs")
    of_pictures = kinds(size="patch_size head_width", any="image_size")
    of_texts = kinds(size="context_length vocab_size heads")
    _check_tower(vision, f"{file}, vision_cfg", both | of_pictures, _VISION)
    _check_tower(text, f"{file}, text_cfg", both | of_texts, _TEXT)
    image_size = _side(vision.get("image_size", 224), file)
    preprocessing = content.get("preprocess_cfg") or {}
    if not _is_object(preprocessing):
        raise UserError(f"{file}: preprocess_cfg is not an object; fetch the file again.")
    check_keys(
        preprocessing,
        f"{file}, preprocess_cfg",
        read=("size", "mean", "std"),
        harmless=("fill_color",),  # only where pictures are padded
        fixed=_PREPROCESSING,
    )
    preprocessed = _side(preprocessing.get("size", image_size), file)
    if preprocessed != image_size:
        raise UserError(
            f"{file}, preprocess_cfg: size is for pictures of {preprocessed} pixels, "
            f"the image tower reads {image_size}; use another checkpoint."
        )
    activation = "quick_gelu" if model.get("quick_gelu") else "gelu"
    width, text_width = vision.get("width", 768), text.get("width", 512)
    return CLIPConfig(
        vision=VisionConfig(
            image_size=image_size,
            patch_size=vision.get("patch_size", 16),
            width=width,
            layers=vision.get("layers", 12),
            heads=width // vision.get("head_width", 64),
            mlp_width=int(width * vision.get("mlp_ratio", 4.0)),
            embed_dim=model["embed_dim"],
            activation=activation,
            eps=_eps(vision, f"{file}, vision_cfg"),
            pixel_mean=_channels(preprocessing, "mean", PIXEL_MEAN, file),
            pixel_std=_channels(preprocessing, "std", PIXEL_STD, file),
        ),
        text=TextConfig(
            vocab_size=text.get("vocab_size", 49408),
            context=text.get("context_length", 77),
            width=text_width,
            layers=text.get("layers", 12),
            heads=text.get("heads", 8),
            mlp_width=int(text_width * text.get("mlp_ratio", 4.0)),
            embed_dim=model["embed_dim"],
            activation=activation,
            eps=_eps(text, f"{file}, text_cfg"),
        ),
    )


def squashes(folder: Path) -> bool:
    """Whether the config in a folder has pictures scaled to a square, not cropped (DFN's large)."""
    file = folder / OPEN_CLIP_CONFIG
    content = read_json(file) if file.is_file() else {}
    preprocessing = content.get("preprocess_cfg") if _is_object(content) else None
    return _is_object(preprocessing) and preprocessing.get("resize_mode") == "squash"


def head_width(folder: Path) -> int:
    """`head_width` of the image tower that the config in a folder names; CLIP's 64 without one."""
    file = folder / OPEN_CLIP_CONFIG
    content = read_json(file) if file.is_file() else {}
    tower: Any = content
    for key in ("model_cfg", "vision_cfg"):
        tower = tower.get(key, {}) if _is_object(tower) else {}
    return tower.get("head_width", 64) if _is_object(tower) else 64


def _check_tower(
    tower: Mapping[str, Any], where: str, read: Mapping[str, str], fixed: Mapping[str, Any]
) -> None:
    unused = [key for key in tower if key.startswith(_UNUSED_ENDS) and key not in fixed]
    check_keys(tower, where, read=read, harmless=(*_HARMLESS, *unused, "pad_id"), fixed=fixed)


def _eps(tower: Mapping[str, Any], where: str) -> float:
    norm = tower.get("norm_kwargs") or {}
    check_keys(norm, f"{where}, norm_kwargs", read=kinds(number="eps"))
    return norm.get("eps", 1e-5)


def _side(size: Any, file: Path) -> int:
    sides = size[-2:] if isinstance(size, list) else [size]  # channels may come first
    if not all(type(side) is int and side >= 1 for side in sides):
        raise UserError(
            f"{file}: its pictures are of {size!r} pixels, expected a whole number of at least 1 "
            "or two of them; repair the file or fetch it again."
        )
    if len(set(sides)) != 1:
        raise UserError(
            f"{file}: its pictures are of {size} pixels; only square pictures are supported, use "
            "another checkpoint."
        )
    return sides[0]


def _channels(
    preprocessing: Mapping[str, Any], key: str, usual: tuple[float, ...], file: Path
) -> tuple[float, float, float]:
    values = preprocessing.get(key)
    if values is None:
        values = usual
    if not isinstance(values, list | tuple):  # one for all
        values = [values] * 3
    least = 0 if key == "mean" else 1e-6
    if len(values) != 3 or not all(type(x) in (int, float) and least <= x <= 1 for x in values):
        raise UserError(
            f"{file}, preprocess_cfg: {key} is {values!r}, expected three numbers up to 1; repair "
            "the file or fetch it again."
        )
    red, green, blue = map(float, values)
    return red, green, blue


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)
