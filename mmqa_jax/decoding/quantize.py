"""int8 weights for generation: every matrix rounded, one scale per output, activations as before.

LLM.int8()'s absmax quantization (Dettmers et al. 2022, section 2.1) of the weights only, per
output channel. A quarter of float32's memory, half of bfloat16's; the product itself runs in the
compute dtype: XLA fuses the conversion of the weights into it on GPU and TPU, but not on CPU, where
this saves memory and costs time.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.models.experts import GroupedLinear, batched_product, grouped_product
from mmqa_jax.models.layers import Linear, TransposedLinear, product
from mmqa_jax.models.llama import Llama


class QuantizedLinear(nnx.Module):
    """y = (x @ kernel) * scale (+ bias); scale float32 [out].

    The kernel is int8, [out, in] of a TransposedLinear and [in, out] of a Linear. Of a stack of
    linears all have a leading axis of layers.
    """

    def __init__(self, linear: Linear | TransposedLinear):
        names = linear.kernel.get_metadata()["out_sharding"]
        self.inputs = int(isinstance(linear, TransposedLinear))  # the kernel's axis, of one layer
        axis = self.inputs - 2
        kernel, scale = _round(linear.kernel[...], axis)
        of_scale = tuple(name for n, name in enumerate(names) if n != len(names) + axis)
        self.kernel = nnx.Param(kernel, out_sharding=names, eager_sharding=False)
        self.scale = nnx.Param(scale, out_sharding=of_scale, eager_sharding=False)
        self.bias = linear.bias

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., in] -> [..., out]
        y = product(x, self.kernel[...].astype(x.dtype), self.inputs)
        y = (y * self.scale[...]).astype(x.dtype)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


class QuantizedGroupedLinear(nnx.Module):
    """A GroupedLinear with int8 kernels [E, in, out] and float32 scale [E, out]."""

    def __init__(self, linear: GroupedLinear):
        names = linear.kernels.get_metadata()["out_sharding"]
        kernels, scale = _round(linear.kernels[...], -2)
        self.kernels = nnx.Param(kernels, out_sharding=names, eager_sharding=False)
        of_scale = (*names[:-2], names[-1])
        self.scale = nnx.Param(scale, out_sharding=of_scale, eager_sharding=False)

    def of_groups(self, rows: jax.Array, sizes: jax.Array, group: jax.Array) -> jax.Array:
        """See GroupedLinear."""
        y = grouped_product(rows, self.kernels[...].astype(rows.dtype), sizes)
        y = (y * self.scale[...].at[group].get(mode="clip")).astype(rows.dtype)
        return jnp.where((group < len(sizes))[:, None], y, 0)

    def of_all(self, x: jax.Array) -> jax.Array:
        """See GroupedLinear."""
        y = batched_product(x, self.kernels[...].astype(x.dtype))
        return (y * self.scale[...][:, None]).astype(x.dtype)


def quantize_weights(model: Llama) -> None:
    """Replaces the matrices of all layers by int8 ones, in place, one by one.

    The embedding table, the output head, the norms and routers stay as they are: the head's
    rounding would directly change the log-probabilities, a router's the choice of experts.
    """
    unstacked = isinstance(model.layers, nnx.List)
    for layer in model.layers if unstacked else [model.layers]:
        for name in model.config.linears:
            linear = getattr(layer, name)
            setattr(layer, name, QuantizedLinear(linear))
            _free(linear.kernel)
        for name in ("gate", "up", "down") if model.config.experts else ():
            grouped = getattr(layer.experts, name)
            setattr(layer.experts, name, QuantizedGroupedLinear(grouped))
            _free(grouped.kernels)


def _free(kernel: nnx.Param) -> None:
    if not isinstance(given := kernel.get_value(), jax.core.Tracer):
        given.delete()


@functools.partial(jax.jit, static_argnums=1)
def _round(kernel: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """The kernel rounded, and one scale per output; `axis` is that of the inputs."""
    largest = jnp.abs(kernel).max(axis=axis, keepdims=True)
    scale = jnp.maximum(largest, 1e-30).astype(jnp.float32) / 127
    return jnp.round(kernel / scale).astype(jnp.int8), scale.squeeze(axis)
