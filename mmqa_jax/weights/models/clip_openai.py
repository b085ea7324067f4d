"""CLIP checkpoints as OpenAI published them: `ViT-B-32.pt` and its like.

A TorchScript archive, or the state dict in it, of float16 tensors. There is no config beside it:
the shapes determine it, with QuickGELU and heads of 64 units, as in openai/CLIP clip/model.py
(`build_model`). What tells OpenAI's own from others are three integers that its archives keep among
the tensors. open_clip's models have the same layout without them, other heads and mostly GELU; see
clip_open_clip.py.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.clip import CLIPConfig, TextConfig, VisionConfig
from mmqa_jax.weights.formats.safetensors import DerivedSource, TensorSource
from mmqa_jax.weights.keymap import (
    TRANSPOSE,
    KeyMap,
    Rule,
    conv_patches,
    norm_rules,
    transformer_rules,
)

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
