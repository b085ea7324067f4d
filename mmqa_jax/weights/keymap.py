"""Declarative key maps: published checkpoint keys to parameters of our models, and back.

A key map is a list of rules `source key template -> (path, transform)`. `{layer}` in a template
stands for a number: it becomes the slice of a stacked parameter, or part of the path where the
path has `{layer}` too. Unlike a regular expression, a template can be run backwards, so the same
map exports.

Loading is strict. A source key without a rule, a parameter left unfilled, two rules or two keys
for one parameter, or a shape that differs ends in one UserError that lists all offenders, before
any tensor is read. Tensors are then read one at a time onto their shardings.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import state_shardings
from mmqa_jax.weights.formats.safetensors import DerivedSource, TensorSource

# Host memory that becomes an array of the CPU as it is.


_ALIGNMENT = 64  # of memory that JAX takes as an array of the CPU without copying it


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array without values; `jax.device_put` of it to a CPU device copies nothing.

    It must not be written to afterwards.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


# What a tensor of a damaged checkpoint looks like: NaN, infinity, nothing but zeros.


# Bits of the exponent; all of them set: NaN or infinity. By NumPy's name of the type.
_EXPONENT = {
    "float16": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
    "float32": (np.uint32, 0x7F800000),
    "float64": (np.uint64, 0x7FF0000000000000),
    "float8_e4m3fn": (np.uint8, 0x7F),  # has NaN alone, by all bits
}
_BLOCK = 2**16  # values looked at together, so that the copies stay small


def all_finite(tensor: np.ndarray) -> bool:
    """Whether no value is NaN or infinite; of integers none is.

    By the bits: np.isfinite takes several times as long for bfloat16, which is no type of NumPy.
    """
    if tensor.dtype.name not in _EXPONENT:
        return True
    integer, exponent = _EXPONENT[tensor.dtype.name]
    mask = integer(exponent)
    return not any(((block.view(integer) & mask) == mask).any() for block in _blocks(tensor))


def all_zero(tensor: np.ndarray) -> bool:
    """Whether every value is 0; true of no values. Of others it ends with the first block."""
    return not any(block.view(np.uint8).any() for block in _blocks(tensor))


def _blocks(tensor: np.ndarray) -> Iterator[np.ndarray]:
    values = np.ravel(tensor, order="K")  # no copy of a whole tensor, nor of its transpose
    return (values[start : start + _BLOCK] for start in range(0, values.size, _BLOCK))


_SHOWN = 10  # offenders listed of each kind


@dataclasses.dataclass(frozen=True)
class Transform:
    """A change of layout between a published tensor and ours, written with array methods."""

    forward: Callable[[Any], Any]  # published -> ours
    # Ours -> published; None where information is lost (export then refuses).
    inverse: Callable[[Any], Any] | None


IDENTITY = Transform(lambda x: x, lambda x: x)
# torch.nn.Linear keeps (out, in), our kernels are [in, out].
TRANSPOSE = Transform(lambda x: x.T, lambda x: x.T)

# Conv2d weight (out, in, K, K) <-> kernel [K, K, in, out].
CONV = Transform(lambda x: x.transpose(2, 3, 1, 0), lambda x: x.transpose(3, 2, 0, 1))
# Conv2d weight (out, in, 1, 1) <-> kernel [in, out].
CONV_1X1 = Transform(lambda x: x[:, :, 0, 0].T, lambda x: x.T[:, :, None, None])


def conv_patches(patch: int) -> Transform:
    """Conv2d weight (out, 3, patch, patch) <-> kernel [patch * patch * 3, out].

    Rows follow a patch flattened as (row, column, channel).
    """
    return Transform(
        lambda x: x.transpose(2, 3, 1, 0).reshape(-1, x.shape[0]),
        lambda x: x.reshape(patch, patch, 3, x.shape[-1]).transpose(3, 2, 0, 1),
    )


@dataclasses.dataclass(frozen=True)
class Rule:
    """One published key (or one per layer) and where it goes."""

    key: str  # template of the source key, e.g. `encoder.layer.{layer}.output.dense.weight`.
    path: str  # path of the parameter joined by `/`, e.g. `layers/mlp_out/kernel`.
    transform: Transform = IDENTITY  # layout change of one source tensor
    # first, step: the rule is of the layers first, first + step, ... alone.
    first: int = 0
    step: int = 1

    @functools.cached_property
    def regex(self) -> re.Pattern:
        """The template as a regular expression with a group `layer`."""
        return re.compile(re.escape(self.key).replace(r"\{layer\}", r"(?P<layer>\d{1,4})") + r"\Z")

    @functools.cached_property
    def path_regex(self) -> re.Pattern:
        """The path as a regular expression with the layer number as its group."""
        return re.compile(re.escape(self.path).replace(r"\{layer\}", r"(\d+)"))

    def match(self, key: str) -> re.Match | None:
        """The match of a source key that this rule is of."""
        match = self.regex.match(key)
        if match and "{layer}" in self.key and not self.has(int(match["layer"])):
            return None
        return match

    def has(self, layer: int) -> bool:
        """Whether the rule is of this layer."""
        return layer >= self.first and (layer - self.first) % self.step == 0

    @property
    def stacked(self) -> bool:
        """Whether the layer number selects a slice of the parameter."""
        return "{layer}" in self.key and "{layer}" not in self.path


@dataclasses.dataclass(frozen=True)
class KeyMap:
    """Rules of one model, with the exceptions spelled out."""

    rules: Sequence[Rule]  # see Rule
    # (regex, replacement) applied to each source key before the rules: prefixes and old names
    # (`gamma` -> `weight`).
    rename: Sequence[tuple[str, str]] = ()
    # Regexes of (renamed) source keys that are dropped: buffers, unused heads.
    ignore: Sequence[str] = ()
    # Regexes of parameter paths that may stay as they are (heads that are newly trained).
    fresh: Sequence[str] = ()
    # (alias key, key): the checkpoint stores one tensor under two names. Both, if present, must be
    # equal; the alias by itself is read as the key.
    tied: Sequence[tuple[str, str]] = ()

    def renamed(self, key: str) -> str:
        """A source key as the rules have it."""
        for pattern, replacement in self.rename:
            key = re.sub(pattern, replacement, key)
        return key

    def with_transform(self, key: str, transform: Transform) -> KeyMap:
        """The map with another transform for the key that ends in `key`."""
        rules = [
            dataclasses.replace(rule, transform=transform) if rule.key.endswith(key) else rule
            for rule in self.rules
        ]
        return dataclasses.replace(self, rules=rules)


@dataclasses.dataclass(frozen=True)
class Assignment:
    """A tensor of a checkpoint, and the place that it fills in a parameter."""

    source_key: str
    slot: tuple[int, ...]  # leading indices into the parameter; () is the whole
    transform: Transform


def abstract_model(
    build: Callable[[], nnx.Module],
    mesh: Mesh | None = None,
    param_dtype: str = "float32",
) -> tuple[nnx.GraphDef, nnx.State]:
    """A model as shapes with dtypes and shardings, for `load_into`; nothing is allocated.

    Args:
      build: makes the model; it is traced, not run.
      mesh: where the parameters go; None is the default device.
      param_dtype: of all parameters.
    """
    return _placed(*nnx.split(nnx.eval_shape(build)), mesh, param_dtype)


def abstract_of(
    model: Callable[..., nnx.Module],
    config: Any,
    mesh: Mesh | None = None,
    param_dtype: str = "float32",
) -> tuple[nnx.GraphDef, nnx.State]:
    """Makes an abstract model, as `abstract_model`, of what `model(config, rngs=...)` makes.

    It is traced once, see `traced_model`.
    """
    return _placed(*traced_model(model, config), mesh, param_dtype)


def traced_model(model: Callable[..., nnx.Module], config: Any) -> tuple[nnx.GraphDef, nnx.State]:
    """What `model(config, rngs=...)` makes, as shapes with its own dtypes.

    It is traced once in a process, however many checkpoints of the config are opened: callers do
    not change the state. A config that has no hash, of somebody's own task, is traced each time.
    """
    try:
        hash(config)
    except TypeError:
        return _traced.__wrapped__(model, config)
    return _traced(model, config)


@functools.lru_cache(maxsize=64)
def _traced(model: Callable[..., nnx.Module], config: Any) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(nnx.eval_shape(lambda: model(config, rngs=nnx.Rngs())))


def _placed(
    graphdef: nnx.GraphDef, state: nnx.State, mesh: Mesh | None, param_dtype: str
) -> tuple[nnx.GraphDef, nnx.State]:
    def typed(leaf, sharding=None):
        return jax.ShapeDtypeStruct(leaf.shape, param_dtype, sharding=sharding)

    shardings = () if mesh is None else (state_shardings(state, mesh),)
    return graphdef, jax.tree.map(typed, state, *shardings)


def load_into(state: nnx.State, key_map: KeyMap, source: TensorSource) -> nnx.State:
    """Fills `state` from a checkpoint, one tensor in host memory at a time.

    Args:
      state: parameters to fill: arrays, or ShapeDtypeStructs (with shardings, if the model is
        to be spread over a mesh: nothing is initialized then, and no host holds the model).
        Fresh parameters need arrays. The given arrays are not changed.
      key_map: the model's map.
      source: the checkpoint.

    Returns:
      A new state: each filled parameter with the dtype and sharding of the one it replaces.
    """
    return _filled(state, plan_loading(named(state), key_map, source), source)


def check_fits(state: nnx.State, key_map: KeyMap, source: TensorSource) -> None:
    """Raises UserError where a checkpoint does not fit shapes; see `load_into`."""
    plan_loading(named(state), key_map, source, shapes_stay=True)


def load_model(model: nnx.Module, key_map: KeyMap, source: TensorSource) -> None:
    """Fills a module's parameters in place from a checkpoint; see `load_into`.

    What they held is forgotten once the checkpoint is known to fit, so that the model is in memory
    once. They may be shapes (nnx.eval_shape); fresh ones then stay shapes.
    """
    plan = plan_loading(named(nnx.state(model)), key_map, source, shapes_stay=True)
    nnx.update(model, _filled(forget(model, plan.__contains__), plan, source))


def forget(model: nnx.Module, which: Callable[[str], bool]) -> nnx.State:
    """Drops the arrays of parameters before others take their place.

    Args:
      model: has only shapes, dtypes and shardings of them afterwards.
      which: whether it is to be dropped, by name (`layers/query/kernel`).

    Returns:
      What is left of them, as `load_into` takes it.
    """
    left = []
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        if which(_join(path)):
            value = leaf.get_value()
            spec = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
            left.append((path, leaf.replace(spec)))
    state = nnx.from_flat_state(left)
    nnx.update(model, state)
    return state


def named(state: nnx.State) -> dict[str, Any]:
    """Parameters by name (`layers/query/kernel`)."""
    return {_join(path): leaf for path, leaf in nnx.to_flat_state(state)}


def _filled(
    state: nnx.State, plan: Mapping[str, Sequence[Assignment]], source: TensorSource
) -> nnx.State:
    filled = []
    for path, leaf in nnx.to_flat_state(state):
        assignments = plan.get(_join(path))
        if assignments:
            leaf = leaf.replace(read_parameter(leaf.get_value(), assignments, source))
        filled.append((path, leaf))
    return nnx.from_flat_state(filled)


def model_source(state: nnx.State, key_map: KeyMap) -> TensorSource:
    """A model's parameters under published keys and layouts: a key map run backwards."""
    tensors = {}

    def read(leaf: Any, slot: tuple[int, ...], inverse: Callable[[Any], Any]) -> np.ndarray:
        if not slot:
            ours = np.asarray(leaf)
        elif _is_one_cpu(getattr(leaf, "sharding", None)):
            ours = np.asarray(leaf)[slot]  # a view: nothing is compiled
        else:
            ours = np.asarray(_get_slice(leaf, slot[0]))
        # C order: safetensors' own save_file writes the bytes of a transposed view unchanged.
        return np.asarray(inverse(ours), order="C")

    leaves = {_join(path): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}
    for rule in key_map.rules:
        inverse = rule.transform.inverse
        if inverse is None:
            raise UserError(
                f"key map, {rule.key}: this layout change cannot be undone; export with the "
                "model's own key map."
            )
        for path, leaf in leaves.items():
            match = rule.path_regex.fullmatch(path)
            if not match:
                continue
            layers = [layer for layer in map(int, match.groups()) if rule.has(layer)]
            if rule.stacked:
                layers = range(rule.first, rule.first + rule.step * leaf.shape[0], rule.step)
            for layer in layers if "{layer}" in rule.key else [None]:
                slot = ((layer - rule.first) // rule.step,) if rule.stacked else ()
                key = rule.key if layer is None else rule.key.format(layer=layer)
                ours = jax.ShapeDtypeStruct(leaf.shape[len(slot) :], leaf.dtype)
                spec = _spec_after(inverse, ours)
                tensors[key] = spec, functools.partial(read, leaf, slot, inverse)
    for alias, key in key_map.tied:
        if key in tensors:
            tensors[alias] = tensors[key]
    return DerivedSource("the model", tensors)


def untied_source(state: nnx.State, key_map: KeyMap) -> TensorSource:
    """A whole model's tensors, each once: transformers ties the other names itself."""
    paths = [_join(path) for path, _ in nnx.to_flat_state(state)]
    extra = [p for p in paths if not any(rule.path_regex.fullmatch(p) for rule in key_map.rules)]
    if extra:
        more = f" and {len(extra) - _SHOWN} more" if len(extra) > _SHOWN else ""
        raise UserError(
            f"the model has parameters that the published layout does not have: "
            f"{', '.join(extra[:_SHOWN])}{more}; it cannot be exported."
        )
    return model_source(state, dataclasses.replace(key_map, tied=()))


def export(state: nnx.State, key_map: KeyMap) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (published key, tensor) of every parameter that the map knows, one at a time."""
    source = model_source(state, key_map)
    for key in source.specs():
        yield key, source.read(key)


def plan_loading(
    leaves: Mapping[str, Any], key_map: KeyMap, source: TensorSource, *, shapes_stay: bool = False
) -> dict[str, list[Assignment]]:
    """Matches every source key with its parameter; raises UserError listing what does not fit.

    `shapes_stay`: whether fresh parameters may be shapes: they get their values later.
    """
    specs = source.specs()
    offenders: dict[str, list[str]] = {}

    def offend(kind: str, what: str) -> None:
        offenders.setdefault(kind, []).append(what)

    keys: dict[str, str] = {}  # renamed key -> key in the file
    for key in specs:
        renamed = key_map.renamed(key)
        if renamed in keys:
            offend("keys with one meaning", f"{keys[renamed]} and {key}")
        keys[renamed] = key
    for alias, original in key_map.tied:
        if alias in keys and original in keys:
            if not _equal(source, keys[alias], keys[original]):
                offend("tensors that should be equal", f"{keys[alias]} and {keys[original]}")
            del keys[alias]
        elif alias in keys:
            keys[original] = keys.pop(alias)

    plan: dict[str, dict[tuple[int, ...], Assignment]] = {}
    for renamed, key in keys.items():
        if any(re.search(pattern, renamed) for pattern in key_map.ignore):
            continue
        matches = [(rule, m) for rule in key_map.rules if (m := rule.match(renamed))]
        if not matches:
            offend("keys without a rule", key)
            continue
        if len(matches) > 1:
            offend("keys with two rules", key)
            continue
        rule, match = matches[0]
        layer = int(match["layer"]) if "{layer}" in rule.key else None
        path = rule.path.format(layer=layer) if layer is not None else rule.path
        if path not in leaves:
            offend("keys whose parameter the model lacks", f"{key} -> {path}")
            continue
        value = leaves[path].get_value()
        slot = ((layer - rule.first) // rule.step,) if rule.stacked else ()
        if slot and slot[0] >= value.shape[0]:
            offend("layers the model lacks", f"{key} (model: {rule.step * value.shape[0]})")
            continue
        slots = plan.setdefault(path, {})
        if slot in slots:
            offend("two keys for one parameter", f"{slots[slot].source_key} and {key}")
            continue
        slots[slot] = Assignment(key, slot, rule.transform)
        wanted = value.shape[len(slot) :]
        got = _shape_after(rule.transform, specs[key])
        if got != wanted:
            shape = tuple(specs[key].shape)
            offend("shapes that differ", f"{key} {shape} (model: {path} {wanted}, here {got})")

    for path, leaf in leaves.items():
        shape = leaf.get_value().shape
        slots = plan.get(path, {})
        if not slots:
            if not any(re.search(pattern, path) for pattern in key_map.fresh):
                offend("parameters without a tensor", path)
            elif not shapes_stay and isinstance(leaf.get_value(), jax.ShapeDtypeStruct):
                offend("fresh parameters that were never initialized", path)
        elif () not in slots and len(slots) < shape[0]:
            absent = (n for n in range(shape[0]) if (n,) not in slots)
            listed = ", ".join(map(str, itertools.islice(absent, _SHOWN)))
            more = shape[0] - len(slots) - _SHOWN
            listed += f" and {more:,} more" if more > 0 else ""
            offend("parameters without a tensor", f"{path}, layers [{listed}]")
    if offenders:
        raise UserError(_sentence(source.name, offenders))
    return {path: [slots[slot] for slot in sorted(slots)] for path, slots in plan.items()}


def _sentence(name: str, offenders: Mapping[str, Sequence[str]]) -> str:
    parts = []
    for kind, items in offenders.items():
        listed = ", ".join(items[:_SHOWN])
        more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
        parts.append(f"{len(items)} {kind}: {listed}{more}")
    return (
        f"{name}: the checkpoint does not fit the model ({'; '.join(parts)}); give a checkpoint "
        "of this model, and a config of the checkpoint's sizes."
    )


def _shape_after(transform: Transform, spec: jax.ShapeDtypeStruct) -> tuple[int, ...] | None:
    try:
        return _spec_after(transform.forward, spec).shape
    except (TypeError, ValueError, IndexError):  # a tensor of another rank
        return None


@functools.lru_cache(maxsize=1024)  # layers have the same tensors
def _spec_after(change: Callable[[Any], Any], spec: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(change, spec)


def _equal(source: TensorSource, first: str, second: str) -> bool:
    specs = source.specs()
    if specs[first].shape != specs[second].shape:
        return False
    return np.array_equal(source.read(first), source.read(second))


def read_assigned(assignment: Assignment, source: TensorSource) -> np.ndarray:
    """The tensor of one slot of a parameter, in our layout and the checkpoint's dtype."""
    tensor = source.read(assignment.source_key)
    if not all_finite(tensor):
        raise UserError(
            f"{source.name}: {assignment.source_key} holds NaN or infinity; its training diverged "
            "or its file is damaged: fetch it again, or give an earlier checkpoint."
        )
    return np.asarray(assignment.transform.forward(tensor))


def read_parameter(
    value: Any, assignments: Sequence[Assignment], source: TensorSource
) -> jax.Array:
    """Reads a parameter, of the shape, type and sharding of `value`."""
    sharding = getattr(value, "sharding", None)
    if _is_one_cpu(sharding):  # the array is built where it stays, and cast as it is written
        whole = aligned_empty(value.shape, value.dtype)
        for assignment in assignments:
            whole[assignment.slot] = read_assigned(assignment, source)
        return jax.device_put(whole, sharding)

    def placed(assignment: Assignment, sharding: jax.sharding.Sharding | None) -> jax.Array:
        tensor = read_assigned(assignment, source).astype(value.dtype, copy=False)
        if sharding is None:
            return jax.device_put(tensor)
        # To each device its own shard; device_put would first compare all processes' tensors.
        return jax.make_array_from_callback(tensor.shape, sharding, tensor.__getitem__)

    if assignments[0].slot == ():
        return placed(assignments[0], sharding)
    buffer = jnp.zeros(value.shape, value.dtype, device=sharding)
    for assignment in assignments:
        buffer = _set_slice(buffer, placed(assignment, _of_layer(sharding)), assignment.slot[0])
    return buffer


def _of_layer(sharding: jax.sharding.Sharding | None) -> jax.sharding.Sharding | None:
    """The sharding of one layer of a stack."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return sharding


def _is_one_cpu(sharding: jax.sharding.Sharding | None) -> bool:
    devices = list(sharding.device_set) if sharding is not None else jax.local_devices()[:1]
    return len(devices) == 1 and devices[0].platform == "cpu"


# The index is an argument: one compilation serves all layers.
_get_slice = jax.jit(lambda leaf, index: jax.lax.dynamic_index_in_dim(leaf, index, 0, False))


@functools.partial(jax.jit, donate_argnums=0)  # donated: the stack is written in place
def _set_slice(buffer: jax.Array, tensor: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(buffer, tensor, index, 0)


def _join(path: Sequence[Any]) -> str:
    return "/".join(str(part) for part in path)


def transformer_rules(
    layer: str, path: str, names: Mapping[str, str], norms: Mapping[str, str]
) -> list[Rule]:
    """Rules of one transformer block: linears (weight transposed, bias) and layer norms.

    Args:
      layer: key template of the block, with `{layer}` and a trailing dot.
      path: path of the stacked block.
      names: published linear -> ours (each with `.weight` and `.bias`).
      norms: published layer norm -> ours.
    """
    rules = []
    for theirs, ours in names.items():
        rules += linear_rules(f"{layer}{theirs}", f"{path}/{ours}")
    for theirs, ours in norms.items():
        rules += norm_rules(f"{layer}{theirs}", f"{path}/{ours}")
    return rules


def linear_rules(key: str, path: str, bias: bool = True) -> list[Rule]:
    """Rules of a torch Linear and our Linear."""
    rules = [Rule(f"{key}.weight", f"{path}/kernel", TRANSPOSE)]
    return [*rules, Rule(f"{key}.bias", f"{path}/bias")] if bias else rules


def norm_rules(key: str, path: str, bias: bool = True) -> list[Rule]:
    """Rules of a torch LayerNorm and our LayerNorm."""
    rules = [Rule(f"{key}.weight", f"{path}/scale")]
    return [*rules, Rule(f"{key}.bias", f"{path}/bias")] if bias else rules
