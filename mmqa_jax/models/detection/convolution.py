"""Convolutions of padded pictures.

Pictures of different sizes share a batch, each in the upper left corner. `extent` [B, 2] says how
many rows and columns of a map are a picture's; what lies beyond is set to 0 before a convolution
looks at it, so that every picture sees the border of zeros that it would see alone.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.flops import one_in
from mmqa_jax.core.mesh import platform
from mmqa_jax.models.common.layers import Names, param, product, zeros_init

# torch's Conv2d: uniform within 1 / sqrt(fan in).
conv_init = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")

# Channels that are multiplied at once where groups have few: a matrix unit's side on TPUs, what
# XLA's CPU convolution is quickest with. cuDNN has kernels for groups (RESULTS.md says more).
_TOGETHER = {"tpu": 128, "cpu": 32}


def within(x: jax.Array, extent: jax.Array | None) -> jax.Array:
    """x [B, H, W, ...] with 0 outside its pictures; all of it is inside where `extent` is None."""
    if extent is None:
        return x
    inside = cells_within(extent, x.shape[1], x.shape[2])
    return jnp.where(inside.reshape(*inside.shape, *(1,) * (x.ndim - 3)), x, 0)


def cells_within(extent: jax.Array, height: int, width: int) -> jax.Array:
    """Which cells are a picture's: extent [..., 2] -> [..., height, width] bool."""
    rows = jnp.arange(height) < extent[..., :1]
    columns = jnp.arange(width) < extent[..., 1:]
    return rows[..., :, None] & columns[..., None, :]


def strided(extent: jax.Array | None, stride: int) -> jax.Array | None:
    """The extent after a padded convolution of that stride: divided, rounded up."""
    return None if extent is None else -(-extent // stride)


class Conv(nnx.Module):
    """A square convolution with a border of zeros; kernel [K, K, in / groups, out].

    The border keeps the size at a stride of 1, whatever the dilation.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        size: int,
        names: Names,
        *,
        rngs: nnx.Rngs,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
        use_bias: bool = False,
    ):
        shape = (size, size, in_channels // groups, out_channels)
        self.kernel = param(rngs, conv_init, shape, (None, None, *names))
        self.bias = param(rngs, zeros_init, (out_channels,), names[1:]) if use_bias else None
        self.stride, self.dilation, self.groups = stride, dilation, groups
        self.border = dilation * (size - 1) // 2

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, H, W, in] -> [B, H/s, W/s, out]
        kernel = self.kernel[...].astype(x.dtype)
        if kernel.shape[0] == 1 and self.groups == 1 and platform() == "cpu":
            y = product(x[:, :: self.stride, :: self.stride], kernel[0, 0], 0)
        else:
            y = self._convolved(x, kernel)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)

    def _convolved(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        if self.groups == 1:
            return self._convolution(x, kernel, 1)
        joined = joined_groups(self.groups, kernel.shape[2], platform())
        groups = self.groups // joined
        with one_in(joined):
            kernel = block_diagonal(kernel, self.groups, joined)
            if platform() != "cpu":
                return self._convolution(x, kernel, groups)
            # XLA's CPU convolution of several groups is five times as slow as one for each.
            parts = zip(
                jnp.split(x, groups, axis=-1), jnp.split(kernel, groups, axis=-1), strict=True
            )
            return jnp.concatenate([self._convolution(*part, 1) for part in parts], axis=-1)

    def _convolution(self, x: jax.Array, kernel: jax.Array, groups: int) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            window_strides=(self.stride, self.stride),
            padding=((self.border, self.border),) * 2,
            rhs_dilation=(self.dilation, self.dilation),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )


def joined_groups(groups: int, channels: int, kind: str) -> int:
    """How many groups of so many channels are multiplied as one on a platform."""
    return math.gcd(groups, max(1, _TOGETHER.get(kind, channels) // channels))


def block_diagonal(kernel: jax.Array, groups: int, joined: int) -> jax.Array:
    """The kernel of fewer groups that does the same, with zeros between those it joins.

    Args:
      kernel: [K, K, in / groups, out].
      groups: of the convolution.
      joined: how many become one.

    Returns:
      [K, K, in / groups * joined, out].
    """
    inputs, outputs = kernel.shape[2], kernel.shape[3] // groups
    of_input = jnp.arange(inputs * joined)[:, None] // inputs
    of_output = jnp.arange(kernel.shape[3])[None] // outputs % joined
    return jnp.where(of_input == of_output, jnp.tile(kernel, (1, 1, joined, 1)), 0)
