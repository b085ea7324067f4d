"""How far a plan's estimates were off where they were measured, as device_check.sh wrote it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from mmqa_jax.core.chips import chip_of_kind
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.plan.topology import Topology

DEFAULT = Path("device_check/device_check.json")  # where device_check.sh writes without --out


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Measured times over the bounds of a plan, on one device.

    Attributes:
      device: as jax or the machine names it.
      over_bound: the median of measured time over bound.
      error: by what share a bound times `over_bound` is off as a rule (the median deviation).
      memory_over_plan: the median of peak memory over the plan's; None where no device reports it.
      programs: that were measured.
    """

    device: str
    over_bound: float
    error: float
    memory_over_plan: float | None
    programs: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """What a plan says of it."""
        memory = ""
        if self.memory_over_plan is not None:
            memory = f" and {self.memory_over_plan:.2f} x the planned memory"
        return (
            f"{', '.join(self.programs)} took {self.over_bound:.2f} x their bounds on "
            f"{self.device}{memory}; a bound times that is off by {100 * self.error:.0f} % "
            "as a rule"
        )


def read_calibration(path: Path | None, topology: Topology) -> Calibration | None:
    """What was measured on devices of the topology's kind.

    Args:
      path: a `device_check.json`; None: DEFAULT, where that exists and is of this kind.

    Returns:
      None where nothing was measured.
    """
    named = path is not None
    path = DEFAULT if path is None else path
    if not named and not path.exists():
        return None
    try:
        found = _calibration(read_json(path))
    except (UserError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        said = f"{type(error).__name__}: {error}"
        if isinstance(error, UserError):  # a sentence with a remedy of its own
            said = str(error).partition(";")[0]
        raise UserError(
            f"--measured={path}: expected the device_check.json that launch/device_check.sh "
            f"writes ({said}); run it, or leave the flag out."
        ) from error
    problem = None
    if found is None:
        problem = "holds no program whose time was measured; see its failed_steps"
    elif not _same_kind(found.device, topology):
        problem = f"was measured on {found.device}, the plan is for {topology.chip.name}"
    if problem is None:
        return found
    if named:
        raise UserError(
            f"--measured={path}: {problem}; run launch/device_check.sh on such a device."
        )
    return None


def _calibration(found: dict[str, Any]) -> Calibration | None:
    rows = found["calibration"]
    if not rows or not found["device"]:
        return None
    return Calibration(
        str(found["device"]),
        float(found["typical_over_bound"]),
        float(found["typical_error"]),
        None if found["typical_memory"] is None else float(found["typical_memory"]),
        tuple(str(row["program"]) for row in rows),
    )


def _same_kind(device: str, topology: Topology) -> bool:
    sheet = chip_of_kind(device)
    if sheet is None or topology.data_sheet is None:
        return sheet is topology.data_sheet and device == topology.chip.name
    return sheet.name == topology.data_sheet.name
