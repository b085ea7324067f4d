"""SigLIP checkpoints: transformers' layout (`SiglipModel`, NaFlex `Siglip2Model`), in and out.

SigLIP 2's models of a fixed size are published as SiglipModel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.clip.keys import (
    BLOCK_LINEARS,
    BLOCK_NORMS,
    TOWERS,
    VECTORS,
    run_towers,
    text_and_pixels,
)
from mmqa_jax.models.common import comparison
from mmqa_jax.models.siglip.network import SiglipConfig, SiglipTextConfig, SiglipVisionConfig
from mmqa_jax.models.siglip.processor import read_preparation
from mmqa_jax.weights.config_json import check_keys, kinds
from mmqa_jax.weights.keymap import (
    TRANSPOSE,
    KeyMap,
    Rule,
    Transform,
    conv_patches,
    linear_rules,
    norm_rules,
    transformer_rules,
    untied_source,
)
from mmqa_jax.weights.layouts import Checkpoint, Published, config_file, open_source, read_hf_config

FIXED, FLEXIBLE = "siglip", "siglip2"  # model types of transformers

_KEYS = kinds(object_or_null="vision_config text_config")
_FIXED = {"tie_word_embeddings": (True, False)}  # SigLIP predicts no words
_TOWER = kinds(
    size="hidden_size num_hidden_layers num_attention_heads intermediate_size",
    number="layer_norm_eps",
    name="hidden_act",
)
_VISION = _TOWER | kinds(size="patch_size")
_VISION_FIXED = _FIXED | {
    "num_channels": (3,),
    "vision_use_head": (True,),
    "is_causal": (False,),
}
_TEXT = _TOWER | kinds(size="vocab_size max_position_embeddings", size_or_null="projection_size")
_TEXT_FIXED = _FIXED | {"is_causal": (False,)}
_TRAINING = ("attention_dropout", "dropout")
# Of the key maps of one number and of a probe [1, 1, width].
_SCALAR = Transform(lambda x: x.reshape(()), lambda x: x.reshape(1))
_PROBE = Transform(lambda x: x.reshape(-1), lambda x: x.reshape(1, 1, -1))
# torch's MultiheadAttention: (3 * out, in) <-> [in, 3, out].
_IN_KERNEL = Transform(
    lambda x: x.T.reshape(x.shape[1], 3, -1), lambda x: x.reshape(x.shape[0], -1).T
)
_IN_BIAS = Transform(lambda x: x.reshape(3, -1), lambda x: x.reshape(-1))


def siglip_key_map(config: SiglipConfig) -> KeyMap:
    """Key map of transformers' SiglipModel and Siglip2Model."""
    text = "text_model."
    return KeyMap(
        rules=[
            Rule("logit_scale", "logit_scale", _SCALAR),
            Rule("logit_bias", "logit_bias", _SCALAR),
            *siglip_vision_rules(config.vision),
            Rule(f"{text}embeddings.token_embedding.weight", "text/tokens/table"),
            Rule(f"{text}embeddings.position_embedding.weight", "text/positions"),
            *transformer_rules(
                f"{text}encoder.layers.{{layer}}.", "text/layers", BLOCK_LINEARS, BLOCK_NORMS
            ),
            *norm_rules(f"{text}final_layer_norm", "text/ln_final"),
            *linear_rules(f"{text}head", "text/proj"),
        ],
        ignore=[r"embeddings\.position_ids$"],  # a buffer of old versions
    )


def siglip_vision_rules(config: SiglipVisionConfig) -> list[Rule]:
    """Rules of the vision tower, under `vision_model.`."""
    vision = "vision_model."
    patches = TRANSPOSE if config.flexible else conv_patches(config.patch_size)
    rules = [
        Rule(f"{vision}embeddings.patch_embedding.weight", "vision/patch/kernel", patches),
        Rule(f"{vision}embeddings.patch_embedding.bias", "vision/patch/bias"),
        Rule(f"{vision}embeddings.position_embedding.weight", "vision/positions"),
        *transformer_rules(
            f"{vision}encoder.layers.{{layer}}.", "vision/layers", BLOCK_LINEARS, BLOCK_NORMS
        ),
        *norm_rules(f"{vision}post_layernorm", "vision/ln_post"),
    ]
    head = f"{vision}head."
    of_head = [
        Rule(f"{head}probe", "vision/head/probe", _PROBE),
        Rule(f"{head}attention.in_proj_weight", "vision/head/kernel", _IN_KERNEL),
        Rule(f"{head}attention.in_proj_bias", "vision/head/bias", _IN_BIAS),
        *linear_rules(f"{head}attention.out_proj", "vision/head/out"),
        *norm_rules(f"{head}layernorm", "vision/head/norm"),
        *linear_rules(f"{head}mlp.fc1", "vision/head/mlp_in"),
        *linear_rules(f"{head}mlp.fc2", "vision/head/mlp_out"),
    ]
    return rules + of_head if config.head else rules


def siglip_config(published: Mapping[str, Any], where: str = "config.json") -> SiglipConfig:
    """Our config from transformers' `config.json`; absent values are transformers' defaults."""
    flexible = published.get("model_type") == FLEXIBLE
    check_keys(published, where, read=_KEYS, fixed=_FIXED)
    vision, text = (published.get(f"{kind}_config") or {} for kind in ("vision", "text"))
    check_keys(text, f"{where}, text_config", read=_TEXT, harmless=_TRAINING, fixed=_TEXT_FIXED)
    width = text.get("hidden_size", 768)
    return SiglipConfig(
        siglip_vision_config(vision, f"{where}, vision_config", flexible=flexible),
        SiglipTextConfig(
            vocab_size=text.get("vocab_size", 32_000),
            length=text.get("max_position_embeddings", 64),
            embed_dim=text.get("projection_size") or width,
            **_sizes(text),
        ),
    )


def siglip_vision_config(
    published: Mapping[str, Any],
    where: str,
    *,
    flexible: bool = False,
    may_lack_head: bool = False,
) -> SiglipVisionConfig:
    """The vision tower's config from its own part of a `config.json`.

    Args:
      published, where: see `siglip_config`.
      flexible: NaFlex.
      may_lack_head: the model reads patches, so that the tower may have no pooling head.
    """
    read = _VISION | kinds(size="num_patches" if flexible else "image_size")
    read |= kinds(flag="vision_use_head") if may_lack_head else {}
    check_keys(published, where, read=read, harmless=_TRAINING, fixed=_VISION_FIXED)
    patch = published.get("patch_size", 16)
    if flexible:
        image_size = patch * _grid(published.get("num_patches", 256), where)
    else:
        image_size = published.get("image_size", 224)
    return SiglipVisionConfig(
        image_size=image_size,
        patch_size=patch,
        flexible=flexible,
        head=published.get("vision_use_head", True),
        **_sizes(published),
    )


def _sizes(tower: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "width": tower.get("hidden_size", 768),
        "layers": tower.get("num_hidden_layers", 12),
        "heads": tower.get("num_attention_heads", 12),
        "mlp_width": tower.get("intermediate_size", 3072),
        "activation": tower.get("hidden_act", "gelu_pytorch_tanh"),
        "eps": tower.get("layer_norm_eps", 1e-6),
    }


def _grid(positions: int, where: str) -> int:
    side = math.isqrt(positions)
    if side * side != positions:
        raise UserError(
            f"{where}: num_patches is {positions}, expected a square number, the "
            "positions of a grid; use another checkpoint."
        )
    return side


def siglip_to_hf(config: SiglipConfig) -> dict[str, Any]:
    """transformers' config.json of a SiglipModel or Siglip2Model."""
    vision, text = config.vision, config.text
    kind = FLEXIBLE if vision.flexible else FIXED
    return {
        "architectures": ["Siglip2Model" if vision.flexible else "SiglipModel"],
        "model_type": kind,
        "vision_config": siglip_vision_to_hf(vision),
        "text_config": {
            **_tower_to_hf(text),
            "model_type": f"{kind}_text_model",
            "vocab_size": text.vocab_size,
            "max_position_embeddings": text.length,
            "projection_size": text.embed_dim,
        },
    }


def siglip_vision_to_hf(config: SiglipVisionConfig) -> dict[str, Any]:
    """The vision tower's part of a config.json."""
    size = {"num_patches": config.patches} if config.flexible else {"image_size": config.image_size}
    return {
        **_tower_to_hf(config),
        "model_type": f"{FLEXIBLE if config.flexible else FIXED}_vision_model",
        "patch_size": config.patch_size,
        **size,
        **({} if config.head else {"vision_use_head": False}),
    }


def _tower_to_hf(config: SiglipVisionConfig | SiglipTextConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp_width,
        "hidden_act": config.activation,
        "layer_norm_eps": config.eps,
    }


def open_siglip(path: Path) -> Checkpoint:
    """SigLIP as transformers publishes it."""
    file = config_file(path)
    config = siglip_config(read_hf_config(path, FIXED, FLEXIBLE), str(file))
    read_preparation(file.parent, config.vision)
    return Checkpoint(config, siglip_key_map, open_source(path), "transformers")


def publish_siglip(config: SiglipConfig, state: nnx.State) -> Published:
    """SiglipModel or Siglip2Model."""
    return Published(untied_source(state, siglip_key_map(config)), siglip_to_hf(config))


# Beside transformers.


def _inputs(config: SiglipConfig) -> dict[str, Any]:
    ids = comparison.tokens(config.text.vocab_size, config.text.length)
    if not config.vision.flexible:
        return {"ids": ids, "pixels": comparison.picture(config.vision)}
    shapes = np.array([comparison.GRID], np.int32)
    size = (1, shapes.prod(), config.vision.patch_size**2 * 3)
    patches = comparison.noise().standard_normal(size).astype(np.float32)
    return {"ids": ids, "pixels": (patches, shapes)}


def _given(inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    if not isinstance(inputs["pixels"], tuple):
        return text_and_pixels(inputs)
    patches, shapes = inputs["pixels"]
    return {
        "input_ids": inputs["ids"],
        "pixel_values": patches,
        "spatial_shapes": shapes,
        "pixel_attention_mask": np.ones(patches.shape[:2], np.int64),
    }


CHECK = comparison.Check("AutoModel", run_towers, VECTORS, TOWERS, _inputs, _given)
