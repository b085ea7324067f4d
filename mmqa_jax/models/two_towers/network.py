"""CLIP (Radford et al. 2021; openai/CLIP clip/model.py), SigLIP (Zhai et al. 2023) and SigLIP 2
(Tschannen et al. 2025), as transformers has them: two towers of the same blocks.

CLIP's vision tower: patch projection (no bias), a class token, positions, ln_pre, pre-LN blocks,
ln_post of the class token, projection. Its text tower: token and position embeddings, causal pre-LN
blocks, ln_final, the state at the end-of-text token, projection.

SigLIP's vision tower has a bias in the patch projection, and a probe that attends to all patches in
place of a class token. In its text tower each token sees all others, padding too; the state of the
last position is projected. Both were trained on texts padded to a fixed length. NaFlex, SigLIP 2's
kind for pictures of any shape, takes a picture as patches with their number of rows and columns, to
which the positions are resized for each picture: of one number of patches nothing compiles twice.

None has dropout.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common import layers
from mmqa_jax.models.common.array_layout import as_rows, pad_length
from mmqa_jax.models.two_towers import config as sizes

# Pixels [B, S, S, 3]; of NaFlex patches [B, P, patch * patch * 3] and int32 [B, 2], their rows and
# columns: what follows rows * columns is padding.
Pictures = jax.Array | tuple[jax.Array, jax.Array]


class Block(nnx.Module):
    """Pre-LN transformer block: x + attn(ln_1(x)), then x + mlp(ln_2(x))."""

    def __init__(self, config: sizes.BlockConfig, *, rngs: nnx.Rngs):
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
        linears = self.q, self.k, self.v
        biases = layers.biases_apart(*linears)
        apart = {} if biases is None else {"constant_bias": True}
        q, k, v = (layers.split_heads(f(y, **apart).reshape(shape), heads) for f in linears)
        same = {"mask": mask, "is_causal": is_causal, "biases": biases}
        y = layers.attention(q, k, v, implementation=self.config.attention, **same)
        x = x + self.out(layers.keep_kernel(layers.merge_heads(y)).reshape(x.shape))
        activation = sizes.BLOCK_ACTIVATIONS[self.config.activation]
        return (x + self.mlp_out(activation(self.mlp_in(self.ln_2(x))))).reshape(shape)


class PoolingHead(nnx.Module):
    """A learned probe attends to all patches; then x + mlp(norm(x))."""

    def __init__(self, config: sizes.SiglipVisionConfig, *, rngs: nnx.Rngs):
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
        activation = sizes.BLOCK_ACTIVATIONS[self.config.activation]
        return x + self.mlp_out(activation(self.mlp_in(self.norm(x))))


class VisionTower(nnx.Module):
    """Vision transformer; pictures must be normalized (`normalize`)."""

    def __init__(self, config: sizes.VisionConfig | sizes.SiglipVisionConfig, *, rngs: nnx.Rngs):
        width, of_patch = config.width, config.patch_size**2 * 3
        init = layers.normal_init(width**-0.5)
        self.is_clip = isinstance(config, sizes.VisionConfig)
        self.patch = (
            layers.Linear(of_patch, width, ("patch", "embed"), use_bias=False, rngs=rngs)
            if self.is_clip
            else layers.Linear(
                of_patch,
                width,
                ("patch", "embed"),
                rngs=rngs,
                kernel_init=layers.normal_init(of_patch**-0.5),
            )
        )
        if self.is_clip:
            self.class_token = layers.param(rngs, init, (width,), ("embed",))
        self.positions = layers.param(
            rngs, init, (self.is_clip + config.patches, width), ("positions", "embed")
        )
        if self.is_clip:
            self.ln_pre = layers.LayerNorm(width, config.eps, rngs=rngs)
        self.layers = layers.stack_layers(
            lambda rngs: Block(config, rngs=rngs), config.layers, rngs
        )
        self.ln_post = layers.LayerNorm(width, config.eps, rngs=rngs)
        if self.is_clip:
            self.proj = layers.Linear(
                width,
                config.embed_dim,
                ("embed", "proj"),
                use_bias=False,
                rngs=rngs,
                kernel_init=init,
            )
        elif config.head:
            self.head = PoolingHead(config, rngs=rngs)
        self.config = config

    def normalize(self, pictures: Pictures) -> Pictures:
        """RGB as uint8 0..255 or float 0..1 -> what the tower takes."""
        mean, std = self.config.pixel_mean, self.config.pixel_std
        if isinstance(pictures, tuple):
            patches, shapes = pictures
            pixels = patches.reshape(*patches.shape[:2], -1, 3)
            return normalize_pixels(pixels, mean, std).reshape(patches.shape), shapes
        return normalize_pixels(pictures, mean, std)

    def embed(self, pictures: Pictures) -> tuple[jax.Array, jax.Array | None]:
        """Normalized pictures -> [B, N, width], a class token first, and the mask of NaFlex.

        The mask is bool [B, N], true at patches that are there.
        """
        c = self.config
        flexible = not self.is_clip and c.flexible
        if isinstance(pictures, tuple) != flexible:
            kind = "patches and their rows and columns" if flexible else "pixels"
            raise UserError(
                f"{c.family} vision: the tower takes {kind}; prepare the pictures for it."
            )
        if isinstance(pictures, tuple):
            patches, shapes = pictures
            side = c.image_size // c.patch_size
            positions = resized_positions(
                self.positions[...].reshape(side, side, c.width), shapes, patches.shape[1]
            )
            mask = jnp.arange(patches.shape[1]) < (shapes[:, :1] * shapes[:, 1:])  # [B, N]
            x = self.patch(patches.astype(c.dtype))
            return x + positions.astype(x.dtype), mask
        if pictures.shape[1:] != (c.image_size, c.image_size, 3):
            raise UserError(
                f"{c.family} vision: pictures of shape {pictures.shape[1:]}, the model takes "
                f"{(c.image_size, c.image_size, 3)}; resize them or set vision.image_size."
            )
        read = c.image_size // c.patch_size * c.patch_size
        pixels = pictures[:, :read, :read].astype(c.dtype)
        x = self.patch(unfold_patches(pixels, c.patch_size))  # [B, patches, width]
        if self.is_clip:
            token = self.class_token[...].astype(x.dtype)
            token = jnp.broadcast_to(token, (x.shape[0], 1, c.width))
            x = jnp.concatenate([token, x], axis=1)
        x = x + self.positions[...].astype(x.dtype)
        return (self.ln_pre(x) if self.is_clip else x), None

    def _run(
        self, pictures: Pictures, *, count: int | None = None, keep: bool = False
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        x, mask = self.embed(pictures)
        return *run_blocks(self.layers, self.config, x, mask=mask, count=count, keep=keep), mask

    def hidden_states(self, pictures: Pictures) -> jax.Array:
        """All layers' states [layers + 1, B, N, width]; 0 is before the blocks."""
        return self._run(pictures, keep=True)[1]

    def states_of(self, pictures: Pictures, layer: int) -> jax.Array:
        """States [B, N, width] of one layer, see `blocks_before`.

        No norm is applied; later blocks do not run.
        """
        return self._run(pictures, count=blocks_before(layer, self.config.layers))[0]

    def patch_features(self, pixels: jax.Array, layer: int = -2) -> jax.Array:
        """Patch states [B, patches, width] of one layer of CLIP's, without the class token."""
        return self.states_of(pixels, layer)[:, 1:]

    def __call__(self, pictures: Pictures) -> jax.Array:
        """Normalized pictures -> [B, embed_dim] float32, not L2-normalized."""
        x, _, mask = self._run(pictures)
        if self.is_clip:
            return self.proj(self.ln_post(x[:, 0]).astype(jnp.float32))
        return self.head(self.ln_post(x), mask).astype(jnp.float32)


class TextTower(nnx.Module):
    """Text transformer.

    CLIP's is causal and read at the end-of-text token, SigLIP's is read at the last one.
    """

    def __init__(self, config: sizes.TextConfig | sizes.SiglipTextConfig, *, rngs: nnx.Rngs):
        width = config.width
        self.is_clip = isinstance(config, sizes.TextConfig)
        init = layers.normal_init(width**-0.5)
        names = ("vocab", "embed")
        self.tokens = (
            layers.Embedding(config.vocab_size, width, names, rngs=rngs)
            if self.is_clip
            else layers.Embedding(config.vocab_size, width, names, rngs=rngs, init=init)
        )
        self.positions = layers.param(
            rngs,
            layers.normal_init(0.01) if self.is_clip else init,
            (config.length, width),
            ("positions", "embed"),
        )
        self.layers = layers.stack_layers(
            lambda rngs: Block(config, rngs=rngs), config.layers, rngs
        )
        self.ln_final = layers.LayerNorm(width, config.eps, rngs=rngs)
        self.proj = layers.Linear(
            width,
            config.embed_dim,
            ("embed", "proj"),
            use_bias=not self.is_clip,
            rngs=rngs,
            kernel_init=init,
        )
        self.config = config

    def embed(self, input_ids: jax.Array) -> jax.Array:  # [B, L] -> [B, L, width]
        """Token plus position embeddings."""
        c, length = self.config, input_ids.shape[1]
        if length > c.length:
            raise UserError(
                f"{c.family} text: {length} tokens, the model takes {c.length}; truncate the texts."
            )
        x = self.tokens(input_ids) + self.positions[...][:length]
        return x.astype(c.dtype)

    def _run(
        self, input_ids: jax.Array, mask: jax.Array | None, *, keep: bool = False
    ) -> tuple[jax.Array, jax.Array | None]:
        x = self.embed(input_ids)
        return run_blocks(self.layers, self.config, x, mask=mask, is_causal=self.is_clip, keep=keep)

    def hidden_states(
        self, input_ids: jax.Array, attention_mask: jax.Array | None = None
    ) -> jax.Array:
        """All layers' states [layers + 1, B, L, width]; 0 is the embeddings."""
        return self._run(input_ids, attention_mask, keep=True)[1]

    def __call__(self, input_ids: jax.Array, attention_mask: jax.Array | None = None) -> jax.Array:
        """Texts -> [B, embed_dim] float32, not L2-normalized.

        Args:
          input_ids: [B, L], of CLIP with the end-of-text token in every row, of SigLIP padded to
            `length` as in training.
          attention_mask: [B, L], true at tokens that are seen; None: all. CLIP needs none for
            right-padded rows: causal attention keeps pads after the end-of-text token out of it.
            SigLIP was trained without one.
        """
        x, _ = self._run(input_ids, attention_mask)
        if self.is_clip:
            eos = self.config.eos_token_id
            # argmax gives the first of equals: of the largest id, or of the matching tokens.
            end = jnp.argmax(input_ids if eos is None else input_ids == eos, axis=1)
            x = jnp.take_along_axis(x, end[:, None, None], axis=1)[:, 0]  # [B, width]
        else:
            x = x[:, -1]
        return self.proj(self.ln_final(x).astype(jnp.float32))


class TwoTowers(nnx.Module):
    """Both towers and the learned temperature, of SigLIP a bias, too."""

    def __init__(self, config: sizes.CLIPConfig | sizes.SiglipConfig, *, rngs: nnx.Rngs):
        self.vision = VisionTower(config.vision, rngs=rngs)
        self.text = TextTower(config.text, rngs=rngs)
        is_clip = isinstance(config, sizes.CLIPConfig)
        scale = sizes.INITIAL_LOGIT_SCALE if is_clip else sizes.SIGLIP_LOGIT_SCALE
        constant = jax.nn.initializers.constant
        self.logit_scale = layers.param(rngs, constant(scale), (), ())
        if not is_clip:
            self.logit_bias = layers.param(rngs, constant(sizes.SIGLIP_LOGIT_BIAS), (), ())
        self.config = config

    def encode_image(self, pictures: Pictures) -> jax.Array:
        """Normalized pictures -> [B, embed_dim], of length 1."""
        return l2_normalize(self.vision(pictures))

    def encode_text(
        self, input_ids: jax.Array, attention_mask: jax.Array | None = None
    ) -> jax.Array:
        """[B, L] token ids -> [B, embed_dim], of length 1."""
        return l2_normalize(self.text(input_ids, attention_mask))

    def logits(
        self, input_ids: jax.Array, pictures: Pictures, attention_mask: jax.Array | None = None
    ) -> jax.Array:
        """Scaled cosine similarities [texts, pictures].

        Of SigLIP less the bias: each pair's logit, whose sigmoid is P(they belong together).
        """
        texts = self.encode_text(input_ids, attention_mask)
        if isinstance(self.config, sizes.CLIPConfig):
            return jnp.exp(self.logit_scale[...]) * texts @ self.encode_image(pictures).T
        cosines = texts @ self.encode_image(pictures).T
        return jnp.exp(self.logit_scale[...]) * cosines + self.logit_bias[...]


class CLIP(TwoTowers):
    """CLIP, by which name its weights are kept."""


class Siglip(TwoTowers):
    """SigLIP, by which name its weights are kept."""


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
    mean: tuple[float, ...] = sizes.PIXEL_MEAN,
    std: tuple[float, ...] = sizes.PIXEL_STD,
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
    config: sizes.BlockConfig,
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
    return positions_at(positions, jnp.stack([number // columns, number % columns], -1), shapes)


def positions_at(positions: jax.Array, places: jax.Array, shapes: jax.Array) -> jax.Array:
    """Resizes `positions` at `places` alone, int32 [B, N, 2] of rows and columns: [B, N, W]."""
    of_row = _triangle(places[..., 0], shapes[:, :1], positions.shape[0])  # [B, N, g]
    of_column = _triangle(places[..., 1], shapes[:, 1:], positions.shape[1])
    weights = of_row[..., :, None] * of_column[..., None, :]  # [B, N, g, g]
    return jnp.einsum("bnij,ijw->bnw", weights, positions, precision=jax.lax.Precision.HIGHEST)


def _triangle(place: jax.Array, target: jax.Array, size: int) -> jax.Array:
    """Weights of `size` inputs for the outputs `place` [B, N] of `target` [B, 1]: [B, N, size]."""
    scale = size / target.astype(jnp.float32)  # [B, 1]
    wide = jnp.maximum(scale, 1.0)[..., None]
    center = ((place + 0.5) * scale)[..., None]  # [B, N, 1]
    weights = jnp.maximum(1 - jnp.abs(jnp.arange(size) + 0.5 - center) / wide, 0)
    return weights / weights.sum(-1, keepdims=True)
