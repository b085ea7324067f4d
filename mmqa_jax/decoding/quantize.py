"""int8 weights for generation: every matrix rounded, one scale per output, activations as before.

LLM.int8()'s absmax quantization (Dettmers et al. 2022, section 2.1) of the weights only, per
output channel. A quarter of float32's memory, half of bfloat16's; the product itself runs in the
compute dtype: XLA fuses the conversion of the weights into it on GPU and TPU, but not on CPU, where
this saves memory and costs time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.models.layers import TransposedLinear, product
from mmqa_jax.models.llama import LINEARS, Llama


class QuantizedLinear(nnx.Module):
    """y = (x @ kernel.T) * scale (+ bias); kernel int8 [out, in], scale float32 [out]."""

    def __init__(self, linear: TransposedLinear):
        names = linear.kernel.get_metadata()["out_sharding"]
        kernel, scale = _round(linear.kernel[...])
        self.kernel = nnx.Param(kernel, out_sharding=names, eager_sharding=False)
        self.scale = nnx.Param(scale, out_sharding=names[:1], eager_sharding=False)
        self.bias = linear.bias

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., in] -> [..., out]
        y = product(x, self.kernel[...].astype(x.dtype), 1)
        y = (y * self.scale[...]).astype(x.dtype)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


def quantize_weights(model: Llama) -> None:
    """Replaces the matrices of all layers by int8 ones, in place, one by one.

    The embedding table, the output head and the norms stay as they are: the head's rounding would
    directly change the log-probabilities.
    """
    assert isinstance(model.layers, nnx.List), "call unstack_layers first"
    for layer in model.layers:
        for name in LINEARS:
            linear = getattr(layer, name)
            setattr(layer, name, QuantizedLinear(linear))
            linear.kernel.get_value().delete()


@jax.jit
def _round(kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    scale = jnp.maximum(jnp.abs(kernel).max(axis=1), 1e-30).astype(jnp.float32) / 127
    return jnp.round(kernel / scale[:, None]).astype(jnp.int8), scale
