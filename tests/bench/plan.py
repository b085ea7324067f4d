"""`python -m tests.bench plan`: what the compiler made of the programs that `mmqa plan` judges.

FLOPs, bytes, copies, loops and collectives are counted in the text of the compiled program
(tests/hlo), and for a TPU the bundles of its kernels. Nothing is run. `mmqa plan` states what a
program needs at least; here stands beside it what it does.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmqa_jax.commands.plan import config_of as plan_config
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.flops import jaxpr_flops
from mmqa_jax.evaluation.tables import Table
from mmqa_jax.evaluation.tables import show as show_table
from mmqa_jax.plan import verdict as planning
from mmqa_jax.plan.program import Bound, Compiled, Planned, Program, build, least_bytes, run_cost
from mmqa_jax.plan.programs import make_program
from mmqa_jax.plan.topology import Topology, of_tpu, open_topology
from mmqa_jax.runs.verbs.plan import bytes_text, memory_cells, milliseconds
from tests.bench.steps import hidden_cycles
from tests.bench.twins import of_twins
from tests.hlo.bundles import Bundles, dumping, take
from tests.hlo.collectives import KINDS, Collective
from tests.hlo.counts import KERNEL, Counts, CyclesOf, count, stated_cycles
from tests.hlo.text import Instruction

if TYPE_CHECKING:
    from mmqa_jax.core.chips import Chip


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compiles the programs of a config; prints them and returns what `--json` prints."""
    config = plan_config(arguments)
    names = planning.chosen(config, arguments.only, arguments.model)
    with dumping() if of_tpu(arguments.topology) else contextlib.nullcontext() as folder:
        topology = open_topology(arguments.topology)
        if topology.chip.links and len(set(topology.hosts)) > 1:
            raise UserError(
                f"--topology={topology.name}: what slices exchange is no collective of the "
                "compiled program, and is not counted; name one slice, or use `mmqa plan`."
            )
        counted = []
        for name in names:
            place = planning.place(name, config, topology)
            program = make_program(name, config, place.devices, arguments.model)
            print(f"compiling {name} for {place.name} ...", file=sys.stderr, flush=True)
            counted.append(Counted.compiled_for(program, place, folder))
    plan = planning.Plan(topology, tuple(counted), {})
    _show(plan)
    return {
        "bench": "plan",
        "topology": topology.name,
        "devices": len(topology.devices),
        "chip": topology.chip.name,
        "programs": [entry.row() for entry in counted],
        "run": run_cost(counted),
        "verdict": plan.verdict,
    }


@dataclasses.dataclass(frozen=True)
class CountedBound(Bound):
    """Seconds of one call, if each part ran at its peak beside the others.

    Attributes:
      exposed: of the collectives, what cannot run beside other work.
    """

    exposed: float = 0.0

    @property
    def seconds(self) -> float:
        """The longest of what can run side by side, and what cannot."""
        return max(self.compute, self.hbm, self.interconnect - self.exposed) + self.exposed


@dataclasses.dataclass(frozen=True)
class Counted(Planned):
    """A program with what the compiled text says that it does, on one device and in one call.

    Attributes:
      counts: None where the compiler refused it.
      bundles: of its kernels by instruction (see twins.py), of a TPU; empty where they were not written.
      parts: cycles by what they are for, see `part_of`.
    """

    counts: Counts | None = None
    collectives: tuple[Collective, ...] = ()
    bundles: Mapping[str, Bundles] = dataclasses.field(default_factory=dict)
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def compiled_for(
        cls, program: Program, topology: Topology, folder: Path | None = None
    ) -> Counted:
        """Compiles and counts a program; `folder` of hlo.bundles.dumping."""
        chip, began = topology.chip, time.perf_counter()
        memory, executable = build(program)
        seconds = time.perf_counter() - began
        if executable is None:
            return cls(Compiled(program, memory, None, (), 0.0, seconds), chip, None)
        text = executable.as_text()
        bundles = of_twins(take(folder), text) if folder else {}
        cycles_of = cycles_by(bundles, chip)
        counts = count(text, cycles_of)
        if counts.unknown.pop(KERNEL, 0):  # kernels that do not state what they do
            jaxpr = program.trace().jaxpr.jaxpr
            flops = jaxpr_flops(jaxpr, kernels_only=True) / program.devices
            counts.flops["bf16"] += flops
        placement = topology.placement(program.placed)
        mesh = program.mesh or {"": 1}
        counted = counts.on_mesh(mesh, placement.hosts, placement.links)
        collectives = tuple(
            _with_steps(collective, text, chip, cycles_of) for collective in counted
        )
        least = least_bytes(program, executable)
        compiled = Compiled(program, memory, counts.flops, (), least, seconds)
        bound = counted_bound(compiled, counts, collectives, chip)
        parts = {name: count(text, cycles_by(bundles, chip, name)).cycles for name in PARTS}
        return cls(compiled, chip, bound, counts, collectives, bundles, parts)

    @property
    def moved(self) -> float:
        """Bytes to and from the device's main memory."""
        assert self.counts is not None
        return max(self.counts.bytes, self.compiled.floor_bytes)

    @property
    def estimated(self) -> float | None:
        """Seconds by the bundles of all kernels, without collectives; None without bundles.

        It is a static count, and nothing ran: see `cycles_by`. Copies that run beside kernels are
        hidden as far as the bandwidth of the memory allows.
        """
        if self.counts is None or not self.bundles:
            return None
        return max(self.counts.cycles / self.chip.clock, self.moved / self.chip.hbm_rate)

    @property
    def estimated_mfu(self) -> float | None:
        """As `Bound.mfu`, in the estimated time and what of the collectives is exposed."""
        if self.estimated is None or self.bound is None:
            return None
        return self.bound.mfu * self.bound.seconds / (self.estimated + self.bound.exposed)

    def row(self) -> dict[str, Any]:
        """The program's entry in `--json`."""
        counts, bound = self.counts, self.bound
        return super().row() | {
            "hbm_bytes": None if counts is None else self.moved,
            "estimated_ms": None if self.estimated is None else 1e3 * self.estimated,
            "mfu_estimated": self.estimated_mfu,
            "collectives_exposed_ms": bound and 1e3 * bound.exposed,
            "collectives": [
                {
                    "kind": collective.kind,
                    "axis": collective.axis,
                    "count": collective.count,
                    "bytes": collective.bytes,
                }
                for collective in self.collectives
            ],
            "loops": 0 if counts is None else len(counts.loops),
            "parts_ms": {name: 1e3 * x / self.chip.clock for name, x in self.parts.items() if x},
        }


PARTS = ("kernels", "products in loops", "products", "in loops", "beside")


def part_of(instruction: Instruction, counted: Counts) -> str:
    """Which of PARTS an instruction is: a Pallas kernel, products (of layers, which lie in a loop, or
    of the head), or else."""
    if instruction.opcode == "custom-call":
        return PARTS[0]
    inside = instruction.attribute(r'op_name="([^"]*)"') or ""
    kind = "products" if counted.total_flops else ""
    if "/while/" in inside:
        return f"{kind} in loops".strip()
    return kind or PARTS[-1]


def cycles_by(bundles: Mapping[str, Bundles], chip: Chip, part: str = "") -> CyclesOf:
    """Cycles of an instruction: its bundles, or if that is longer its bytes or FLOPs at the chip's
    peak, for which it waits. Instructions without bundles take what XLA estimates. A collective
    takes none, though its kernel has bundles: the links' time is counted in its place. Nor do those
    of another `part`, where that is given."""

    def cycles_of(instruction: Instruction, counted: Counts) -> float:
        if part and part_of(instruction, counted) != part:
            return 0.0
        scatters = instruction.called.get("calls", "").startswith("all-reduce-scatter")
        if scatters or instruction.opcode.removesuffix("-start") in KINDS:
            return 0.0
        kernel = bundles.get(instruction.name)
        if kernel is None:
            return stated_cycles(instruction, counted)
        waits = max(counted.bytes / chip.hbm_rate, chip.seconds(counted.flops)) * chip.clock
        return max(kernel.cycles(counted.bytes), waits)

    return cycles_of


def _with_steps(collective: Collective, text: str, chip: Chip, cycles_of: CyclesOf) -> Collective:
    """A collective with what hides it over all fusions that have a step of it."""
    if collective.hidden_cycles is None or not collective.bytes or not chip.clock:
        return collective
    hidden = hidden_cycles(
        text, collective.kind, collective.seconds(chip) * chip.clock / collective.bytes, cycles_of
    )
    return collective._replace(hidden_cycles=max(collective.hidden_cycles, hidden))


def counted_bound(
    compiled: Compiled, counts: Counts, collectives: tuple[Collective, ...], chip: Chip
) -> CountedBound:
    """The roofline of what was counted."""
    bound = CountedBound(
        chip.seconds(counts.flops),
        max(counts.bytes, compiled.floor_bytes) / chip.hbm_rate,
        sum(collective.seconds(chip) for collective in collectives),
        exposed=sum(collective.exposed_seconds(chip) for collective in collectives),
    )
    model = compiled.program.model_flops() / compiled.program.devices
    if counts.total_flops and not counts.unknown:  # XLA drops what no result needs
        model = min(model, counts.total_flops)
    mfu = model / (bound.seconds * chip.peak) if bound.seconds else 0.0
    return dataclasses.replace(bound, mfu=mfu)


def _show(plan: planning.Plan) -> None:
    chip, devices = plan.topology.chip, len(plan.topology.devices)
    cells = [_cells(planned) for planned in plan.planned]
    show_table(
        Table(
            f"{devices} x {chip.name} ({plan.topology.name}), in one call",
            ["a device", *(planned.compiled.program.name for planned in plan.planned)],
            [[name, *(column[name] for column in cells)] for name in cells[0]],
            f"Bounds are by the data sheet ({chip.source}): each part at its peak, beside the "
            "others, and collectives that nothing runs beside. The estimate is by the bundles "
            "of the TPU compiler's kernels, without collectives.",
        )
    )
    for planned in plan.planned:
        name = planned.compiled.program.name
        for collective in planned.collectives:
            far = " between hosts" if collective.hosts else ""
            print(
                f"{name}: {collective.count:,.0f} x {collective.kind} over {collective.axis}{far}, "
                f"{bytes_text(collective.bytes)} in all"
            )
        if planned.counts is not None and planned.counts.unknown:
            print(f"{name}: FLOPs of {', '.join(sorted(planned.counts.unknown))} are not known")
    print(plan.verdict)


def _cells(planned: Counted) -> dict[str, str | None]:
    """Row name -> text."""
    counts, bound, program = planned.counts, planned.bound, planned.compiled.program
    cells = memory_cells(planned)
    if counts is None or bound is None:
        return {**cells, **dict.fromkeys(_COUNTED)}
    share = counts.total_flops * program.devices / max(program.model_flops(), 1)
    loops = ", ".join("?" if turns is None else str(turns) for turns in counts.loops[:6])
    values = (
        f"{counts.total_flops:.4g}",
        f"{share:.3f} x",
        bytes_text(planned.moved),
        f"{planned.moved / max(planned.compiled.floor_bytes, 1):.2f} x",
        f"{len(counts.loops)}"
        + (f" ({loops}{', ...' if len(counts.loops) > 6 else ''})" if loops else ""),
        f"{counts.copies:,.0f}, {bytes_text(counts.copied_bytes)}",
        milliseconds(bound.compute),
        milliseconds(bound.hbm),
        f"{milliseconds(bound.interconnect)}, {milliseconds(bound.exposed)} by themselves",
        f"{milliseconds(bound.seconds)} ({bound.by})",
        None if planned.estimated is None else milliseconds(planned.estimated),
        f"{100 * bound.mfu:.1f} %",
        None if planned.estimated_mfu is None else f"{100 * planned.estimated_mfu:.1f} %",
        f"{planned.compiled.seconds:.0f} s",
    )
    return {**cells, **dict(zip(_COUNTED, values, strict=True))}


_COUNTED = (
    *("FLOPs", "of the model's", "HBM traffic", "of the least", "loops (turns)", "copies in HBM"),
    *("bound: compute", "bound: HBM", "bound: interconnect", "bound", "estimate"),
    *("MFU at most", "MFU by the estimate", "compiled in"),
)
