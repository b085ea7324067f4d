"""What both MCANs share (Yu et al. 2019, Deep Modular Co-Attention Networks).

An encoder of self-attention layers over the question, a decoder over the image whose layers
attend to the image and then to the encoded question, a learned pooling of each, and the norm of
their sum. Prophet's variant and openvqa's differ in the norm, in the bias of the values and in
the rotary positions of the image.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.nn.initializers import Initializer

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.layers import (
    LayerNorm,
    Linear,
    Names,
    attention,
    dropout,
    merge_heads,
    ones_init,
    param,
    scan_layers,
    split_heads,
    split_key,
    stack_layers,
    zeros_init,
)

_CLOSED = -1e9  # the published score of a closed token


def uniform_init(bound: float) -> Initializer:
    """Uniform within -bound..bound; torch's Linear: 1 / sqrt(in), its LSTM: 1 / sqrt(hidden)."""
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


def torch_linear(
    in_features: int, out_features: int, names: Names, *, rngs: nnx.Rngs, use_bias: bool = True
) -> Linear:
    """A Linear whose kernel starts as torch's does (MCAN starts from no checkpoint)."""
    init = uniform_init(in_features**-0.5)
    return Linear(in_features, out_features, names, rngs=rngs, use_bias=use_bias, kernel_init=init)


class UnbiasedLayerNorm(nnx.Module):
    """openvqa's LayerNorm (openvqa/ops/layer_norm.py): divides by (standard deviation + eps).

    The deviation is the unbiased one, with features - 1 in its denominator. Computed in float32,
    returned in x's dtype.
    """

    def __init__(self, features: int, eps: float, *, rngs: nnx.Rngs, name: str = "embed"):
        self.scale = param(rngs, ones_init, (features,), (name,))
        self.bias = param(rngs, zeros_init, (features,), (name,))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        centred = x32 - x32.mean(-1, keepdims=True)
        deviation = jnp.sqrt(jnp.square(centred).sum(-1, keepdims=True) / (x.shape[-1] - 1))
        y = self.scale[...] * centred / (deviation + self.eps) + self.bias[...]
        return y.astype(x.dtype)


NORMS = {"layer": LayerNorm, "unbiased": UnbiasedLayerNorm}


@dataclasses.dataclass(frozen=True)
class FusionConfig:
    """Sizes of encoder, decoder and pooling; the defaults are openvqa's mcan_small.

    Attributes:
      hidden, heads, mlp, layers: of encoder and decoder each.
      flat_mlp, glimpses, flat_out: inner width and number of poolings, size of the latent.
      value_bias: whether the values have a bias (openvqa: yes, Prophet: no).
      norm: `unbiased` (openvqa's own) or `layer`.
      eps: of the norms.
      dropout: on attention weights, on the residual branches and inside the MLPs.
      dtype: compute type; norms, softmax and the latent stay float32.
      attention: see layers.attention.
      remat, unroll: see layers.scan_layers.
    """

    hidden: int = 512
    heads: int = 8
    mlp: int = 2048
    layers: int = 6
    flat_mlp: int = 512
    glimpses: int = 1
    flat_out: int = 1024
    value_bias: bool = True
    norm: str = "unbiased"
    eps: float = 1e-6
    dropout: float = 0.1
    dtype: str = "float32"
    attention: str = "xla"
    remat: str = "none"
    unroll: int | bool | None = None

    def __post_init__(self):
        if self.hidden % self.heads:
            raise UserError(
                f"mcan: hidden {self.hidden} is not a multiple of heads {self.heads}; choose sizes "
                "that divide."
            )
        if self.norm not in NORMS:
            raise UserError(
                f"mcan: norm {self.norm!r} is not known; use one of {', '.join(NORMS)}."
            )
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"mcan: dropout {self.dropout}; give a rate from 0 to below 1.")


@dataclasses.dataclass(frozen=True)
class Rotation:
    """Cosines and signed sines [tokens, head_dim] that turn queries and keys, float32."""

    cos: np.ndarray
    sin: np.ndarray


def grid_rotation(grid: int, head_dim: int, base: float) -> Rotation:
    """Two-dimensional rotary positions of a grid x grid picture, row by row.

    prophet/stage1/model/rope2d.py: the first half of a head turns with the column, the second
    with the row; 2n and 2n + 1 are a pair, with angle position * base^(-2n / (head_dim / 2)).
    sin is negative at even places, so that a pair (a, b) becomes (a cos - b sin, b cos + a sin).
    """
    half = head_dim // 2
    exponents = (np.arange(0, half, 2) / half).astype(np.float32)
    # The power in float64, the rest in float32: the bits of torch's float32 table.
    frequencies = np.float32(1) / (base ** exponents.astype(np.float64)).astype(np.float32)
    angles = np.arange(grid, dtype=np.float32)[:, None] * frequencies  # [grid, half / 2]
    cos = np.repeat(np.cos(angles), 2, axis=1)  # [grid, half]
    sin = np.stack([-np.sin(angles), np.sin(angles)], axis=-1).reshape(grid, half)

    def over_grid(x: np.ndarray) -> np.ndarray:
        by_column = np.broadcast_to(x[None], (grid, grid, half))
        by_row = np.broadcast_to(x[:, None], (grid, grid, half))
        return np.concatenate([by_column, by_row], axis=-1).reshape(grid * grid, head_dim)

    return Rotation(over_grid(cos), over_grid(sin))


def rotate_pairs(x: jax.Array, rotation: Rotation) -> jax.Array:
    """x [B, tokens, heads, head_dim], turned in float32."""
    x32 = x.astype(jnp.float32)
    partner = x32.reshape(*x.shape[:-1], -1, 2)[..., ::-1].reshape(x.shape)
    turned = x32 * rotation.cos[:, None] + partner * rotation.sin[:, None]
    return turned.astype(x.dtype)


class Attention(nnx.Module):
    """Multi-head attention of x over a context."""

    def __init__(self, config: FusionConfig, *, rngs: nnx.Rngs):
        size = config.hidden
        self.query = torch_linear(size, size, ("embed", "heads"), rngs=rngs)
        self.key = torch_linear(size, size, ("embed", "heads"), rngs=rngs)
        self.value = torch_linear(
            size, size, ("embed", "heads"), rngs=rngs, use_bias=config.value_bias
        )
        self.out = torch_linear(size, size, ("heads", "embed"), rngs=rngs)
        self.config = config

    def __call__(
        self,
        x: jax.Array,
        context: jax.Array,
        mask: jax.Array | None,
        *,
        rotation: Rotation | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """x [B, Lx, H], context [B, Lc, H], mask bool [B, Lc] or None (all open) -> [B, Lx, H]."""
        heads = self.config.heads
        query = split_heads(self.query(x), heads)
        key, value = (split_heads(f(context), heads) for f in (self.key, self.value))
        if rotation is not None:
            query, key = rotate_pairs(query, rotation), rotate_pairs(key, rotation)
        attended = attention(
            query,
            key,
            value,
            mask=None if mask is None else mask[:, None, None],
            dropout_rate=self.config.dropout,
            dropout_key=dropout_key,
            implementation=self.config.attention,
        )
        return self.out(merge_heads(attended))


class FeedForward(nnx.Module):
    """Linear, ReLU, dropout, linear: [..., in] -> [..., out]."""

    def __init__(
        self,
        in_features: int,
        inner: int,
        out_features: int,
        rate: float,
        *,
        rngs: nnx.Rngs,
        out_name: str | None = "embed",
    ):
        self.up = torch_linear(in_features, inner, ("embed", "mlp"), rngs=rngs)
        self.down = torch_linear(inner, out_features, ("mlp", out_name), rngs=rngs)
        self.rate = rate

    def __call__(self, x: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        return self.down(dropout(jax.nn.relu(self.up(x)), self.rate, dropout_key))


class EncoderLayer(nnx.Module):
    """Self-attention and MLP, each added to its input and normed afterwards."""

    def __init__(self, config: FusionConfig, *, rngs: nnx.Rngs):
        norm = NORMS[config.norm]
        self.attention = Attention(config, rngs=rngs)
        self.attention_norm = norm(config.hidden, config.eps, rngs=rngs)
        self.ffn = FeedForward(config.hidden, config.mlp, config.hidden, config.dropout, rngs=rngs)
        self.ffn_norm = norm(config.hidden, config.eps, rngs=rngs)
        self.rate = config.dropout

    def __call__(
        self, x: jax.Array, mask: jax.Array, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """x [B, L, H], mask bool [B, L] -> [B, L, H]."""
        keys = split_key(dropout_key, 4)
        y = self.attention(x, x, mask, dropout_key=keys[0])
        x = self.attention_norm(x + dropout(y, self.rate, keys[1]))
        y = self.ffn(x, keys[2])
        return self.ffn_norm(x + dropout(y, self.rate, keys[3]))


class DecoderLayer(nnx.Module):
    """Self-attention of the image, attention to the question, MLP; post-norm."""

    def __init__(self, config: FusionConfig, *, rngs: nnx.Rngs):
        norm = NORMS[config.norm]
        self.attention = Attention(config, rngs=rngs)
        self.attention_norm = norm(config.hidden, config.eps, rngs=rngs)
        self.guided = Attention(config, rngs=rngs)
        self.guided_norm = norm(config.hidden, config.eps, rngs=rngs)
        self.ffn = FeedForward(config.hidden, config.mlp, config.hidden, config.dropout, rngs=rngs)
        self.ffn_norm = norm(config.hidden, config.eps, rngs=rngs)
        self.rate = config.dropout

    def __call__(
        self,
        x: jax.Array,
        question: jax.Array,
        mask: jax.Array | None,
        question_mask: jax.Array,
        *,
        rotation: Rotation | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """x [B, R, H], question [B, L, H], masks bool [B, R] (or None) and [B, L] -> [B, R, H]."""
        keys = split_key(dropout_key, 6)
        y = self.attention(x, x, mask, rotation=rotation, dropout_key=keys[0])
        x = self.attention_norm(x + dropout(y, self.rate, keys[1]))
        y = self.guided(x, question, question_mask, dropout_key=keys[2])
        x = self.guided_norm(x + dropout(y, self.rate, keys[3]))
        y = self.ffn(x, keys[4])
        return self.ffn_norm(x + dropout(y, self.rate, keys[5]))


class AttentionFlatten(nnx.Module):
    """AttFlat: an MLP weighs the tokens, once per glimpse; their weighted sums are projected."""

    def __init__(self, config: FusionConfig, *, rngs: nnx.Rngs):
        self.mlp = FeedForward(
            config.hidden,
            config.flat_mlp,
            config.glimpses,
            config.dropout,
            rngs=rngs,
            out_name=None,
        )
        self.merge = torch_linear(
            config.hidden * config.glimpses, config.flat_out, ("embed", "proj"), rngs=rngs
        )

    def __call__(
        self, x: jax.Array, mask: jax.Array | None, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """x [B, L, H], mask bool [B, L] or None -> [B, flat_out]."""
        scores = self.mlp(x, dropout_key).astype(jnp.float32)  # [B, L, glimpses]
        if mask is not None:
            scores = jnp.where(mask[:, :, None], scores, _CLOSED)
        weights = jax.nn.softmax(scores, axis=1).astype(x.dtype)
        pooled = jnp.einsum("blg,blh->bgh", weights, x)
        return self.merge(pooled.reshape(x.shape[0], -1))


class Fusion(nnx.Module):
    """Question and image features to one latent vector."""

    def __init__(self, config: FusionConfig, *, rngs: nnx.Rngs):
        self.encoder = stack_layers(lambda r: EncoderLayer(config, rngs=r), config.layers, rngs)
        self.decoder = stack_layers(lambda r: DecoderLayer(config, rngs=r), config.layers, rngs)
        self.flatten_question = AttentionFlatten(config, rngs=rngs)
        self.flatten_image = AttentionFlatten(config, rngs=rngs)
        self.norm = NORMS[config.norm](config.flat_out, config.eps, rngs=rngs, name="proj")
        self.config = config

    def __call__(
        self,
        question: jax.Array,
        image: jax.Array,
        question_mask: jax.Array,
        image_mask: jax.Array | None,
        *,
        rotation: Rotation | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The latent that answers and similar questions are read from.

        question [B, L, H], image [B, R, H]; masks bool [B, L] and [B, R], True = a real token,
        None = all are. Returns [B, flat_out] float32.
        """
        keys = split_key(dropout_key, 4)
        config = self.config

        def encode(layer: EncoderLayer, x, _, key):
            return layer(x, question_mask, key), None

        question, _ = scan_layers(
            self.encoder,
            question,
            encode,
            dropout_key=keys[0],
            remat=config.remat,
            unroll=config.unroll,
        )

        def decode(layer: DecoderLayer, x, _, key):
            x = layer(x, question, image_mask, question_mask, rotation=rotation, dropout_key=key)
            return x, None

        image, _ = scan_layers(
            self.decoder,
            image,
            decode,
            dropout_key=keys[1],
            remat=config.remat,
            unroll=config.unroll,
        )
        fused = self.flatten_question(question, question_mask, keys[2])
        fused = fused + self.flatten_image(image, image_mask, keys[3])
        return self.norm(fused.astype(jnp.float32))
