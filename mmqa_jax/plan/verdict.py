"""`mmqa plan`: do a config's programs fit a slice, how fast can they be, and what would help?"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from mmqa_jax.core.chips import GIB
from mmqa_jax.core.errors import UserError
from mmqa_jax.plan.calibration import Calibration
from mmqa_jax.plan.program import compile_program
from mmqa_jax.plan.programs import (
    ENGINE,
    FIXED,
    make_program,
    on_one_host,
    program_names,
    remat_keys,
    set_key,
    settled,
    whole_meshes,
)
from mmqa_jax.plan.roofline import Planned, run_cost
from mmqa_jax.plan.topology import Topology

_MOST_REMEDIES = 4  # each is a compilation
_STRONGER = {"none": ("dots", "full"), "dots": ("full",), "full": ()}

Changes = Mapping[str, Any]  # config key -> value


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A changed config of a program that does not fit, compiled."""

    changes: Changes
    planned: Planned


@dataclasses.dataclass(frozen=True)
class Plan:
    """The programs of a config on a topology.

    Attributes:
      remedies: program -> what was tried where it does not fit.
      calibration: how far such estimates were off on such devices; None: not measured.
    """

    topology: Topology
    planned: tuple[Planned, ...]
    remedies: Mapping[str, tuple[Remedy, ...]]
    calibration: Calibration | None = None

    @property
    def verdict(self) -> str:
        """One sentence: it fits, or what is lacking and what would help."""
        lacking = [one for one in self.planned if not one.fits]
        if lacking:
            return "; ".join(map(self._lacking, lacking)) + "."
        tightest = max(self.planned, key=lambda one: one.compiled.memory.total)
        most = tightest.compiled.memory.total / GIB
        bounds = ", ".join(
            f"{one.compiled.program.name} is bound by {one.bound.by}"
            f" at {100 * one.bound.mfu:.0f} % MFU"
            for one in self.planned
            if one.bound is not None
        )
        return f"fits: {most:.1f} of {tightest.chip.hbm_bytes / GIB:.1f} GiB; {bounds}."

    def _lacking(self, one: Planned) -> str:
        program, memory = one.compiled.program, one.compiled.memory
        said = (
            f"{program.name} needs {memory.total / GIB:.1f} of {one.chip.hbm_bytes / GIB:.1f} GiB"
        )
        tried = [
            f"{described(remedy.changes)} needs {remedy.planned.compiled.memory.total / GIB:.1f}"
            for remedy in self.remedies.get(program.name, ())
        ]
        return f"{said}: {', '.join(tried)}" if tried else said

    def to_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "topology": self.topology.name,
            "devices": len(self.topology.devices),
            "chip": self.topology.chip.name,
            "programs": [one.row() for one in self.planned],
            "run": run_cost(self.planned),
            "calibration": self.calibration and dataclasses.asdict(self.calibration),
            "verdict": self.verdict,
        }


def plan(
    config: ConfigDict,
    topology: Topology,
    *,
    model: str | None = None,
    only: Sequence[str] = (),
    calibration: Calibration | None = None,
) -> Plan:
    """Compiles a config's programs for a topology, and remedies for those that do not fit.

    Args:
      config: empty where the model alone decides the program; see programs.program_names.
      calibration: of the topology's kind of devices.
      model: of a language model, a name of programs.PRESETS; or one of BARTS.
      only: names of programs; all by default.

    Raises:
      UserError: a config, mesh or program that cannot be; see programs.make_program.
    """
    names = chosen(config, only, model)
    planned = {name: _planned(name, config, place(name, config, topology), model) for name in names}
    remedies = {
        name: tuple(_remedies(name, config, place(name, config, topology), model))
        for name, one in planned.items()
        if not one.fits
    }
    return Plan(topology, tuple(planned.values()), remedies, calibration)


def chosen(config: ConfigDict, only: Sequence[str], model: str | None = None) -> tuple[str, ...]:
    """The programs of a config that `--only` asks for; `model` as in `plan`."""
    names = program_names(config, model)
    for name in only:
        if name not in names:
            raise UserError(f"--only={name}: the config has the programs {', '.join(names)}.")
    return tuple(name for name in names if not only or name in only)


def place(name: str, config: ConfigDict, topology: Topology) -> Topology:
    """The devices of a topology that a program runs on: all, or those of one host."""
    one_host = on_one_host(name, config, len(topology.devices))
    return topology.host if one_host else topology


def _planned(name: str, config: ConfigDict, topology: Topology, model: str | None) -> Planned:
    program = make_program(name, config, topology.devices, model)
    print(f"compiling {name} for {topology.name} ...", file=sys.stderr, flush=True)
    return Planned.of(compile_program(program, topology.placement(program.placed)), topology.chip)


def changed(config: ConfigDict, changes: Changes) -> ConfigDict:
    """A copy of a config with other values."""
    copy = ConfigDict(config.to_dict())
    for key, value in changes.items():
        set_key(copy, key, value)
    return copy


def described(changes: Changes) -> str:
    """`model.changes.remat=dots batches.batch_size=512`."""
    return " ".join(f"{key}={value}" for key, value in changes.items())


def _remedies(
    name: str, config: ConfigDict, topology: Topology, model: str | None
) -> Iterator[Remedy]:
    """Changed configs, compiled: each kind of change until one fits."""
    left, config = _MOST_REMEDIES, settled(name, config, topology.devices, model)
    for kind in _alternatives(name, config, len(topology.devices), model):
        for changes in kind:
            if left == 0:
                return
            left -= 1
            try:
                planned = _planned(name, changed(config, changes), topology, model)
            except UserError:  # such as a batch that the mesh does not divide
                break
            yield Remedy(changes, planned)
            if planned.fits:
                break


def _alternatives(
    name: str, config: ConfigDict, devices: int, model: str | None
) -> list[Iterable[Changes]]:
    """What may help a program into memory, each kind from little to much."""
    if name == "train":
        return [_stronger_remat(config), _whole_fsdp(config, devices), _halved(config, _BATCH)]
    if name in ENGINE:
        present = config.model.mesh.to_dict()
        split = [
            {f"model.mesh.{axis}": size for axis, size in mesh.items()}
            for mesh in whole_meshes(devices, model)
            if mesh != present
        ]
        return [split, _halved(config, "engine.slots"), [{"engine.cache_dtype": "int8"}]]
    return [] if name in FIXED else [_halved(config, "inference.batch_size")]


_BATCH = "batches.batch_size"


def _stronger_remat(config: ConfigDict) -> list[Changes]:
    keys = remat_keys(config)
    if not keys:
        return []
    return [dict.fromkeys(keys, remat) for remat in _STRONGER[_remat(config)]]


def _remat(config: ConfigDict) -> str:
    return config.model.get("changes", {}).get("remat", "none")


def _whole_fsdp(config: ConfigDict, devices: int) -> list[Changes]:
    mesh = config.mesh
    if devices == 1 or mesh.get("fsdp", 1) != 1 or mesh.get("tensor", 1) != 1:
        return []
    return [{"mesh.data": 1, "mesh.fsdp": -1}]


def _halved(config: ConfigDict, key: str) -> Iterator[Changes]:
    section, last = key.split(".")
    size = config[section][last]
    while size > 1:
        size //= 2
        yield {key: size}


@dataclasses.dataclass(frozen=True)
class Found:
    """One setting of a search."""

    changes: Changes
    planned: Planned

    @property
    def rate(self) -> float:
        """Examples per second over all devices, at best; 0 where it does not fit."""
        bound = self.planned.bound
        if not self.planned.fits or bound is None or not bound.seconds:
            return 0.0
        return self.planned.compiled.program.examples / bound.seconds

    def to_json(self) -> dict[str, Any]:
        """An entry of `search` in `--json`."""
        return {
            "changes": dict(self.changes),
            "examples_per_second_bound": self.rate,
            **self.planned.row(),
        }


def best_settings(
    config: ConfigDict, topology: Topology, *, model: str | None = None, only: Sequence[str] = ()
) -> list[Found]:
    """Tries mesh x remat x batch (of an engine mesh x slots), the fastest first.

    Of every mesh and remat the batch is doubled until it does not fit; what fits with less
    recomputation is not tried with more.

    Raises:
      UserError: as `plan`.
    """
    name = chosen(config, only, model)[0]
    if name in FIXED:
        raise UserError(f"--search: a config has no setting of the program {name}; leave it out.")
    found: list[Found] = []
    refused: UserError | None = None
    topology = place(name, config, topology)
    config = settled(name, config, topology.devices, model)
    space, remats = list(_space(name, config, len(topology.devices))), _all_remat(name, config)
    most, tried = sum(len(batches) for _, batches in space) * len(remats), 0
    for mesh, batches in space:
        fitted = 0  # of the batches, with the recomputation so far
        for remat in remats:
            for batch in batches[fitted:]:
                changes = {**mesh, **remat, **batch}
                tried += 1
                print(
                    f"setting {tried} of {most} at most: {described(changes)}",
                    file=sys.stderr,
                    flush=True,
                )
                try:
                    planned = _planned(name, changed(config, changes), topology, model)
                except UserError as error:  # a batch or heads that the mesh does not divide
                    refused = refused or error
                    continue
                found.append(Found(changes, planned))
                if not planned.fits:
                    break
                fitted += 1
    if not found:
        raise UserError(
            f"--search: the config fits no mesh of {topology.name}; of the first: {refused}"
        ) from refused
    return sorted(found, key=lambda one: -one.rate)


def _space(
    name: str, config: ConfigDict, devices: int
) -> Iterator[tuple[Changes, Sequence[Changes]]]:
    """Meshes, and the batches to try on each."""
    engine = name in ENGINE
    prefix = "model.mesh" if engine else "mesh"
    key = "engine.slots" if engine else _BATCH
    section, last = key.split(".")
    if name not in ("train", *ENGINE):  # a copy on each device
        key = "inference.batch_size"
        size = config.inference.batch_size
        yield {}, [{key: size * factor} for factor in (1, 2, 4)]
        return
    size = config[section][last]
    sizes = [{key: size * factor} for factor in (1, 2, 4)]
    splits = _splits(devices, engine)
    for data, fsdp, tensor in splits:
        yield {f"{prefix}.data": data, f"{prefix}.fsdp": fsdp, f"{prefix}.tensor": tensor}, sizes


def _splits(devices: int, engine: bool) -> list[tuple[int, int, int]]:
    """Few of all meshes (data, fsdp, tensor), those that are used in practice."""
    few = min(8, devices)
    if engine:
        return list(dict.fromkeys([(1, 1, devices), (devices // few, 1, few)]))
    whole = [(devices, 1, 1), (1, devices, 1)]
    return list(dict.fromkeys([*whole, (devices // few, few, 1), (1, devices // few, few)]))


def _all_remat(name: str, config: ConfigDict) -> list[Changes]:
    keys = remat_keys(config) if name == "train" else []
    return [dict.fromkeys(keys, remat) for remat in ("none", "dots", "full")] if keys else [{}]
