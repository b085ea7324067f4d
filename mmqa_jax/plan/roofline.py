"""The least time that a chip can take for a program, and which of its parts decides it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mmqa_jax.core.chips import GIB, Chip
from mmqa_jax.plan.program import Compiled

_PARTS = ("compute", "hbm", "interconnect", "network")


@dataclasses.dataclass(frozen=True)
class Bound:
    """Seconds of one call by the data sheet, if each part ran at its peak beside the others.

    Attributes:
      compute: products; hbm: bytes that must go to or from the device's memory; interconnect: what
        the devices must exchange within slices, network: with other slices, or hosts of GPUs.
      mfu: the model's FLOPs (recomputation not counted) over what the chip computes in that time.
    """

    compute: float
    hbm: float
    interconnect: float
    network: float = 0.0
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
        sum(one.seconds(chip) for one in compiled.exchanges),
        sum(one.network_bytes for one in compiled.exchanges) / chip.network_rate,
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
                {"kind": one.kind, "axis": one.axis, "bytes": one.bytes, "slices": one.slices}
                for one in compiled.exchanges
            ],
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
