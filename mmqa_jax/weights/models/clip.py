"""CLIP checkpoints: transformers' layout (`CLIPModel.save_pretrained`), in and out.

OpenAI's own layout is in clip_openai.py, open_clip's config in clip_open_clip.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flax import nnx

from mmqa_jax.models.clip import CLIPConfig, TextConfig, VisionConfig
from mmqa_jax.models.published_keys import check_keys, kinds
from mmqa_jax.weights.formats.safetensors import TensorSource
from mmqa_jax.weights.keymap import (
    TRANSPOSE,
    KeyMap,
    Rule,
    conv_patches,
    norm_rules,
    transformer_rules,
    untied_source,
)
from mmqa_jax.weights.layouts import (
    OPEN_CLIP_CONFIG,
    Checkpoint,
    Published,
    config_file,
    read_hf_config,
)
from mmqa_jax.weights.models.clip_open_clip import open_clip_config, open_clip_file
from mmqa_jax.weights.models.clip_openai import (
    clip_openai_config,
    clip_openai_key_map,
    is_openai_clip,
    is_openais_own,
    split_attention,
    usual_constants,
)
from mmqa_jax.weights.models.clip_processor import check_processor
from mmqa_jax.weights.models.clip_uniir import UNIIR, is_uniir_clip, without_wrapper
from mmqa_jax.weights.sources import open_source

BLOCK_LINEARS = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.out_proj": "out",
    "mlp.fc1": "mlp_in",
    "mlp.fc2": "mlp_out",
}
BLOCK_NORMS = {"layer_norm1": "ln_1", "layer_norm2": "ln_2"}

_KEYS = kinds(
    size="projection_dim",
    object_or_null="vision_config text_config vision_config_dict text_config_dict",
)
_FIXED = {"tie_word_embeddings": (True, False)}  # CLIP predicts no words
_TOWER = kinds(
    size="hidden_size num_hidden_layers num_attention_heads intermediate_size",
    number="layer_norm_eps",
    name="hidden_act",
)
# Of each tower: the keys that are read, and those that have only these values here.
_TOWER_KEYS: Mapping[str, tuple[Mapping[str, str], Mapping[str, tuple[Any, ...]]]] = {
    "vision": (
        _TOWER | kinds(size="image_size patch_size"),
        _FIXED | {"num_channels": (3,), "is_causal": (False,)},
    ),
    "text": (
        _TOWER | kinds(size="vocab_size max_position_embeddings", integer_or_null="eos_token_id"),
        _FIXED | {"is_causal": (True,)},
    ),
}
# Dropout is of training, projection_dim of a tower by itself; old vision configs have a vocab_size.
_TRAINING = ("attention_dropout", "dropout", "projection_dim", "vocab_size")


def clip_key_map(config: CLIPConfig) -> KeyMap:
    """Key map of transformers' CLIPModel (its `pre_layrnorm` is spelled so)."""
    vision, text = "vision_model.", "text_model."
    patches = conv_patches(config.vision.patch_size)
    return KeyMap(
        rules=[
            Rule("logit_scale", "logit_scale"),
            Rule(f"{vision}embeddings.class_embedding", "vision/class_token"),
            Rule(f"{vision}embeddings.patch_embedding.weight", "vision/patch/kernel", patches),
            Rule(f"{vision}embeddings.position_embedding.weight", "vision/positions"),
            *norm_rules(f"{vision}pre_layrnorm", "vision/ln_pre"),
            *transformer_rules(
                f"{vision}encoder.layers.{{layer}}.", "vision/layers", BLOCK_LINEARS, BLOCK_NORMS
            ),
            *norm_rules(f"{vision}post_layernorm", "vision/ln_post"),
            Rule("visual_projection.weight", "vision/proj/kernel", TRANSPOSE),
            Rule(f"{text}embeddings.token_embedding.weight", "text/tokens/table"),
            Rule(f"{text}embeddings.position_embedding.weight", "text/positions"),
            *transformer_rules(
                f"{text}encoder.layers.{{layer}}.", "text/layers", BLOCK_LINEARS, BLOCK_NORMS
            ),
            *norm_rules(f"{text}final_layer_norm", "text/ln_final"),
            Rule("text_projection.weight", "text/proj/kernel", TRANSPOSE),
        ],
        ignore=[r"embeddings\.position_ids$"],  # a buffer of old versions
    )


def clip_config(published: Mapping[str, Any], where: str = "config.json") -> CLIPConfig:
    """Our config from transformers' `config.json`; absent values are transformers' defaults."""
    check_keys(published, where, read=_KEYS, fixed=_FIXED)
    vision, text = (_tower(published, kind, where) for kind in ("vision", "text"))
    embed_dim = published.get("projection_dim", 512)
    # Transformers pools at the largest id when an old config says 2 (a wrong value, kept).
    eos = text.get("eos_token_id", 49407)
    return CLIPConfig(
        vision=VisionConfig(
            image_size=vision.get("image_size", 224),
            patch_size=vision.get("patch_size", 32),
            width=vision.get("hidden_size", 768),
            layers=vision.get("num_hidden_layers", 12),
            heads=vision.get("num_attention_heads", 12),
            mlp_width=vision.get("intermediate_size", 3072),
            embed_dim=embed_dim,
            activation=vision.get("hidden_act", "quick_gelu"),
            eps=vision.get("layer_norm_eps", 1e-5),
        ),
        text=TextConfig(
            vocab_size=text.get("vocab_size", 49408),
            context=text.get("max_position_embeddings", 77),
            width=text.get("hidden_size", 512),
            layers=text.get("num_hidden_layers", 12),
            heads=text.get("num_attention_heads", 8),
            mlp_width=text.get("intermediate_size", 2048),
            embed_dim=embed_dim,
            eos_token_id=None if eos == 2 else eos,
            activation=text.get("hidden_act", "quick_gelu"),
            eps=text.get("layer_norm_eps", 1e-5),
        ),
    )


def _tower(published: Mapping[str, Any], kind: str, where: str) -> Mapping[str, Any]:
    """`vision_config` or `text_config`; the whole of it is `*_config_dict` where that is given.

    transformers completes the latter by defaults and lets all of it take precedence.
    """
    key = f"{kind}_config_dict"
    if published.get(key) is None:
        key = f"{kind}_config"
    tower = published.get(key) or {}
    read, fixed = _TOWER_KEYS[kind]
    check_keys(tower, f"{where}, {key}", read=read, harmless=_TRAINING, fixed=fixed)
    return tower


def clip_to_hf(config: CLIPConfig) -> dict[str, Any]:
    """transformers' config.json of a CLIPModel."""
    text = config.text
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": config.vision.embed_dim,
        "vision_config": vision_to_hf(config.vision),
        "text_config": {
            **_tower_to_hf(text),
            "model_type": "clip_text_model",
            "vocab_size": text.vocab_size,
            "max_position_embeddings": text.context,
            # 2 tells transformers to pool at the largest id (see clip_config).
            "eos_token_id": 2 if text.eos_token_id is None else text.eos_token_id,
        },
    }


def vision_to_hf(config: VisionConfig) -> dict[str, Any]:
    """transformers' config of a CLIPVisionModel."""
    return {
        **_tower_to_hf(config),
        "model_type": "clip_vision_model",
        "image_size": config.image_size,
        "patch_size": config.patch_size,
    }


def _tower_to_hf(config: VisionConfig | TextConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp_width,
        "projection_dim": config.embed_dim,
        "hidden_act": config.activation,
        "layer_norm_eps": config.eps,
    }


def open_clip(path: Path) -> Checkpoint:
    """CLIP as transformers' `CLIPModel`, OpenAI, open_clip or UniIR (CLIP_SF) publishes it.

    A folder with transformers' config.json is read as such; of a folder without, and of a file in
    OpenAI's layout, `open_clip_config.json` in the same folder says what the tensors do not.
    """
    if path.is_dir() and not config_file(path).exists():
        path = open_clip_file(path) or path
    if path.is_file():
        source = open_source(path)
        if is_uniir_clip(source):
            return Checkpoint(
                clip_openai_config(inner := without_wrapper(source)),
                clip_openai_key_map,
                split_attention(inner),
                UNIIR,
            )
        if is_openai_clip(source.specs()):
            return _open_openai_layout(source, path.parent)
    file = config_file(path)
    config = clip_config(read_hf_config(path, "clip"), str(file))
    check_processor(file.parent, config.vision.image_size)
    return Checkpoint(config, clip_key_map, open_source(path), "transformers")


def _open_openai_layout(source: TensorSource, folder: Path) -> Checkpoint:
    """OpenAI's own checkpoint, or one of open_clip in its layout, whose config decides."""
    tensors, config, unknown = split_attention(source), open_clip_config(folder), {}
    if config is None:
        config = clip_openai_config(source)
        if not is_openais_own(source.specs()):
            unknown = usual_constants(config)
    layout = "openai" if is_openais_own(source.specs()) else "open_clip"
    remedy = f"put the {OPEN_CLIP_CONFIG} that it was published with beside it"
    return Checkpoint(config, clip_openai_key_map, tensors, layout, unknown=unknown, remedy=remedy)


def publish_clip(config: CLIPConfig, state: nnx.State) -> Published:
    """CLIPModel."""
    return Published(untied_source(state, clip_key_map(config)), clip_to_hf(config))
