"""Names of slices and hosts -> devices to compile for, which need not be there.

XLA's own compilers run on a plain machine: the TPU's is in the package libtpu (extra `plan`), the
GPU's in JAX's CUDA plugin (extra `cuda12`), which also wants a description of the GPU (targets/).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from mmqa_jax.core.chips import GPUS, TPUS, Chip, chip_of_kind, fewest_links, most_even
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.core.mesh import slice_of
from mmqa_jax.plan.exchange import Placement

LOCAL = "local"
_OF_TPU = {spelling: name for name, chip in TPUS.items() for spelling in chip.spellings}
_TPU = re.compile(
    rf"(?:(\d{{1,6}})x ?)?({'|'.join(_OF_TPU)})(?::(\d{{1,4}}(?:x\d{{1,4}})+)|-(\d{{1,6}}))"
)
_GPU = re.compile(rf"(?:(\d{{1,6}})x ?)?({'|'.join(GPUS)}):(\d{{1,6}})")
_SHAPES = {2: "AxB", 3: "AxBxC"}
_SLICES = ", ".join(f"{name}:{_SHAPES[chip.dimensions]}" for name, chip in TPUS.items())
KNOWN = (
    f"local, {_SLICES} (such as v5e:16x16 and v5p:4x4x4), Google's names of slices (v5e-8, "
    "v5litepod-8, v5p-64, tpu7x-8), 2xv5e:4x4 (two slices), "
    f"{', '.join(f'{name}:N' for name in GPUS)}, and several hosts of GPUs as 2x h100:8"
)
_TARGETS = Path(__file__).parent / "targets"


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices to compile for."""

    name: str
    devices: tuple[Any, ...]
    # Of every device its slice, of GPUs its host: those of one number are linked without the
    # data-center network.
    hosts: tuple[int, ...]
    data_sheet: Chip | None = None  # of the devices' kind; None where there is none

    @functools.cached_property
    def chip(self) -> Chip:
        """The figures of a device, by its data sheet or measured on this machine (seconds)."""
        return self.data_sheet or _measured(self.devices[0], len(self.devices))

    @functools.cached_property
    def host(self) -> Topology:
        """The devices of one process: those of one host, on a TPU as a slice of their own.

        (The TPU's compiler takes one device of a slice or all of them.)
        """
        if not of_tpu(self.name):
            same = [n for n, host in enumerate(self.hosts) if host == self.hosts[0]]
            devices = tuple(self.devices[n] for n in same)
            return dataclasses.replace(self, devices=devices, hosts=self.hosts[: len(same)])
        slices, version, shape = _slice(self.name)
        alone = open_topology(f"{version}:{self.chip.host}")
        if len(alone.devices) * slices < len(self.devices):
            return alone
        return open_topology(f"{version}:{shape}") if slices > 1 else self

    def placement(self, placed: Sequence[Any]) -> Placement:
        """Returns the places of a mesh's devices, in its flat order."""
        number = {device: n for n, device in enumerate(self.devices)}
        hosts = tuple(self.hosts[number[device]] for device in placed)
        if not self.chip.links:
            return Placement(hosts)
        dimensions = self.chip.dimensions  # a v5e has a third coordinate, always 0
        places = [tuple(device.coords)[:dimensions] for device in placed]
        ends = zip(*(device.coords for device in self.devices), strict=True)
        shape = [1 + max(numbers) for numbers in ends][:dimensions]

        def links(group: Sequence[int]) -> int:
            of_slice: dict[int, list[int]] = {}
            for n in group:
                of_slice.setdefault(hosts[n], []).append(n)
            return min(
                fewest_links([places[n] for n in numbers], shape, self.chip)
                for numbers in of_slice.values()
            )

        return Placement(hosts, links)


def of_tpu(name: str) -> bool:
    """Whether a topology's name is one of a TPU, whether or not such a slice exists."""
    return _TPU.fullmatch(name) is not None


def open_topology(name: str) -> Topology:
    """The devices of a topology."""
    if name == LOCAL:
        return _local()
    gpu = _GPU.fullmatch(name)
    if of_tpu(name):
        slices, version, shape = _slice(name)
        if slices and shape.count("x") + 1 == TPUS[version].dimensions:
            return _tpu(name, slices, version, shape)
    if gpu is not None and int(gpu[3]) and gpu[1] != "0":
        return _gpu(name, gpu[2], int(gpu[1] or 1), int(gpu[3]))
    raise UserError(f"--topology={name}: unknown; use one of {KNOWN}.")


def _slice(name: str) -> tuple[int, str, str]:
    """The number of slices, the chip's name and the shape of one, of a TPU's topology.

    Google's names count chips; where a chip has two TensorCores, they count these.
    """
    slices, spelling, shape, count = _TPU.fullmatch(name).groups()
    version = _OF_TPU[spelling]
    if shape is None:
        chip = TPUS[version]
        cores = 2 if chip.dimensions == 3 else 1
        sides = most_even(int(count) // cores, chip.dimensions) if int(count) % cores == 0 else ()
        shape = "x".join(map(str, sides))
    return int(slices or 1), version, shape


def _tpu(name: str, slices: int, version: str, shape: str) -> Topology:
    _check_libtpu(name)
    # Only compiles: looks for no TPU in the cloud, and lets other processes load libtpu as well.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    # It complains without these, and does not use them: the topology's name decides.
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    from jax.experimental import topologies

    one_chip = {} if set(shape) != {"1", "x"} else {"chips_per_host_bounds": (1, 1, 1)}
    try:
        devices = topologies.get_topology_desc(
            platform="tpu",
            topology_name=f"{TPUS[version].target}:{shape}",
            num_slices=slices,
            **one_chip,
        ).devices
    except Exception as error:
        raise UserError(
            f"--topology={name}: libtpu knows no such slice ({_first_line(error)}); use one that "
            "exists, such as v5e:2x4, v5e:16x16, v6e:8x8, v5p:4x4x4 or v7x:2x2x1."
        ) from error
    return Topology(name, tuple(devices), tuple(map(slice_of, devices)), TPUS[version])


def _check_libtpu(name: str) -> None:
    """UserError if the TPU's compiler is not there, or of another jax version."""
    advice = "install it with `pip install mmqa-jax[plan]` (Linux), or plan for --topology=local."
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            f"--topology={name}: the TPU's compiler, libtpu, is not installed; {advice}"
        )
    asked = [text for text in metadata.requires("jax") or () if text.startswith("libtpu")]
    wanted = re.search(r"==\s*([\d.]+?)\.?\*?\s*(?:;|$)", asked[0]) if asked else None
    installed, jax = _installed("libtpu"), _installed("jax")
    if wanted is not None and not f"{installed}.".startswith(f"{wanted[1]}."):
        raise UserError(
            f"--topology={name}: libtpu {installed} is installed, but jax {jax} needs "
            f"libtpu {wanted[1]}; {advice}"
        )


def _installed(package: str) -> str:
    """Version of an installed package."""
    return metadata.version(package)


def _gpu(name: str, chip: str, hosts: int, each: int) -> Topology:
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        raise UserError(
            f"--topology={name}: the GPU's compiler comes with JAX's CUDA plugin, which is not "
            "installed; install it with `pip install mmqa-jax[cuda12]`, or plan for a TPU or "
            "--topology=local."
        )
    from jax.experimental import topologies

    described = (_TARGETS / f"{chip}.txtpb").read_text(encoding="utf-8")
    try:
        devices = topologies.get_topology_desc(
            platform="cuda", topology_name="", topology=f"1x{hosts}x{each}", target_config=described
        ).devices
    except Exception as error:
        raise UserError(
            f"--topology={name}: JAX's CUDA plugin cannot compile for it ({_first_line(error)}); "
            "install the plugin of jax's own version, with `pip install mmqa-jax[cuda12]`."
        ) from error
    of_host = tuple(n // each for n in range(len(devices)))
    return Topology(name, tuple(devices), of_host, GPUS[chip])


def _local() -> Topology:
    import jax

    devices = jax.devices()
    hosts = tuple(map(slice_of, devices))
    return Topology(LOCAL, tuple(devices), hosts, chip_of_kind(devices[0].device_kind))


def _measured(device: Any, count: int) -> Chip:
    """A device without a data sheet: what it does in a short measurement, shared by `count`."""
    from mmqa_jax.core.host import device_name, matmul_rates, read_bandwidth

    rates = {name: rate * 1e9 / count for name, rate in matmul_rates().items()}
    stated = {"f32": rates["float32"], "bf16": rates["bfloat16"], "f16": rates["float32"]}
    memory = (device.memory_stats() or {}).get("bytes_limit") or _host_memory() / count
    bandwidth = read_bandwidth() / count
    return Chip(
        device_name(),
        {**stated, "f32:highest": stated["f32"], "bf16": max(stated.values())},
        memory,
        bandwidth,
        bandwidth,
        bandwidth,
        "measured on this machine just now",
    )


def _host_memory() -> float:
    """Bytes of the machine's memory."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _first_line(error: Exception) -> str:
    """Returns an XLA error's first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__


# How far a plan's estimates were off where they were measured, as device_check.sh wrote it.

DEFAULT = Path("device_check/device_check.json")  # where device_check.sh writes without --out


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Measured times over the bounds of a plan, on one device."""

    device: str  # as jax or the machine names it
    over_bound: float  # the median of measured time over bound
    error: float  # by what share a bound times `over_bound` is off as a rule (the median deviation)
    # The median of peak memory over the plan's; None where no device reports it.
    memory_over_plan: float | None
    programs: tuple[str, ...]  # that were measured

    @property
    def sentence(self) -> str:
        """Describes the topology in a plan."""
        memory = ""
        if self.memory_over_plan is not None:
            memory = f" and {self.memory_over_plan:.2f} x the planned memory"
        return (
            f"{', '.join(self.programs)} took {self.over_bound:.2f} x their bounds on "
            f"{self.device}{memory}; a bound times that is off by {100 * self.error:.0f} % "
            "as a rule"
        )


def read_calibration(path: Path | None, topology: Topology) -> Calibration | None:
    """Reads the measurements on devices of the topology's kind.

    `path`: a `device_check.json`; None: DEFAULT, where that exists and is of this kind.

    Returns:
      None where nothing was measured.
    """
    named = path is not None
    path = DEFAULT if path is None else path
    if not named and not path.exists():
        return None
    try:
        calibration = _calibration(read_json(path))
    except (UserError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, UserError):  # a sentence with a remedy of its own
            reason = str(error).partition(";")[0]
        raise UserError(
            f"--measured={path}: expected the device_check.json that launch/device_check.sh "
            f"writes ({reason}); run it, or leave the flag out."
        ) from error
    problem = None
    if calibration is None:
        problem = "holds no program whose time was measured; see its failed_steps"
    elif not _same_kind(calibration.device, topology):
        problem = f"was measured on {calibration.device}, the plan is for {topology.chip.name}"
    if problem is None:
        return calibration
    if named:
        raise UserError(
            f"--measured={path}: {problem}; run launch/device_check.sh on such a device."
        )
    return None


def _calibration(record: dict[str, Any]) -> Calibration | None:
    rows = record["calibration"]
    if not rows or not record["device"]:
        return None
    return Calibration(
        str(record["device"]),
        float(record["typical_over_bound"]),
        float(record["typical_error"]),
        None if record["typical_memory"] is None else float(record["typical_memory"]),
        tuple(str(row["program"]) for row in rows),
    )


def _same_kind(device: str, topology: Topology) -> bool:
    sheet = chip_of_kind(device)
    if sheet is None or topology.data_sheet is None:
        return sheet is topology.data_sheet and device == topology.chip.name
    return sheet.name == topology.data_sheet.name
