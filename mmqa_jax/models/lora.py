"""LoRA (Hu et al. 2021): a LLaMA whose projections get low-rank additions, the rest frozen; ours.

A linear y = x W becomes y = x W + (alpha / r) x A B with A [in, r] and B [r, out] (section 4.1).
B starts at zero, so that the model starts as the base. The base keeps its parameters' names.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TypeVar

import jax
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.layers import Linear, param, product, uniform_init, zeros_init
from mmqa_jax.models.llama import LINEARS, Llama

M = TypeVar("M", bound=nnx.Module)

# Regular expression over the names of the added parameters, for an optimizer's filter.
ADDED = r"/lora_[ab]$"


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """What is added.

    Attributes:
      rank: r.
      alpha: the additions are scaled by alpha / r.
      targets: the projections of every layer that get one, of models.llama.LINEARS; () is all that
        the layers have, without those inside experts.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ()

    def __post_init__(self):
        unknown = [name for name in self.targets if name not in LINEARS]
        if unknown:
            raise UserError(
                f"config key model.lora.targets={tuple(self.targets)}: some of "
                f"{', '.join(LINEARS)} were expected; correct the names."
            )
        if self.rank < 1:
            raise UserError(
                f"config key model.lora.rank={self.rank}: at least 1 was expected; set model.lora "
                "to none to train all parameters."
            )


class LoraLinear(nnx.Module):
    """A stack of linears with their additions; parameters have an axis of layers in front."""

    def __init__(self, linear: Linear, config: LoraConfig, *, rngs: nnx.Rngs):
        self.kernel, self.bias = linear.kernel, linear.bias
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
        self.scale = config.alpha / config.rank

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., in] -> [..., out]
        y = product(x, self.kernel[...].astype(x.dtype), 0)
        if self.bias is not None:
            y = y + self.bias[...].astype(x.dtype)
        low = product(x, self.lora_a[...].astype(x.dtype), 0)  # [..., r]
        return y + self.scale * product(low, self.lora_b[...].astype(x.dtype), 0)


def add_lora(model: Llama, config: LoraConfig, *, rngs: nnx.Rngs) -> None:
    """Adds LoRA to the stacked layers of a model, in place.

    Raises:
      UserError: a target inside experts.
    """
    linears = model.config.linears
    inside = [name for name in config.targets if name not in linears]
    if inside:
        raise UserError(
            f"config key model.lora.targets={tuple(config.targets)}: {', '.join(inside)} are "
            "inside this model's experts, which LoRA does not change here; leave them out: "
            f"{linears}."
        )
    for name in config.targets or linears:
        linear = LoraLinear(getattr(model.layers, name), config, rngs=rngs)
        setattr(model.layers, name, linear)


def freeze_base(model: M, trained: str = ADDED) -> M:
    """The model with gradients to those parameters alone whose names match `trained`, a regular
    expression: the additions."""
    pattern = re.compile(trained)
    graphdef, own, base = nnx.split(
        model, lambda path, _: bool(pattern.search("/".join(map(str, path)))), ...
    )
    return nnx.merge(graphdef, own, jax.lax.stop_gradient(base))


def merge_lora(model: Llama) -> Llama:
    """A LLaMA without additions that computes the same: its kernels are W + (alpha / r) A B."""
    named = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    for path in [path for path in named if path[-1] == "lora_a"]:
        place = path[:-1]
        scale = getattr(model.layers, place[-1]).scale
        a, b = (named.pop((*place, name)).get_value() for name in ("lora_a", "lora_b"))
        kernel = named[(*place, "kernel")]
        named[(*place, "kernel")] = kernel.replace(_merged(kernel.get_value(), a, b, scale))
    plain = nnx.eval_shape(lambda: Llama(model.config, rngs=nnx.Rngs()))
    return nnx.merge(nnx.graphdef(plain), nnx.from_flat_state(list(named.items())))


@jax.jit
def _merged(kernel: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """Kernels [layers, in, out] with what is added to them."""
    return kernel + scale * jax.numpy.einsum(
        "lir,lro->lio", a, b, precision=jax.lax.Precision.HIGHEST
    )
