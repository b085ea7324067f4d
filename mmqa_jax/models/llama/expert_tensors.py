"""Experts of a mixture as a checkpoint keeps them, and as one tensor of a layer.

Published files hold each linear of each expert, `mlp.experts.N.gate_proj.weight` (out, in);
transformers 5 holds in memory what its models compute with, `mlp.experts.gate_up_proj` (E,
gate's rows then up's, in) and `mlp.experts.down_proj` (E, out, in). Our key maps have
`mlp.experts.gate_proj.weight` (E, out, in), and alike `up_proj` and `down_proj`.
gpt-oss and Llama 4 keep both the other way, (E, in, out).
"""

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
_IN_TURN = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)(|_bias)")


def experts_together(source: TensorSource, experts: int) -> TensorSource:
    """The tensors of a checkpoint of either layout with those of all experts as one."""
    tensors: dict[str, Any] = {}
    parts: dict[str, dict[int, str]] = {}  # name of the whole -> key of each expert
    for key, spec in source.specs().items():
        if match := _ONE.fullmatch(key):
            parts.setdefault(f"{match[1]}{match[3]}", {})[int(match[2])] = key
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


def experts_paired(source: TensorSource) -> TensorSource:
    """The reverse, as transformers 5 holds them in memory: gate and up of all experts in one."""
    tensors = {}
    for key, spec in source.specs().items():
        if not _STACKED.fullmatch(key):
            tensors[key] = spec, functools.partial(source.read, key)
        elif key.endswith("gate_proj.weight"):
            pair = [key, key.replace("gate_proj", "up_proj")]
            shape = (spec.shape[0], 2 * spec.shape[1], spec.shape[2])
            read = functools.partial(
                lambda pair: np.concatenate([*map(source.read, pair)], 1), pair
            )
            name = key.replace("gate_proj.weight", "gate_up_proj")
            tensors[name] = jax.ShapeDtypeStruct(shape, spec.dtype), read
        elif key.endswith("down_proj.weight"):
            name = key.removesuffix(".weight")
            tensors[name] = spec, functools.partial(source.read, key)
    return DerivedSource(source.name, tensors)


def experts_by_linear(source: TensorSource, *, in_turn: bool) -> TensorSource:
    """The tensors of a checkpoint that keeps `gate_up_proj` (E, in, out), `down_proj`, and their
    biases (E, out), with each linear of all experts as one.

    in_turn: every other column is gate's; else the first half are.
    """
    tensors: dict[str, Any] = {}
    specs = source.specs()
    for key, spec in specs.items():
        part = _IN_TURN.fullmatch(key)
        if part is None:
            tensors[key] = spec, functools.partial(source.read, key)
            continue
        stem, linear, kind = part[1], part[2], part[3]
        read = functools.partial(source.read, key)
        if kind == "":
            spec = jax.ShapeDtypeStruct((spec.shape[0], *spec.shape[:0:-1]), spec.dtype)
            read = functools.partial(lambda read: read().swapaxes(1, 2), read)
        half = spec.shape[1] // 2
        halves = {"gate": slice(half), "up": slice(half, None)}
        if in_turn:
            halves = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
        for name, rows in halves.items() if linear == "gate_up_proj" else [("down", slice(None))]:
            of_name = functools.partial(lambda read, rows: read()[:, rows], read, rows)
            shape = (spec.shape[0], len(range(*rows.indices(spec.shape[1]))), *spec.shape[2:])
            ours = f"{stem}{name}_proj.{'bias' if kind == '_bias' else 'weight'}"
            tensors[ours] = jax.ShapeDtypeStruct(shape, spec.dtype), of_name
    return DerivedSource(source.name, tensors)


def experts_across(source: TensorSource, *, in_turn: bool) -> TensorSource:
    """The reverse, not rounded."""
    tensors = {}
    for key, spec in source.specs().items():
        part = re.fullmatch(r"(.*\.experts\.)(gate|up|down)_proj\.(weight|bias)", key)
        if part is None:
            tensors[key] = spec, functools.partial(source.read, key)
            continue
        keys, linear = [key], "down_proj"
        if part[2] != "down":
            linear = "gate_up_proj"
            keys = [f"{part[1]}{name}_proj.{part[3]}" for name in ("gate", "up")]
        shape = [spec.shape[0], spec.shape[1] * len(keys), *spec.shape[2:]]
        if part[3] == "weight":
            shape[1:] = shape[:0:-1]
        name = f"{part[1]}{linear}{'_bias' if part[3] == 'bias' else ''}"
        read = functools.partial(_across, source, keys, in_turn)
        tensors[name] = jax.ShapeDtypeStruct(tuple(shape), spec.dtype), read
    return DerivedSource(source.name, tensors)


def _across(source: TensorSource, keys: list[str], in_turn: bool) -> np.ndarray:
    """Tensors (E, out, in) as one (E, in, out), or of biases (E, out); the rows of all are in turn,
    or follow each other."""
    whole = np.stack([*map(source.read, keys)], axis=2 if in_turn else 1)
    whole = whole.reshape(whole.shape[0], -1, *whole.shape[3:])
    return np.ascontiguousarray(whole.swapaxes(1, -1) if whole.ndim == 3 else whole)


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
