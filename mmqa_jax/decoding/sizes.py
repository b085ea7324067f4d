"""The engine's devices and sizes, as given or chosen for model, chip and prompts.

`mmqa prompt`, `mmqa run` and `mmqa plan` ask `choose_sizes`. By default the devices of the process
hold as many copies of the weights, split over `tensor` as many times, as take the least time for
the whole job (job_time.py). On devices without a data sheet, such as CPUs, they are split as few
times as leave room for a useful cache.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from mmqa_jax.core.chips import Chip, chip_of_kind
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import (
    DEFAULT_RULES,
    MESH_AXES,
    Rules,
    make_mesh,
    partition_spec,
    replicated,
    state_shardings,
)
from mmqa_jax.core.serving import AUTO, free_bytes
from mmqa_jax.core.typed import Key, spec_of
from mmqa_jax.decoding import scanned_cache, slot_runner
from mmqa_jax.decoding.cached_attention import Branches
from mmqa_jax.decoding.image_tower import SizedTower, tower_programs_of
from mmqa_jax.decoding.job_time import Job, JobTime, SplitCopy
from mmqa_jax.decoding.scheduler import Buckets
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.experts import multiplies_by_kernel
from mmqa_jax.models.llama.gated_delta import state_shapes
from mmqa_jax.models.llama.layer_kinds import FullLayers
from mmqa_jax.models.llama.network import Llama, stacks, unstack_layers
from mmqa_jax.models.llama.quantize import FORMS, hold_form, quantize_weights
from mmqa_jax.models.llava.config import LlavaConfig
from mmqa_jax.models.llava.pixtral import PixtralVisionConfig
from mmqa_jax.models.qwen_vl.network import QwenVisionConfig, QwenVLConfig
from mmqa_jax.models.two_towers.config import SiglipVisionConfig, VisionConfig
from mmqa_jax.weights.registry import architecture_of

LENGTH = 2048  # tokens of a slot where no prompt is known
_GIB = 2**30
_SHARE = 0.9  # of what is free, for weights, cache and the arrays of a step
_MANY, _NEW = 10_000, 64  # sequences, and new tokens of each, where they are not known
_NEAR = 1.03  # of the least time: a mesh with fewer exchanges is taken
_USEFUL = 8  # slots for a copy of the weights, below which it is split instead
_SLOTS = 128  # for a copy: by then a step's time is no longer that of reading the weights
_CPU_SLOTS = (16, 32)  # and for many prompts
_CPU_PREFILL, _PREFILL = 256, 2048  # tokens of a copy, of a batch of chunks
_CPU_BUCKETS, _BUCKETS = (32, 128), (128, 512)

Size = int | Literal["auto"]

DRAFT = "draft"  # beside EngineConfig's values: path or name of a model that proposes tokens; ""
SIZES = ("slots", "length", "prefill_tokens", "buckets")  # of EngineConfig, which may be AUTO
ENGINE_SPEC = spec_of(slot_runner.EngineConfig) | {
    **{name: Key(Size, False) for name in SIZES},
    "buckets": Key(Buckets | Literal["auto"], False),
    DRAFT: Key(str, False),
}


@dataclasses.dataclass(frozen=True)
class Demand:
    """What is to be served, as far as it is known before the first step; None: unknown."""

    sequences: int | None = None  # prompts, each as often as it is drawn
    tokens: int | None = None  # of the longest prompt with its new tokens
    # prompt_tokens, new_tokens: of all sequences together, or of one if it is not known how many
    # there are; the new ones at most.
    prompt_tokens: int | None = None
    new_tokens: int | None = None

    def job(self, length: int) -> Job:
        """The job, whose sequences are as long as a slot where nothing is known of them."""
        known = self.sequences or 1
        new = self.new_tokens / known if self.new_tokens else min(_NEW, length / 2)
        prompt = self.prompt_tokens / known if self.prompt_tokens else max(1, length - new)
        return Job(self.sequences or _MANY, prompt, new)


UNKNOWN = Demand()


@dataclasses.dataclass(frozen=True)
class EngineSizes:
    """Where an engine runs and how large it is."""

    shape: Mapping[str, int]  # size of each mesh axis
    devices: Sequence[jax.Device]  # as many as these sizes take
    engine: slot_runner.EngineConfig  # the sizes
    # How much memory the weights, or the longest sequence beside them, lack, and what to do; "":
    # they fit, or how much is free is not known.
    lacking: str = ""
    # Why the mesh was chosen, one sentence; "": it was given, or follows from memory alone.
    reason: str = ""

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
        engine, chunks = self.engine, " or ".join(map(str, self.engine.buckets))
        of_slots, pages = f"of {engine.length:,} tokens", ""
        if engine.pages:
            page = slot_runner.page_of(engine, self.devices[0])
            of_slots = f"of up to {engine.length:,} tokens"
            pages = f", {engine.pages:,} pages of {page:,}"
        return (
            f"{devices}, {engine.slots:,} slots {of_slots}{pages}, prompts "
            f"{engine.prefill_tokens:,} tokens at a time in chunks of {chunks}"
        )


def sizes_json(shape: Mapping[str, int], engine: slot_runner.EngineConfig) -> dict[str, Any]:
    """Returns the sizes as JSON values, as `EngineSizes.to_json` does."""
    sizes = {name: getattr(engine, name) for name in SIZES}
    sizes["buckets"] = list(engine.buckets)
    return {"devices": math.prod(shape.values()), "mesh": dict(shape), **sizes}


def parameter_count(model: LlamaConfig) -> int:
    """Counts the numbers of a decoder's matrices, without its norms and biases."""
    layers = sum(place.mixing + place.mlp_numbers(place.experts) for place in model.places)
    tables = (1 if model.tied else 2) * model.vocab_size * model.hidden
    return int(layers * (model.layers // model.period) + tables)


def tower_bytes(
    llama: LlamaConfig, vision: VisionConfig | SiglipVisionConfig | QwenVisionConfig | None
) -> float:
    """Bytes of the matrices of a picture tower and its projector, whole on each device."""
    if vision is None:
        return 0.0
    item = np.dtype(_numpy(llama.dtype)).itemsize
    if isinstance(vision, QwenVisionConfig):
        products = 3 if vision.switches.gated else 2
        of_layer = 4 * vision.width**2 + products * vision.width * vision.mlp
        joined = vision.width * vision.merge**2
        mergers = (1 + len(vision.deepstack)) * joined * (joined + vision.out)
        if vision.merger_mlp:
            mergers = vision.out * (joined + vision.out + 3 * vision.merger_mlp)
        return (vision.layers * of_layer + mergers) * item
    products = 3 if isinstance(vision, PixtralVisionConfig) else 2
    of_layer = 4 * vision.width**2 + products * vision.width * vision.mlp_width
    projector = llama.hidden * (vision.width + llama.hidden)
    return (vision.layers * of_layer + projector) * item


def takes_all(mesh: Mapping[str, Any], count: int) -> bool:
    """Whether the axes of a mesh that are given in numbers multiply to all of `count` devices.

    Such an engine may span the hosts of a launch; any other has the devices of one process.
    """
    numbers = [mesh[axis] for axis in MESH_AXES if mesh.get(axis, AUTO) != AUTO]
    return bool(numbers) and math.prod(numbers) == count


def choose_sizes(
    model: LlamaConfig,
    settings: Mapping[str, Any],
    mesh: Mapping[str, Any],
    devices: Sequence[jax.Device],
    demand: Demand = UNKNOWN,
    *,
    free: float | None = None,
    beside: float = 0,
    draft: LlamaConfig | None = None,
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
      draft: of the model that the settings name as their draft.
    """
    chosen = {key: value for key, value in settings.items() if value != AUTO and key != DRAFT}
    cpu = devices[0].platform == "cpu"
    most = chosen.get("length", model.served_positions)
    model.check_served(most)
    needed = min(most, demand.tokens or LENGTH)
    buckets = chosen.get("buckets") or (_CPU_BUCKETS if cpu or needed <= _BUCKETS[-1] else _BUCKETS)
    unit = buckets[-1]
    base = slot_runner.EngineConfig(**{"length": unit, **chosen, "buckets": buckets, "slots": 1})
    base = slot_runner.for_kinds(base, model)
    length = min(most, -(-needed // unit) * unit)
    whole = min(map(free_bytes, devices)) if free is None else free
    most_free, free = whole - beside, _SHARE * whole - beside
    page = slot_runner.page_of(base, devices[0])
    job = demand.job(length)
    mean = job.prompt_tokens + job.new_tokens + page / 2  # half of the last page is empty
    lengths = (length, min(mean, length), page, cpu)

    def cost_of(config: LlamaConfig, draft: _Cost | None = None) -> _Cost:
        of_rows = scanned_cache.serves(devices[0])
        scanned = of_rows and base.scan_layers is not False
        by_kernel = scanned and multiplies_by_kernel(config, "tpu", _PREFILL)
        return _Cost(config, base, *lengths, of_rows, by_kernel, draft)

    cost = cost_of(model, draft and cost_of(draft))
    chip = chip_of_kind(getattr(devices[0], "device_kind", ""))
    splits = [n for n in range(1, len(devices) + 1) if _divides(n, len(devices), model)]
    tensor, reason = _fewest(cost, splits, free, most_free, len(devices), demand), ""
    if chip is not None:
        tensor, reason = _fastest(cost, splits, free, most_free, len(devices), demand, chip)
    shape = choose_mesh(mesh, len(devices), tensor, chosen.get("slots", 0))
    if any(mesh.get(axis, AUTO) != AUTO for axis in MESH_AXES):
        reason = ""
    _check_slots(chosen.get("slots"), shape)
    copies = shape["data"] * shape["fsdp"]
    of_copy = cost.slots(free, shape["tensor"], shape["fsdp"])
    if cpu:
        few, many = _CPU_SLOTS
        of_copy = max(1, (many if (demand.sequences or 0) > 2 * many else few) // copies)
    of_copy = min(of_copy, _wanted(demand, copies))
    of_copy = max(of_copy, 2) if cpu and base.exact else of_copy  # see EngineConfig
    engine = dataclasses.replace(
        base,
        length=length,
        slots=chosen.get("slots", copies * of_copy),
        prefill_tokens=chosen.get("prefill_tokens", _prefill(cpu, copies, base.buckets)),
    )
    if not engine.pages:
        engine = dataclasses.replace(engine, pages=cost.pages(free, shape, engine))
    lacking = _lacking(cost, shape, tensor, most_free)
    return EngineSizes(shape, devices[: math.prod(shape.values())], engine, lacking, reason)


def _wanted(demand: Demand, copies: int) -> float:
    """How many slots of a copy have a sequence."""
    if demand.sequences is None:
        return math.inf
    return 2 ** math.ceil(math.log2(max(1, demand.sequences / copies)))


def _divides(tensor: int, devices: int, model: LlamaConfig) -> bool:
    return devices % tensor == 0 and model.heads % tensor == 0


def _check_slots(slots: int | None, shape: Mapping[str, int]) -> None:
    """UserError for slots, as given, that would be whole, and computed, on every device."""
    copies = shape["data"] * shape["fsdp"]
    if slots is None or min(shape.values()) < 1 or slots % copies == 0:
        return
    over = " ".join(f"{axis}={shape[axis]}" for axis in ("data", "fsdp") if shape[axis] > 1)
    raise UserError(
        f"engine.slots is {slots}: expected a multiple of {copies}, since the mesh splits them "
        f"over {over}; set it to {max(1, round(slots / copies)) * copies}, or leave model.mesh at "
        "auto."
    )


def _lacking(cost: _Cost, shape: Mapping[str, int], tensor: int, free: float) -> str:
    """See EngineSizes; only of what cannot be loaded whatever the prompts and sizes are.

    Args:
      tensor: that `choose_mesh` takes where nothing is given.
      free: all bytes of a device for the language model's weights.
    """
    if min(shape.values()) < 1:  # refused as a mesh
        return ""
    needed = cost.loading(shape["tensor"], shape["fsdp"])
    if needed <= free:
        room = free - cost.held(shape["tensor"], shape["fsdp"])
        longest = cost.length * cost.token(shape["tensor"]) + cost.state(shape["tensor"])
        if longest <= room:
            return ""
        return (
            f"a sequence of {cost.length:,} tokens needs {longest / _GIB:.3g} GiB of cache, where "
            f"the weights leave {room / _GIB:.3g} GiB of each device; lower engine.length, or use "
            "more devices."
        )
    count = math.prod(shape.values())
    remedy = "use more devices, devices with more memory, or a smaller model"
    if cost.loading(tensor, 1) <= free:
        remedy = f"leave model.mesh at auto, which is tensor={tensor} here"
    axes = " ".join(f"{axis}={size}" for axis, size in shape.items() if size > 1)
    devices = f"each of {count} devices ({axes})" if count > 1 else "the device"
    loaded = " to be loaded and rounded to int8" if cost.sizes.weights == "int8" else ""
    return (
        f"the weights need {needed / _GIB:.3g} GiB of {devices}{loaded}, where "
        f"{free / _GIB:.3g} GiB are free; {remedy}."
    )


def _prefill(cpu: bool, copies: int, buckets: Buckets) -> int:
    return max(_CPU_PREFILL, copies * buckets[-1]) if cpu else copies * _PREFILL


def choose_mesh(
    axes: Mapping[str, Any], devices: int, tensor: int, slots: int = 0
) -> dict[str, int]:
    """The size of each mesh axis.

    Args:
      axes: axis -> size or AUTO. Where all are AUTO, `tensor` is the one given here; beside a
        number `fsdp` and `tensor` are 1. `data` is the rest. All 1 is one device.
      slots: as given; 0: not yet known. Of the rest `data` takes what divides them: slots that a
        mesh does not divide are whole on every device, and computed on each.
    """
    sizes = {axis: axes.get(axis, AUTO) for axis in MESH_AXES}
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
    """Bytes of an engine on one device."""

    model: LlamaConfig
    sizes: slot_runner.EngineConfig
    length: int  # tokens of the longest sequence
    mean: float  # tokens whose pages a sequence takes
    page: int  # tokens of a page
    cpu: bool  # whether the devices are CPUs
    of_rows: bool = False  # whether the cache holds tokens as rows, as a TPU's does
    by_kernel: bool = False  # whether experts multiply prompts by a kernel for TPU
    # Of a model that proposes tokens, with a cache of its own; None: there is none.
    draft: _Cost | None = None

    def weights(self, tensor: int, kind: str | None = None) -> float:
        """Bytes of a device's part of a copy split over `tensor`; `kind` is engine.weights."""
        model, size = self.model, np.dtype(_numpy(self.model.dtype)).itemsize
        of_dense, of_expert = self._of_numbers(kind or self.sizes.weights)
        mixing = self._of_places(
            lambda layer: (
                dataclasses.replace(layer, kv_heads=_kv_heads(layer, tensor, layer.heads)).mixing
            )
        )
        dense = mixing + self._of_places(lambda layer: layer.mlp_numbers(None))
        matrices = dense * of_dense + self._experts() * of_expert
        tables = (1 if model.tied else 2) * model.vocab_size * model.hidden
        of_draft = self.draft.weights(tensor, kind) if self.draft else 0
        return (matrices + tables * size) / tensor + of_draft

    def _of_numbers(self, kind: str) -> tuple[float, float]:
        """Bytes of a number of a layer's matrices, of experts' and of others."""
        size = np.dtype(_numpy(self.model.dtype)).itemsize
        if kind not in FORMS:
            return (1, 1) if kind == "int8" else (size, size)
        form = FORMS[kind]
        return (size if form.experts_alone and self.model.experts else form.bytes), form.bytes

    def _experts(self) -> float:
        """Numbers of all experts' matrices."""
        return self._of_places(
            lambda layer: layer.mlp_numbers(layer.experts) - layer.mlp_numbers(None)
        )

    def copy(self, tensor: int, chip: Chip) -> SplitCopy:
        """Returns what one call reads of a copy of the weights that is split over `tensor`."""
        model, size = self.model, np.dtype(_numpy(self.model.dtype)).itemsize
        head = model.vocab_size * model.hidden * size / tensor
        experts = self._experts() * self._of_numbers(self.sizes.weights)[1] / tensor
        return SplitCopy(
            dataclasses.replace(model, kv_heads=_kv_heads(model, tensor, model.heads)),
            chip,
            tensor,
            self.weights(tensor) - (1 if model.tied else 2) * head,
            experts,
            head,
            self.token(tensor),
            self.state(tensor),
        )

    def held(self, tensor: int, fsdp: int, kind: str | None = None) -> float:
        """Bytes of the weights on a device, split over `tensor` and `fsdp`."""
        weights = self.weights(tensor, kind)
        if fsdp > 1:  # a layer is whole while it is used, and the next while it is gathered
            weights = min(weights, weights / fsdp + 2 * weights / self.model.layers)
        return weights

    def loading(self, tensor: int, fsdp: int) -> float:
        """The most bytes while the weights are loaded: to be rounded to int8 (see quantize.py), all
        are there, and the largest matrices of all layers twice."""
        held = self.held(tensor, fsdp, None if self.sizes.weights in FORMS else "given")
        if self.sizes.weights != "int8":
            return held
        return held + self.model.layers * self._of_mlp() / (tensor * fsdp)

    def token(self, tensor: int, dtype: str | None = None) -> float:
        """Bytes of a token's keys and values."""
        held_as = dtype or self.sizes.cache_dtype or ("float32" if self.cpu else self.model.dtype)
        item, of_scale = np.dtype(_numpy(held_as)).itemsize, 4 if held_as == "int8" else 0
        of_draft = self.draft.token(tensor, dtype) if self.draft else 0

        def of_layer(layer: LlamaConfig) -> float:
            numbers = (
                scanned_cache.token_width(layer.head_size) if self.of_rows else 2 * layer.head_size
            )
            heads = 0 if layer.recurrent or layer.borrows else _kv_heads(layer, tensor, layer.heads)
            return heads * (numbers * item + 2 * of_scale)

        return self._of_places(of_layer) / tensor + of_draft

    def state(self, tensor: int) -> float:
        """Bytes of what recurrent layers hold of a sequence, whatever its length."""
        arrays = self._of_places(
            lambda layer: sum(
                math.prod(x.shape) * x.dtype.itemsize
                for x in jax.tree.leaves(state_shapes(layer, 1) if layer.recurrent else ())
            )
        )
        return arrays / tensor

    def _of_places(self, function: Callable[[LlamaConfig], float]) -> float:
        """The sum over all layers of a function of each one's config."""
        return sum(map(function, self.model.places)) * (self.model.layers // self.model.period)

    def step(self, tensor: int) -> float:
        """Bytes of the arrays of a batch of chunks; keys and values are written at its end."""
        model = self.model
        rows = _PREFILL // self.sizes.buckets[-1]
        inside = 3 * model.mlp / tensor
        if model.experts:  # a kernel for TPU has few rows of an expert at once
            inside = 2 * model.hidden
            if not self.by_kernel:  # each device has room for all of a token's copies
                inside = model.active_experts * (2 * model.hidden + 3 * model.expert_mlp)
        of_token = self.token(tensor, model.dtype) + 4 * (6 * model.hidden + inside)
        return _PREFILL * of_token + 8 * rows * model.vocab_size / tensor

    def slots(self, free: float, tensor: int, fsdp: int) -> int:
        """Number of a device's rows, with weights split over `tensor` and `fsdp`; at least 1."""
        of_slot = self.mean * self.token(tensor) + self.state(tensor)
        count = min(_SLOTS, self._room(free, tensor, fsdp) / of_slot)
        return int(count) // 8 * 8 if count >= 8 else max(1, int(count))

    def pages(self, free: float, shape: Mapping[str, int], engine: slot_runner.EngineConfig) -> int:
        """Pages that fit; 0: all slots may be as long as the longest, or not even one."""
        copies = shape["data"] * shape["fsdp"]
        tensor, room = shape["tensor"], self._room(free, shape["tensor"], shape["fsdp"])
        room -= engine.slots / max(1, copies) * self.state(tensor)
        fitting = room / self.token(tensor) / self.page - 1  # one is nobody's
        longest = slot_runner.most_pages(engine, self.page)
        if copies < 1 or not longest <= fitting < engine.slots / copies * longest:
            return 0
        return copies * int(fitting)

    def _room(self, free: float, tensor: int, fsdp: int) -> float:
        """Bytes of a device that its cache can have."""
        return free - self.held(tensor, fsdp) - self.step(tensor)

    def _of_mlp(self) -> int:
        """Parameters of one of the matrices of a layer's MLP, or experts."""
        return (self.model.experts or 1) * self.model.hidden * self.model.expert_mlp


def _kv_heads(layers: LlamaConfig | FullLayers, tensor: int, queries: int) -> int:
    """Number of key heads, with those that are repeated (see `repeat_key_heads`)."""
    heads = math.lcm(layers.kv_heads, tensor)
    return layers.kv_heads if queries % heads else heads


def _numpy(dtype: str) -> str:
    return "float16" if dtype == "bfloat16" else dtype


def _fewest(
    cost: _Cost,
    splits: Sequence[int],
    free: float,
    most_free: float,
    devices: int,
    demand: Demand,
) -> int:
    """Over how few devices of `most_free` bytes a copy of the weights is split to leave a useful
    cache.
    """
    for tensor in splits:
        copies = devices // tensor
        useful = min(_USEFUL, -(-(demand.sequences or _USEFUL * copies) // copies))
        if _leaves(cost, tensor, free, most_free, useful):
            return tensor
    return splits[-1]


def _leaves(cost: _Cost, tensor: int, free: float, most_free: float, slots: int) -> bool:
    """Whether a copy can be loaded, and leaves room for slots."""
    room = free - cost.weights(tensor) - cost.step(tensor)
    loads = cost.loading(tensor, 1) <= most_free
    tokens = max(cost.length, slots * cost.mean)
    return loads and room >= cost.token(tensor) * tokens + slots * cost.state(tensor)


def _fastest(
    cost: _Cost,
    splits: Sequence[int],
    free: float,
    most_free: float,
    devices: int,
    demand: Demand,
    chip: Chip,
) -> tuple[int, str]:
    """Over how many devices a copy is split so that the job takes the least time, and why."""
    job = demand.job(cost.length)
    times: dict[int, JobTime] = {}
    for tensor in splits:
        copies = devices // tensor
        if not _leaves(cost, tensor, free, most_free, 1):
            continue
        slots = min(cost.slots(free, tensor, 1), _wanted(demand, copies))
        times[tensor] = cost.copy(tensor, chip).seconds(job, copies, slots, _PREFILL)
    if not times:
        return splits[-1], ""
    least = min(time.seconds for time in times.values())
    best = next(n for n in splits if n in times and times[n].seconds <= _NEAR * least)
    others = [n for n in times if n != best]
    if not others:
        return best, ""
    other = min(others, key=lambda tensor: times[tensor].seconds)
    prefill, seconds = times[best].prefill, times[best].seconds
    return best, (
        f"{_axes(devices // best, best)} needs {seconds / times[other].seconds:.2f} of the time of "
        f"{_axes(devices // other, other)} by the roofline of {job.sequences:,.0f} prompts of "
        f"{job.prompt_tokens:,.0f} tokens with {job.new_tokens:,.0f} new ones: "
        f"{100 * prefill / seconds:.0f} % of it are prompts, then up to "
        f"{times[best].tokens_per_second:,.0f} tokens/s"
    )


def _axes(data: int, tensor: int) -> str:
    sizes = {"data": data, "tensor": tensor}
    return " ".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1) or "one device"


# Key and value heads repeated until a mesh divides them, so that each device caches its own.


def repeat_key_heads(model: Llama, mesh: Mesh | None, rules: Rules = DEFAULT_RULES) -> None:
    """Repeats the key and value heads of all layers, in place, where `tensor` does not divide them.

    A cache of 8 key heads cannot be split over 16 devices and would be whole on each. With every
    head twice, which changes no result, each device keeps one: an eighth of that memory. A mesh
    that does not divide the query heads leaves the model as it is.
    """
    tensor = 1 if mesh is None else mesh.shape["tensor"]

    def repeated(config: Any) -> Any:
        return dataclasses.replace(config, kv_heads=_kv_heads(config, tensor, model.config.heads))

    for layer in model.layers if isinstance(model.layers, nnx.List) else stacks(model.layers):
        before, layer.config = layer.config.kv_heads, repeated(layer.config)
        if layer.config.recurrent or layer.config.kv_heads == before:
            continue
        linears = [getattr(layer, name) for name in "kv" if name in layer.config.linears]
        names = ("kernel", "scale", "zero", "bias")  # two of them of rounded ones
        parameters = [getattr(linear, name, None) for linear in linears for name in names]
        if layer.config.qk_norm == "whole":  # the mean over repeated heads is the same
            parameters.append(layer.k_norm.scale)
        for parameter in parameters:
            if parameter is not None:
                _repeat(parameter, before, layer.config.kv_heads // before, mesh, rules)
    full = model.config.full_layers and repeated(model.config.full_layers)
    model.config = dataclasses.replace(repeated(model.config), full_layers=full)


def _repeat(parameter: nnx.Param, heads: int, times: int, mesh: Mesh, rules: Rules) -> None:
    """Repeats each head along the axis named `heads`, [.., heads * D, ..], onto its own shards."""
    names = parameter.get_metadata()["out_sharding"]
    axis, shape = names.index("heads"), parameter.shape
    split = (*shape[:axis], heads, -1, *shape[axis + 1 :])
    whole = (*shape[:axis], times * shape[axis], *shape[axis + 1 :])
    sharding = NamedSharding(mesh, partition_spec(names, whole, mesh, rules))

    @functools.partial(jax.jit, out_shardings=sharding)
    def repeat(array: jax.Array) -> jax.Array:
        return jnp.repeat(array.reshape(split), times, axis=axis).reshape(whole)

    parameter.set_value(repeat(parameter[...]))


# The engine's programs and their arguments as shapes: compiled without weights or devices.


class Program(NamedTuple):
    """A jitted function and what it is called with: `function.lower(*arguments).compile()`."""

    function: Any
    arguments: tuple[Any, ...]


def engine_programs(
    config: LlamaConfig,
    sizes: slot_runner.EngineConfig,
    mesh: Mesh,
    *,
    columns: int | None = None,
    rules: Rules = DEFAULT_RULES,
) -> dict[str, Program]:
    """What an engine runs for a LLaMA: a step of all slots, and a batch of prompts' chunks.

    Args:
      config: parameters are in its compute dtype.
      sizes: of the engine, whose weights are "given", "int8" or one of `FORMS`.
      mesh: of real devices, or of `jax.experimental.topologies`.
      columns: how far the longest sequence reaches; None is `sizes.length`. A prompt's chunk is
        the last of such a sequence.
      rules: of the parameters' sharding.

    Returns:
      {"decode": Program, "prefill": Program}.
    """

    sizes = slot_runner.for_kinds(sizes, config)

    def build() -> Llama:
        model = Llama(config, rngs=nnx.Rngs())
        nnx.update(model, jax.tree.map(lambda x: x.astype(config.dtype), nnx.state(model)))
        repeat_key_heads(model, mesh, rules)
        if not slot_runner.scans(sizes, mesh):
            unstack_layers(model)
        if sizes.weights == "int8":
            quantize_weights(model)
        elif sizes.weights in FORMS:
            hold_form(model, FORMS[sizes.weights])
        return model

    model = nnx.eval_shape(build)
    state = nnx.state(model)
    state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        state,
        state_shardings(state, mesh, rules),
    )
    programs = slot_runner.Programs(model, sizes, mesh)

    def array(kind: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.dtype(kind), sharding=programs.rows)

    columns, bucket = columns or sizes.length, sizes.buckets[-1]
    rows, pages = sizes.rows(bucket, programs.shards), programs.columns // programs.page
    of_row = array("int32", rows)
    branches = None
    if not programs.of_rows:
        branches = Branches(of_row, array("int32", rows, bucket))
    limit = programs.read(columns)
    before = max(columns - bucket, 0)  # columns in front of the chunk
    shifts = array("int32", rows, bucket, 3) if config.mrope else None
    chunk = (array("int32", rows, bucket), array("int32", rows, pages), of_row, of_row)
    chunk = (*chunk, branches, None, shifts, None, of_row if config.recurrent else None)
    active = jax.ShapeDtypeStruct((sizes.slots,), bool, sharding=programs.whole)
    of_prompt = programs.read(before if programs.of_rows else columns)
    greedy = programs.sampled(np.zeros(sizes.slots))
    table = array("int32", sizes.slots, pages)
    step = (state, programs.cache, programs.slots, table, active, None, limit, greedy)
    return {
        "decode": Program(programs.step, step),
        "prefill": Program(programs.encode, (state, programs.cache, *chunk, of_prompt)),
    }


# A tower and its arguments as shapes: compiled without weights or devices.


def tower_programs(
    config: LlavaConfig | QwenVLConfig, sizes: slot_runner.EngineConfig, mesh: Mesh
) -> dict[str, Program]:
    """What an engine runs for pictures, beside `engine_programs` of its LLaMA.

    Args:
      config: parameters are in the LLaMA's compute dtype. Where pictures have several sizes, these
        have a usual one (`SizedTower.usual`).
      sizes: of the engine.
      mesh: of real devices, or of `jax.experimental.topologies`.

    Returns:
      {"tower": Program of a full batch of pictures, "gather": of the patches in a batch of chunks,
      where pictures have several sizes those of one picture}.
    """
    build = architecture_of(config).build
    tower = nnx.eval_shape(lambda: build(config, rngs=nnx.Rngs()).tower())
    programs = tower_programs_of(tower, config, replicated(mesh), mesh)
    dtype = np.dtype(config.llama.dtype)
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=programs.parameters),
        nnx.state(tower),
    )
    bucket = sizes.buckets[-1]
    rows = sizes.rows(bucket, slot_runner.slot_shards(sizes.slots, mesh))
    index = jax.ShapeDtypeStruct((rows, bucket), np.int32, sharding=programs.parameters)
    if isinstance(programs, SizedTower):
        usual = programs.usual()
        inputs = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (programs.batches[-1], *x.shape[1:]), x.dtype, sharding=programs.pixels
            ),
            programs.laid([usual]),
        )
        of_picture = jax.ShapeDtypeStruct(
            (programs.length(programs.kind(usual)), programs.width),
            dtype,
            sharding=programs.features,
        )
        placed = jax.ShapeDtypeStruct((rows, bucket, programs.width), dtype, sharding=programs.rows)
        return {
            "tower": Program(programs.encode, (state, inputs)),
            "gather": Program(programs.put, (placed, of_picture, index)),
        }
    size = config.vision.image_size
    shape = (programs.batches[-1], size, size, 3)
    pixels = jax.ShapeDtypeStruct(shape, np.uint8, sharding=programs.pixels)
    patches = (config.features, config.llama.hidden)
    picture = jax.ShapeDtypeStruct(patches, dtype, sharding=programs.features)
    pictures = (picture,) * (rows * programs.in_chunk(bucket))
    return {
        "tower": Program(programs.encode, (state, pixels)),
        "gather": Program(programs.gather, (pictures, index)),
    }


def feature_bytes(
    config: LlavaConfig | QwenVLConfig,
    sizes: slot_runner.EngineConfig,
    mesh: Mesh,
    pictures: int = 1,
) -> int:
    """The most bytes that features take on a device, where prompts have up to `pictures` pictures.

    Parameters and temporaries of the tower come on top: they are its program's.
    """
    programs = tower_programs(config, sizes, mesh)
    # Of pictures of one size all, else that of one in the rows of a batch.
    features, *others = programs["gather"].arguments
    picture = features[0] if isinstance(features, tuple) else others[0]
    _, pixels = programs["tower"].arguments
    batch = jax.tree.leaves(pixels)[0].shape[0]
    squares = config.most_squares if isinstance(config, LlavaConfig) else 1
    most = sizes.slots * max(1, pictures) * squares + batch  # see image_features
    shard = picture.sharding.shard_shape(picture.shape)
    return most * math.prod(shard) * picture.dtype.itemsize
