"""Convolutions of padded pictures.

Pictures of different sizes share a batch, each in the upper left corner. `extent` [B, 2] says how
many rows and columns of a map are a picture's; what lies beyond is set to 0 before a convolution
looks at it, so that every picture sees the border of zeros that it would see alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.models.layers import Names, param, zeros_init

# torch's Conv2d: uniform within 1 / sqrt(fan in).
conv_init = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


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
        y = jax.lax.conv_general_dilated(
            x,
            self.kernel[...].astype(x.dtype),
            window_strides=(self.stride, self.stride),
            padding=((self.border, self.border),) * 2,
            rhs_dilation=(self.dilation, self.dilation),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=self.groups,
        )
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)
