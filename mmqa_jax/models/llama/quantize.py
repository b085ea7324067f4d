"""Rounded weights: every matrix of the layers in 8 or 4 bits, activations as before.

LLM.int8()'s absmax quantization (Dettmers et al. 2022, section 2.1) of the weights only: one scale
per output in 8 bits, one for each 64 inputs of an output in 4 (QLoRA's block size, Dettmers et al.
2023). 8 bits are half of bfloat16's memory; the product itself runs in the compute dtype: XLA fuses
the conversion of the weights into it on GPU and TPU, but not on CPU, where this saves memory and
costs time.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.models.common.layers import Linear, TransposedLinear, product
from mmqa_jax.models.llama.experts import (
    GroupedLinear,
    batched_product,
    grouped_product,
    with_bias,
)
from mmqa_jax.models.llama.network import Llama, stacks

_GROUP = 64  # inputs that share a scale in 4 bits


class QuantizedLinear(nnx.Module):
    """y = x @ kernel * scale (+ bias); see `rounded_product`.

    The kernel is [out, in] of a TransposedLinear and [in, out] of a Linear. Of a stack of
    linears all have a leading axis of layers.
    """

    def __init__(self, linear: Linear | TransposedLinear, bits: int = 8):
        names = linear.kernel.get_metadata()["out_sharding"]
        self.inputs = int(isinstance(linear, TransposedLinear))  # the kernel's axis, of one layer
        axis = self.inputs - 2
        kernel, scale = _round(linear.kernel[...], axis, bits)
        of_scale = names
        if bits == 8:
            of_scale = tuple(name for n, name in enumerate(names) if n != len(names) + axis)
        self.kernel = nnx.Param(kernel, out_sharding=names, eager_sharding=False)
        self.scale = nnx.Param(scale, out_sharding=of_scale, eager_sharding=False)
        self.bias = linear.bias

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., in] -> [..., out]
        y = rounded_product(x, self.kernel[...], self.scale[...], self.inputs)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


def rounded_product(x: jax.Array, kernel: jax.Array, scale: jax.Array, axis: int = 0) -> jax.Array:
    """x [..., in] times a rounded matrix: [..., out] in x's dtype.

    Args:
      kernel: int8 or int4 [in, out], or [out, in] with `axis` 1, which is that of the inputs.
      scale: float32 [out]; or with the kernel's axes, for groups of inputs.
    """
    if scale.ndim == kernel.ndim:
        return product(x, unrounded(kernel, scale, axis - 2).astype(x.dtype), axis)
    return (product(x, kernel.astype(x.dtype), axis) * scale).astype(x.dtype)


def unrounded(kernel: jax.Array, scale: jax.Array, axis: int = -2) -> jax.Array:
    """The matrices that a rounded kernel [..., in, out] stands for, float32.

    axis: that of the inputs.
    """
    axis %= kernel.ndim
    if scale.ndim < kernel.ndim:
        return kernel.astype(jnp.float32) * jnp.expand_dims(scale, axis)
    groups = scale.shape[axis]
    shape = (*kernel.shape[:axis], groups, -1, *kernel.shape[axis + 1 :])
    apart = kernel.astype(jnp.float32).reshape(shape) * jnp.expand_dims(scale, axis + 1)
    return apart.reshape(kernel.shape)


class QuantizedGroupedLinear(nnx.Module):
    """A GroupedLinear with int8 kernels [E, in, out] and float32 scale [E, out]."""

    def __init__(self, linear: GroupedLinear):
        names = linear.kernels.get_metadata()["out_sharding"]
        kernels, scale = _round(linear.kernels[...], -2, 8)
        self.kernels = nnx.Param(kernels, out_sharding=names, eager_sharding=False)
        of_scale = (*names[:-2], names[-1])
        self.scale = nnx.Param(scale, out_sharding=of_scale, eager_sharding=False)
        self.bias = linear.bias

    def of_groups(self, rows: jax.Array, sizes: jax.Array, group: jax.Array) -> jax.Array:
        """See GroupedLinear."""
        y = grouped_product(rows, self.kernels[...].astype(rows.dtype), sizes)
        y = (y * self.scale[...].at[group].get(mode="clip")).astype(rows.dtype)
        return jnp.where((group < len(sizes))[:, None], with_bias(y, self.bias, group), 0)

    def of_all(self, x: jax.Array) -> jax.Array:
        """See GroupedLinear."""
        y = batched_product(x, self.kernels[...].astype(x.dtype))
        return with_bias((y * self.scale[...][:, None]).astype(x.dtype), self.bias)


def quantize_weights(model: Llama, bits: int = 8) -> None:
    """Replaces the matrices of all layers by rounded ones, in place, one by one.

    bits: 8 or 4; experts are rounded to 8.

    The embedding table, the output head, the norms and routers stay as they are: the head's
    rounding would directly change the log-probabilities, a router's the choice of experts.
    """
    unstacked = isinstance(model.layers, nnx.List)
    for layer in model.layers if unstacked else stacks(model.layers):
        for owner, name in layer.each_linear():
            linear = getattr(owner, name)
            setattr(owner, name, QuantizedLinear(linear, bits))
            _free(linear.kernel)
        for name in ("gate", "up", "down") if layer.config.experts else ():
            grouped = getattr(layer.experts, name)
            setattr(layer.experts, name, QuantizedGroupedLinear(grouped))
            _free(grouped.kernels)


def _free(kernel: nnx.Param) -> None:
    if not isinstance(given := kernel.get_value(), jax.core.Tracer):
        given.delete()


@functools.partial(jax.jit, static_argnums=(1, 2))
def _round(kernel: jax.Array, axis: int, bits: int) -> tuple[jax.Array, jax.Array]:
    """The kernel rounded, and its scales; `axis` is that of the inputs."""
    if bits == 8:
        largest = jnp.abs(kernel).max(axis=axis, keepdims=True)
        scale = jnp.maximum(largest, 1e-30).astype(jnp.float32) / 127
        return jnp.round(kernel / scale).astype(jnp.int8), scale.squeeze(axis)
    axis %= kernel.ndim
    inputs = kernel.shape[axis]
    group = _GROUP if inputs % _GROUP == 0 else inputs
    shape = (*kernel.shape[:axis], inputs // group, group, *kernel.shape[axis + 1 :])
    apart = kernel.reshape(shape)
    scale = jnp.maximum(jnp.abs(apart).max(axis=axis + 1), 1e-30).astype(jnp.float32) / 7
    rounded = jnp.round(apart / jnp.expand_dims(scale, axis + 1))
    return rounded.astype(jnp.int4).reshape(kernel.shape), scale
