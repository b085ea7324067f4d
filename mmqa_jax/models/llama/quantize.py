"""Rounded weights: every matrix of the layers in 8 or 4 bits, activations as before.

LLM.int8()'s absmax quantization (Dettmers et al. 2022, section 2.1) of the weights only: one scale
per output in 8 bits, one for each 64 inputs of an output in 4 (QLoRA's block size, Dettmers et al.
2023). 8 bits are half of bfloat16's memory; the product itself runs in the compute dtype: XLA fuses
the conversion of the weights into it on GPU and TPU, but not on CPU, where this saves memory and
costs time. Matrices that a checkpoint itself holds in codes stay in them; where
groups of their inputs share scales, a step of decoding on a TPU multiplies by `codes_kernel`.

Such a checkpoint is opened once for each part of its matrices (`weights.quantization.reading`): as
whole ones, of which the key map makes its plan, and as codes, scales and zeros, which take the same
way through renames, splits, stacks and transposes.
"""

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from mmqa_jax.core.mesh import MeshAxes, batch_axes, partition_spec, platform
from mmqa_jax.models.common.layers import Linear, Names, TransposedLinear, product
from mmqa_jax.models.llama import experts
from mmqa_jax.models.llama.network import Llama, stacks
from mmqa_jax.weights.config_json import replace_fields
from mmqa_jax.weights.formats.safetensors import TensorSource
from mmqa_jax.weights.keymap import Assignment, abstract_of, named, plan_loading, read_parameter
from mmqa_jax.weights.layouts import Checkpoint
from mmqa_jax.weights.quantization import reading
from mmqa_jax.weights.registry import architecture

_GROUP = 64  # inputs that share a scale in 4 bits


class Rounded(NamedTuple):
    """A linear's matrix in codes; see `rounded_product`."""

    kernel: jax.Array
    scale: jax.Array
    zero: jax.Array | None = None

    def parameters(self, names: Names, axis: int) -> list[nnx.Param | None]:
        """Kernel, scale and zero as parameters; `names`: of the kernel's axes, of which `axis` is
        that of the inputs."""
        outputs = tuple(name for n, name in enumerate(names) if n != len(names) + axis)
        return [
            None
            if array is None
            else nnx.Param(
                array,
                out_sharding=names if array.ndim == len(names) else outputs,
                eager_sharding=False,
            )
            for array in self
        ]


class QuantizedLinear(nnx.Module):
    """y = x @ kernel * scale (+ bias); see `rounded_product`.

    The kernel is [out, in] of a TransposedLinear and [in, out] of a Linear. Of a stack of
    linears all have a leading axis of layers.
    """

    def __init__(self, linear: Linear | TransposedLinear, rounded: Rounded):
        names = linear.kernel.get_metadata()["out_sharding"]
        self.inputs = input_axis(linear)
        self.kernel, self.scale, self.zero = rounded.parameters(names, self.inputs - 2)
        self.bias = linear.bias

    def __call__(self, x: jax.Array, layer: jax.Array | None = None) -> jax.Array:
        """x [..., in] -> [..., out].

        layer: int32 [], of parameters that are a stack's (`apart`); None: they are one layer's.
        """
        if layer is None:
            rounded = self.kernel[...], self.scale[...], self.inputs, _array(self.zero)
            y = rounded_product(x, *rounded, _fused(x.dtype))
            return y if self.bias is None else y + self.bias[...].astype(x.dtype)
        y = self._by_kernel(x, layer)
        return y if self.bias is None else y + self.bias[...][layer].astype(x.dtype)

    def multiplies_by_kernel(self, x: jax.Array) -> bool:
        """Whether the linear of a stack multiplies states x [B, L, H] by `codes_kernel` on the
        platform of the trace: few rows, whose product takes as long as reading the matrix."""
        mesh = jax.sharding.get_abstract_mesh()
        split = () if mesh.empty else batch_axes(mesh, x.shape[0]) or ()
        rows = x.shape[0] * x.shape[1] // math.prod(mesh.shape[axis] for axis in split)
        if platform() != "tpu" or x.dtype != jnp.bfloat16 or rows > experts.FEW:
            return False
        kernel, scale = self.kernel[...], self.scale[...]
        if self.inputs or scale.ndim != 3 or kernel.dtype == jnp.float4_e2m1fn:
            return False
        from mmqa_jax.models.llama.codes_kernel import fits  # Pallas takes long to import

        of_codes, of_groups = self._specs(mesh)
        parts = [_parts(mesh, axes) for axes in of_codes[1:]]
        _, inputs, outputs = kernel.shape
        alike = of_codes == of_groups
        return alike and fits(inputs // parts[0], outputs // parts[1], scale.shape[1] // parts[0])

    def _specs(self, mesh: AbstractMesh) -> tuple[PartitionSpec, PartitionSpec]:
        """How a mesh splits the codes, and their scales."""
        whole = PartitionSpec(None, None, None)
        if mesh.empty:
            return whole, whole
        names = self.kernel.get_metadata()["out_sharding"]
        return tuple(
            partition_spec(names, array.get_value().shape, mesh)
            for array in (self.kernel, self.scale)
        )

    def _by_kernel(self, x: jax.Array, layer: jax.Array) -> jax.Array:
        """x [B, L, in] -> [B, L, out] without bias, each device by its part of the matrix."""
        from mmqa_jax.models.llama.codes_kernel import multiply

        parameters = self.kernel[...], self.scale[...], _array(self.zero)
        mesh = jax.sharding.get_abstract_mesh()
        of_codes, of_groups = self._specs(mesh)
        _, inputs, outputs = of_codes

        def local(x: jax.Array, parameters: tuple, layer: jax.Array) -> jax.Array:
            y = multiply(x.reshape(-1, x.shape[-1]), *parameters, layer)
            y = y.reshape(*x.shape[:-1], -1)
            return y if inputs is None else jax.lax.psum(y, inputs)

        if mesh.empty or mesh.size == 1:
            return local(x, parameters, layer)
        rows = batch_axes(mesh, x.shape[0])
        of_zero = None if parameters[2] is None else of_groups
        split = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(
                PartitionSpec(rows, None, inputs),
                (of_codes, of_groups, of_zero),
                PartitionSpec(),
            ),
            out_specs=PartitionSpec(rows, None, outputs),
            check_vma=False,
        )
        return split(x, parameters, layer)


def _parts(mesh: AbstractMesh, axes: MeshAxes) -> int:
    """Into how many parts these axes of a mesh split an array's."""
    names = (axes,) if isinstance(axes, str) else axes or ()
    return math.prod(mesh.shape[name] for name in names)


def apart(layers: nnx.Module, x: jax.Array) -> tuple[nnx.Module, list[QuantizedLinear | None]]:
    """A stack of layers without the linears that multiply states x [B, L, H] by a kernel, which
    reads them from the stack, and these in the order of `each_linear`; traced. None: it stays."""
    layers = nnx.merge(*nnx.split(layers))  # one of this trace
    stacked: list[QuantizedLinear | None] = []
    for owner, name in layers.each_linear():
        linear = getattr(owner, name)
        by_kernel = isinstance(linear, QuantizedLinear) and linear.multiplies_by_kernel(x)
        stacked.append(linear if by_kernel else None)
        if by_kernel:
            setattr(owner, name, None)
    return layers, stacked


def put_back(layer: nnx.Module, stacked: list[QuantizedLinear | None], number: jax.Array) -> None:
    """Gives the layer of this number, in place, the linears that `apart` took out of the stack."""
    for (owner, name), linear in zip(layer.each_linear(), stacked, strict=True):
        if linear is not None:
            setattr(owner, name, functools.partial(linear, layer=number))


def input_axis(linear: Linear | TransposedLinear) -> int:
    """The axis of the inputs in the kernel of one layer."""
    return int(isinstance(linear, TransposedLinear))


def _array(parameter: nnx.Param | None) -> jax.Array | None:
    return None if parameter is None else parameter[...]


def rounded_product(
    x: jax.Array,
    kernel: jax.Array,
    scale: jax.Array,
    axis: int = 0,
    zero: jax.Array | None = None,
    inside: jnp.dtype = jnp.float32,
) -> jax.Array:
    """x [..., in] times a rounded matrix: [..., out] in x's dtype.

    Args:
      kernel: codes of 4 or 8 bits [in, out], or [out, in] with `axis` 1, which is that of the
        inputs.
      scale: [out]; or with the kernel's axes, for groups of inputs.
      zero: int8, taken from codes; only beside groups, in their shape.
      inside: the type in which groups' matrices are computed.
    """
    if scale.ndim == kernel.ndim:
        matrix = unrounded(kernel, scale, axis - 2, zero, inside)
        return product(x, matrix.astype(x.dtype), axis)
    return (product(x, kernel.astype(x.dtype), axis) * scale).astype(x.dtype)


def _fused(dtype: jnp.dtype) -> jnp.dtype:
    """The type in which a matrix is computed that is multiplied in `dtype`: XLA on TPU computes it
    inside the product if that is one type; what is rounded from float32 goes to main memory."""
    return dtype if platform() == "tpu" else jnp.float32


def unrounded(
    kernel: jax.Array,
    scale: jax.Array,
    axis: int = -2,
    zero: jax.Array | None = None,
    dtype: jnp.dtype = jnp.float32,
) -> jax.Array:
    """The matrices that a rounded kernel [..., in, out] stands for, computed in `dtype`.

    axis: that of the inputs.
    """
    axis %= kernel.ndim
    if scale.ndim < kernel.ndim:
        return kernel.astype(dtype) * jnp.expand_dims(scale.astype(dtype), axis)
    groups = scale.shape[axis]
    shape = (*kernel.shape[:axis], groups, -1, *kernel.shape[axis + 1 :])
    apart = kernel.astype(dtype).reshape(shape)
    if zero is not None:
        apart = apart - jnp.expand_dims(zero.astype(dtype), axis + 1)
    return (apart * jnp.expand_dims(scale.astype(dtype), axis + 1)).reshape(kernel.shape)


class QuantizedGroupedLinear(nnx.Module):
    """A GroupedLinear with rounded kernels [E, in, out] and scale [E, out], or of groups of inputs
    [E, groups, out], perhaps with zeros."""

    def __init__(self, linear: experts.GroupedLinear, rounded: Rounded):
        names = linear.kernels.get_metadata()["out_sharding"]
        self.kernels, self.scale, self.zero = rounded.parameters(names, -2)
        self.bias = linear.bias

    def of_groups(self, rows: jax.Array, sizes: jax.Array, group: jax.Array) -> jax.Array:
        """See GroupedLinear."""
        y = experts.grouped_product(rows, self._factors(rows.dtype), sizes)
        if not self._by_groups:
            y = (y * self.scale[...].at[group].get(mode="clip")).astype(rows.dtype)
        return jnp.where((group < len(sizes))[:, None], experts.with_bias(y, self.bias, group), 0)

    def of_all(self, x: jax.Array, layer: jax.Array | None = None) -> jax.Array:
        """See GroupedLinear.

        layer: int32 [], of parameters that are a stack's, which `multiplies_by_kernel`; x may be
          [T, in], the same of all.
        """
        if layer is not None:
            from mmqa_jax.models.llama.mxfp4_kernel import multiply

            bias = None if self.bias is None else self.bias[...][layer]
            return experts.with_bias(multiply(x, self.kernels[...], self.scale[...], layer), bias)
        y = experts.batched_product(x, self._factors(x.dtype))
        if not self._by_groups:
            y = (y * self.scale[...][:, None]).astype(x.dtype)
        return experts.with_bias(y, self.bias)

    def multiplies_by_kernel(self) -> bool:
        """Whether experts of a stack multiply bfloat16 states by `mxfp4_kernel` on a TPU."""
        kernels, scale = self.kernels[...], self.scale[...]
        if kernels.dtype != jnp.float4_e2m1fn or scale.ndim != 4 or scale.dtype != jnp.bfloat16:
            return False
        from mmqa_jax.models.llama.mxfp4_kernel import fits  # Pallas takes long to import

        return fits(*kernels.shape[2:], scale.shape[2])

    @property
    def _by_groups(self) -> bool:
        return self.scale.ndim == self.kernels.ndim

    def _factors(self, dtype: jnp.dtype) -> jax.Array:
        """What rows are multiplied by, [E, in, out]."""
        if not self._by_groups:
            return self.kernels[...].astype(dtype)
        rounded = self.kernels[...], self.scale[...], -2, _array(self.zero)
        return unrounded(*rounded, _fused(dtype)).astype(dtype)


class Form(NamedTuple):
    """How checkpoints hold their matrices, for sizes and programs without one."""

    codes: jnp.dtype  # their type
    group: int  # inputs that share a scale
    scale: jnp.dtype = jnp.float32  # the type of scales
    zero: bool = False  # whether there are zeros
    experts_alone: bool = False  # whether a mixture's other matrices are not rounded

    @property
    def bytes(self) -> float:
        """Bytes of a number of a matrix, with its share of scales and zeros."""
        shared = jnp.dtype(self.scale).itemsize + self.zero
        return jax.dtypes.itemsize_bits(self.codes) / 8 + shared / self.group

    def rounded(self, kernel: jax.Array, axis: int) -> Rounded:
        """A kernel's parts, of zeros; `axis` is that of the inputs."""
        axis %= kernel.ndim
        inputs = kernel.shape[axis]
        groups = inputs // math.gcd(inputs, self.group)
        shape = (*kernel.shape[:axis], groups, *kernel.shape[axis + 1 :])
        zero = jnp.zeros(shape, jnp.int8) if self.zero else None
        return Rounded(jnp.zeros(kernel.shape, self.codes), jnp.zeros(shape, self.scale), zero)


FORMS = {  # FP8 in blocks, AWQ's and GPTQ's groups, gpt-oss's experts
    "fp8": Form(jnp.float8_e4m3fn, 128),
    "int4": Form(jnp.int4, 128, zero=True),
    "mxfp4": Form(jnp.float4_e2m1fn, 32, jnp.bfloat16, experts_alone=True),
}


def hold_form(model: Llama, form: Form) -> None:
    """Gives a model of shapes the matrices of a checkpoint of this form, in place."""
    _replace_matrices(
        model, lambda kernel, axis, _: form.rounded(kernel, axis), dense=not form.experts_alone
    )


def holds_codes(model: nnx.Module) -> bool:
    """Whether matrices of a model are rounded."""
    kinds = (QuantizedLinear, QuantizedGroupedLinear)
    return any(isinstance(part, kinds) for _, part in nnx.iter_modules(model))


def quantize_weights(model: Llama, bits: int = 8) -> None:
    """Replaces the matrices of all layers by rounded ones, in place, one by one.

    bits: 8 or 4; experts are rounded to 8.

    The embedding table, the output head, the norms and routers stay as they are: the head's
    rounding would directly change the log-probabilities, a router's the choice of experts.
    """
    _replace_matrices(model, round_matrix, bits)


def _replace_matrices(
    model: Llama, rounded: Callable[[jax.Array, int, int], Rounded], bits: int = 8, *, dense=True
) -> None:
    """Replaces matrices by what `rounded` makes of a kernel, its axis of inputs and the bits.

    dense: whether those of a mixture that are not experts' are replaced, too.
    """
    unstacked = isinstance(model.layers, nnx.List)
    for layer in model.layers if unstacked else stacks(model.layers):
        for owner, name in layer.each_linear() if dense or not layer.config.experts else ():
            linear = getattr(owner, name)
            made = rounded(linear.kernel[...], input_axis(linear) - 2, bits)
            setattr(owner, name, QuantizedLinear(linear, made))
            _free(linear.kernel)
        for name in ("gate", "up", "down") if layer.config.experts else ():
            grouped = getattr(layer.experts, name)
            made = rounded(grouped.kernels[...], -2, 8)
            setattr(layer.experts, name, QuantizedGroupedLinear(grouped, made))
            _free(grouped.kernels)


def _free(kernel: nnx.Param) -> None:
    if not isinstance(value := kernel.get_value(), jax.core.Tracer):
        value.delete()


@functools.partial(jax.jit, static_argnums=(1, 2))
def round_matrix(kernel: jax.Array, axis: int, bits: int) -> Rounded:
    """The kernel rounded; `axis` is that of the inputs."""
    if bits == 8:
        largest = jnp.abs(kernel).max(axis=axis, keepdims=True)
        scale = jnp.maximum(largest, 1e-30).astype(jnp.float32) / 127
        return Rounded(jnp.round(kernel / scale).astype(jnp.int8), scale.squeeze(axis))
    axis %= kernel.ndim
    inputs = kernel.shape[axis]
    group = _GROUP if inputs % _GROUP == 0 else inputs
    shape = (*kernel.shape[:axis], inputs // group, group, *kernel.shape[axis + 1 :])
    apart = kernel.reshape(shape)
    scale = jnp.maximum(jnp.abs(apart).max(axis=axis + 1), 1e-30).astype(jnp.float32) / 7
    rounded = jnp.round(apart / jnp.expand_dims(scale, axis + 1))
    return Rounded(rounded.astype(jnp.int4).reshape(kernel.shape), scale)


_CODES = {np.dtype(kind) for kind in (ml_dtypes.int4, "int8", ml_dtypes.float4_e2m1fn)}
_CODES |= {np.dtype(kind) for kind in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)}
_PARTS = ("codes", "scale", "zero")
_LAYERS = "layers/"


def load_in_codes(
    kind: str,
    path: Path,
    *,
    mesh: Mesh | None = None,
    param_dtype: str = "float32",
    layers_apart: bool = False,
    **changes: Any,
) -> nnx.Module:
    """Reads a published checkpoint as `load_published` does, but for matrices of the language
    model's layers that it holds in codes of 4 or 8 bits: these stay.

    A matrix whose codes are looked up in a table, or whose inputs are not grouped in their order,
    becomes whole, as does one of a stack whose layers differ.
    """
    entry = architecture(kind)
    build = entry.build

    def opened(part: str) -> Checkpoint:
        nonlocal build
        with reading(part):
            checkpoint = entry.open(path)
        if layers_apart:
            build, checkpoint = entry.part("layers_apart")(checkpoint)
        return checkpoint

    checkpoint = opened("whole")
    parts = {part: opened(part).source for part in _PARTS}
    config = replace_fields(checkpoint.config, **changes)
    graphdef, state = abstract_of(build, config, mesh, param_dtype)
    plan = plan_loading(named(state), checkpoint.key_map(config), checkpoint.source)
    model = nnx.merge(graphdef, state)
    for name, assignments in plan.items():
        owner, linear = _linear(model, name)
        if linear is not None and _stays(parts, assignments):
            _replace(owner, name.split("/")[-2], linear, parts, assignments, mesh)
        else:
            parameter = _at(model, name.split("/"))
            parameter.set_value(
                read_parameter(parameter.get_value(), assignments, checkpoint.source)
            )
    return model


def published_form(kind: str, path: Path) -> str:
    """The form (`FORMS`) of most of a checkpoint's matrices by size; "": none is in codes."""
    with reading("codes"):
        specs = architecture(kind).open(path).source.specs()
    sizes: dict[str, float] = dict.fromkeys(FORMS, 0)
    for spec in specs.values():
        if spec.dtype in _CODES:  # integers of 8 bits take as much memory as FP8
            same = (name for name, form in FORMS.items() if np.dtype(form.codes) == spec.dtype)
            sizes[next(same, "fp8")] += math.prod(spec.shape)
    largest = max(sizes, key=sizes.__getitem__)
    return largest if sizes[largest] else ""


def _at(model: nnx.Module, path: list[str]) -> Any:
    for name in path:
        model = model[int(name)] if name.isdigit() else getattr(model, name)
    return model


def _linear(model: nnx.Module, name: str) -> tuple[nnx.Module | None, nnx.Module | None]:
    """What holds the linear of a layer whose kernel has this name, and the linear."""
    path = name.split("/")
    is_kernel = path[-1] in ("kernel", "kernels") and name.removeprefix("llama/").startswith(
        _LAYERS
    )
    linear = _at(model, path[:-1]) if is_kernel else None
    if not isinstance(linear, Linear | TransposedLinear | experts.GroupedLinear):
        return None, None
    return _at(model, path[:-2]), linear


def _stays(parts: Mapping[str, TensorSource], assignments: list[Assignment]) -> bool:
    """Whether the tensors of a parameter, of all its layers, are in codes of one kind."""
    specs = [parts["codes"].specs()[assignment.source_key] for assignment in assignments]
    kinds = {
        (spec.dtype, _group(parts, assignment))
        for spec, assignment in zip(specs, assignments, strict=True)
    }
    return len(kinds) == 1 and specs[0].dtype in _CODES


def _group(parts: Mapping[str, TensorSource], assignment: Assignment) -> int:
    """Inputs that share a scale."""
    return (
        parts["codes"].specs()[assignment.source_key].shape[-1]
        // parts["scale"].specs()[assignment.source_key].shape[-1]
    )


def _replace(
    owner: nnx.Module,
    name: str,
    linear: Linear | TransposedLinear | experts.GroupedLinear,
    parts: Mapping[str, TensorSource],
    assignments: list[Assignment],
    mesh: Mesh | None,
) -> None:
    """Puts a linear in codes into the place of one that is shapes."""
    is_grouped = isinstance(linear, experts.GroupedLinear)
    kernel = linear.kernels if is_grouped else linear.kernel
    axis = -2 if is_grouped else input_axis(linear) - 2
    names = kernel.get_metadata()["out_sharding"]
    groups = kernel.shape[axis] // _group(parts, assignments[0])
    arrays = []
    for part in _PARTS:
        spec = parts[part].specs()[assignments[0].source_key]
        if part == "zero" and spec.dtype != np.int8:  # the whole matrix: it has no zeros
            arrays.append(None)
            continue
        shape = list(kernel.shape)
        if part != "codes":
            shape[axis] = groups
        sharding = mesh and NamedSharding(mesh, partition_spec(names, tuple(shape), mesh))
        value = jax.ShapeDtypeStruct(tuple(shape), spec.dtype, sharding=sharding)
        arrays.append(read_parameter(value, assignments, parts[part]))
    codes, scale, zero = arrays
    if groups == 1 and zero is None:
        scale = scale.squeeze(axis)
    made = QuantizedGroupedLinear if is_grouped else QuantizedLinear
    setattr(owner, name, made(linear, Rounded(codes, scale, zero)))
