"""Llama 4's vision tower: squares of one size, as transformers has it.

Pre-norm blocks on patches and a class token behind them, with learned positions; in each head half
of the rotary pairs turn by a patch's column, half by its row, and those of the class token not at
all. Original: transformers models/llama4/modeling_llama4.py.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common import layers
from mmqa_jax.models.common.config_checks import check_divides
from mmqa_jax.models.llama.keys import rotary_rows
from mmqa_jax.models.llama.network import rotate
from mmqa_jax.models.llava.pixtral import rope_theta
from mmqa_jax.models.two_towers import config as two_towers
from mmqa_jax.models.two_towers.network import Block, VisionTower, unfold_patches
from mmqa_jax.weights import layouts
from mmqa_jax.weights.config_json import check_keys, kinds
from mmqa_jax.weights.keymap import Rule, Transform, linear_rules, norm_rules

MODEL_TYPE = "llama4_vision_model"
# Our fields -> their keys, and transformers' defaults.
_KEYS = {
    "image_size": ("image_size", 448),
    "patch_size": ("patch_size", 14),
    "width": ("hidden_size", 768),
    "layers": ("num_hidden_layers", 34),
    "heads": ("num_attention_heads", 16),
    "mlp_width": ("intermediate_size", 5632),
}
_KINDS = kinds(
    size="image_size patch_size hidden_size num_hidden_layers num_attention_heads "
    "intermediate_size",
    number_or_null="rope_theta",
    object_or_null="rope_parameters",
)
_FIXED = {
    "hidden_act": ("gelu",),
    "num_channels": (3,),
    "pixel_shuffle_ratio": (0.5,),
    "multi_modal_projector_bias": (False,),
    "vision_feature_select_strategy": ("default",),
}
# Of training; its class reads no eps.
_HARMLESS = ("attention_dropout", "projector_dropout", "norm_eps")
_NORMS = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}
_LINEARS = {"self_attn.v_proj": "v", "self_attn.o_proj": "out", "mlp.fc1": "mlp_in"}
_LINEARS["mlp.fc2"] = "mlp_out"


@dataclasses.dataclass(frozen=True)
class Llama4VisionConfig:
    """Sizes of the tower; the defaults are those of Scout and Maverick.

    Other fields are as two_towers.config.VisionConfig.
    """

    image_size: int = 336
    patch_size: int = 14
    width: int = 1408
    layers: int = 34
    heads: int = 16
    mlp_width: int = 5632
    activation: str = "gelu"
    eps: float = 1e-5
    rope_theta: float = 10000.0  # base of the rotary frequencies
    dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"
    unroll: int | bool | None = None
    family: ClassVar[str] = "llama4"
    pixel_mean: ClassVar[tuple[float, float, float]] = two_towers.SIGLIP_MEAN
    pixel_std: ClassVar[tuple[float, float, float]] = two_towers.SIGLIP_STD

    def __post_init__(self):
        two_towers.check_transformer("vision", self)
        check_divides("vision.patch_size", self.patch_size, "vision.image_size", self.image_size)
        if self.width // self.heads % 4:
            raise UserError(
                f"vision.heads is {self.heads}: a head of {self.width // self.heads} numbers, "
                "expected a multiple of 4 for rotary positions of columns and rows; change it."
            )

    @property
    def patches(self) -> int:
        """Number of patches of a picture."""
        return (self.image_size // self.patch_size) ** 2

    def angles(self) -> np.ndarray:
        """Angles of rotary pairs, float32 [patches + 1, 1, D / 2]; the class token has none."""
        side, half = self.image_size // self.patch_size, self.width // self.heads // 2
        row, column = np.indices((side, side)).reshape(2, -1, 1) + 1
        exponents = (np.arange(0, half, 2) / half).astype(np.float32)
        turning = np.float32(1) / (self.rope_theta**exponents).astype(np.float32)
        angles = np.concatenate([column * turning, row * turning], axis=1).astype(np.float32)
        return np.pad(angles, ((0, 1), (0, 0)))[:, None]


class Llama4Block(Block):
    """CLIP's block with rotary positions."""

    def __call__(
        self, x: jax.Array, *, mask: jax.Array | None = None, is_causal: bool = False
    ) -> jax.Array:  # [B, N, width] -> [B, N, width]
        c, y = self.config, self.ln_1(x)
        angles = c.angles()
        angles = np.pad(angles, ((0, x.shape[1] - len(angles)), (0, 0), (0, 0)))  # x has padding
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        q, k, v = (layers.split_heads(linear(y), c.heads) for linear in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = layers.attention(q, k, v, mask=mask, is_causal=is_causal, implementation=c.attention)
        x = x + self.out(layers.keep_kernel(layers.merge_heads(y)))
        activation = two_towers.BLOCK_ACTIVATIONS[c.activation]
        return x + self.mlp_out(activation(self.mlp_in(self.ln_2(x))))


def _rounded(x: jax.Array) -> jax.Array:
    """Float32 with the bits that bfloat16 has; XLA leaves out a cast there and back."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


class Llama4Vision(VisionTower):
    """The tower; the class token is behind the patches."""

    def __init__(self, config: Llama4VisionConfig, *, rngs: nnx.Rngs):
        width = config.width
        init = layers.normal_init(width**-0.5)
        self.is_clip = False
        self.patch = layers.Linear(
            config.patch_size**2 * 3,
            width,
            ("patch", "embed"),
            use_bias=False,
            rngs=rngs,
            kernel_init=layers.normal_init(0.02),
        )
        self.class_token = layers.param(rngs, init, (width,), ("embed",))
        names = ("positions", "embed")
        self.positions = layers.param(rngs, init, (config.patches + 1, width), names)
        self.ln_pre = layers.LayerNorm(width, config.eps, rngs=rngs)
        self.layers = layers.stack_layers(
            lambda rngs: Llama4Block(config, rngs=rngs), config.layers, rngs
        )
        self.ln_post = layers.LayerNorm(width, config.eps, rngs=rngs)
        self.config = config

    def normalize(self, pictures: jax.Array) -> jax.Array:
        """Pixels as uint8 0..255 -> what the tower takes, rounded to bfloat16 as in the original's
        processor."""
        scaled = _rounded(pictures.astype(jnp.float32) * np.float32(1 / 255))
        return _rounded(scaled - 0.5) / 0.5

    def embed(self, pictures: jax.Array) -> tuple[jax.Array, None]:
        """Normalized pictures [B, S, S, 3] -> [B, patches + 1, width], the class token last."""
        c = self.config
        x = self.patch(unfold_patches(pictures.astype(c.dtype), c.patch_size))
        token = jnp.broadcast_to(self.class_token[...].astype(x.dtype), (len(x), 1, c.width))
        x = jnp.concatenate([x, token], axis=1)
        return self.ln_pre(x + self.positions[...].astype(x.dtype)), None


def read(published: Mapping[str, Any], where: str) -> Llama4VisionConfig:
    """Our config from a `vision_config`; absent values are transformers' defaults."""
    layouts.check_model_type(published, where, MODEL_TYPE)
    check_keys(published, where, read=_KINDS, harmless=_HARMLESS, fixed=_FIXED)
    fields = {name: published.get(key, default) for name, (key, default) in _KEYS.items()}
    theta = rope_theta(published, where, published.get("rope_theta") or 10000.0)
    return Llama4VisionConfig(**fields, rope_theta=theta)


def write(config: Llama4VisionConfig) -> dict[str, Any]:
    """transformers' `vision_config`."""
    return {
        **{key: getattr(config, name) for name, (key, _) in _KEYS.items()},
        **{key: values[0] for key, values in _FIXED.items()},
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }


def rules(config: Llama4VisionConfig) -> list[Rule]:
    """Rules of the tower's tensors."""
    theirs, ours, patch = "vision_model.model.layers.{layer}.", "vision/layers/", config.patch_size
    by_channel = Transform(  # of a patch's values as (channel, row, column)
        lambda x: x.T.reshape(3, patch * patch, -1).swapaxes(0, 1).reshape(3 * patch**2, -1),
        lambda x: x.reshape(patch * patch, 3, -1).swapaxes(0, 1).reshape(3 * patch**2, -1).T,
    )
    made = [
        Rule("vision_model.class_embedding", "vision/class_token"),
        Rule("vision_model.positional_embedding_vlm", "vision/positions"),
        Rule("vision_model.patch_embedding.linear.weight", "vision/patch/kernel", by_channel),
        *norm_rules("vision_model.layernorm_pre", "vision/ln_pre"),
        *norm_rules("vision_model.layernorm_post", "vision/ln_post"),
    ]
    for name, path in _NORMS.items():
        made += norm_rules(f"{theirs}{name}", f"{ours}{path}")
    for name, path in _LINEARS.items():
        made += linear_rules(f"{theirs}{name}", f"{ours}{path}")
    size = config.width // config.heads
    turned = rotary_rows(config.heads, size, size, neighbours=True)
    for part in "qk":
        for name, path in (("weight", "kernel"), ("bias", "bias")):
            made.append(
                Rule(f"{theirs}self_attn.{part}_proj.{name}", f"{ours}{part}/{path}", turned)
            )
    return made
