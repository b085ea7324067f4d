"""CLIP checkpoints: transformers' layout (`CLIPModel.save_pretrained`), in and out.

OpenAI's own layout is in clip_openai.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flax import nnx

from mmqa_jax.models.clip import CLIPConfig, TextConfig, VisionConfig
from mmqa_jax.weights.keymap import (
    TRANSPOSE,
    KeyMap,
    Rule,
    conv_patches,
    norm_rules,
    transformer_rules,
    untied_source,
)
from mmqa_jax.weights.layouts import Checkpoint, Published, read_hf_config
from mmqa_jax.weights.models.clip_openai import (
    clip_openai_config,
    clip_openai_key_map,
    is_openai_clip,
    split_attention,
)
from mmqa_jax.weights.sources import open_source

_LINEARS = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.out_proj": "out",
    "mlp.fc1": "mlp_in",
    "mlp.fc2": "mlp_out",
}
_NORMS = {"layer_norm1": "ln_1", "layer_norm2": "ln_2"}


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
                f"{vision}encoder.layers.{{layer}}.", "vision/layers", _LINEARS, _NORMS
            ),
            *norm_rules(f"{vision}post_layernorm", "vision/ln_post"),
            Rule("visual_projection.weight", "vision/proj/kernel", TRANSPOSE),
            Rule(f"{text}embeddings.token_embedding.weight", "text/tokens/table"),
            Rule(f"{text}embeddings.position_embedding.weight", "text/positions"),
            *transformer_rules(f"{text}encoder.layers.{{layer}}.", "text/layers", _LINEARS, _NORMS),
            *norm_rules(f"{text}final_layer_norm", "text/ln_final"),
            Rule("text_projection.weight", "text/proj/kernel", TRANSPOSE),
        ],
        ignore=[r"embeddings\.position_ids$"],  # a buffer of old versions
    )


def clip_config(published: Mapping[str, Any]) -> CLIPConfig:
    """Our config from transformers' `config.json`; absent values are transformers' defaults."""
    vision, text = published.get("vision_config") or {}, published.get("text_config") or {}
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
    """CLIP as `CLIPModel.save_pretrained` writes it, or a file as OpenAI published it."""
    if path.is_file() and is_openai_clip((source := open_source(path)).specs()):
        config = clip_openai_config(source)
        return Checkpoint(config, clip_openai_key_map, split_attention(source), "openai")
    config = clip_config(read_hf_config(path, "clip"))
    return Checkpoint(config, clip_key_map, open_source(path), "transformers")


def publish_clip(config: CLIPConfig, state: nnx.State) -> Published:
    """CLIPModel."""
    return Published(untied_source(state, clip_key_map(config)), clip_to_hf(config))
