"""CLIP checkpoints: transformers' layout (`CLIPModel.save_pretrained`), in and out.

open_clip's config is in clip_open_clip.py.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.clip.network import CLIPConfig, TextConfig, VisionConfig
from mmqa_jax.models.clip.open_clip import open_clip_config, open_clip_file
from mmqa_jax.models.clip.processor import check_processor
from mmqa_jax.models.clip.uniir import UNIIR, is_uniir_clip, without_wrapper
from mmqa_jax.models.common import comparison
from mmqa_jax.weights.config_json import check_keys, kinds
from mmqa_jax.weights.formats.safetensors import DerivedSource, TensorSource
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
    open_source,
    read_hf_config,
)

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


# CLIP checkpoints as OpenAI published them: `ViT-B-32.pt` and its like.
#
# A TorchScript archive, or the state dict in it, of float16 tensors. There is no config beside
# it: the shapes determine it, with QuickGELU and heads of 64 units, as in openai/CLIP
# clip/model.py (`build_model`). What tells OpenAI's own from others are three integers that its
# archives keep among the tensors. open_clip's models have the same layout without them, other
# heads and mostly GELU; see clip_open_clip.py.


_HEAD = 64  # units of every head of OpenAI's
# Heads of the published image towers whose heads are of another size (open_clip model_configs).
_OTHER_HEADS = {1280: 16, 1408: 16, 1664: 16, 1792: 16}
_BLOCK = "transformer.resblocks."
_LINEARS = {"attn.out_proj": "out", "mlp.c_fc": "mlp_in", "mlp.c_proj": "mlp_out"}
_NORMS = {"ln_1": "ln_1", "ln_2": "ln_2"}
_SIZES = ("input_resolution", "context_length", "vocab_size")  # in OpenAI's own files alone
# Those, and the causal mask of the text tower, which is computed.
_IGNORED = (rf"^({'|'.join(_SIZES)})$", r"(^|\.)attn_mask$")

_PATCHES = "visual.conv1.weight"
_POSITIONS = "visual.positional_embedding"
_TOKENS = "token_embedding.weight"
_CONTEXT = "positional_embedding"
_PROJECTION = "text_projection"
_INNER = f"{_BLOCK}0.mlp.c_fc.weight"
# The tensors that determine the sizes, and how many axes they have.
_RANKS = {
    _PATCHES: 4,
    _POSITIONS: 2,
    f"visual.{_INNER}": 2,
    _TOKENS: 2,
    _CONTEXT: 2,
    _PROJECTION: 2,
    _INNER: 2,
}


def is_openai_clip(keys: Iterable[str]) -> bool:
    """Whether tensors of these names are a CLIP in OpenAI's layout, with whatever image tower."""
    return any(key.startswith("visual.") for key in keys)


def is_openais_own(keys: Iterable[str]) -> bool:
    """Whether OpenAI itself published tensors of these names, so that its constants hold."""
    return set(_SIZES) <= set(keys)


def usual_constants(config: CLIPConfig) -> dict[str, Any]:
    """What no tensor shows of a CLIP that is not OpenAI's own, with the values of most."""
    heads = _OTHER_HEADS.get(config.vision.width, config.vision.heads)
    return {
        "vision.heads": heads,
        "text.heads": config.text.heads,
        "vision.activation": "gelu",
        "text.activation": "gelu",
    }


def clip_openai_key_map(config: CLIPConfig) -> KeyMap:
    """Key map of the keys of `split_attention`."""
    patches = conv_patches(config.vision.patch_size)
    return KeyMap(
        rules=[
            Rule("logit_scale", "logit_scale"),
            Rule("visual.class_embedding", "vision/class_token"),
            Rule(_PATCHES, "vision/patch/kernel", patches),
            Rule(_POSITIONS, "vision/positions"),
            *norm_rules("visual.ln_pre", "vision/ln_pre"),
            *_block_rules(f"visual.{_BLOCK}{{layer}}.", "vision/layers"),
            *norm_rules("visual.ln_post", "vision/ln_post"),
            Rule("visual.proj", "vision/proj/kernel"),  # [in, out] here, unlike torch's Linear
            Rule(_TOKENS, "text/tokens/table"),
            Rule(_CONTEXT, "text/positions"),
            *_block_rules(f"{_BLOCK}{{layer}}.", "text/layers"),
            *norm_rules("ln_final", "text/ln_final"),
            Rule(_PROJECTION, "text/proj/kernel"),
        ],
        ignore=_IGNORED,
    )


def clip_openai_config(source: TensorSource) -> CLIPConfig:
    """The config that a checkpoint's shapes determine, with QuickGELU and heads of 64."""
    shapes = {key: spec.shape for key, spec in source.specs().items()}
    if "visual.layer1.0.conv1.weight" in shapes:
        raise UserError(
            f"{source.name}: its image tower is a ResNet; only that tower can be converted, with "
            "--model=modified_resnet."
        )
    missing = [key for key, rank in _RANKS.items() if len(shapes.get(key, ())) != rank]
    if missing:
        raise UserError(
            f"{source.name}: no whole CLIP in OpenAI's layout: it lacks {', '.join(missing)}; give "
            "the .pt file as OpenAI published it, or all of its state dict."
        )
    width, _, _, patch = shapes[_PATCHES]
    side = round((shapes[_POSITIONS][0] - 1) ** 0.5)  # patches
    text_width, embed_dim = shapes[_PROJECTION]
    return CLIPConfig(
        vision=VisionConfig(
            image_size=side * patch,
            patch_size=patch,
            width=width,
            layers=_count_blocks(shapes, "visual."),
            heads=max(width // _HEAD, 1),
            mlp_width=shapes[f"visual.{_INNER}"][0],
            embed_dim=embed_dim,
        ),
        text=TextConfig(
            vocab_size=shapes[_TOKENS][0],
            context=shapes[_CONTEXT][0],
            width=text_width,
            layers=_count_blocks(shapes, ""),
            heads=max(text_width // _HEAD, 1),
            mlp_width=shapes[_INNER][0],
            embed_dim=embed_dim,
        ),
    )


def split_attention(source: TensorSource) -> TensorSource:
    """The checkpoint with each attention's fused projection split into query, key and value.

    `attn.in_proj_weight` (3 * width, width) becomes `attn.in_proj_weight[q]`, `[k]` and `[v]`,
    (width, width) each; `attn.in_proj_bias` likewise.
    """
    tensors = {}
    for key, spec in source.specs().items():
        if not re.search(r"\.in_proj_(weight|bias)$", key) or not spec.shape or spec.shape[0] % 3:
            tensors[key] = spec, functools.partial(source.read, key)
            continue
        part = jax.ShapeDtypeStruct((spec.shape[0] // 3, *spec.shape[1:]), spec.dtype)
        for third, name in enumerate("qkv"):
            tensors[f"{key}[{name}]"] = part, functools.partial(_read_third, source, key, third)
    return DerivedSource(source.name, tensors)


def _read_third(source: TensorSource, key: str, third: int) -> np.ndarray:
    return np.split(source.read(key), 3)[third]


def _block_rules(block: str, path: str) -> list[Rule]:
    rules = transformer_rules(block, path, _LINEARS, _NORMS)
    for part in "qkv":
        weight, bias = (f"{block}attn.in_proj_{kind}[{part}]" for kind in ("weight", "bias"))
        rules += [
            Rule(weight, f"{path}/{part}/kernel", TRANSPOSE),
            Rule(bias, f"{path}/{part}/bias"),
        ]
    return rules


def _count_blocks(keys: Iterable[str], tower: str) -> int:
    pattern = re.compile(rf"{re.escape(tower + _BLOCK)}(\d{{1,4}})\.")
    return 1 + max(int(match[1]) for key in keys if (match := pattern.match(key)))


# Beside transformers.


def _inputs(config: CLIPConfig) -> dict[str, np.ndarray]:
    ids = comparison.tokens(config.text.vocab_size - 1, config.text.context)
    end = config.text.eos_token_id
    ids[0, -1] = config.text.vocab_size - 1 if end is None else end
    return {"ids": ids, "pixels": comparison.picture(config.vision)}


def run_towers(model: Any, inputs: Mapping[str, Any]) -> comparison.Outputs:
    """Both towers of a CLIP or a SigLIP."""
    ids, pixels = inputs["ids"], inputs["pixels"]
    stacks = {
        "text": model.text.hidden_states(ids),
        "picture": model.vision.hidden_states(pixels),
    }
    ends = {"text vector": model.encode_text(ids), "picture vector": model.encode_image(pixels)}
    return comparison.Outputs(stacks, ends)


def text_and_pixels(inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A text and pixels as transformers' models name them."""
    pixels = comparison.channels_first(inputs["pixels"])
    return {"input_ids": inputs["ids"], "pixel_values": pixels}


VECTORS = {"text vector": "text_embeds", "picture vector": "image_embeds"}
TOWERS = {"text": "text_model", "picture": "vision_model"}
CHECK = comparison.Check("CLIPModel", run_towers, VECTORS, TOWERS, _inputs, text_and_pixels)
