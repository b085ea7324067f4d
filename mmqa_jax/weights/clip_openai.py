"""CLIP checkpoints as OpenAI published them: `ViT-B-32.pt` and its like.

A TorchScript archive, or the state dict in it, of float16 tensors. There is no config beside it:
the shapes tell it, as in openai/CLIP clip/model.py (`build_model`). open_clip's models have the
same layout; most of LAION's have exact GELU (`vision.activation=gelu`, `text.activation=gelu`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import jax
import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.clip import CLIPConfig, TextConfig, VisionConfig
from mmqa_jax.weights.keymap import (
    TRANSPOSE,
    KeyMap,
    Rule,
    conv_patches,
    norm_rules,
    transformer_rules,
)
from mmqa_jax.weights.safetensors_io import TensorSource

_HEAD = 64  # units of every head
_BLOCK = "transformer.resblocks."
_LINEARS = {"attn.out_proj": "out", "mlp.c_fc": "mlp_in", "mlp.c_proj": "mlp_out"}
_NORMS = {"ln_1": "ln_1", "ln_2": "ln_2"}
# Sizes that the archives keep beside the tensors, and the causal mask of their text tower.
_IGNORED = (r"^(input_resolution|context_length|vocab_size)$", r"(^|\.)attn_mask$")

_PATCHES = "visual.conv1.weight"
_POSITIONS = "visual.positional_embedding"
_TOKENS = "token_embedding.weight"
_CONTEXT = "positional_embedding"
_PROJECTION = "text_projection"
_INNER = f"{_BLOCK}0.mlp.c_fc.weight"
# The tensors that tell the sizes, and how many axes they have.
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


def clip_openai_key_map(config: CLIPConfig) -> KeyMap:
    """Key map of `SplitAttention`'s keys."""
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
    """The config that a checkpoint's shapes tell, with QuickGELU and heads of 64.

    Raises:
      UserError: a CLIP with a ResNet, or tensors are missing that tell a size.
    """
    shapes = {key: spec.shape for key, spec in source.specs().items()}
    if "visual.layer1.0.conv1.weight" in shapes:
        raise UserError(
            f"{source.name}: its image tower is a ResNet; that tower alone can be converted, with "
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


class SplitAttention:
    """A checkpoint whose attentions' one projection of queries, keys and values is three.

    `attn.in_proj_weight` (3 * width, width) becomes `attn.in_proj_weight[q]`, `[k]` and `[v]`,
    (width, width) each; `attn.in_proj_bias` likewise.
    """

    def __init__(self, source: TensorSource):
        self.name = source.name
        self._source = source
        self._places: dict[str, tuple[str, int | None]] = {}  # key -> key in the file, third
        for key, spec in source.specs().items():
            fused = re.search(r"\.in_proj_(weight|bias)$", key)
            if fused and spec.shape and spec.shape[0] % 3 == 0:
                for third, part in enumerate("qkv"):
                    self._places[f"{key}[{part}]"] = (key, third)
            else:
                self._places[key] = (key, None)

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every tensor, by key."""
        whole, found = self._source.specs(), {}
        for key, (original, third) in self._places.items():
            found[key] = spec = whole[original]
            if third is not None:
                rows, *rest = spec.shape
                found[key] = jax.ShapeDtypeStruct((rows // 3, *rest), spec.dtype)
        return found

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor."""
        original, third = self._places[key]
        tensor = self._source.read(original)
        if third is None:
            return tensor
        rows = len(tensor) // 3
        return tensor[third * rows : (third + 1) * rows]


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
    pattern = re.compile(rf"{re.escape(tower + _BLOCK)}(\d+)\.")
    return 1 + max(int(match[1]) for key in keys if (match := pattern.match(key)))
