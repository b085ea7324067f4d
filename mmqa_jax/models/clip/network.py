"""CLIP with vision transformers (Radford et al. 2021; openai/CLIP clip/model.py).

Vision tower: patch projection (no bias), a class token, positions, ln_pre, pre-LN blocks,
ln_post of the class token, projection. Text tower: token and position embeddings, causal
pre-LN blocks, ln_final, the state at the end-of-text token, projection. CLIP has no dropout.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common import layers
from mmqa_jax.models.common.activations import ACTIVATIONS, by_platform
from mmqa_jax.models.common.config_checks import check_divides, check_known, check_layers
from mmqa_jax.models.common.row_layout import as_rows, pad_length

# Mean and standard deviation of CLIP's training pictures, RGB (clip/clip.py).
PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)
INITIAL_LOGIT_SCALE = math.log(1 / 0.07)
MAX_LOGIT_SCALE = math.log(100.0)

BLOCK_ACTIVATIONS = {
    "quick_gelu": by_platform(lambda x: x * jax.nn.sigmoid(1.702 * x)),  # clip/model.py, QuickGELU
    "gelu": ACTIVATIONS["gelu"],
    "gelu_pytorch_tanh": ACTIVATIONS["gelu_new"],  # SigLIP
}


class BlockConfig(Protocol):
    """What a tower's config says of its blocks; see VisionConfig."""

    width: int
    layers: int
    heads: int
    mlp_width: int
    activation: str
    eps: float
    dtype: str
    remat: str
    attention: str
    unroll: int | bool | None


def check_transformer(name: str, config: BlockConfig) -> None:
    """Checks a tower's config; `name` is of the tower in messages."""
    check_layers(config, name, "layers")
    check_divides(f"{name}.heads", config.heads, f"{name}.width", config.width)
    check_known(f"{name}.activation", config.activation, BLOCK_ACTIVATIONS)


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """Sizes of the vision tower; the defaults are ViT-B/16's.

    Attributes:
      image_size, patch_size: side of the square picture and of a patch, in pixels.
      width, layers, heads, mlp_width: of the transformer.
      embed_dim: size of the projected output.
      activation: `quick_gelu` (OpenAI's weights) or `gelu` (exact erf; some LAION weights).
      eps: of the layer norms.
      dtype: compute type; norms and softmax stay float32.
      remat, unroll: see layers.scan_layers.
      attention: see layers.attention.
      pixel_mean, pixel_std: of the training pictures, RGB from 0 to 1; some of open_clip's differ.
    """

    image_size: int = 224
    patch_size: int = 16
    width: int = 768
    layers: int = 12
    heads: int = 12
    mlp_width: int = 3072
    embed_dim: int = 512
    activation: str = "quick_gelu"
    eps: float = 1e-5
    dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"
    unroll: int | bool | None = None
    pixel_mean: tuple[float, float, float] = PIXEL_MEAN
    pixel_std: tuple[float, float, float] = PIXEL_STD

    def __post_init__(self):
        check_transformer("vision", self)
        check_divides("vision.patch_size", self.patch_size, "vision.image_size", self.image_size)

    @property
    def patches(self) -> int:
        """Number of patches of a picture."""
        return (self.image_size // self.patch_size) ** 2


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """Sizes of the text tower; the defaults are ViT-B/16's.

    Attributes:
      vocab_size, context: number of tokens known, and longest text.
      eos_token_id: the pooled state is the first token of this id; None takes the largest id of
        the row, as OpenAI does (end-of-text is the last entry of its vocabulary). Transformers
        does the latter too for old configs that say 2.
      others: as VisionConfig.
    """

    vocab_size: int = 49408
    context: int = 77
    width: int = 512
    layers: int = 12
    heads: int = 8
    mlp_width: int = 2048
    embed_dim: int = 512
    eos_token_id: int | None = None
    activation: str = "quick_gelu"
    eps: float = 1e-5
    dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"
    unroll: int | bool | None = None

    def __post_init__(self):
        check_transformer("text", self)


@dataclasses.dataclass(frozen=True)
class CLIPConfig:
    """Both towers, which must project to the same size."""

    vision: VisionConfig = VisionConfig()
    text: TextConfig = TextConfig()

    def __post_init__(self):
        if self.vision.embed_dim != self.text.embed_dim:
            raise UserError(
                f"clip: vision.embed_dim {self.vision.embed_dim} is not text.embed_dim "
                f"{self.text.embed_dim}; both towers must project to one size."
            )


def vit_b_32() -> CLIPConfig:
    """openai/clip-vit-base-patch32."""
    return CLIPConfig(vision=VisionConfig(patch_size=32))


def vit_b_16() -> CLIPConfig:
    """openai/clip-vit-base-patch16: WebQA's dense retriever."""
    return CLIPConfig()


def vit_l_14(image_size: int = 224) -> CLIPConfig:
    """openai/clip-vit-large-patch14."""
    return CLIPConfig(
        vision=VisionConfig(
            image_size=image_size,
            patch_size=14,
            width=1024,
            layers=24,
            heads=16,
            mlp_width=4096,
            embed_dim=768,
        ),
        text=TextConfig(width=768, heads=12, mlp_width=3072, embed_dim=768),
    )


def vit_l_14_336() -> CLIPConfig:
    """openai/clip-vit-large-patch14-336: LLaVA-1.5's eyes."""
    return vit_l_14(image_size=336)


class Block(nnx.Module):
    """Pre-LN transformer block: x + attn(ln_1(x)), then x + mlp(ln_2(x))."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs):
        width, hidden = config.width, config.mlp_width
        # OpenAI's text tower initialization, for both towers.
        inner = layers.normal_init(width**-0.5)
        outer = layers.normal_init(width**-0.5 * (2 * config.layers) ** -0.5)
        up = layers.normal_init((2 * width) ** -0.5)

        def linear(in_features, out_features, names, init):
            return layers.Linear(in_features, out_features, names, rngs=rngs, kernel_init=init)

        self.ln_1 = layers.LayerNorm(width, config.eps, rngs=rngs)
        self.q = linear(width, width, ("embed", "heads"), inner)
        self.k = linear(width, width, ("embed", "heads"), inner)
        self.v = linear(width, width, ("embed", "heads"), inner)
        self.out = linear(width, width, ("heads", "embed"), outer)
        self.ln_2 = layers.LayerNorm(width, config.eps, rngs=rngs)
        self.mlp_in = linear(width, hidden, ("embed", "mlp"), up)
        self.mlp_out = linear(hidden, width, ("mlp", "embed"), outer)
        self.config = config

    def __call__(
        self, x: jax.Array, *, mask: jax.Array | None = None, is_causal: bool = False
    ) -> jax.Array:  # [B, N, width] -> [B, N, width]
        shape, heads = x.shape, self.config.heads
        x = as_rows(x)  # [B, N, width] or [B * N, width]
        y = self.ln_1(x)
        q, k, v = (layers.split_heads(f(y).reshape(shape), heads) for f in (self.q, self.k, self.v))
        y = layers.attention(
            q, k, v, mask=mask, is_causal=is_causal, implementation=self.config.attention
        )
        x = x + self.out(layers.keep_kernel(layers.merge_heads(y)).reshape(x.shape))
        activation = BLOCK_ACTIVATIONS[self.config.activation]
        return (x + self.mlp_out(activation(self.mlp_in(self.ln_2(x))))).reshape(shape)


class VisionTower(nnx.Module):
    """Vision transformer; pictures must be normalized (`normalize_pixels`)."""

    def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs):
        width = config.width
        init = layers.normal_init(width**-0.5)
        self.patch = layers.Linear(
            config.patch_size**2 * 3, width, ("patch", "embed"), use_bias=False, rngs=rngs
        )
        self.class_token = layers.param(rngs, init, (width,), ("embed",))
        self.positions = layers.param(
            rngs, init, (config.patches + 1, width), ("positions", "embed")
        )
        self.ln_pre = layers.LayerNorm(width, config.eps, rngs=rngs)
        self.layers = layers.stack_layers(
            lambda rngs: Block(config, rngs=rngs), config.layers, rngs
        )
        self.ln_post = layers.LayerNorm(width, config.eps, rngs=rngs)
        self.proj = layers.Linear(
            width, config.embed_dim, ("embed", "proj"), use_bias=False, rngs=rngs, kernel_init=init
        )
        self.config = config

    def embed(self, pixels: jax.Array) -> jax.Array:
        """[B, S, S, 3] normalized pixels -> [B, 1 + patches, width], class token first."""
        c = self.config
        if pixels.shape[1:] != (c.image_size, c.image_size, 3):
            raise UserError(
                f"clip vision: pictures of shape {pixels.shape[1:]}, the model takes "
                f"{(c.image_size, c.image_size, 3)}; resize them or set vision.image_size."
            )
        x = unfold_patches(pixels.astype(c.dtype), c.patch_size)
        x = self.patch(x)  # [B, patches, width]
        token = jnp.broadcast_to(self.class_token[...].astype(x.dtype), (x.shape[0], 1, c.width))
        x = jnp.concatenate([token, x], axis=1) + self.positions[...].astype(x.dtype)
        return self.ln_pre(x)

    def normalize(self, pixels: jax.Array) -> jax.Array:
        """RGB as uint8 0..255 or float 0..1 -> what the tower takes."""
        return normalize_pixels(pixels, self.config.pixel_mean, self.config.pixel_std)

    def hidden_states(self, pixels: jax.Array) -> jax.Array:
        """All layers' states [layers + 1, B, 1 + patches, width]; 0 is after ln_pre."""
        return run_blocks(self.layers, self.config, self.embed(pixels), keep=True)[1]

    def states_of(self, pixels: jax.Array, layer: int) -> jax.Array:
        """States [B, 1 + patches, width] of one layer, see `blocks_before`.

        No norm is applied; later blocks do not run.
        """
        count = blocks_before(layer, self.config.layers)
        return run_blocks(self.layers, self.config, self.embed(pixels), count=count)[0]

    def patch_features(self, pixels: jax.Array, layer: int = -2) -> jax.Array:
        """Patch states [B, patches, width] of one layer, without the class token."""
        return self.states_of(pixels, layer)[:, 1:]

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """[B, S, S, 3] normalized pixels -> [B, embed_dim] float32, not L2-normalized."""
        x, _ = run_blocks(self.layers, self.config, self.embed(pixels))
        return self.proj(self.ln_post(x[:, 0]).astype(jnp.float32))


class TextTower(nnx.Module):
    """Causal text transformer read at the end-of-text token."""

    def __init__(self, config: TextConfig, *, rngs: nnx.Rngs):
        width = config.width
        self.tokens = layers.Embedding(config.vocab_size, width, ("vocab", "embed"), rngs=rngs)
        self.positions = layers.param(
            rngs, layers.normal_init(0.01), (config.context, width), ("positions", "embed")
        )
        self.layers = layers.stack_layers(
            lambda rngs: Block(config, rngs=rngs), config.layers, rngs
        )
        self.ln_final = layers.LayerNorm(width, config.eps, rngs=rngs)
        self.proj = layers.Linear(
            width,
            config.embed_dim,
            ("embed", "proj"),
            use_bias=False,
            rngs=rngs,
            kernel_init=layers.normal_init(width**-0.5),
        )
        self.config = config

    def embed(self, input_ids: jax.Array) -> jax.Array:  # [B, L] -> [B, L, width]
        """Token plus position embeddings."""
        length = input_ids.shape[1]
        if length > self.config.context:
            raise UserError(
                f"clip text: {length} tokens, the model takes {self.config.context}; "
                "truncate the texts."
            )
        x = self.tokens(input_ids) + self.positions[...][:length]
        return x.astype(self.config.dtype)

    def hidden_states(
        self, input_ids: jax.Array, attention_mask: jax.Array | None = None
    ) -> jax.Array:
        """All layers' states [layers + 1, B, L, width]; 0 is the embeddings."""
        return run_blocks(
            self.layers,
            self.config,
            self.embed(input_ids),
            mask=attention_mask,
            is_causal=True,
            keep=True,
        )[1]

    def __call__(self, input_ids: jax.Array, attention_mask: jax.Array | None = None) -> jax.Array:
        """Texts -> [B, embed_dim] float32, not L2-normalized.

        Args:
          input_ids: [B, L] with the end-of-text token in every row.
          attention_mask: [B, L], true at real tokens. Not needed for right-padded rows: causal
            attention keeps pads after the end-of-text token out of it.
        """
        x, _ = run_blocks(
            self.layers, self.config, self.embed(input_ids), mask=attention_mask, is_causal=True
        )
        eos = self.config.eos_token_id
        # argmax gives the first of equals: of the largest id, or of the matching tokens.
        end = jnp.argmax(input_ids if eos is None else input_ids == eos, axis=1)
        x = jnp.take_along_axis(x, end[:, None, None], axis=1)[:, 0]  # [B, width]
        return self.proj(self.ln_final(x).astype(jnp.float32))


class CLIP(nnx.Module):
    """Both towers and the learned temperature."""

    def __init__(self, config: CLIPConfig, *, rngs: nnx.Rngs):
        self.vision = VisionTower(config.vision, rngs=rngs)
        self.text = TextTower(config.text, rngs=rngs)
        self.logit_scale = layers.param(
            rngs, jax.nn.initializers.constant(INITIAL_LOGIT_SCALE), (), ()
        )
        self.config = config

    def encode_image(self, pixels: jax.Array) -> jax.Array:
        """[B, S, S, 3] normalized pixels -> [B, embed_dim], of length 1."""
        return l2_normalize(self.vision(pixels))

    def encode_text(
        self, input_ids: jax.Array, attention_mask: jax.Array | None = None
    ) -> jax.Array:
        """[B, L] token ids -> [B, embed_dim], of length 1."""
        return l2_normalize(self.text(input_ids, attention_mask))

    def logits(
        self, input_ids: jax.Array, pixels: jax.Array, attention_mask: jax.Array | None = None
    ) -> jax.Array:
        """Scaled cosine similarities [texts, pictures]."""
        texts = self.encode_text(input_ids, attention_mask)
        return jnp.exp(self.logit_scale[...]) * texts @ self.encode_image(pixels).T


def unfold_patches(pixels: jax.Array, patch: int) -> jax.Array:
    """[B, S, S, 3] -> [B, (S / patch)^2, patch * patch * 3]: a convolution as a matmul.

    Patches run row by row, a patch's values by row, column, channel.
    """
    side = pixels.shape[1] // patch
    # Columns and channels in one dimension: a TPU pads 3 channels to the 128 lanes of a register.
    x = pixels.reshape(-1, side, patch, side, patch * 3)
    return x.transpose(0, 1, 3, 2, 4).reshape(-1, side * side, patch * patch * 3)


def normalize_pixels(
    pixels: jax.Array,
    mean: tuple[float, ...] = PIXEL_MEAN,
    std: tuple[float, ...] = PIXEL_STD,
) -> jax.Array:
    """RGB as uint8 0..255 or float 0..1 -> float32 less mean, over deviation, per channel."""
    x = pixels.astype(jnp.float32)
    if jnp.issubdtype(pixels.dtype, jnp.integer):
        x = x / 255.0
    return (x - jnp.array(mean)) / jnp.array(std)


def l2_normalize(x: jax.Array) -> jax.Array:
    """Scales the last axis to length 1, in float32; a zero vector stays zero."""
    x = x.astype(jnp.float32)
    square = jnp.square(x).sum(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(square, 1e-24))


def blocks_before(layer: int, total: int, key: str = "layer") -> int:
    """How many of a tower's `total` blocks run before the states of a layer.

    `layer` counts as transformers' `hidden_states`: 0 is before the blocks, -1 after the last, -2
    (LLaVA-1.5's) after the last but one. `key` named it, for messages.
    """
    count = layer if layer >= 0 else total + 1 + layer
    if not 0 <= count <= total:
        raise UserError(
            f"{key} is {layer}: the vision tower has {total} layers; choose one from "
            f"{-total - 1} to {total}."
        )
    return count


def run_blocks(
    stack: Block,
    config: BlockConfig,
    x: jax.Array,
    *,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    count: int | None = None,
    keep: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """A tower's stacked blocks on x [B, N, width].

    Args:
      stack: made by `layers.stack_layers`.
      config: of the tower.
      mask: [B, N], true where a position is seen; None: everywhere.
      count: the first so many blocks; None: all.
      keep: return every layer's states, too.

    Returns:
      The last states [B, N, width], and all [count + 1, B, N, width] or None.
    """
    if count is not None:
        graphdef, params = nnx.split(stack)
        stack = nnx.merge(graphdef, jax.tree.map(lambda p: p[:count], params))
    if mask is not None:
        mask = mask.astype(bool)[:, None, None, :]  # [B, 1, 1, N]: columns
    length = x.shape[1]
    x, mask = pad_length(x, mask, is_causal=is_causal)

    def body(layer, x, _, key):
        x = layer(x, mask=mask, is_causal=is_causal)
        return x, x[:, :length] if keep else None

    last, states = layers.scan_layers(stack, x, body, remat=config.remat, unroll=config.unroll)
    states = jnp.concatenate([x[None, :, :length], states]) if keep else None
    return last[:, :length], states
