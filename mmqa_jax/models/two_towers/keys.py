"""CLIP and SigLIP checkpoints in transformers' layout, in and out.

CLIPModel, SiglipModel, and Siglip2Model for NaFlex; SigLIP 2's models of a fixed size are published
as SiglipModel. OpenAI's layout of CLIP is in openai.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common import comparison
from mmqa_jax.models.two_towers.config import (
    CLIPConfig,
    SiglipConfig,
    SiglipTextConfig,
    SiglipVisionConfig,
    TextConfig,
    VisionConfig,
)
from mmqa_jax.models.two_towers.openai import open_openai
from mmqa_jax.models.two_towers.processor import check_processor, read_preparation
from mmqa_jax.weights import keymap
from mmqa_jax.weights.config_json import check_keys, kinds
from mmqa_jax.weights.layouts import Checkpoint, Published, config_file, open_source, read_hf_config

FIXED, FLEXIBLE = "siglip", "siglip2"  # SigLIP's model types of transformers

_BLOCK_LINEARS = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.out_proj": "out",
    "mlp.fc1": "mlp_in",
    "mlp.fc2": "mlp_out",
}
_BLOCK_NORMS = {"layer_norm1": "ln_1", "layer_norm2": "ln_2"}
_VISION, _TEXT = "vision_model.", "text_model."

_KEYS = kinds(object_or_null="vision_config text_config")
_CLIP_KEYS = kinds(size="projection_dim", object_or_null="vision_config_dict text_config_dict")
_FIXED = {"tie_word_embeddings": (True, False)}  # they predict no words
_TOWER = kinds(
    size="hidden_size num_hidden_layers num_attention_heads intermediate_size",
    number="layer_norm_eps",
    name="hidden_act",
)
_OF_PICTURES = _FIXED | {"num_channels": (3,), "is_causal": (False,)}
# Of each tower of CLIP: the keys that are read, and those that have only these values here.
_CLIP_TOWERS: Mapping[str, tuple[Mapping[str, str], Mapping[str, tuple[Any, ...]]]] = {
    "vision": (_TOWER | kinds(size="image_size patch_size"), _OF_PICTURES),
    "text": (
        _TOWER | kinds(size="vocab_size max_position_embeddings", integer_or_null="eos_token_id"),
        _FIXED | {"is_causal": (True,)},
    ),
}
_SIGLIP_VISION = _TOWER | kinds(size="patch_size")
_SIGLIP_TEXT = _TOWER | kinds(
    size="vocab_size max_position_embeddings", size_or_null="projection_size"
)
# Dropout is of training, projection_dim of a tower by itself; old vision configs have a vocab_size.
_TRAINING = ("attention_dropout", "dropout")
_OF_CLIP_ALONE = ("projection_dim", "vocab_size")
# Of the key maps of SigLIP: one number, and a probe [1, 1, width].
_SCALAR = keymap.Transform(lambda x: x.reshape(()), lambda x: x.reshape(1))
_PROBE = keymap.Transform(lambda x: x.reshape(-1), lambda x: x.reshape(1, 1, -1))
# torch's MultiheadAttention: (3 * out, in) <-> [in, 3, out].
_IN_KERNEL = keymap.Transform(
    lambda x: x.T.reshape(x.shape[1], 3, -1), lambda x: x.reshape(x.shape[0], -1).T
)
_IN_BIAS = keymap.Transform(lambda x: x.reshape(3, -1), lambda x: x.reshape(-1))


def key_map(config: CLIPConfig | SiglipConfig) -> keymap.KeyMap:
    """Key map of transformers' CLIPModel, SiglipModel and Siglip2Model."""
    is_clip = isinstance(config, CLIPConfig)
    scalars = [keymap.Rule("logit_scale", "logit_scale")]
    if not is_clip:
        scalars = [keymap.Rule(name, name, _SCALAR) for name in ("logit_scale", "logit_bias")]
    projection = [keymap.Rule("visual_projection.weight", "vision/proj/kernel", keymap.TRANSPOSE)]
    return keymap.KeyMap(
        rules=[
            *scalars,
            *vision_rules(config.vision),
            *(projection if is_clip else []),
            keymap.Rule(f"{_TEXT}embeddings.token_embedding.weight", "text/tokens/table"),
            keymap.Rule(f"{_TEXT}embeddings.position_embedding.weight", "text/positions"),
            *keymap.transformer_rules(
                f"{_TEXT}encoder.layers.{{layer}}.", "text/layers", _BLOCK_LINEARS, _BLOCK_NORMS
            ),
            *keymap.norm_rules(f"{_TEXT}final_layer_norm", "text/ln_final"),
            *(
                [keymap.Rule("text_projection.weight", "text/proj/kernel", keymap.TRANSPOSE)]
                if is_clip
                else keymap.linear_rules(f"{_TEXT}head", "text/proj")
            ),
        ],
        ignore=[r"embeddings\.position_ids$"],  # a buffer of old versions
    )


def vision_rules(config: VisionConfig | SiglipVisionConfig) -> list[keymap.Rule]:
    """Rules of the vision tower but CLIP's projection (its `pre_layrnorm` is spelled so)."""
    is_clip, embeddings = isinstance(config, VisionConfig), f"{_VISION}embeddings."
    flexible = not is_clip and config.flexible
    rules = [
        keymap.Rule(
            f"{embeddings}patch_embedding.weight",
            "vision/patch/kernel",
            keymap.TRANSPOSE if flexible else keymap.conv_patches(config.patch_size),
        ),
        keymap.Rule(f"{embeddings}position_embedding.weight", "vision/positions"),
    ]
    if is_clip:
        rules.insert(0, keymap.Rule(f"{embeddings}class_embedding", "vision/class_token"))
        rules += keymap.norm_rules(f"{_VISION}pre_layrnorm", "vision/ln_pre")
    else:
        rules.insert(1, keymap.Rule(f"{embeddings}patch_embedding.bias", "vision/patch/bias"))
    rules += keymap.transformer_rules(
        f"{_VISION}encoder.layers.{{layer}}.", "vision/layers", _BLOCK_LINEARS, _BLOCK_NORMS
    )
    rules += keymap.norm_rules(f"{_VISION}post_layernorm", "vision/ln_post")
    if is_clip or not config.head:
        return rules
    head = f"{_VISION}head."
    return [
        *rules,
        keymap.Rule(f"{head}probe", "vision/head/probe", _PROBE),
        keymap.Rule(f"{head}attention.in_proj_weight", "vision/head/kernel", _IN_KERNEL),
        keymap.Rule(f"{head}attention.in_proj_bias", "vision/head/bias", _IN_BIAS),
        *keymap.linear_rules(f"{head}attention.out_proj", "vision/head/out"),
        *keymap.norm_rules(f"{head}layernorm", "vision/head/norm"),
        *keymap.linear_rules(f"{head}mlp.fc1", "vision/head/mlp_in"),
        *keymap.linear_rules(f"{head}mlp.fc2", "vision/head/mlp_out"),
    ]


def clip_config(published: Mapping[str, Any], where: str = "config.json") -> CLIPConfig:
    """Our config from transformers' `config.json`; absent values are transformers' defaults."""
    check_keys(published, where, read=_KEYS | _CLIP_KEYS, fixed=_FIXED)
    vision, text = (_clip_tower(published, kind, where) for kind in ("vision", "text"))
    embed_dim = published.get("projection_dim", 512)
    # Transformers pools at the largest id when an old config says 2 (a wrong value, kept).
    eos = text.get("eos_token_id", 49407)
    common = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
    of_text = {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}
    return CLIPConfig(
        vision=VisionConfig(
            image_size=vision.get("image_size", 224),
            patch_size=vision.get("patch_size", 32),
            embed_dim=embed_dim,
            **_sizes(common | vision),
        ),
        text=TextConfig(
            vocab_size=text.get("vocab_size", 49408),
            context=text.get("max_position_embeddings", 77),
            embed_dim=embed_dim,
            eos_token_id=None if eos == 2 else eos,
            **_sizes(common | of_text | text),
        ),
    )


def _clip_tower(published: Mapping[str, Any], kind: str, where: str) -> dict[str, Any]:
    """`vision_config` or `text_config`; the whole of it is `*_config_dict` where that is given.

    transformers completes the latter by defaults and lets all of it take precedence.
    """
    key = f"{kind}_config_dict"
    if published.get(key) is None:
        key = f"{kind}_config"
    tower = published.get(key) or {}
    read, fixed = _CLIP_TOWERS[kind]
    harmless = (*_TRAINING, *_OF_CLIP_ALONE)
    check_keys(tower, f"{where}, {key}", read=read, harmless=harmless, fixed=fixed)
    return tower


def siglip_config(published: Mapping[str, Any], where: str = "config.json") -> SiglipConfig:
    """Our config from transformers' `config.json`; absent values are transformers' defaults."""
    check_keys(published, where, read=_KEYS, fixed=_FIXED)
    vision, text = (published.get(f"{kind}_config") or {} for kind in ("vision", "text"))
    fixed = _FIXED | {"is_causal": (False,)}
    check_keys(text, f"{where}, text_config", read=_SIGLIP_TEXT, harmless=_TRAINING, fixed=fixed)
    flexible = published.get("model_type") == FLEXIBLE
    sizes = _sizes(text)
    return SiglipConfig(
        siglip_vision_config(vision, f"{where}, vision_config", flexible=flexible),
        SiglipTextConfig(
            vocab_size=text.get("vocab_size", 32_000),
            length=text.get("max_position_embeddings", 64),
            embed_dim=text.get("projection_size") or sizes["width"],
            **sizes,
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
    read = _SIGLIP_VISION | kinds(size="num_patches" if flexible else "image_size")
    read |= kinds(flag="vision_use_head") if may_lack_head else {}
    fixed = _OF_PICTURES | {"vision_use_head": (True,)}
    check_keys(published, where, read=read, harmless=_TRAINING, fixed=fixed)
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


def to_hf(config: CLIPConfig | SiglipConfig) -> dict[str, Any]:
    """transformers' config.json of a CLIPModel, SiglipModel or Siglip2Model."""
    text, vision = config.text, vision_to_hf(config.vision)
    kind = vision["model_type"].removesuffix("_vision_model")
    sizes = {"vocab_size": text.vocab_size, "max_position_embeddings": text.length}
    of_text = {**_tower_to_hf(text), "model_type": f"{kind}_text_model", **sizes}
    if isinstance(text, TextConfig):
        # 2 tells transformers to pool at the largest id (see clip_config).
        of_text["eos_token_id"] = 2 if text.eos_token_id is None else text.eos_token_id
    else:
        of_text["projection_size"] = text.embed_dim
    return {
        "architectures": [{"clip": "CLIPModel", FLEXIBLE: "Siglip2Model"}.get(kind, "SiglipModel")],
        "model_type": kind,
        **({"projection_dim": text.embed_dim} if kind == "clip" else {}),
        "vision_config": vision,
        "text_config": of_text,
    }


def vision_to_hf(config: VisionConfig | SiglipVisionConfig) -> dict[str, Any]:
    """The vision tower's part of a config.json, or of CLIP's, its own."""
    tower = _tower_to_hf(config)
    if isinstance(config, VisionConfig):
        sizes = {"image_size": config.image_size, "patch_size": config.patch_size}
        return {**tower, "model_type": "clip_vision_model", **sizes}
    size = {"num_patches": config.patches} if config.flexible else {"image_size": config.image_size}
    return {
        **tower,
        "model_type": f"{FLEXIBLE if config.flexible else FIXED}_vision_model",
        "patch_size": config.patch_size,
        **size,
        **({} if config.head else {"vision_use_head": False}),
    }


def _tower_to_hf(
    config: VisionConfig | TextConfig | SiglipVisionConfig | SiglipTextConfig,
) -> dict[str, Any]:
    return {
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp_width,
        **({"projection_dim": config.embed_dim} if config.family == "clip" else {}),
        "hidden_act": config.activation,
        "layer_norm_eps": config.eps,
    }


def open_clip(path: Path) -> Checkpoint:
    """CLIP as transformers' `CLIPModel`, OpenAI, open_clip or UniIR (CLIP_SF) publishes it.

    A folder with transformers' config.json is read as such.
    """
    file = config_file(path)
    if not (path.is_dir() and file.exists()) and (checkpoint := open_openai(path)):
        return checkpoint
    config = clip_config(read_hf_config(path, "clip"), str(file))
    check_processor(file.parent, config.vision.image_size)
    return Checkpoint(config, key_map, open_source(path), "transformers")


def open_siglip(path: Path) -> Checkpoint:
    """SigLIP as transformers publishes it."""
    file = config_file(path)
    config = siglip_config(read_hf_config(path, FIXED, FLEXIBLE), str(file))
    read_preparation(file.parent, config.vision)
    return Checkpoint(config, key_map, open_source(path), "transformers")


def publish_clip(config: CLIPConfig | SiglipConfig, state: nnx.State) -> Published:
    """CLIPModel; of SigLIP SiglipModel or Siglip2Model."""
    return Published(keymap.untied_source(state, key_map(config)), to_hf(config))


publish_siglip = publish_clip


# Beside transformers.


def _inputs(config: CLIPConfig | SiglipConfig) -> dict[str, Any]:
    text, vision = config.text, config.vision
    if isinstance(text, TextConfig):
        ids = comparison.tokens(text.vocab_size - 1, text.context)
        end = text.eos_token_id
        ids[0, -1] = text.vocab_size - 1 if end is None else end
        return {"ids": ids, "pixels": comparison.picture(vision)}
    ids = comparison.tokens(text.vocab_size, text.length)
    if not vision.flexible:
        return {"ids": ids, "pixels": comparison.picture(vision)}
    shapes = np.array([comparison.GRID], np.int32)
    size = (1, shapes.prod(), vision.patch_size**2 * 3)
    patches = comparison.noise().standard_normal(size).astype(np.float32)
    return {"ids": ids, "pixels": (patches, shapes)}


def _run_towers(model: Any, inputs: Mapping[str, Any]) -> comparison.Outputs:
    ids, pixels = inputs["ids"], inputs["pixels"]
    stacks = {
        "text": model.text.hidden_states(ids),
        "picture": model.vision.hidden_states(pixels),
    }
    ends = {"text vector": model.encode_text(ids), "picture vector": model.encode_image(pixels)}
    return comparison.Outputs(stacks, ends)


def text_and_pixels(inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A text and a picture as transformers' models name them."""
    if not isinstance(inputs["pixels"], tuple):
        pixels = comparison.channels_first(inputs["pixels"])
        return {"input_ids": inputs["ids"], "pixel_values": pixels}
    patches, shapes = inputs["pixels"]
    return {
        "input_ids": inputs["ids"],
        "pixel_values": patches,
        "spatial_shapes": shapes,
        "pixel_attention_mask": np.ones(patches.shape[:2], np.int64),
    }


_VECTORS = {"text vector": "text_embeds", "picture vector": "image_embeds"}
_TOWERS = {"text": "text_model", "picture": "vision_model"}
_COMPARED = _run_towers, _VECTORS, _TOWERS, _inputs, text_and_pixels
CLIP_CHECK = comparison.Check("CLIPModel", *_COMPARED)
SIGLIP_CHECK = comparison.Check("AutoModel", *_COMPARED)
