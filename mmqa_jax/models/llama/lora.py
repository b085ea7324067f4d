"""LoRA (Hu et al. 2021): a LLaMA whose projections get low-rank additions, the rest frozen; ours.

A linear y = x W becomes y = x W + (alpha / r) x A B with A [in, r] and B [r, out] (section 4.1).
B starts at zero, so that the model starts as the base. The base keeps its parameters' names.

The base gets no gradient, so that it needs no float32: its matrices are held in the type in which
they are multiplied, which changes no bit, or rounded to 8 or 4 bits (QLoRA, Dettmers et al. 2023,
with evenly spaced values in place of NormalFloat's).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import WIDE_ON_CPU, gather_frozen, partition_spec, platform
from mmqa_jax.models.common.layers import (
    Linear,
    TransposedLinear,
    keep_product,
    param,
    product,
    uniform_init,
    zeros_init,
)
from mmqa_jax.models.llama import quantize
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.network import LINEARS, Llama, LlamaLayer, stacks
from mmqa_jax.weights.keymap import TRANSPOSE, KeyMap, Rule, abstract_of
from mmqa_jax.weights.registry import architecture_of, nouns

if TYPE_CHECKING:
    from mmqa_jax.weights.adapters import Adapter  # its files are read by torch

# Regular expression over the names of the added parameters.
ADDED = r"/lora_[ab]$"
Base = Literal["compute", "float32", "int8", "int4"]


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """What is added."""

    rank: int = 16  # r
    alpha: float = 32.0  # the additions are scaled by alpha / r
    # The projections of every layer that get one, of network.LINEARS; () is all that the layers
    # have, without those inside experts.
    targets: tuple[str, ...] = ()
    # How the frozen matrices are held: `compute`, in the model's dtype; `float32`; `int8` or
    # `int4`, those of the layers rounded (llama.quantize), the others in the model's dtype.
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

    def __init__(
        self, linear: Linear | quantize.QuantizedLinear, config: LoraConfig, *, rngs: nnx.Rngs
    ):
        self.kernel, self.bias = linear.kernel, linear.bias
        if isinstance(linear, quantize.QuantizedLinear):
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
            y = quantize.rounded_product(x, self.kernel[...], self.scale[...])
        else:
            names = self.kernel.get_metadata()["out_sharding"][-2:]
            y = product(x, gather_frozen(self.kernel[...].astype(x.dtype), names), 0)
        if self.bias is not None:
            y = y + self.bias[...].astype(x.dtype)
        low = product(x, self.lora_a[...].astype(x.dtype), 0)  # [..., r]
        added = self.factor * product(low, self.lora_b[...].astype(x.dtype), 0)
        # The backward pass needs the sum alone: kept apart, its two products take twice the memory.
        return _with_whole_gradient(keep_product(y + added))


@jax.custom_vjp
def _with_whole_gradient(y: jax.Array) -> jax.Array:
    """y, whose gradient is made before the three products that read it: XLA on TPU else makes that
    of a gated MLP again for each tile of each of them."""
    return y


_with_whole_gradient.defvjp(lambda y: (y, None), lambda _, dy: (jax.lax.optimization_barrier(dy),))


def hold_base(model: Llama, config: LoraConfig) -> None:
    """Holds the matrices of a model that is to be frozen as `config.base` says, in place."""
    if config.base == "float32":
        return
    if config.base in ("int8", "int4"):
        quantize.quantize_weights(model, bits=int(config.base[3:]))
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
    """Adds LoRA to the stacked layers of a model, in place; of layers of several kinds each gets
    those of the projections that it has, the gated delta rule's own none."""
    places = stacks(model.layers)
    linears = tuple(dict.fromkeys(name for place in places for name in place.config.linears))
    inside = [name for name in config.targets if name not in linears]
    if inside:
        raise UserError(
            f"config key model.lora.targets={config.targets}: {', '.join(inside)} are "
            "inside this model's experts, which LoRA does not change here; leave them out: "
            f"{linears}."
        )
    hold_base(model, config)
    for place in places:
        for name in config.targets or linears:
            if name in place.config.linears:
                setattr(place, name, LoraLinear(getattr(place, name), config, rngs=rngs))


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
            merged = quantize.unrounded(merged, scale.get_value())
        if (*place, "lora_a") in named:
            a, b = (named.pop((*place, name)).get_value() for name in ("lora_a", "lora_b"))
            added = jnp.einsum("lir,lro->lio", a, b, precision=jax.lax.Precision.HIGHEST)
            factor = functools.reduce(_inside, place, model).factor
            merged = (merged + factor * added).astype(merged.dtype)
        named[path] = kernel.replace(merged)
        if consume and merged is not kernel.get_value():
            kernel.get_value().delete()
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):  # its axes are no names
        # Of a kind with further parameters that kind, or they had no place.
        kind = type(model) if getattr(model, "stays", False) else Llama
        plain = nnx.eval_shape(lambda: kind(model.config, rngs=nnx.Rngs()))
    return nnx.merge(nnx.graphdef(plain), nnx.from_flat_state(list(named.items())))


def _inside(module: nnx.Module, step: str | int) -> nnx.Module:
    return module[step] if isinstance(step, int) else getattr(module, step)


# Several adapters over one base.

_NOBODY = -1  # owner of columns that are padding


class Additions(NamedTuple):
    """What one adapter adds to a LLaMA."""

    factor: float  # alpha / r
    # Of each projection that it changes A [layers, in, r] and B [layers, r, out].
    matrices: Mapping[str, tuple[np.ndarray, np.ndarray]]


class AdaptedLinear(nnx.Module):
    """A linear with the additions of several adapters: each row of a batch has one, or none.

    The A of all adapters lie side by side, [in, sum of r], and so do their B, [sum of r, out]. Each
    row is multiplied by all A, and the results of adapters that are not its own become zero before
    the product with B. A step thus reads each adapter once, where a gather would copy A and B for
    every row. Ranks may differ, and a row without an adapter gets what the linear alone gives.
    """

    def __init__(
        self,
        linear: nnx.Module,
        lora_a: nnx.Param,
        lora_b: nnx.Param,
        owners: tuple[int, ...],
    ):
        self.linear, self.lora_a, self.lora_b = linear, lora_a, lora_b
        self.owners = owners  # the adapter's number of each column of A
        self.chosen = None  # see `with_chosen`

    def __call__(self, x: jax.Array) -> jax.Array:  # [R, L, in] -> [R, L, out]
        low = product(x, self.lora_a[...].astype(x.dtype), 0)  # [R, L, sum of r]
        low = jnp.where(self.chosen[..., None] == jnp.array(self.owners), low, 0)
        return self.linear(x) + product(low, self.lora_b[...].astype(x.dtype), 0)


def add_adapters(model: Llama, adapters: Sequence[Additions], mesh: Mesh | None = None) -> None:
    """Adds adapters to a model, in place; the first has the number 1, and 0 stands for none.

    Args:
      model: as an engine serves it: its layers may be stacked, its matrices rounded, its key heads
        repeated.
      adapters: their shapes are those of the model.
      mesh: of the model's parameters.
    """
    stacked = not isinstance(model.layers, nnx.List)
    for number, layer in enumerate([model.layers] if stacked else model.layers):
        for name in model.config.linears:
            of_layer = slice(None) if stacked else number
            changing = [
                (owner, adapter.factor, *(x[of_layer] for x in adapter.matrices[name]))
                for owner, adapter in enumerate(adapters, start=1)
                if name in adapter.matrices
            ]
            if changing:
                setattr(layer, name, _adapted(model, getattr(layer, name), changing, mesh))


def _adapted(
    model: Llama,
    linear: nnx.Module,
    changing: Sequence[tuple[int, float, np.ndarray, np.ndarray]],
    mesh: Mesh | None,
) -> AdaptedLinear:
    """A linear with adapters: the number, factor, A and B of each."""
    kernel_names = linear.kernel.get_metadata()["out_sharding"]
    is_transposed = isinstance(linear, TransposedLinear) or getattr(linear, "inputs", 0)
    *of_layers, of_inputs, of_outputs = kernel_names
    outputs = linear.kernel.shape[-1]
    if is_transposed:
        of_inputs, of_outputs, outputs = of_outputs, of_inputs, linear.kernel.shape[-2]

    def placed(x: np.ndarray, names: tuple[str | None, ...]) -> nnx.Param:
        x = x.astype(jnp.dtype(model.config.dtype))
        where = mesh and NamedSharding(mesh, partition_spec(names, x.shape, mesh))
        return nnx.Param(jax.device_put(x, where), out_sharding=names, eager_sharding=False)

    a = np.concatenate([a for _, _, a, _ in changing], axis=-1)
    b = np.concatenate([factor * b for _, factor, _, b in changing], axis=-2)
    if times := outputs // b.shape[-1] - 1:  # key heads that are repeated, see decoding/sizes.py
        heads = b.reshape(*b.shape[:-1], -1, model.config.head_size)
        b = np.repeat(heads, times + 1, axis=-2).reshape(*b.shape[:-1], outputs)
    owners = tuple(owner for owner, _, a, _ in changing for _ in range(a.shape[-1]))
    absent = WIDE_ON_CPU - len(owners) if platform() == "cpu" else 0
    if absent > 0:  # for the bits of a row
        before = [(0, 0)] * (a.ndim - 2)
        a = np.pad(a, [*before, (0, 0), (0, absent)])
        b = np.pad(b, [*before, (0, absent), (0, 0)])
        owners += (_NOBODY,) * absent
    return AdaptedLinear(
        linear,
        placed(a, (*of_layers, of_inputs, None)),
        placed(b, (*of_layers, None, of_outputs)),
        owners,
    )


def with_chosen(layer: LlamaLayer, adapters: jax.Array | None) -> LlamaLayer:
    """A layer, not stacked, whose rows have these adapters.

    adapters: numbers int [R, L] or [R, 1] of the tokens [R, L]; None: the model has no adapters.
    """
    if adapters is None:
        return layer
    layer = nnx.merge(*nnx.split(layer))  # one of this trace, which may hold its arrays
    for name in layer.config.linears:
        if isinstance(linear := getattr(layer, name), AdaptedLinear):
            linear.chosen = adapters
    return layer


# LoRA's additions as an adapter keeps them: without their base, in PEFT's names or in ours.


_PEFT_PREFIX = "base_model.model."


def _with_additions(base: nnx.Module, adapter: Adapter) -> nnx.Module:
    """A model whose language model has additions, which are zero; in place."""
    lora = LoraConfig(adapter.rank, adapter.alpha, adapter.targets, base="float32")
    add_lora(language_model(base), lora, rngs=nnx.Rngs())
    return base


def abstract_additions(
    build: Callable[..., nnx.Module], config: Any, adapter: Adapter
) -> nnx.State:
    """Shapes of what is added to the model that `build(config, rngs=...)` makes."""

    def adapted(config: Any, rngs: nnx.Rngs) -> nnx.Module:
        return _with_additions(build(config, rngs=rngs), adapter)

    _, state = abstract_of(adapted, config)
    leaves = [x for x in nnx.to_flat_state(state) if x[0][-1] in ("lora_a", "lora_b")]
    return nnx.from_flat_state(leaves)


def language_model(model: nnx.Module) -> Llama:
    """The LLaMA that a model is, or has."""
    if isinstance(model, Llama):
        return model
    if (entry := architecture_of(model)) is not None and entry.lora:
        return model.llama
    raise UserError(f"LoRA: a {type(model).__name__} takes no additions; name a {nouns('lora')}.")


def merged(
    base: nnx.Module, adapter: Adapter, read: Callable[[nnx.State], nnx.State]
) -> nnx.Module:
    """A base with an adapter's additions in its kernels; the base is used up.

    `read`: abstract parameters of the model with additions -> those that the adapter has, read.
    """
    model = _with_additions(base, adapter)
    nnx.update(model, read(nnx.state(model, nnx.Param)))
    whole = merge_lora(language_model(model), consume=True)
    if isinstance(model, Llama):
        return whole
    model.llama = whole
    return model


def served(adapter: Adapter, state: nnx.State) -> Additions:
    """An adapter's parameters as an engine adds them beside others'."""
    matrices: dict[str, dict[str, Any]] = {}
    for path, matrix in nnx.to_flat_state(state):
        matrices.setdefault(path[-2], {})[path[-1]] = jax.device_get(matrix.get_value())
    both = {target: (pair["lora_a"], pair["lora_b"]) for target, pair in matrices.items()}
    return Additions(adapter.alpha / adapter.rank, both)


# Linears that are one in a family's checkpoints (`Family.fused`), of which PEFT has one addition.
_FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up"), "q": ("q", "out_gate")}


def peft_map(config: LlamaConfig, targets: tuple[str, ...]) -> KeyMap:
    """PEFT's keys: `base_model.model.` before the layer's name, `.lora_A.weight` [r, in] and
    `.lora_B.weight` [out, r] behind it."""
    from mmqa_jax.models.llama.families import FAMILIES

    fused = [name for part in FAMILIES[config.family].fused for name in _FUSED.get(part, ())]
    if inside := [name for name in targets if name in fused]:
        raise UserError(
            f"an adapter of {', '.join(inside)} has no names in PEFT for {config.family}, whose "
            "checkpoints hold them inside larger matrices; export the whole model by --export=hf, "
            "or train other model.lora.targets."
        )
    rules = []
    for rule in _kernels(config):
        if _linear(rule) in targets:
            key, path = rule.key.removesuffix(".weight"), rule.path.removesuffix("/kernel")
            # B's rows are the projection's, and are in the order of its.
            for part, transform in (("A", TRANSPOSE), ("B", rule.transform)):
                name = f"{_PEFT_PREFIX}{key}.lora_{part}.weight"
                path_of_part = f"{path}/lora_{part.lower()}"
                rules.append(
                    dataclasses.replace(rule, key=name, path=path_of_part, transform=transform)
                )
    return KeyMap(rules)


def peft_linears(config: LlamaConfig | None = None) -> Mapping[str, str]:
    """PEFT's names of a layer's projections -> ours."""
    return {rule.key.split(".")[-2]: _linear(rule) for rule in _kernels(config or LlamaConfig())}


def _kernels(config: LlamaConfig) -> list[Rule]:
    """The rules of a layer's projections, by the names of the family's class in transformers."""
    from mmqa_jax.models.llama.keys import (  # imports torch, to read its files
        llama_rules,
        published_names,
        with_names,
    )

    names = published_names(config.family)
    return [
        dataclasses.replace(rule, key=with_names(rule.key, names))
        for rule in llama_rules(config)
        if re.fullmatch(r"layers/(places/\d+/)?\w+/kernel", rule.path)
        and _linear(rule) in config.linears
    ]  # fmt: skip


def _linear(rule: Rule) -> str:
    return rule.path.split("/")[-2]
