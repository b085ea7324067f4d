"""Defines a program to plan, and reads its compiler's analysis."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from mmqa_jax.core.chips import GIB, Chip
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.flops import flops_by_type, jaxpr_flops
from mmqa_jax.plan.exchange import Exchange, Placement, least_exchanges

_EXCEEDS = re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM")
_USED = re.compile(r"[Uu]sed ([\d.]+)([KMGT]?) ?(?:i?B)? of ([\d.]+)([KMGT]?) ?(?:i?B)? hbm")
_ASKED = re.compile(r"(?:allocate|allocating|requires|total of) ([\d.]+) ?([KMGT]?)i?B?(?:ytes)?")
_UNIT = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Program:
    """One jitted function with the shapes and shardings that a verb gives it."""

    name: str  # of the verb, or of the engine's part (`decode`, `prefill`)
    trace: Callable[[], jax.stages.Traced]  # traces it for the devices of `mesh`
    mesh: Mapping[str, int]  # axis -> size; {} is one device
    model_flops: Callable[[], float]  # of one call over all devices, without recomputation
    # parameters, optimizer, cache: bytes on one device; `optimizer` has the parameters' average.
    parameters: float
    optimizer: float = 0
    cache: float = 0
    host: float = 0  # bytes of its state in the host's memory, for one device
    # Bytes that one device must move to or from its memory at least; None: what goes in and comes
    # out, once.
    floor_bytes: float | None = None
    examples: int = 0  # questions, pairs or tokens of one call, over all devices
    unit: str = "examples"
    input_bytes: float = 0  # that the host brings for a call, over all devices
    # How often a whole run of the config calls it; None: the config does not say.
    steps: int | None = None
    # Of the function: trees of jax.ShapeDtypeStructs with shardings, static values.
    arguments: Any = ()
    weights: Any = ()  # what of `arguments` are weights, the same leaves
    trained: Any = ()  # what of `weights` gets gradients, the same leaves
    # The devices of the mesh in its flat order; () where nobody asks where they are.
    placed: tuple[jax.Device, ...] = ()

    @classmethod
    def of(
        cls,
        name: str,
        function: Any,
        arguments: Sequence[Any],
        mesh: Mesh,
        options: Mapping[str, Any] | None = None,
        **sizes: Any,
    ) -> Program:
        """A jitted function with arguments as shapes; `options` are its static ones.

        The first argument holds its weights. It is traced once, for the mesh, when that is needed
        first. `sizes`: the other attributes.
        """

        @functools.cache
        def trace() -> jax.stages.Traced:
            with jax.set_mesh(mesh):
                return function.trace(*arguments, **(options or {}))

        return cls(
            name=name,
            trace=trace,
            mesh=dict(mesh.shape),
            placed=tuple(mesh.devices.flat),
            arguments=arguments,
            **{
                "model_flops": lambda: jaxpr_flops(trace().jaxpr.jaxpr),
                "weights": arguments[0],
                **sizes,
            },
        )

    @property
    def devices(self) -> int:
        """How many run it together."""
        return math.prod(self.mesh.values())

    @property
    def shapes(self) -> list[Any]:
        """The inputs of the jaxpr: static arguments, which have no shape, are none."""
        return [leaf for leaf in jax.tree.leaves(self.arguments) if hasattr(leaf, "shape")]


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device while the program runs; without `temporaries` where it was refused."""

    parameters: float
    optimizer: float
    cache: float
    # Activations, batch, results and workspace, with the padding of tiled layouts.
    temporaries: float | None
    total: float


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The facts about a compiled program, on one device and in one call."""

    program: Program
    memory: Memory
    # Of its products by type (keys of Chip.rates), recomputed ones included; None where the program
    # was refused for its memory.
    flops: Mapping[str, float] | None
    exchanges: tuple[Exchange, ...]  # that its mesh needs at least
    floor_bytes: float  # see Program
    seconds: float  # that compiling took

    @property
    def refused(self) -> bool:
        """Whether the compiler found that it does not fit."""
        return self.flops is None


def compile_program(program: Program, placement: Placement | None = None) -> Compiled:
    """Compiles a program, and reads from its jaxpr what it has to do.

    Without a placement all devices are of one host, and each reaches all others.
    """
    began = time.perf_counter()
    memory, executable = build(program)
    seconds = time.perf_counter() - began
    if executable is None:
        return Compiled(program, memory, None, (), 0.0, seconds)
    flops, exchanges = _work(program, placement)
    return Compiled(program, memory, flops, exchanges, least_bytes(program, executable), seconds)


def trace_program(program: Program, placement: Placement | None = None) -> Compiled:
    """Traces a program in a fraction of `compile_program`'s time: memory is without `temporaries`.

    Where the program does not say `floor_bytes`, what it keeps is read, and what it donates is
    written: less than `compile_program` counts, which sees the batch and the results.
    """
    parts = (program.parameters, program.optimizer, program.cache)
    flops, exchanges = _work(program, placement)
    floor = program.floor_bytes
    if floor is None:
        infos = jax.tree.leaves(program.trace().args_info)
        pairs = zip(program.shapes, infos, strict=True)
        floor = sum(parts) + shard_bytes([leaf for leaf, info in pairs if info.donated])
    return Compiled(program, Memory(*parts, None, sum(parts)), flops, exchanges, floor, 0.0)


def _work(
    program: Program, placement: Placement | None
) -> tuple[dict[str, float], tuple[Exchange, ...]]:
    """One device's FLOPs by type, and what the mesh needs to exchange at least."""
    jaxpr = program.trace().jaxpr.jaxpr
    flops = {kind: count / program.devices for kind, count in flops_by_type(jaxpr).items()}
    exchanges: tuple[Exchange, ...] = ()
    if program.devices > 1 and program.arguments:
        exchanges = least_exchanges(
            jaxpr,
            program.shapes,
            *map(jax.tree.leaves, (program.weights, program.trained)),
            program.mesh,
            placement or Placement((0,) * program.devices),
        )
    return flops, exchanges


def build(program: Program) -> tuple[Memory, jax.stages.Compiled | None]:
    """Compiles a program; None where the compiler finds that it does not fit."""
    parts = (program.parameters, program.optimizer, program.cache)
    try:
        executable = program.trace().lower().compile()
    except jax.errors.JaxRuntimeError as error:
        total = needed_bytes(str(error))
        if total is None:
            raise UserError(
                f"{program.name}: the compiler refuses the program ({_first_line(error)}); change "
                "the mesh or the sizes in the config."
            ) from error
        return Memory(*parts, None, max(total, sum(parts))), None
    stats = executable.memory_analysis()
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    total = stats.argument_size_in_bytes + results + stats.temp_size_in_bytes
    total += stats.generated_code_size_in_bytes
    # What a program does not read is no argument of it (the head, in chunks of prompts), and there.
    total += max(0.0, shard_bytes(program.shapes) - stats.argument_size_in_bytes)
    return Memory(*parts, max(0.0, total - sum(parts)), total), executable


def least_bytes(program: Program, executable: jax.stages.Compiled) -> float:
    """Bytes that one device must move to or from its memory in a call."""
    if program.floor_bytes is not None:
        return program.floor_bytes
    stats = executable.memory_analysis()
    return stats.argument_size_in_bytes + stats.output_size_in_bytes


def needed_bytes(message: str) -> float | None:
    """The bytes that a program asked for, from the message that refuses it; None: another error.

    The TPU's compiler says `HLO temporaries (258.00G) exceeds available HBM (15.75G)`, arguments
    and results included, or `Used 20.30G of 15.75G hbm`; allocators `Out of memory allocating ...
    bytes`.
    """
    if "RESOURCE_EXHAUSTED" not in message and "memory" not in message.lower():
        return None
    match = next((m for p in (_EXCEEDS, _USED, _ASKED) if (m := p.search(message))), None)
    return None if match is None else float(match[1]) * _UNIT[match[2]]


def shard_bytes(tree: Any, *, on_host: bool = False) -> float:
    """Bytes of one device's shards of a tree of arrays or ShapeDtypeStructs with shardings.

    on_host: those in the host's memory, which else do not count.
    """
    total = 0.0
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if (getattr(sharding, "memory_kind", None) == "pinned_host") != on_host:
            continue
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * _bytes(leaf.dtype)
    return total


def _bytes(dtype: Any) -> float:
    """Bytes of a number on a device, where two of 4 bits share one."""
    return 0.5 if dtype.name in ("int4", "float4_e2m1fn") else dtype.itemsize


def tree_bytes(tree: Any) -> float:
    """Bytes of all arrays of a tree, whole."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


# The least time that a chip can take for a program, and which of its parts decides it.

_PARTS = ("compute", "hbm", "interconnect", "network")


@dataclasses.dataclass(frozen=True)
class Bound:
    """Seconds of one call by the data sheet, if each part ran at its peak beside the others."""

    # Products; hbm: bytes that must go to or from the device's memory; interconnect: what the
    # devices must exchange within slices, network: with other slices, or hosts of GPUs.
    compute: float
    hbm: float
    interconnect: float
    network: float = 0.0
    # The model's FLOPs (recomputation not counted) over what the chip computes in that time.
    mfu: float = 0.0

    @property
    def seconds(self) -> float:
        """The longest of what can run side by side."""
        return max(getattr(self, name) for name in _PARTS)

    @property
    def by(self) -> str:
        """The name of what takes longest."""
        return max(_PARTS, key=lambda name: getattr(self, name))


def bound(compiled: Compiled, chip: Chip) -> Bound | None:
    """The roofline of a program; None where the compiler refused it."""
    if compiled.flops is None:
        return None
    roofline = least_time(compiled, chip)
    model = compiled.program.model_flops() / compiled.program.devices
    model = min(model, sum(compiled.flops.values()) or model)
    mfu = model / (roofline.seconds * chip.peak) if roofline.seconds else 0.0
    return dataclasses.replace(roofline, mfu=mfu)


def least_time(compiled: Compiled, chip: Chip) -> Bound:
    """Computes the bound of a program that was not refused, without `mfu`, which is traced."""
    return Bound(
        chip.seconds(compiled.flops or {}),
        compiled.floor_bytes / chip.hbm_rate,
        sum(exchange.seconds(chip) for exchange in compiled.exchanges),
        sum(exchange.network_bytes for exchange in compiled.exchanges) / chip.network_rate,
    )


def fits(compiled: Compiled, chip: Chip) -> bool:
    """Whether the program's memory is at most the chip's."""
    return not compiled.refused and compiled.memory.total <= chip.hbm_bytes


@dataclasses.dataclass(frozen=True)
class Planned:
    """A compiled program with its roofline."""

    compiled: Compiled
    chip: Chip
    bound: Bound | None

    @classmethod
    def of(cls, compiled: Compiled, chip: Chip) -> Planned:
        """Counts the model's FLOPs, too."""
        return cls(compiled, chip, bound(compiled, chip))

    @property
    def fits(self) -> bool:
        """Whether it can run."""
        return fits(self.compiled, self.chip)

    def row(self) -> dict[str, Any]:
        """The program's entry in `--json`."""
        compiled, memory, flops = self.compiled, self.compiled.memory, self.compiled.flops
        program = compiled.program
        return {
            "name": program.name,
            "fits": self.fits,
            "memory_gib": {
                part.name: _gib(getattr(memory, part.name)) for part in dataclasses.fields(memory)
            },
            "host_gib": _gib(program.host),
            "hbm_gib": _gib(self.chip.hbm_bytes),
            "floor_bytes": compiled.floor_bytes,
            "flops": None if flops is None else sum(flops.values()),
            "model_flops": program.model_flops() / program.devices,
            "bound_ms": self.bound and 1e3 * self.bound.seconds,
            "bound_by": self.bound and self.bound.by,
            "mfu_bound": self.bound and self.bound.mfu,
            "collectives_ms": self.bound and 1e3 * self.bound.interconnect,
            "network_ms": self.bound and 1e3 * self.bound.network,
            "collectives": [
                {
                    "kind": exchange.kind,
                    "axis": exchange.axis,
                    "bytes": exchange.bytes,
                    "slices": exchange.slices,
                }
                for exchange in compiled.exchanges
            ],
            "compile_seconds": round(compiled.seconds, 1),
        }


def run_cost(planned: Sequence[Planned]) -> dict[str, Any]:
    """Steps, hours and chip-hours of the whole config; None where it does not say how long it is.

    Of several programs the one with a known number of steps counts (training).
    """
    for part in planned:
        steps = part.compiled.program.steps
        if steps is None or part.bound is None:
            continue
        hours = steps * part.bound.seconds / 3600
        chips = part.compiled.program.devices / part.chip.of_chip
        return {"steps": steps, "hours_bound": hours, "chip_hours_bound": hours * chips}
    return {"steps": None, "hours_bound": None, "chip_hours_bound": None}


def _gib(size: float | None) -> float | None:
    return None if size is None else round(size / GIB, 3)
