"""The engine's devices and sizes, as given or chosen for model, chip and prompts.

`mmqa prompt`, `mmqa run` and `mmqa plan` ask `choose_sizes`. By default every device of the process
holds a copy of the weights and serves its own slots; weights that leave no room for a useful cache
are split over `tensor`, as few times as will do.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import MESH_AXES, make_mesh
from mmqa_jax.core.sections import Key, spec_of
from mmqa_jax.core.serving import AUTO, free_bytes
from mmqa_jax.decoding.prefix_cache import Buckets
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.clip import VisionConfig
from mmqa_jax.models.llama_config import LlamaConfig

LENGTH = 2048  # tokens of a slot where no prompt is known
_SHARE = 0.9  # of what is free, for weights, cache and the arrays of a step
_USEFUL = 8  # slots for a copy of the weights, below which it is split instead
_SLOTS = 128  # for a copy: by then a step's time is no longer that of reading the weights
_CPU_SLOTS = (16, 32)  # and for many prompts
_CPU_PREFILL, _PREFILL = 256, 2048  # tokens of a copy, of a batch of chunks
_CPU_BUCKETS, _BUCKETS = (32, 128), (128, 512)

Size = int | Literal["auto"]

SIZES = ("slots", "length", "prefill_tokens", "buckets")  # of EngineConfig, which may be AUTO
ENGINE_SPEC = spec_of(EngineConfig) | {
    **{name: Key(Size, False) for name in SIZES},
    "buckets": Key(Buckets | Literal["auto"], False),
}


@dataclasses.dataclass(frozen=True)
class Demand:
    """What is to be served, as far as it is known before the first step; None: unknown.

    Attributes:
      sequences: prompts, each as often as it is drawn.
      tokens: of the longest prompt with its new tokens.
    """

    sequences: int | None = None
    tokens: int | None = None


UNKNOWN = Demand()


@dataclasses.dataclass(frozen=True)
class EngineSizes:
    """Where an engine runs and how large it is.

    Attributes:
      shape: size of each mesh axis.
      devices: as many as these sizes take.
      engine: the sizes.
    """

    shape: Mapping[str, int]
    devices: Sequence[jax.Device]
    engine: EngineConfig

    def mesh(self) -> Mesh:
        """The mesh, also of one device."""
        return make_mesh(self.shape, self.devices)

    def to_json(self) -> dict[str, Any]:
        """`devices`, `mesh` (axis -> size), `slots`, `length`, `prefill_tokens`, `buckets`."""
        return sizes_json(self.shape, self.engine)

    def __str__(self) -> str:
        """`8 devices (data=8), 128 slots of 768 tokens, prompts 16,384 tokens at a time in chunks
        of 128 or 512`."""
        axes = " ".join(f"{axis}={size}" for axis, size in self.shape.items() if size > 1)
        devices = f"{len(self.devices)} devices ({axes})" if axes else "1 device"
        one, chunks = self.engine, " or ".join(map(str, self.engine.buckets))
        return (
            f"{devices}, {one.slots:,} slots of {one.length:,} tokens, prompts "
            f"{one.prefill_tokens:,} tokens at a time in chunks of {chunks}"
        )


def sizes_json(shape: Mapping[str, int], engine: EngineConfig) -> dict[str, Any]:
    """As `EngineSizes.to_json`."""
    sizes = {name: getattr(engine, name) for name in SIZES}
    sizes["buckets"] = list(engine.buckets)
    return {"devices": math.prod(shape.values()), "mesh": dict(shape), **sizes}


def tower_bytes(llama: LlamaConfig, vision: VisionConfig | None) -> float:
    """Of the matrices of a LLaVA's picture tower and projector, which each device holds whole."""
    if vision is None:
        return 0.0
    of_layer = 4 * vision.width**2 + 2 * vision.width * vision.mlp_width
    projector = llama.hidden * (vision.width + llama.hidden)
    return (vision.layers * of_layer + projector) * np.dtype(_numpy(llama.dtype)).itemsize


def choose_sizes(
    model: LlamaConfig,
    settings: Mapping[str, Any],
    mesh: Mapping[str, Any],
    devices: Sequence[jax.Device],
    demand: Demand = UNKNOWN,
    *,
    free: float | None = None,
    beside: float = 0,
) -> EngineSizes:
    """Devices and sizes of an engine; what the settings give is kept.

    Args:
      model: with the dtype of parameters and arithmetic.
      settings: values of EngineConfig, those of ENGINE_SPEC may be AUTO. `length` is the most
        tokens of a prompt with its answer; of the cache a slot has as many as `demand` needs.
      mesh: axis -> size or AUTO, see `choose_mesh`.
      devices: of the process, or compile-only ones.
      free: bytes on each device before the weights are there; None: what the devices say.
      beside: bytes of other weights that each device holds, see `tower_bytes`.

    Raises:
      UserError: sizes that contradict each other, or a length beyond the model's.
    """
    given = {key: value for key, value in settings.items() if value != AUTO}
    cpu = devices[0].platform == "cpu"
    most = given.get("length", model.positions)
    if most > model.positions:
        raise UserError(
            f"engine.length is {most}: expected at most model.positions = {model.positions}; "
            "lower it."
        )
    needed = min(most, demand.tokens or LENGTH)
    buckets = given.get("buckets") or (_CPU_BUCKETS if cpu or needed <= _BUCKETS[-1] else _BUCKETS)
    unit = math.lcm(buckets[-1], given.get("block", EngineConfig.block) or 1)
    base = EngineConfig(**{"length": unit, **given, "buckets": buckets, "slots": 1})
    length = min(most, -(-needed // unit) * unit)
    free = _SHARE * (min(map(free_bytes, devices)) if free is None else free) - beside
    cost = _Cost(model, base, length, cpu)
    tensor = _tensor(cost, free, len(devices), demand)
    shape = choose_mesh(mesh, len(devices), tensor, given.get("slots", 0))
    copies = shape["data"] * shape["fsdp"]
    of_copy = cost.slots(free, shape["tensor"], shape["fsdp"])
    if cpu:
        few, many = _CPU_SLOTS
        of_copy = max(1, (many if (demand.sequences or 0) > 2 * many else few) // copies)
    if demand.sequences is not None:
        of_copy = min(of_copy, 2 ** math.ceil(math.log2(max(1, demand.sequences / copies))))
    engine = dataclasses.replace(
        base,
        length=length,
        slots=given.get("slots", copies * of_copy),
        prefill_tokens=given.get("prefill_tokens", _prefill(cpu, copies, base.buckets)),
    )
    return EngineSizes(shape, devices[: math.prod(shape.values())], engine)


def _prefill(cpu: bool, copies: int, buckets: Buckets) -> int:
    return max(_CPU_PREFILL, copies * buckets[-1]) if cpu else copies * _PREFILL


def choose_mesh(
    given: Mapping[str, Any], devices: int, tensor: int, slots: int = 0
) -> dict[str, int]:
    """The size of each mesh axis.

    Args:
      given: axis -> size or AUTO. Where all are AUTO, `tensor` is the one given here; beside a
        number `fsdp` and `tensor` are 1. `data` is the rest. All 1 is one device.
      slots: as given; 0: not yet known. Of the rest `data` takes what divides them: slots that a
        mesh does not divide are whole on every device, and computed on each.
    """
    sizes = {axis: given.get(axis, AUTO) for axis in MESH_AXES}
    chosen = {"fsdp": 1, "tensor": tensor if set(sizes.values()) == {AUTO} else 1}
    shape = {axis: chosen.get(axis, 0) if size == AUTO else size for axis, size in sizes.items()}
    if sizes["data"] == AUTO:
        split = shape["fsdp"] * shape["tensor"]
        shape["data"] = max(1, devices // split) if split > 0 else 1
        if shape["fsdp"] > 0 and slots % shape["fsdp"] == 0:
            shape["data"] = math.gcd(shape["data"], slots // shape["fsdp"])
    rest = [axis for axis, size in shape.items() if size == -1]
    if len(rest) == 1:
        split = -math.prod(shape.values())
        shape[rest[0]] = devices // split if split > 0 and devices % split == 0 else -1
    return shape


@dataclasses.dataclass(frozen=True)
class _Cost:
    """Bytes of an engine on one device.

    Attributes:
      length: tokens of a slot.
      cpu: whether the devices are CPUs.
    """

    model: LlamaConfig
    sizes: EngineConfig
    length: int
    cpu: bool

    def weights(self, tensor: int) -> float:
        model, size = self.model, np.dtype(_numpy(self.model.dtype)).itemsize
        of_head = 2 * model.hidden * model.head_size  # query and output, or key and value
        matrices = model.layers * (
            of_head * (model.heads + self._kv_heads(tensor)) + 3 * model.hidden * model.mlp
        )
        tables = (1 if model.tied else 2) * model.vocab_size * model.hidden
        of_matrix = 1 if self.sizes.weights == "int8" else size
        return (matrices * of_matrix + tables * size) / tensor

    def token(self, tensor: int, dtype: str | None = None) -> float:
        """Of a token's keys and values."""
        kept = dtype or self.sizes.cache_dtype or ("float32" if self.cpu else self.model.dtype)
        of_head = self.model.head_size * np.dtype(_numpy(kept)).itemsize
        of_head += 4 if kept == "int8" else 0  # its scale
        return 2 * self.model.layers * self._kv_heads(tensor) / tensor * of_head

    def step(self, tensor: int) -> float:
        """Of the arrays of a batch of chunks, whose keys and values are written at its end."""
        model = self.model
        rows = _PREFILL // self.sizes.buckets[-1]
        of_token = self.token(tensor, model.dtype) + 4 * (6 * model.hidden + 3 * model.mlp / tensor)
        return _PREFILL * of_token + 8 * rows * model.vocab_size / tensor

    def slots(self, free: float, tensor: int, fsdp: int) -> int:
        """Of a device's rows, with weights split over `tensor` and `fsdp`; at least 1."""
        weights = self.weights(tensor)
        if fsdp > 1:  # a layer is whole while it is used, and the next while it is gathered
            weights = min(weights, weights / fsdp + 2 * weights / self.model.layers)
        room = free - weights - self.step(tensor)
        count = min(_SLOTS, room / (self.token(tensor) * self.length))
        return int(count) // 8 * 8 if count >= 8 else max(1, int(count))

    def _kv_heads(self, tensor: int) -> int:
        """With those that are repeated (see key_heads.py)."""
        heads = math.lcm(self.model.kv_heads, tensor)
        return self.model.kv_heads if self.model.heads % heads else heads


def _numpy(dtype: str) -> str:
    return "float16" if dtype == "bfloat16" else dtype


def _tensor(cost: _Cost, free: float, devices: int, demand: Demand) -> int:
    """Over how few devices a copy of the weights is split so that a useful cache fits."""
    splits = [n for n in range(1, devices + 1) if devices % n == 0 and cost.model.heads % n == 0]
    for tensor in splits:
        copies = devices // tensor
        useful = min(_USEFUL, -(-(demand.sequences or _USEFUL * copies) // copies))
        room = free - cost.weights(tensor) - cost.step(tensor)
        if room >= useful * cost.token(tensor) * cost.length:
            return tensor
    return splits[-1]
