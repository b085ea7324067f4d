"""LoRA (Hu et al. 2021): a LLaMA whose projections get low-rank additions, the rest frozen; ours.

A linear y = x W becomes y = x W + (alpha / r) x A B with A [in, r] and B [r, out] (section 4.1).
B starts at zero, so that the model starts as the base. The base keeps its parameters' names.

The base gets no gradient, so that it needs no float32: its matrices are held in the type in which
they are multiplied, which changes no bit, or rounded to 8 or 4 bits (QLoRA, Dettmers et al. 2023,
with evenly spaced values in place of NormalFloat's).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.layers import Linear, param, product, uniform_init, zeros_init
from mmqa_jax.models.llama import LINEARS, Llama
from mmqa_jax.models.quantize import QuantizedLinear, quantize_weights, rounded_product, unrounded

# Regular expression over the names of the added parameters.
ADDED = r"/lora_[ab]$"
Base = Literal["compute", "float32", "int8", "int4"]


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """What is added.

    Attributes:
      rank: r.
      alpha: the additions are scaled by alpha / r.
      targets: the projections of every layer that get one, of models.llama.LINEARS; () is all that
        the layers have, without those inside experts.
      base: how the frozen matrices are held: `compute`, in the model's dtype; `float32`; `int8` or
        `int4`, those of the layers rounded (models.quantize), the others in the model's dtype.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ()
    base: Base = "compute"

    def __post_init__(self):
        object.__setattr__(self, "targets", tuple(self.targets))
        unknown = [name for name in self.targets if name not in LINEARS]
        if unknown:
            raise UserError(
                f"config key model.lora.targets={self.targets}: some of "
                f"{', '.join(LINEARS)} were expected; correct the names."
            )
        if self.rank < 1:
            raise UserError(
                f"config key model.lora.rank={self.rank}: at least 1 was expected; set model.lora "
                "to none to train all parameters."
            )


class LoraLinear(nnx.Module):
    """A stack of linears with their additions; parameters have an axis of layers in front."""

    def __init__(self, linear: Linear | QuantizedLinear, config: LoraConfig, *, rngs: nnx.Rngs):
        self.kernel, self.bias = linear.kernel, linear.bias
        if isinstance(linear, QuantizedLinear):
            self.scale = linear.scale
        layers, inputs, outputs = linear.kernel.shape
        of_layers, of_inputs, of_outputs = linear.kernel.get_metadata()["out_sharding"]
        # A as the authors' code (loralib layers.py: kaiming_uniform_ with a = sqrt(5)).
        self.lora_a = param(
            rngs,
            uniform_init(1 / math.sqrt(inputs)),
            (layers, inputs, config.rank),
            (of_layers, of_inputs, None),
        )
        self.lora_b = param(
            rngs, zeros_init, (layers, config.rank, outputs), (of_layers, None, of_outputs)
        )
        self.factor = config.alpha / config.rank

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., in] -> [..., out]
        if hasattr(self, "scale"):
            y = rounded_product(x, self.kernel[...], self.scale[...])
        else:
            y = product(x, self.kernel[...].astype(x.dtype), 0)
        if self.bias is not None:
            y = y + self.bias[...].astype(x.dtype)
        low = product(x, self.lora_a[...].astype(x.dtype), 0)  # [..., r]
        return y + self.factor * product(low, self.lora_b[...].astype(x.dtype), 0)


def hold_base(model: Llama, config: LoraConfig) -> None:
    """Holds the matrices of a model that is to be frozen as `config.base` says, in place."""
    if config.base == "float32":
        return
    if config.base in ("int8", "int4"):
        quantize_weights(model, bits=int(config.base[3:]))
    dtype = jnp.dtype(model.config.dtype)
    for path, matrix in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        value = matrix.get_value()
        # Norms and biases, which are small, are computed with in float32.
        if path[-1] in ("kernel", "kernels", "table") and value.dtype == jnp.float32:
            matrix.set_value(_cast(value, dtype))


def _cast(value: jax.Array | jax.ShapeDtypeStruct, dtype: jnp.dtype) -> jax.Array:
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, dtype, sharding=value.sharding)
    return value.astype(dtype)


def add_lora(model: Llama, config: LoraConfig, *, rngs: nnx.Rngs) -> None:
    """Adds LoRA to the stacked layers of a model, in place.

    Raises:
      UserError: a target inside experts.
    """
    linears = model.config.linears
    inside = [name for name in config.targets if name not in linears]
    if inside:
        raise UserError(
            f"config key model.lora.targets={config.targets}: {', '.join(inside)} are "
            "inside this model's experts, which LoRA does not change here; leave them out: "
            f"{linears}."
        )
    hold_base(model, config)
    for name in config.targets or linears:
        linear = LoraLinear(getattr(model.layers, name), config, rngs=rngs)
        setattr(model.layers, name, linear)


def merge_lora(model: Llama, *, consume: bool = False) -> Llama:
    """A LLaMA without additions that computes the same: its kernels are W + (alpha / r) A B.

    Rounded kernels become float32 again, with what the additions make of them; the others keep
    their type. With `consume` each kernel is freed as its sum is made, so that the model is in
    memory once.
    """
    named = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    for path in [path for path in named if path[-1] in ("kernel", "kernels")]:
        place = path[:-1]
        kernel = named[path]
        merged = kernel.get_value()
        if (scale := named.pop((*place, "scale"), None)) is not None:
            merged = unrounded(merged, scale.get_value())
        if (*place, "lora_a") in named:
            a, b = (named.pop((*place, name)).get_value() for name in ("lora_a", "lora_b"))
            added = jnp.einsum("lir,lro->lio", a, b, precision=jax.lax.Precision.HIGHEST)
            factor = getattr(model.layers, place[-1]).factor
            merged = (merged + factor * added).astype(merged.dtype)
        named[path] = kernel.replace(merged)
        if consume and merged is not kernel.get_value():
            kernel.get_value().delete()
    plain = nnx.eval_shape(lambda: Llama(model.config, rngs=nnx.Rngs()))
    return nnx.merge(nnx.graphdef(plain), nnx.from_flat_state(list(named.items())))
