"""Experts of a mixture as a checkpoint keeps them, and as one tensor of a layer.

Published files hold each linear of each expert, `mlp.experts.N.gate_proj.weight` (out, in);
transformers 5 holds in memory what its models compute with, `mlp.experts.gate_up_proj`
(E, gate's rows then up's, in) and `mlp.experts.down_proj` (E, out, in). Our key maps have
`mlp.experts.gate_proj.weight` (E, out, in), and alike `up_proj` and `down_proj`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.weights.formats.safetensors import DerivedSource, TensorSource

_ONE = re.compile(r"(.*\.experts\.)(\d{1,4})\.((?:gate|up|down)_proj\.weight)")
_STACKED = re.compile(r"(.*\.experts\.)((?:gate|up|down)_proj\.weight)")
_BOTH, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def experts_together(source: TensorSource, experts: int) -> TensorSource:
    """The tensors of a checkpoint of either layout with those of all experts as one."""
    tensors: dict[str, Any] = {}
    parts: dict[str, dict[int, str]] = {}  # name of the whole -> key of each expert
    for key, spec in source.specs().items():
        if one := _ONE.fullmatch(key):
            parts.setdefault(f"{one[1]}{one[3]}", {})[int(one[2])] = key
        elif key.endswith(_BOTH):
            half = spec.shape[1] // 2
            of_half = jax.ShapeDtypeStruct((spec.shape[0], half, *spec.shape[2:]), spec.dtype)
            for name, rows in (("gate", slice(half)), ("up", slice(half, None))):
                read = functools.partial(_rows, source, key, rows)
                tensors[key.replace("gate_up_proj", f"{name}_proj.weight")] = of_half, read
        else:
            name = f"{key}.weight" if key.endswith(_DOWN) else key
            tensors[name] = spec, functools.partial(source.read, key)
    for name, keys in parts.items():
        if sorted(keys) != list(range(experts)):
            wrong = sorted(set(keys) ^ set(range(experts)))
            raise UserError(
                f"{source.name}: {name.removesuffix('.weight')} is of {len(keys)} experts, of the "
                f"config's {experts} without or beyond numbers {wrong[:8]}; fetch the checkpoint "
                "again, or correct num_experts in its config.json."
            )
        spec = source.specs()[keys[0]]
        of_all = jax.ShapeDtypeStruct((experts, *spec.shape), spec.dtype)
        in_order = [keys[number] for number in range(experts)]
        tensors[name] = of_all, functools.partial(_stack, source, in_order, of_all)
    return DerivedSource(source.name, tensors)


def experts_apart(source: TensorSource) -> TensorSource:
    """The reverse, in the published layout, which all versions of transformers read."""
    tensors = {}
    read_layer = functools.lru_cache(maxsize=1)(source.read)  # for one expert after another
    for key, spec in source.specs().items():
        stacked = _STACKED.fullmatch(key)
        if not stacked:
            tensors[key] = spec, functools.partial(source.read, key)
            continue
        of_one = jax.ShapeDtypeStruct(spec.shape[1:], spec.dtype)
        for number in range(spec.shape[0]):
            read = functools.partial(_one, read_layer, key, number)
            tensors[f"{stacked[1]}{number}.{stacked[2]}"] = of_one, read
    return DerivedSource(source.name, tensors)


def _rows(source: TensorSource, key: str, rows: slice) -> np.ndarray:
    return source.read(key)[:, rows]


def _stack(source: TensorSource, keys: list[str], spec: jax.ShapeDtypeStruct) -> np.ndarray:
    """One tensor is in memory beside the whole at a time."""
    whole = np.empty(spec.shape, spec.dtype)
    for number, key in enumerate(keys):
        whole[number] = source.read(key)
    return whole


def _one(read_layer: Callable[[str], np.ndarray], key: str, number: int) -> np.ndarray:
    return np.ascontiguousarray(read_layer(key)[number])
