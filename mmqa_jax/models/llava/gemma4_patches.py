"""What Gemma 4's 12B has in the place of a vision tower, as transformers has it.

A unit of `merge` x `merge` patches of a picture of any size is one large patch: a layer norm of its
pixels, a linear, a layer norm, learned positions of its column and its row, and a third layer norm.
No unit sees another before the decoder. Original: transformers models/gemma4_unified.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.models.common import layers
from mmqa_jax.models.qwen_vl.network import PatchBatch
from mmqa_jax.weights import layouts
from mmqa_jax.weights.config_json import check_keys, kinds
from mmqa_jax.weights.keymap import Rule, linear_rules, norm_rules

MODEL_TYPE = "gemma4_unified_vision"
_EPS = 1e-5  # of the layer norms, PyTorch's
# Our fields -> their keys, and transformers' defaults.
_KEYS = {
    "patch_size": ("patch_size", 16),
    "merge": ("pooling_kernel_size", 3),
    "width": ("mm_embed_dim", 3840),
    "positions": ("mm_posemb_size", 1120),
    "eps": ("rms_norm_eps", 1e-6),
}
_KINDS = kinds(
    size="patch_size pooling_kernel_size mm_embed_dim mm_posemb_size", number="rms_norm_eps"
)
_NORMS = {"patch_ln1": "pixel_norm", "patch_ln2": "patch_norm", "pos_norm": "ln_post"}


@dataclasses.dataclass(frozen=True)
class Gemma4PatchesConfig:
    """Sizes; the defaults are transformers'."""

    patch_size: int = 16  # side of a patch in pixels
    merge: int = 3  # side of a unit in patches
    width: int = 3840  # of a unit's state
    positions: int = 1120  # learned positions of columns, and of rows, of units
    eps: float = 1e-6  # of the norm before the decoder
    # dtype, remat, attention, unroll: as two_towers.config.VisionConfig; it has no layers.
    dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"
    unroll: int | bool | None = None
    layers: ClassVar[int] = 0
    mlp_width: ClassVar[int] = 0
    family: ClassVar[str] = "gemma4_unified"

    @property
    def pixels(self) -> int:
        """Numbers of a unit."""
        return (self.patch_size * self.merge) ** 2 * 3


class Gemma4Patches(nnx.Module):
    """States of units, of which each is its own."""

    def __init__(self, config: Gemma4PatchesConfig, *, rngs: nnx.Rngs):
        init, width = layers.normal_init(0.02), config.width
        self.pixel_norm = layers.LayerNorm(config.pixels, _EPS, rngs=rngs, name="patch")
        self.patch = layers.Linear(
            config.pixels, width, ("patch", "embed"), rngs=rngs, kernel_init=init
        )
        self.patch_norm, self.ln_post = (layers.LayerNorm(width, _EPS, rngs=rngs) for _ in range(2))
        names = ("positions", None, "embed")
        self.positions = layers.param(rngs, init, (config.positions, 2, width), names)
        self.config = config

    def normalize(self, pictures: PatchBatch) -> PatchBatch:
        """Patches as uint8 0..255 -> what `states_of` takes."""
        return pictures.replace(patches=pictures.patches.astype(jnp.float32) / 255)

    def states_of(self, pictures: PatchBatch, layer: int) -> jax.Array:
        """States [B, U, width] of units; `layer` is that of a tower, and there is none."""
        config, merge = self.config, self.config.merge
        patch = (config.patch_size, config.patch_size, 3)
        units = pictures.patches.reshape(len(pictures.patches), -1, merge, merge, *patch)
        units = units.swapaxes(3, 4).reshape(*units.shape[:2], -1).astype(config.dtype)
        x = self.patch_norm(self.patch(self.pixel_norm(units)))
        place = jnp.maximum(pictures.places[:, :: merge**2], 0) // merge  # [B, U, 2]
        row, column = jnp.moveaxis(place, -1, 0)
        learned = self.positions[...].astype(x.dtype)
        return self.ln_post(x + learned[column, 0] + learned[row, 1])


def read(published: Mapping[str, Any], where: str) -> Gemma4PatchesConfig:
    """Our config from a `vision_config`; absent values are transformers' defaults."""
    layouts.check_model_type(published, where, MODEL_TYPE)
    follow = ("output_proj_dims", "model_patch_size")
    copies = ("num_soft_tokens",)  # of what a processor's file says
    check_keys(published, where, read=_KINDS, harmless=(*follow, *copies))
    fields = {name: published.get(key, default) for name, (key, default) in _KEYS.items()}
    side = fields["patch_size"] * fields["merge"]
    fixed = dict(zip(follow, ((fields["width"],), (side,)), strict=True))
    check_keys(published, where, read=_KINDS, harmless=copies, fixed=fixed)
    return Gemma4PatchesConfig(**fields)


def write(config: Gemma4PatchesConfig) -> dict[str, Any]:
    """transformers' `vision_config`."""
    published = {key: getattr(config, name) for name, (key, _) in _KEYS.items()}
    return {**published, "output_proj_dims": config.width}


def rules(config: Gemma4PatchesConfig) -> list[Rule]:
    """Rules of its tensors."""
    made = linear_rules("patch_dense", "vision/patch")
    for name, path in _NORMS.items():
        made += norm_rules(name, f"vision/{path}")
    return [*made, Rule("pos_embedding", "vision/positions")]
