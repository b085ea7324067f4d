"""SigLIP (Zhai et al. 2023) and SigLIP 2 (Tschannen et al. 2025), as transformers has them.

Vision tower: patch projection with bias, positions, CLIP's blocks, ln_post, and a probe that
attends to all patches in place of a class token. Text tower: the same blocks, each token sees all
others, padding too; the state of the last position is projected. Both were trained on texts padded
to a fixed length. NaFlex, SigLIP 2's kind for pictures of any shape, takes a picture as patches
with their number of rows and columns, to which the positions are resized for each picture: of one
number of patches nothing compiles twice.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.clip.network import (
    BLOCK_ACTIVATIONS,
    Block,
    blocks_before,
    check_transformer,
    l2_normalize,
    normalize_pixels,
    run_blocks,
    unfold_patches,
)
from mmqa_jax.models.common import layers

# Both of all channels; of 8 bits this is x / 127.5 - 1.
PIXEL_MEAN = (0.5, 0.5, 0.5)
PIXEL_STD = (0.5, 0.5, 0.5)
# Of the temperature's inverse (its logarithm) and the bias (Zhai et al. 2023, section 3.2).
INITIAL_LOGIT_SCALE = math.log(10.0)
INITIAL_LOGIT_BIAS = -10.0

# Pixels [B, S, S, 3]; of NaFlex patches [B, P, patch * patch * 3] and int32 [B, 2], their rows and
# columns: what follows rows * columns is padding.
Pictures = jax.Array | tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class SiglipVisionConfig:
    """Sizes of the vision tower; the defaults are those of base-patch16-224.

    Attributes:
      image_size: side of the square picture in pixels; of NaFlex, of the grid of positions in
        pixels: patch_size * sqrt(num_patches). Pixels beyond the last whole patch are not read.
      flexible: NaFlex.
      head: whether the tower has its pooling head; one of which patches alone are read may lack it.
      others: as clip.VisionConfig.
    """

    image_size: int = 224
    patch_size: int = 16
    width: int = 768
    layers: int = 12
    heads: int = 12
    mlp_width: int = 3072
    flexible: bool = False
    head: bool = True
    activation: str = "gelu_pytorch_tanh"
    eps: float = 1e-6
    dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"
    unroll: int | bool | None = None

    def __post_init__(self):
        check_transformer("vision", self)
        if self.patch_size > self.image_size:
            raise UserError(
                f"vision.patch_size is {self.patch_size}: larger than vision.image_size = "
                f"{self.image_size}; change one of the two."
            )

    @property
    def pixel_mean(self) -> tuple[float, float, float]:
        """The mean of the training pictures, RGB from 0 to 1."""
        return PIXEL_MEAN

    @property
    def side(self) -> int:
        """Rows, and columns, of the grid of positions."""
        return self.image_size // self.patch_size

    @property
    def patches(self) -> int:
        """Number of positions; of a fixed size also of a picture's patches."""
        return self.side**2

    @property
    def embed_dim(self) -> int:
        """Size of a picture's embedding."""
        return self.width


@dataclasses.dataclass(frozen=True)
class SiglipTextConfig:
    """Sizes of the text tower; the defaults are those of base-patch16-224.

    Attributes:
      vocab_size: number of tokens known.
      length: in tokens, to which every text is padded.
      embed_dim: size of the projected output.
      others: as SiglipVisionConfig.
    """

    vocab_size: int = 32_000
    length: int = 64
    width: int = 768
    layers: int = 12
    heads: int = 12
    mlp_width: int = 3072
    embed_dim: int = 768
    activation: str = "gelu_pytorch_tanh"
    eps: float = 1e-6
    dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"
    unroll: int | bool | None = None

    def __post_init__(self):
        check_transformer("text", self)


@dataclasses.dataclass(frozen=True)
class SiglipConfig:
    """Both towers, which must give vectors of one size."""

    vision: SiglipVisionConfig = SiglipVisionConfig()
    text: SiglipTextConfig = SiglipTextConfig()

    def __post_init__(self):
        if self.vision.embed_dim != self.text.embed_dim:
            raise UserError(
                f"siglip: vision.width is {self.vision.width}, text.embed_dim "
                f"{self.text.embed_dim}; pictures and texts must be embedded in one size."
            )


def siglip_base(
    image_size: int = 224, patch_size: int = 16, vocab_size: int = 32_000
) -> SiglipConfig:
    """google/siglip-base-patch16-224; with 256,000 tokens SigLIP 2's."""
    return SiglipConfig(
        SiglipVisionConfig(image_size=image_size, patch_size=patch_size),
        SiglipTextConfig(vocab_size=vocab_size),
    )


def siglip_large(image_size: int = 256, vocab_size: int = 32_000) -> SiglipConfig:
    """google/siglip-large-patch16-256; with 256,000 tokens SigLIP 2's."""
    sizes = {"width": 1024, "layers": 24, "heads": 16, "mlp_width": 4096}
    return SiglipConfig(
        SiglipVisionConfig(image_size=image_size, **sizes),
        SiglipTextConfig(vocab_size=vocab_size, embed_dim=1024, **sizes),
    )


def siglip_so400m(
    image_size: int = 384, patch_size: int = 14, vocab_size: int = 32_000
) -> SiglipConfig:
    """google/siglip-so400m-patch14-384; with 256,000 tokens SigLIP 2's."""
    sizes = {"width": 1152, "layers": 27, "heads": 16, "mlp_width": 4304}
    return SiglipConfig(
        SiglipVisionConfig(image_size=image_size, patch_size=patch_size, **sizes),
        SiglipTextConfig(vocab_size=vocab_size, embed_dim=1152, **sizes),
    )


class PoolingHead(nnx.Module):
    """A learned probe attends to all patches; then x + mlp(norm(x))."""

    def __init__(self, config: SiglipVisionConfig, *, rngs: nnx.Rngs):
        width, hidden = config.width, config.mlp_width
        init = layers.normal_init(width**-0.5)
        self.probe = layers.param(rngs, init, (width,), ("embed",))
        # Of queries, keys and values, as torch's MultiheadAttention keeps them.
        self.kernel = layers.param(rngs, init, (width, 3, width), ("embed", None, "heads"))
        self.bias = layers.param(rngs, layers.zeros_init, (3, width), (None, "heads"))
        self.out = layers.Linear(width, width, ("heads", "embed"), rngs=rngs, kernel_init=init)
        self.norm = layers.LayerNorm(width, config.eps, rngs=rngs)
        self.mlp_in = layers.Linear(width, hidden, ("embed", "mlp"), rngs=rngs, kernel_init=init)
        self.mlp_out = layers.Linear(
            hidden, width, ("mlp", "embed"), rngs=rngs, kernel_init=layers.normal_init(hidden**-0.5)
        )
        self.config = config

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """[B, N, width], mask bool [B, N] -> [B, width]."""
        probe = jnp.broadcast_to(self.probe[...].astype(x.dtype), (x.shape[0], 1, x.shape[-1]))
        kernel, bias = (p[...].astype(x.dtype) for p in (self.kernel, self.bias))
        q, k, v = (
            layers.split_heads(layers.product(y, kernel[:, n], 0) + bias[n], self.config.heads)
            for n, y in enumerate((probe, x, x))
        )
        seen = None if mask is None else mask[:, None, None, :]
        x = self.out(layers.merge_heads(layers.attention(q, k, v, mask=seen)))[:, 0]
        activation = BLOCK_ACTIVATIONS[self.config.activation]
        return x + self.mlp_out(activation(self.mlp_in(self.norm(x))))


class SiglipVisionTower(nnx.Module):
    """Vision transformer; pictures must be normalized (`normalize`)."""

    def __init__(self, config: SiglipVisionConfig, *, rngs: nnx.Rngs):
        width = config.width
        self.patch = layers.Linear(
            config.patch_size**2 * 3,
            width,
            ("patch", "embed"),
            rngs=rngs,
            kernel_init=layers.normal_init((config.patch_size**2 * 3) ** -0.5),
        )
        self.positions = layers.param(
            rngs, layers.normal_init(width**-0.5), (config.patches, width), ("positions", "embed")
        )
        self.layers = layers.stack_layers(
            lambda rngs: Block(config, rngs=rngs), config.layers, rngs
        )
        self.ln_post = layers.LayerNorm(width, config.eps, rngs=rngs)
        if config.head:
            self.head = PoolingHead(config, rngs=rngs)
        self.config = config

    def normalize(self, pictures: Pictures) -> Pictures:
        """Values as uint8 0..255 or float 0..1 -> what the tower takes."""
        if isinstance(pictures, tuple):
            patches, shapes = pictures
            pixels = patches.reshape(*patches.shape[:2], -1, 3)
            return normalize_pixels(pixels, PIXEL_MEAN, PIXEL_STD).reshape(patches.shape), shapes
        return normalize_pixels(pictures, PIXEL_MEAN, PIXEL_STD)

    def embed(self, pictures: Pictures) -> tuple[jax.Array, jax.Array | None]:
        """Normalized pictures -> [B, N, width], and of NaFlex which are there, bool [B, N]."""
        c = self.config
        if isinstance(pictures, tuple) != c.flexible:
            kind = "patches and their rows and columns" if c.flexible else "pixels"
            raise UserError(f"siglip vision: the tower takes {kind}; prepare the pictures for it.")
        if isinstance(pictures, tuple):
            patches, shapes = pictures
            positions = resized_positions(
                self.positions[...].reshape(c.side, c.side, c.width), shapes, patches.shape[1]
            )
            mask = jnp.arange(patches.shape[1]) < (shapes[:, :1] * shapes[:, 1:])  # [B, N]
            x = self.patch(patches.astype(c.dtype))
            return x + positions.astype(x.dtype), mask
        if pictures.shape[1:] != (c.image_size, c.image_size, 3):
            raise UserError(
                f"siglip vision: pictures of shape {pictures.shape[1:]}, the model takes "
                f"{(c.image_size, c.image_size, 3)}; resize them or set vision.image_size."
            )
        read = c.side * c.patch_size
        pixels = pictures[:, :read, :read].astype(c.dtype)
        x = self.patch(unfold_patches(pixels, c.patch_size))  # [B, patches, width]
        return x + self.positions[...].astype(x.dtype), None

    def hidden_states(self, pictures: Pictures) -> jax.Array:
        """All layers' states [layers + 1, B, N, width]; 0 is before the blocks."""
        x, mask = self.embed(pictures)
        return run_blocks(self.layers, self.config, x, mask=mask, keep=True)[1]

    def states_of(self, pictures: Pictures, layer: int) -> jax.Array:
        """States [B, N, width] of one layer, see `clip.blocks_before`.

        No norm is applied; later blocks do not run.
        """
        x, mask = self.embed(pictures)
        count = blocks_before(layer, self.config.layers)
        return run_blocks(self.layers, self.config, x, mask=mask, count=count)[0]

    def __call__(self, pictures: Pictures) -> jax.Array:
        """Normalized pictures -> [B, width] float32, not L2-normalized."""
        x, mask = self.embed(pictures)
        x, _ = run_blocks(self.layers, self.config, x, mask=mask)
        return self.head(self.ln_post(x), mask).astype(jnp.float32)


class SiglipTextTower(nnx.Module):
    """Text transformer without a causal mask, read at the last position."""

    def __init__(self, config: SiglipTextConfig, *, rngs: nnx.Rngs):
        width = config.width
        init = layers.normal_init(width**-0.5)
        self.tokens = layers.Embedding(
            config.vocab_size, width, ("vocab", "embed"), rngs=rngs, init=init
        )
        self.positions = layers.param(rngs, init, (config.length, width), ("positions", "embed"))
        self.layers = layers.stack_layers(
            lambda rngs: Block(config, rngs=rngs), config.layers, rngs
        )
        self.ln_final = layers.LayerNorm(width, config.eps, rngs=rngs)
        self.proj = layers.Linear(
            width, config.embed_dim, ("embed", "proj"), rngs=rngs, kernel_init=init
        )
        self.config = config

    def embed(self, input_ids: jax.Array) -> jax.Array:  # [B, L] -> [B, L, width]
        """Token plus position embeddings."""
        length = input_ids.shape[1]
        if length > self.config.length:
            raise UserError(
                f"siglip text: {length} tokens, the model takes {self.config.length}; truncate "
                "the texts."
            )
        x = self.tokens(input_ids) + self.positions[...][:length]
        return x.astype(self.config.dtype)

    def hidden_states(
        self, input_ids: jax.Array, attention_mask: jax.Array | None = None
    ) -> jax.Array:
        """All layers' states [layers + 1, B, L, width]; 0 is the embeddings."""
        x = self.embed(input_ids)
        return run_blocks(self.layers, self.config, x, mask=attention_mask, keep=True)[1]

    def __call__(self, input_ids: jax.Array, attention_mask: jax.Array | None = None) -> jax.Array:
        """Texts -> [B, embed_dim] float32, not L2-normalized.

        Args:
          input_ids: [B, L], padded to `length` as in training.
          attention_mask: [B, L], true at tokens that are seen; None, as in training: all, padding
            too.
        """
        x, _ = run_blocks(self.layers, self.config, self.embed(input_ids), mask=attention_mask)
        return self.proj(self.ln_final(x[:, -1]).astype(jnp.float32))


class Siglip(nnx.Module):
    """Both towers, the learned temperature and bias."""

    def __init__(self, config: SiglipConfig, *, rngs: nnx.Rngs):
        self.vision = SiglipVisionTower(config.vision, rngs=rngs)
        self.text = SiglipTextTower(config.text, rngs=rngs)
        constant = jax.nn.initializers.constant
        self.logit_scale = layers.param(rngs, constant(INITIAL_LOGIT_SCALE), (), ())
        self.logit_bias = layers.param(rngs, constant(INITIAL_LOGIT_BIAS), (), ())
        self.config = config

    def encode_image(self, pictures: Pictures) -> jax.Array:
        """Normalized pictures -> [B, width], of length 1."""
        return l2_normalize(self.vision(pictures))

    def encode_text(
        self, input_ids: jax.Array, attention_mask: jax.Array | None = None
    ) -> jax.Array:
        """[B, L] token ids -> [B, embed_dim], of length 1."""
        return l2_normalize(self.text(input_ids, attention_mask))

    def logits(
        self, input_ids: jax.Array, pictures: Pictures, attention_mask: jax.Array | None = None
    ) -> jax.Array:
        """Computes each pair's logit, whose sigmoid is P(they belong together): [texts, B]."""
        texts = self.encode_text(input_ids, attention_mask)
        cosines = texts @ self.encode_image(pictures).T
        return jnp.exp(self.logit_scale[...]) * cosines + self.logit_bias[...]


def resized_positions(positions: jax.Array, shapes: jax.Array, count: int) -> jax.Array:
    """Positions of a grid, resized to that of each picture.

    As torch's `interpolate`, bilinear with `antialias`, from weights of rows and columns that are
    computed for every patch: the pictures' shapes are values, not sizes of arrays.

    Args:
      positions: float32 [g, g, width].
      shapes: int32 [B, 2], rows and columns.
      count: of patches N, with padding.

    Returns:
      [B, N, width]; padding has the first patch's, as in transformers.
    """
    rows, columns = shapes[:, :1], shapes[:, 1:]  # [B, 1]
    number = jnp.arange(count)
    number = jnp.where(number < rows * columns, number, 0)  # [B, N]
    of_row = _triangle(number // columns, rows, positions.shape[0])  # [B, N, g]
    of_column = _triangle(number % columns, columns, positions.shape[1])
    weights = of_row[..., :, None] * of_column[..., None, :]  # [B, N, g, g]
    return jnp.einsum("bnij,ijw->bnw", weights, positions, precision=jax.lax.Precision.HIGHEST)


def _triangle(place: jax.Array, target: jax.Array, size: int) -> jax.Array:
    """Weights of `size` inputs for the outputs `place` [B, N] of `target` [B, 1]: [B, N, size]."""
    scale = size / target.astype(jnp.float32)  # [B, 1]
    wide = jnp.maximum(scale, 1.0)[..., None]
    center = ((place + 0.5) * scale)[..., None]  # [B, N, 1]
    weights = jnp.maximum(1 - jnp.abs(jnp.arange(size) + 0.5 - center) / wide, 0)
    return weights / weights.sum(-1, keepdims=True)
