"""Models whose layers' matrices stay in the codes in which a checkpoint is published.

The checkpoint is opened once for each part of its matrices (`weights.quantization.reading`): as
whole ones, of which the key map makes its plan, and as codes, scales and zeros, which take the same
way through renames, splits, stacks and transposes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from mmqa_jax.core.mesh import partition_spec
from mmqa_jax.models.common.layers import Linear, TransposedLinear
from mmqa_jax.models.llama.experts import GroupedLinear
from mmqa_jax.models.llama.quantize import (
    FORMS,
    QuantizedGroupedLinear,
    QuantizedLinear,
    Rounded,
    input_axis,
)
from mmqa_jax.weights.config_json import replace_fields
from mmqa_jax.weights.formats.safetensors import TensorSource
from mmqa_jax.weights.keymap import Assignment, abstract_of, named, plan_loading, read_parameter
from mmqa_jax.weights.layouts import Checkpoint
from mmqa_jax.weights.quantization import reading
from mmqa_jax.weights.registry import architecture

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
    if not isinstance(linear, Linear | TransposedLinear | GroupedLinear):
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
    linear: Linear | TransposedLinear | GroupedLinear,
    parts: Mapping[str, TensorSource],
    assignments: list[Assignment],
    mesh: Mesh | None,
) -> None:
    """Puts a linear in codes into the place of one that is shapes."""
    is_grouped = isinstance(linear, GroupedLinear)
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
