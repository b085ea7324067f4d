"""InternVL's tower (Chen et al. 2023, InternViT), as transformers has it.

Pre-norm blocks on a class token and patches with learned positions; what attention and MLP add is
scaled by a vector each (layer scale). The large one (6B) has RMS norms, also of whole queries and
keys. No norm follows the last block. Original: transformers models/internvl/modeling_internvl.py.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common import layers
from mmqa_jax.models.common.config_checks import check_divides, check_known
from mmqa_jax.models.llama.norms import RMSNorm
from mmqa_jax.models.two_towers import config as two_towers
from mmqa_jax.models.two_towers.network import VisionTower, unfold_patches
from mmqa_jax.weights import keymap, layouts
from mmqa_jax.weights.config_json import check_keys, kinds

MODEL_TYPE = "internvl_vision"
_NORMS = ("layer_norm", "rms_norm")
_QK_EPS = 1e-6  # no key of a config.json says it
# Our fields -> their keys, and transformers' defaults.
_KEYS = {
    "width": ("hidden_size", 1024),
    "layers": ("num_hidden_layers", 24),
    "heads": ("num_attention_heads", 16),
    "mlp_width": ("intermediate_size", 4096),
    "activation": ("hidden_act", "gelu"),
    "eps": ("layer_norm_eps", 1e-6),
    "norm": ("norm_type", "layer_norm"),
    "biases": ("attention_bias", False),
    "qk_norm": ("use_qk_norm", False),
}
_KINDS = kinds(
    size="hidden_size num_hidden_layers num_attention_heads intermediate_size",
    number="layer_norm_eps",
    name="hidden_act norm_type",
    flag="attention_bias use_qk_norm",
    any="image_size patch_size",
)
_FIXED = {
    "num_channels": (3,),
    "use_mask_token": (False,),
    "use_absolute_position_embeddings": (True,),
    "use_mean_pooling": (True,),  # else a norm follows
}
_TRAINING = (
    *("attention_dropout", "projection_dropout", "hidden_dropout_prob", "dropout"),
    "layer_scale_init_value",
)
_ATTENTION = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}
# A published parameter (1, 1, width) or (1, positions, width).
_TOKEN = keymap.Transform(lambda x: x.reshape(-1), lambda x: x.reshape(1, 1, -1))
_POSITIONS = keymap.Transform(lambda x: x[0], lambda x: x[None])


@dataclasses.dataclass(frozen=True)
class InternVisionConfig:
    """Sizes and switches; the defaults are InternViT-300M's, which InternVL 3.5 has up to 8B.

    Other fields are as two_towers.config.VisionConfig.
    """

    image_size: int = 448
    patch_size: int = 14
    width: int = 1024
    layers: int = 24
    heads: int = 16
    mlp_width: int = 4096
    activation: str = "gelu"
    eps: float = 1e-6
    norm: str = "layer_norm"  # `layer_norm` or `rms_norm`
    biases: bool = True  # whether the linears of queries, keys and values have biases
    qk_norm: bool = False  # whether whole queries and keys have an RMS norm
    dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"
    unroll: int | bool | None = None
    pixel_mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    pixel_std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    family: ClassVar[str] = "internvl"

    def __post_init__(self):
        two_towers.check_transformer("vision", self)
        check_known("vision.norm", self.norm, _NORMS)
        check_divides("vision.patch_size", self.patch_size, "vision.image_size", self.image_size)

    @property
    def patches(self) -> int:
        """Number of patches of a picture."""
        return (self.image_size // self.patch_size) ** 2


class InternBlock(nnx.Module):
    """x + scale_1 * attention(ln_1(x)), then x + scale_2 * mlp(ln_2(x))."""

    def __init__(self, config: InternVisionConfig, *, rngs: nnx.Rngs):
        width, hidden = config.width, config.mlp_width

        def linear(inside: int, out: int, names: tuple[str, str], bias: bool = True):
            init = layers.normal_init(0.02)
            return layers.Linear(inside, out, names, use_bias=bias, rngs=rngs, kernel_init=init)

        norm = layers.LayerNorm if config.norm == "layer_norm" else RMSNorm
        self.ln_1, self.ln_2 = (norm(width, config.eps, rngs=rngs) for _ in range(2))
        heads = ("embed", "heads")
        self.q, self.k, self.v = (linear(width, width, heads, config.biases) for _ in range(3))
        if config.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(width, _QK_EPS, rngs=rngs, name="heads") for _ in range(2)
            )
        self.out = linear(width, width, ("heads", "embed"))
        self.mlp_in = linear(width, hidden, ("embed", "mlp"))
        self.mlp_out = linear(hidden, width, ("mlp", "embed"))
        self.scale_1, self.scale_2 = (
            layers.param(rngs, jax.nn.initializers.constant(0.1), (width,), ("embed",))
            for _ in range(2)
        )
        self.config = config

    def __call__(
        self, x: jax.Array, *, mask: jax.Array | None = None, is_causal: bool = False
    ) -> jax.Array:  # [B, N, width] -> [B, N, width]
        c, y = self.config, self.ln_1(x)
        q, k, v = self.q(y), self.k(y), self.v(y)
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (layers.split_heads(part, c.heads) for part in (q, k, v))
        y = layers.attention(q, k, v, mask=mask, is_causal=is_causal, implementation=c.attention)
        y = self.out(layers.keep_kernel(layers.merge_heads(y)))
        x = x + y * self.scale_1[...].astype(y.dtype)
        activation = two_towers.BLOCK_ACTIVATIONS[c.activation]
        y = self.mlp_out(activation(self.mlp_in(self.ln_2(x))))
        return x + y * self.scale_2[...].astype(y.dtype)


class InternVision(VisionTower):
    """The tower; its states are read without a norm."""

    def __init__(self, config: InternVisionConfig, *, rngs: nnx.Rngs):
        width, of_patch = config.width, config.patch_size**2 * 3
        init = layers.normal_init(0.02)
        self.is_clip = False
        self.patch = layers.Linear(of_patch, width, ("patch", "embed"), rngs=rngs, kernel_init=init)
        self.class_token = layers.param(rngs, init, (width,), ("embed",))
        names = ("positions", "embed")
        self.positions = layers.param(rngs, init, (1 + config.patches, width), names)
        self.layers = layers.stack_layers(
            lambda rngs: InternBlock(config, rngs=rngs), config.layers, rngs
        )
        self.config = config

    def embed(self, pictures: jax.Array) -> tuple[jax.Array, None]:
        """Normalized pictures [B, S, S, 3] -> [B, 1 + patches, width], the class token first."""
        c = self.config
        if pictures.shape[1:] != (c.image_size, c.image_size, 3):
            raise UserError(
                f"internvl vision: pictures of shape {pictures.shape[1:]}, the model takes "
                f"{(c.image_size, c.image_size, 3)}; resize them or set vision.image_size."
            )
        x = self.patch(unfold_patches(pictures.astype(c.dtype), c.patch_size))
        token = jnp.broadcast_to(self.class_token[...].astype(x.dtype), (len(x), 1, c.width))
        x = jnp.concatenate([token, x], axis=1)
        return x + self.positions[...].astype(x.dtype), None


def read(published: Mapping[str, Any], where: str) -> InternVisionConfig:
    """Our config from a `vision_config`; absent values are transformers' defaults."""
    layouts.check_model_type(published, where, MODEL_TYPE)
    check_keys(published, where, read=_KINDS, harmless=_TRAINING, fixed=_FIXED)
    fields = {name: published.get(key, default) for name, (key, default) in _KEYS.items()}
    check_known(f"{where}: hidden_act", fields["activation"], two_towers.BLOCK_ACTIVATIONS)
    return InternVisionConfig(
        image_size=_square(published, "image_size", 448, where),
        patch_size=_square(published, "patch_size", 14, where),
        **fields,
    )


def _square(published: Mapping[str, Any], key: str, default: int, where: str) -> int:
    """The side of a square, of which a config says one number or both."""
    value = published.get(key, default)
    sides = list(value) if isinstance(value, list | tuple) else [value]
    if not sides or any(type(side) is not int or side < 1 or side != sides[0] for side in sides):
        raise UserError(
            f"{where}: {key} is {value!r}, expected the side of a square in pixels; use a "
            "checkpoint as it was published."
        )
    return sides[0]


def write(config: InternVisionConfig) -> dict[str, Any]:
    """transformers' `vision_config`."""
    return {
        **{key: getattr(config, name) for name, (key, _) in _KEYS.items()},
        "image_size": [config.image_size] * 2,
        "patch_size": [config.patch_size] * 2,
    }


def rules(config: InternVisionConfig) -> list[keymap.Rule]:
    """Rules of the tower's tensors, below `vision_model.`."""
    theirs, ours = "vision_model.encoder.layer.{layer}.", "vision/layers/"
    embeddings = "vision_model.embeddings."
    patch = f"{embeddings}patch_embeddings.projection."
    has_bias = config.norm == "layer_norm"
    made = [
        keymap.Rule(f"{embeddings}cls_token", "vision/class_token", _TOKEN),
        keymap.Rule(f"{embeddings}position_embeddings", "vision/positions", _POSITIONS),
        keymap.Rule(
            f"{patch}weight", "vision/patch/kernel", keymap.conv_patches(config.patch_size)
        ),
        keymap.Rule(f"{patch}bias", "vision/patch/bias"),
        *keymap.norm_rules(f"{theirs}layernorm_before", f"{ours}ln_1", has_bias),
        *keymap.norm_rules(f"{theirs}layernorm_after", f"{ours}ln_2", has_bias),
        *keymap.linear_rules(f"{theirs}attention.projection_layer", f"{ours}out"),
        *keymap.linear_rules(f"{theirs}mlp.fc1", f"{ours}mlp_in"),
        *keymap.linear_rules(f"{theirs}mlp.fc2", f"{ours}mlp_out"),
        keymap.Rule(f"{theirs}lambda_1", f"{ours}scale_1"),
        keymap.Rule(f"{theirs}lambda_2", f"{ours}scale_2"),
    ]
    for name, path in _ATTENTION.items():
        made += keymap.linear_rules(f"{theirs}attention.{name}", f"{ours}{path}", config.biases)
    for name in ("q_norm", "k_norm") if config.qk_norm else ():
        made.append(keymap.Rule(f"{theirs}attention.{name}.weight", f"{ours}{name}/scale"))
    return made
