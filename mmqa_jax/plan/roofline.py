"""The least time that a chip can take for a compiled program, and which of its parts decides it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mmqa_jax.core.chips import GIB, Chip
from mmqa_jax.plan.program import Compiled

# How far XLA:TPU's own estimates of plain streaming and of large products lie above the data sheet:
# kernels, which it does not estimate, are taken to be as far.
_STREAMED, _MULTIPLIED = 1.6, 1.77


@dataclasses.dataclass(frozen=True)
class Bound:
    """Seconds of one call by the data sheet, if each part ran at its peak beside the others.

    Attributes:
      compute: products; hbm: bytes of the device's memory; interconnect: collectives.
      exposed: of the collectives, what cannot run beside other work.
      mfu: the model's FLOPs (recomputation not counted) over what the chip computes in that time.
    """

    compute: float
    hbm: float
    interconnect: float
    exposed: float
    mfu: float = 0.0

    @property
    def seconds(self) -> float:
        """The longest of what can run side by side, and what cannot."""
        return max(self.compute, self.hbm, self.interconnect - self.exposed) + self.exposed

    @property
    def by(self) -> str:
        """The name of what takes longest."""
        return max(("compute", "hbm", "interconnect"), key=lambda name: getattr(self, name))


def bound(compiled: Compiled, chip: Chip) -> Bound | None:
    """The roofline of a program; None where the compiler refused it."""
    counts = compiled.counts
    if counts is None:
        return None
    found = Bound(
        chip.seconds(counts.flops),
        max(counts.bytes, compiled.floor_bytes) / chip.hbm_rate,
        sum(one.seconds(chip) for one in compiled.collectives),
        sum(one.exposed_seconds(chip) for one in compiled.collectives),
    )
    model = compiled.program.model_flops() / compiled.program.devices
    if counts.total_flops and not counts.unknown:  # XLA drops what no result needs
        model = min(model, counts.total_flops)
    mfu = model / (found.seconds * chip.peak) if found.seconds else 0.0
    return dataclasses.replace(found, mfu=mfu)


def estimated_seconds(compiled: Compiled, chip: Chip) -> float | None:
    """What XLA for TPUs estimates for a call, without collectives; None where it does not.

    It is a model of the chip, and nothing ran. Loops are multiplied out. Kernels, of which it says
    nothing, are added by the bytes and FLOPs that they state.
    """
    counts = compiled.counts
    if counts is None or not counts.cycles or not chip.clock:
        return None
    flops, moved = counts.kernels
    kernels = max(_STREAMED * moved / chip.hbm_rate, _MULTIPLIED * flops / chip.peak)
    return counts.cycles / chip.clock + kernels


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
    def estimated(self) -> float | None:
        """See `estimated_seconds`."""
        return estimated_seconds(self.compiled, self.chip)

    @property
    def fits(self) -> bool:
        """Whether it can run."""
        return fits(self.compiled, self.chip)

    def row(self) -> dict[str, Any]:
        """The program's entry in `--json`."""
        compiled, memory, counts = self.compiled, self.compiled.memory, self.compiled.counts
        program = compiled.program
        return {
            "name": program.name,
            "fits": self.fits,
            "memory_gib": {
                part.name: _gib(getattr(memory, part.name)) for part in dataclasses.fields(memory)
            },
            "hbm_gib": _gib(self.chip.hbm_bytes),
            "hbm_bytes": None if counts is None else max(counts.bytes, compiled.floor_bytes),
            "floor_bytes": compiled.floor_bytes,
            "flops": None if counts is None else counts.total_flops,
            "model_flops": program.model_flops() / program.devices,
            "bound_ms": self.bound and 1e3 * self.bound.seconds,
            "bound_by": self.bound and self.bound.by,
            "mfu_bound": self.bound and self.bound.mfu,
            "estimated_ms": None if self.estimated is None else 1e3 * self.estimated,
            "collectives_ms": self.bound and 1e3 * self.bound.interconnect,
            "collectives_exposed_ms": self.bound and 1e3 * self.bound.exposed,
            "collectives": [
                {"kind": c.kind, "axis": c.axis, "count": c.count, "bytes": c.bytes}
                for c in compiled.collectives
            ],
            "loops": 0 if counts is None else len(counts.loops),
            "compile_seconds": round(compiled.seconds, 1),
        }


def run_cost(planned: Sequence[Planned]) -> dict[str, Any]:
    """Steps, hours and chip-hours of the whole config; None where it does not say how long it is.

    Of several programs the one with a known number of steps counts (training).
    """
    for one in planned:
        steps = one.compiled.program.steps
        if steps is None or one.bound is None:
            continue
        hours = steps * one.bound.seconds / 3600
        chips = one.compiled.program.devices / one.chip.of_chip
        return {"steps": steps, "hours_bound": hours, "chip_hours_bound": hours * chips}
    return {"steps": None, "hours_bound": None, "chip_hours_bound": None}


def _gib(size: float | None) -> float | None:
    return None if size is None else round(size / GIB, 3)
