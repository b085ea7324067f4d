"""Pixtral's tower (Agrawal et al. 2024), which Mistral Small 3.1 and Ministral 3 have: pictures of
any size.

RMS norms, gated MLPs and no biases; half of each head's rotary pairs turn by a patch's row, the
other half by its column. A picture attends to itself alone. Original: transformers
models/pixtral/modeling_pixtral.py.
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
from mmqa_jax.models.common.config_checks import check_divides, check_known, check_layers
from mmqa_jax.models.common.rope import rotate
from mmqa_jax.models.llama.norms import RMSNorm
from mmqa_jax.models.qwen_vl.network import PatchBatch
from mmqa_jax.models.two_towers.config import PIXEL_MEAN, PIXEL_STD
from mmqa_jax.models.two_towers.network import blocks_before, normalize_pixels
from mmqa_jax.weights import layouts
from mmqa_jax.weights.config_json import check_keys, kinds
from mmqa_jax.weights.keymap import Rule, conv_patches, linear_rules, norm_rules

MODEL_TYPE = "pixtral"
_EPS = 1e-5  # of all norms; no key of a config.json says it
# Our fields -> their keys, and transformers' defaults.
_KEYS = {
    "image_size": ("image_size", 1024),
    "patch_size": ("patch_size", 16),
    "width": ("hidden_size", 1024),
    "layers": ("num_hidden_layers", 24),
    "heads": ("num_attention_heads", 16),
    "mlp_width": ("intermediate_size", 4096),
    "activation": ("hidden_act", "gelu"),
}
_KINDS = kinds(
    size="image_size patch_size hidden_size num_hidden_layers num_attention_heads "
    "intermediate_size",
    size_or_null="head_dim",
    name="hidden_act",
    number_or_null="rope_theta",
    object_or_null="rope_parameters",
)
_LINEARS = {
    **{f"attention.{name}_proj": name for name in "qkv"},
    "attention.o_proj": "out",
    **{f"feed_forward.{name}_proj": name for name in ("gate", "up", "down")},
}


@dataclasses.dataclass(frozen=True)
class PixtralVisionConfig:
    """Sizes of the tower; the defaults are Mistral Small 3.1's."""

    image_size: int = 1540  # the longest side of a picture in pixels; larger ones are made smaller
    patch_size: int = 14  # side of a patch in pixels
    # width, layers, heads, mlp_width: of the transformer.
    width: int = 1024
    layers: int = 24
    heads: int = 16
    mlp_width: int = 4096
    activation: str = "gelu"  # of the gated MLP
    rope_theta: float = 10000.0  # base of the rotary frequencies
    # dtype, remat, attention, unroll: as two_towers.config.VisionConfig.
    dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"
    unroll: int | bool | None = None
    # pixel_mean, pixel_std: of each channel, of pixels 0..1.
    pixel_mean: tuple[float, float, float] = PIXEL_MEAN
    pixel_std: tuple[float, float, float] = PIXEL_STD
    family: ClassVar[str] = "pixtral"

    def __post_init__(self):
        check_layers(self, "vision", "layers")
        check_divides("vision.heads", self.heads, "vision.width", self.width)
        check_known("vision.activation", self.activation, ACTIVATIONS)
        if self.width // self.heads % 4:
            raise UserError(
                f"vision.heads is {self.heads}: a head of {self.width // self.heads} numbers, "
                "expected a multiple of 4 for rotary positions of rows and columns; change it."
            )

    @property
    def patches(self) -> int:
        """Patches of the largest picture."""
        return (self.image_size // self.patch_size) ** 2


class PixtralLayer(nnx.Module):
    """x + attention(norm(x)), then x + down(act(gate(norm(x))) * up(norm(x)))."""

    def __init__(self, config: PixtralVisionConfig, *, rngs: nnx.Rngs):
        init = layers.normal_init(0.02)
        linear = functools.partial(layers.Linear, use_bias=False, rngs=rngs, kernel_init=init)
        width, hidden = config.width, config.mlp_width
        self.norm_1, self.norm_2 = (RMSNorm(width, _EPS, rngs=rngs) for _ in range(2))
        self.q, self.k, self.v = (linear(width, width, ("embed", "heads")) for _ in range(3))
        self.out = linear(width, width, ("heads", "embed"))
        self.gate, self.up = (linear(width, hidden, ("embed", "mlp")) for _ in range(2))
        self.down = linear(hidden, width, ("mlp", "embed"))
        self.config = config

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, real: jax.Array) -> jax.Array:
        """x [B, N, width]; cos, sin [B, N, 1, D / 2]; real bool [B, N]."""
        c, y = self.config, self.norm_1(x)
        q, k, v = (layers.split_heads(linear(y), c.heads) for linear in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mask = real[:, None, None]
        y = layers.attention(q, k, v, mask=mask, implementation=c.attention)
        x = x + self.out(layers.keep(layers.merge_heads(y)))
        y = self.norm_2(x)
        return x + self.down(ACTIVATIONS[c.activation](self.gate(y)) * self.up(y))


class PixtralVision(nnx.Module):
    """The tower; no norm follows the last layer."""

    def __init__(self, config: PixtralVisionConfig, *, rngs: nnx.Rngs):
        self.patch = layers.Linear(
            config.patch_size**2 * 3,
            config.width,
            ("patch", "embed"),
            use_bias=False,
            rngs=rngs,
            kernel_init=layers.normal_init(0.02),
        )
        self.ln_pre = RMSNorm(config.width, _EPS, rngs=rngs)
        self.layers = layers.stack_layers(
            lambda rngs: PixtralLayer(config, rngs=rngs), config.layers, rngs
        )
        self.config = config

    def normalize(self, pictures: PatchBatch) -> PatchBatch:
        """Patches as uint8 0..255 -> what the tower takes."""
        pixels = pictures.patches.reshape(*pictures.patches.shape[:2], -1, 3)
        pixels = normalize_pixels(pixels, self.config.pixel_mean, self.config.pixel_std)
        return pictures.replace(patches=pixels.reshape(pictures.patches.shape))

    def states_of(self, pictures: PatchBatch, layer: int) -> jax.Array:
        """States [B, N, width] of one layer, see `blocks_before`; unit by unit."""
        return self._run(pictures, blocks_before(layer, self.config.layers))[0]

    def hidden_states(self, pictures: PatchBatch) -> jax.Array:
        """All layers' states [layers + 1, B, N, width]; 0 is before the layers."""
        _, first, states = self._run(pictures, self.config.layers)
        return jnp.concatenate([first[None], states])

    def embed(self, pictures: PatchBatch) -> jax.Array:
        """The layers' input, [B, N, width]."""
        return self.ln_pre(self.patch(pictures.patches.astype(self.config.dtype)))

    def angles(self, places: jax.Array) -> jax.Array:
        """int [B, N, 2] -> [B, N, 1, D / 2]."""
        half = self.config.width // self.config.heads // 2
        exponents = (np.arange(half) / half).astype(np.float32)
        turning = np.float32(1) / (self.config.rope_theta**exponents).astype(np.float32)
        turning = np.stack([turning[0::2], turning[1::2]])  # of rows, of columns
        angles = places[..., None].astype(jnp.float32) * turning  # [B, N, 2, D / 4]
        return angles.reshape(*places.shape[:2], 1, half)

    def _run(self, pictures: PatchBatch, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        config, places = self.config, pictures.places
        first, angles = self.embed(pictures), self.angles(places)
        cos, sin, real = jnp.cos(angles), jnp.sin(angles), places[..., 0] >= 0
        graphdef, params = nnx.split(self.layers)
        stack = nnx.merge(graphdef, jax.tree.map(lambda p: p[:count], params))

        def body(layer: nnx.Module, x, _, key):
            x = layer(x, cos, sin, real)
            return x, x

        last, states = layers.scan_layers(
            stack, first, body, remat=config.remat, unroll=config.unroll
        )
        return last, first, states


def read(published: Mapping[str, Any], where: str) -> PixtralVisionConfig:
    """Our config from a `vision_config`; absent values are transformers' defaults."""
    layouts.check_model_type(published, where, MODEL_TYPE)
    check_keys(
        published,
        where,
        read=_KINDS,
        harmless=("attention_dropout", "vocab_size"),
        fixed={"num_channels": (3,)},
    )
    fields = {name: published.get(key, default) for name, (key, default) in _KEYS.items()}
    theta = rope_theta(published, where, published.get("rope_theta") or 10000.0)
    head = published.get("head_dim") or fields["width"] // fields["heads"]
    if head * fields["heads"] != fields["width"]:
        raise UserError(
            f"{where}: head_dim is {head}, which transformers reads for positions alone; use a "
            "checkpoint where it is hidden_size over num_attention_heads."
        )
    return PixtralVisionConfig(**fields, rope_theta=theta)


def rope_theta(published: Mapping[str, Any], where: str, usual: float) -> float:
    """The base that `rope_parameters` of a `vision_config` say, which have no scaling."""
    rope = published.get("rope_parameters") or {}
    check_keys(
        rope,
        f"{where}, rope_parameters",
        read=kinds(number="rope_theta"),
        fixed={"rope_type": ("axial", "default")},
    )
    return float(rope.get("rope_theta") or usual)


def write(config: PixtralVisionConfig) -> dict[str, Any]:
    """transformers' `vision_config`."""
    return {
        **{key: getattr(config, name) for name, (key, _) in _KEYS.items()},
        "rope_parameters": {"rope_type": "axial", "rope_theta": config.rope_theta},
    }


def rules(config: PixtralVisionConfig) -> list[Rule]:
    """Rules of the tower's tensors."""
    theirs, ours = "transformer.layers.{layer}.", "vision/layers/"
    made = [
        Rule("patch_conv.weight", "vision/patch/kernel", conv_patches(config.patch_size)),
        *norm_rules("ln_pre", "vision/ln_pre", False),
        *norm_rules(f"{theirs}attention_norm", f"{ours}norm_1", False),
        *norm_rules(f"{theirs}ffn_norm", f"{ours}norm_2", False),
    ]
    for name, path in _LINEARS.items():
        made += linear_rules(f"{theirs}{name}", f"{ours}{path}", False)
    return made
