"""The vision towers of Qwen2.5-VL (Bai et al. 2025) and Qwen3-VL.

Both are transformers over the patches of a picture of any size with rotary positions in two
dimensions, after which a merger makes one vector of 2 x 2 patches. Videos are pairs of frames; a
picture is such a pair twice the same. Qwen2.5-VL attends within windows but in a few layers, with
RMS norms and gated MLPs; Qwen3-VL attends to all, adds learned positions interpolated to the
picture's size, and gives what some of its layers hold as well (deepstack).
Originals: transformers models/qwen2_5_vl/modeling_qwen2_5_vl.py and qwen3_vl/modeling_qwen3_vl.py.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmqa_jax.core.mesh import gather_columns, on_device
from mmqa_jax.models.activations import ACTIVATIONS
from mmqa_jax.models.layers import (
    LayerNorm,
    Linear,
    attention,
    keep,
    merge_heads,
    normal_init,
    param,
    scan_layers,
    split_heads,
    stack_layers,
)
from mmqa_jax.models.llama import RMSNorm, rotate
from mmqa_jax.models.qwen_vl_layout import PatchBatch
from mmqa_jax.models.qwen_vl_vision import QwenVisionConfig

_EPS = 1e-6  # of all norms; no key of a config.json says it


def _norm(config: QwenVisionConfig, size: int, rngs: nnx.Rngs) -> RMSNorm | LayerNorm:
    kind = RMSNorm if config.family == "qwen2_5_vl" else LayerNorm
    return kind(size, _EPS, rngs=rngs)


class QwenVisionLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: QwenVisionConfig, *, rngs: nnx.Rngs):
        linear = functools.partial(Linear, rngs=rngs, kernel_init=normal_init(config.init_stddev))
        width, hidden = config.width, config.mlp
        self.norm_1 = _norm(config, width, rngs)
        self.qkv = linear(width, 3 * width, ("embed", "heads"))
        self.out = linear(width, width, ("heads", "embed"))
        self.norm_2 = _norm(config, width, rngs)
        if config.family == "qwen2_5_vl":
            self.gate = linear(width, hidden, ("embed", "mlp"))
        self.up = linear(width, hidden, ("embed", "mlp"))
        self.down = linear(hidden, width, ("mlp", "embed"))
        self.config = config

    def __call__(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, real: jax.Array, whole: jax.Array | bool
    ) -> jax.Array:
        """x [B, N, width]; cos, sin [B, N, 1, D / 2]; real bool [B, N]; whole: no windows."""
        q, k, v = jnp.split(self.qkv(self.norm_1(x)), 3, axis=-1)
        q, k, v = (split_heads(part, self.config.heads) for part in (q, k, v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.config.window:
            attended = jax.lax.cond(whole, self._attend, self._attend_in_windows, q, k, v, real)
        else:
            attended = self._attend(q, k, v, real)
        x = x + self.out(keep(merge_heads(attended)))
        y = self.norm_2(x)
        activation = ACTIVATIONS[self.config.activation]
        if self.config.family == "qwen2_5_vl":
            return x + self.down(activation(self.gate(y)) * self.up(y))
        return x + self.down(activation(self.up(y)))

    def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array, real: jax.Array) -> jax.Array:
        mask = real[:, None, None]
        return attention(q, k, v, mask=mask, implementation=self.config.attention)

    def _attend_in_windows(
        self, q: jax.Array, k: jax.Array, v: jax.Array, real: jax.Array
    ) -> jax.Array:
        size = (self.config.window_units * self.config.merge) ** 2

        def apart(x: jax.Array) -> jax.Array:  # [B, N, ...] -> [B * windows, size, ...]
            return x.reshape(-1, size, *x.shape[2:])

        return self._attend(*map(apart, (q, k, v, real))).reshape(q.shape)


class Merger(nnx.Module):
    """norm, linear, GELU, linear: the patches of a unit become one vector.

    whole: the norm is over a unit, not over each patch.
    """

    def __init__(self, config: QwenVisionConfig, *, whole: bool, rngs: nnx.Rngs):
        linear = functools.partial(Linear, rngs=rngs, kernel_init=normal_init(config.init_stddev))
        joined = config.width * config.merge**2
        self.norm = _norm(config, joined if whole else config.width, rngs)
        self.linear_1 = linear(joined, joined, ("embed", "mlp"))
        self.linear_2 = linear(joined, config.out, ("mlp", "embed"))
        self.joined, self.whole = joined, whole

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, N, width] -> [B, U, out]
        if self.whole:
            x = self.norm(x.reshape(len(x), -1, self.joined))
        else:
            x = self.norm(x).reshape(len(x), -1, self.joined)
        return self.linear_2(ACTIVATIONS["gelu"](self.linear_1(x)))


class QwenVision(nnx.Module):
    """A tower with its mergers."""

    def __init__(self, config: QwenVisionConfig, *, rngs: nnx.Rngs):
        init = normal_init(config.init_stddev)
        self.patch = Linear(
            config.temporal * config.patch**2 * 3,
            config.width,
            ("patch", "embed"),
            rngs=rngs,
            use_bias=config.family == "qwen3_vl",
            kernel_init=init,
        )
        if config.positions:
            shape = (config.positions**2, config.width)
            self.positions = param(rngs, init, shape, ("positions", "embed"))
        self.layers = stack_layers(lambda r: QwenVisionLayer(config, rngs=r), config.layers, rngs)
        self.merger = Merger(config, whole=False, rngs=rngs)
        if config.deepstack:
            self.deepstack = stack_layers(
                lambda r: Merger(config, whole=True, rngs=r), len(config.deepstack), rngs
            )
        self.config = config

    def embed(self, pictures: PatchBatch) -> jax.Array:
        """The layers' input, [B, N, width] in the compute dtype."""
        config = self.config
        pixels = pictures.patches.astype(jnp.float32).reshape(*pictures.patches.shape[:2], -1, 3)
        pixels = (pixels / 255.0 - jnp.array(config.pixel_mean)) / jnp.array(config.pixel_std)
        pixels = pixels.reshape(*pixels.shape[:2], -1).astype(config.dtype)
        kernel = self.patch.kernel[...].astype(jnp.float32)
        kernel = kernel.reshape(config.temporal, -1, config.width).sum(0)  # all frames are the same
        x = jnp.einsum("bnp,pw->bnw", pixels, kernel.astype(pixels.dtype))
        if self.patch.bias is not None:
            x = x + self.patch.bias[...].astype(x.dtype)
        if config.positions:
            x = x + self._interpolated(pictures).astype(x.dtype)
        return x

    def _interpolated(self, pictures: PatchBatch) -> jax.Array:
        """Learned positions at the patches' places, corners on corners: [B, N, width] float32."""
        side, table = self.config.positions, self.positions[...].astype(jnp.float32)
        places = jnp.maximum(pictures.places, 0).astype(jnp.float32)
        at = places * (side - 1) / jnp.maximum(pictures.grid - 1, 1)[:, None]  # [B, N, 2]
        low = jnp.floor(at)
        high_share = at - low
        low = low.astype(jnp.int32)
        high = jnp.minimum(low + 1, side - 1)
        total = jnp.zeros((), jnp.float32)
        for rows, of_rows in ((low, 1 - high_share), (high, high_share)):
            for columns, of_columns in ((low, 1 - high_share), (high, high_share)):
                weight = of_rows[..., 0] * of_columns[..., 1]
                total += table[rows[..., 0] * side + columns[..., 1]] * weight[..., None]
        return total

    def _angles(self, places: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cosines and sines of rows and columns, [B, N, 1, D / 2] each."""
        half = self.config.width // self.config.heads // 2
        exponents = (np.arange(0, half, 2) / half).astype(np.float32)
        turning = np.float32(1) / (self.config.rope_theta**exponents).astype(np.float32)
        angles = places[..., None].astype(jnp.float32) * turning  # [B, N, 2, D / 4]
        angles = angles.reshape(*places.shape[:2], 1, half)
        return jnp.cos(angles), jnp.sin(angles)

    def __call__(self, pictures: PatchBatch) -> jax.Array:
        """Pictures -> [B, U, features], a picture's units row by row; behind them anything.

        The first `out` of each are the merged vector, then those of `deepstack`.
        """
        config, x = self.config, self.embed(pictures)
        (cos, sin), real = self._angles(pictures.places), pictures.places[..., 0] >= 0
        kept = jnp.zeros((*x.shape[:2], len(config.deepstack), x.shape[2]), x.dtype)

        def body(layer: QwenVisionLayer, carry, of_layer, _):
            (x, kept), (whole, place) = carry, of_layer
            x = layer(x, cos, sin, real, whole)
            if config.deepstack:  # a place behind the last is not written
                kept = kept.at[:, :, place].set(x, mode="drop")
            return (x, kept), None

        options = {"remat": config.remat, "unroll": config.unroll}
        (x, kept), _ = scan_layers(self.layers, (x, kept), body, xs=self._of_layers(), **options)
        merged = [self.merger(x)]
        if config.deepstack:
            graphdef, params = nnx.split(self.deepstack)
            params = on_device(params)
            for number in range(len(config.deepstack)):
                own = jax.tree.map(lambda p, n=number: p[n], params)
                merged.append(nnx.merge(graphdef, own)(kept[:, :, number]))
        features = gather_columns(jnp.concatenate(merged, axis=-1))
        return jnp.take_along_axis(features, pictures.order[..., None], axis=1)

    def _of_layers(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each layer: whether it attends to the whole picture, and its place in deepstack."""
        numbers = range(self.config.layers)
        count = len(self.config.deepstack)
        whole = np.array([number in self.config.full_layers for number in numbers])
        places = dict(zip(self.config.deepstack, range(count), strict=True))
        return whole, np.array([places.get(number, count) for number in numbers], np.int32)

    def layer_outputs(self, pictures: PatchBatch) -> jax.Array:
        """Every layer's output, [layers, B, N, width]."""
        (cos, sin), real = self._angles(pictures.places), pictures.places[..., 0] >= 0

        def body(layer: QwenVisionLayer, x, of_layer, _):
            x = layer(x, cos, sin, real, of_layer[0])
            return x, x

        return scan_layers(self.layers, self.embed(pictures), body, xs=self._of_layers())[1]
