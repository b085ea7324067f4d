"""Gemma 4's vision tower: pictures of any size, as transformers has it.

Pixtral's in outline, with RMS norms before and after attention and MLP, of queries and keys, and of
values without a scale; learned positions of columns and rows; half of each head turns by a patch's
column, the other by its row. The small models' linears keep what they get and give within bounds
that their checkpoint holds. Original: transformers models/gemma4/modeling_gemma4.py.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common import layers
from mmqa_jax.models.common.activations import ACTIVATIONS
from mmqa_jax.models.common.config_checks import check_known, check_layers
from mmqa_jax.models.common.rope import rotate
from mmqa_jax.models.llama.norms import RMSNorm, unit_rms
from mmqa_jax.models.llava.pixtral import PixtralVision, rope_theta
from mmqa_jax.models.qwen_vl.network import PatchBatch
from mmqa_jax.models.two_towers.config import SIGLIP_MEAN, SIGLIP_STD
from mmqa_jax.weights import layouts
from mmqa_jax.weights.config_json import check_keys, kinds
from mmqa_jax.weights.keymap import TRANSPOSE, Rule, norm_rules

MODEL_TYPE = "gemma4_vision"
# Our fields -> their keys, and transformers' defaults.
_KEYS = {
    "patch_size": ("patch_size", 16),
    "positions": ("position_embedding_size", 10240),
    "width": ("hidden_size", 768),
    "layers": ("num_hidden_layers", 16),
    "heads": ("num_attention_heads", 12),
    "head_dim": ("head_dim", 64),
    "mlp_width": ("intermediate_size", 3072),
    "activation": ("hidden_activation", "gelu_pytorch_tanh"),
    "eps": ("rms_norm_eps", 1e-6),
    "clipped": ("use_clipped_linears", False),
    "standardize": ("standardize", False),
}
_KINDS = kinds(
    size="patch_size position_embedding_size hidden_size num_hidden_layers num_attention_heads "
    "head_dim intermediate_size",
    name="hidden_activation",
    number="rms_norm_eps",
    flag="use_clipped_linears standardize",
    object_or_null="rope_parameters",
)
_BOUNDS = {"input_min": -np.inf, "input_max": np.inf, "output_min": -np.inf, "output_max": np.inf}
_LINEARS = {
    **{f"self_attn.{name}_proj": name for name in "qkv"},
    "self_attn.o_proj": "out",
    **{f"mlp.{name}_proj": name for name in ("gate", "up", "down")},
}
_NORMS = {
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "out_norm",
    "pre_feedforward_layernorm": "norm_2",
    "post_feedforward_layernorm": "down_norm",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
}


@dataclasses.dataclass(frozen=True)
class Gemma4VisionConfig:
    """Sizes of the tower; the defaults are those of the 31B and the 26B-A4B."""

    patch_size: int = 16  # side of a patch in pixels
    positions: int = 10240  # learned positions of columns, and of rows
    # width, layers, heads, head_dim, mlp_width: of the transformer.
    width: int = 1152
    layers: int = 27
    heads: int = 16
    head_dim: int = 72
    mlp_width: int = 4304
    activation: str = "gelu_pytorch_tanh"  # of the gated MLP
    eps: float = 1e-6  # of all norms
    clipped: bool = False  # whether linears have bounds of what they get and give
    # Whether pooled states are shifted and scaled (`connectors.UnitPooled`).
    standardize: bool = True
    rope_theta: float = 100.0  # base of the rotary frequencies
    # dtype, remat, attention, unroll: as two_towers.config.VisionConfig.
    dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"
    unroll: int | bool | None = None
    # pixel_mean, pixel_std: of each channel, of pixels 0..1.
    pixel_mean: tuple[float, float, float] = SIGLIP_MEAN
    pixel_std: tuple[float, float, float] = SIGLIP_STD
    family: ClassVar[str] = "gemma4"

    def __post_init__(self):
        check_layers(self, "vision", "layers")
        check_known("vision.activation", self.activation, ACTIVATIONS)
        if self.head_dim % 4:
            raise UserError(
                f"vision.head_dim is {self.head_dim}: expected a multiple of 4 for rotary "
                "positions of columns and rows; change it."
            )


class BoundedLinear(layers.Linear):
    """A linear without bias; if `clipped`, what it gets and gives stays within numbers of its
    checkpoint, which training leaves as they are."""

    def __init__(self, *sizes: Any, clipped: bool, rngs: nnx.Rngs):
        init = layers.normal_init(0.02)
        super().__init__(*sizes, use_bias=False, rngs=rngs, kernel_init=init)
        for name, value in _BOUNDS.items() if clipped else ():
            constant = jax.nn.initializers.constant(value)
            setattr(self, name, layers.param(rngs, constant, (), ()))
        self.clipped = clipped

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., in] -> [..., out]."""
        if not self.clipped:
            return super().__call__(x)
        bounds = (getattr(self, name)[...].astype(x.dtype) for name in _BOUNDS)
        least, most, least_out, most_out = map(jax.lax.stop_gradient, bounds)
        return jnp.clip(super().__call__(jnp.clip(x, least, most)), least_out, most_out)


class Gemma4VisionLayer(nnx.Module):
    """x + norm(attention(norm(x))), then x + norm(down(act(gate(norm(x))) * up(norm(x))))."""

    def __init__(self, config: Gemma4VisionConfig, *, rngs: nnx.Rngs):
        width, hidden, inner = config.width, config.mlp_width, config.heads * config.head_dim
        linear = functools.partial(BoundedLinear, clipped=config.clipped, rngs=rngs)
        norm = functools.partial(RMSNorm, eps=config.eps, rngs=rngs)
        self.norm_1, self.out_norm, self.norm_2, self.down_norm = (norm(width) for _ in range(4))
        self.q_norm, self.k_norm = (norm(config.head_dim, name="head_dim") for _ in "qk")
        self.q, self.k, self.v = (linear(width, inner, ("embed", "heads")) for _ in "qkv")
        self.out = linear(inner, width, ("heads", "embed"))
        self.gate, self.up = (linear(width, hidden, ("embed", "mlp")) for _ in range(2))
        self.down = linear(hidden, width, ("mlp", "embed"))
        self.config = config

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, real: jax.Array) -> jax.Array:
        """x [B, N, width]; cos, sin [B, N, 1, 2, D / 4] of columns and rows; real bool [B, N]."""
        c, y = self.config, self.norm_1(x)
        q, k, v = (layers.split_heads(linear(y), c.heads) for linear in (self.q, self.k, self.v))
        halves = (*q.shape[:-1], 2, c.head_dim // 2)
        q, k = (
            rotate(norm(x).reshape(halves), cos, sin).reshape(q.shape)
            for norm, x in ((self.q_norm, q), (self.k_norm, k))
        )
        q = q * c.head_dim**0.5  # attention divides by it
        mask = real[:, None, None]
        y = layers.attention(q, k, unit_rms(v, c.eps), mask=mask, implementation=c.attention)
        x = x + self.out_norm(self.out(layers.keep(layers.merge_heads(y))))
        y = self.norm_2(x)
        y = self.down(ACTIVATIONS[c.activation](self.gate(y)) * self.up(y))
        return x + self.down_norm(y)


class Gemma4Vision(PixtralVision):
    """The tower; no norm follows the last layer."""

    def __init__(self, config: Gemma4VisionConfig, *, rngs: nnx.Rngs):
        init, width = layers.normal_init(0.02), config.width
        self.patch = layers.Linear(
            config.patch_size**2 * 3,
            width,
            ("patch", "embed"),
            use_bias=False,
            rngs=rngs,
            kernel_init=init,
        )
        names = (None, "positions", "embed")
        self.positions = layers.param(rngs, init, (2, config.positions, width), names)
        self.layers = layers.stack_layers(
            lambda rngs: Gemma4VisionLayer(config, rngs=rngs), config.layers, rngs
        )
        self.config = config

    def embed(self, pictures: PatchBatch) -> jax.Array:
        """The layers' input, [B, N, width]."""
        x = self.patch(pictures.patches.astype(self.config.dtype))
        columns, rows = self.positions[...].astype(x.dtype)
        row, column = jnp.moveaxis(jnp.maximum(pictures.places, 0), -1, 0)  # [B, N] each
        return x + columns[column] + rows[row]

    def angles(self, places: jax.Array) -> jax.Array:
        """int [B, N, 2] -> [B, N, 1, 2, D / 4]."""
        half = self.config.head_dim // 2
        exponents = (np.arange(0, half, 2) / half).astype(np.float32)
        turning = np.float32(1) / (self.config.rope_theta**exponents).astype(np.float32)
        return places[:, :, None, ::-1, None].astype(jnp.float32) * turning


def read(published: Mapping[str, Any], where: str) -> Gemma4VisionConfig:
    """Our config from a `vision_config`; absent values are transformers' defaults."""
    layouts.check_model_type(published, where, MODEL_TYPE)
    fields = {name: published.get(key, default) for name, (key, default) in _KEYS.items()}
    check_keys(
        published,
        where,
        read=_KINDS,
        # The last two are copies of head_dim and of what a processor's file says.
        harmless=(
            *("attention_dropout", "max_position_embeddings"),
            *("global_head_dim", "default_output_length"),
        ),
        fixed={"attention_bias": (False,), "num_key_value_heads": (fields["heads"],)},
    )
    return Gemma4VisionConfig(**fields, rope_theta=rope_theta(published, where, 100.0))


def write(config: Gemma4VisionConfig) -> dict[str, Any]:
    """transformers' `vision_config`."""
    return {
        **{key: getattr(config, name) for name, (key, _) in _KEYS.items()},
        "num_key_value_heads": config.heads,
        "rope_parameters": {"rope_type": "axial", "rope_theta": config.rope_theta},
    }


def rules(config: Gemma4VisionConfig) -> list[Rule]:
    """Rules of the tower's tensors."""
    theirs, ours = "vision_model.encoder.layers.{layer}.", "vision/layers/"
    made = [
        Rule("patch_embedder.input_proj.weight", "vision/patch/kernel", TRANSPOSE),
        Rule("patch_embedder.position_embedding_table", "vision/positions"),
    ]
    for name, path in _NORMS.items():
        made += norm_rules(f"{theirs}{name}", f"{ours}{path}", False)
    for name, path in _LINEARS.items():
        made.append(Rule(f"{theirs}{name}.linear.weight", f"{ours}{path}/kernel", TRANSPOSE))
        for bound in _BOUNDS if config.clipped else ():
            made.append(Rule(f"{theirs}{name}.{bound}", f"{ours}{path}/{bound}"))
    return made
