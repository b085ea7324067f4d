"""`mmqa plan`: do a config's programs fit a slice, how fast can they be, and what would help?"""

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from ml_collections import ConfigDict

from mmqa_jax.core.chips import GIB
from mmqa_jax.core.errors import UserError
from mmqa_jax.plan.program import (
    Bound,
    Planned,
    Program,
    compile_program,
    least_time,
    run_cost,
    trace_program,
)
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
from mmqa_jax.plan.topology import Calibration, Topology

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
    """The programs of a config on a topology."""

    topology: Topology
    planned: tuple[Planned, ...]
    remedies: Mapping[str, tuple[Remedy, ...]]  # program -> what was tried where it does not fit
    # How far such estimates were off on such devices; None: not measured.
    calibration: Calibration | None = None

    @property
    def verdict(self) -> str:
        """One sentence: it fits, or what is lacking and what would help."""
        lacking = [program for program in self.planned if not program.fits]
        if lacking:
            return "; ".join(map(self._lacking, lacking)) + "."
        tightest = max(self.planned, key=lambda program: program.compiled.memory.total)
        most = tightest.compiled.memory.total / GIB
        bounds = ", ".join(
            f"{program.compiled.program.name} is bound by {program.bound.by}"
            f" at {100 * program.bound.mfu:.0f} % MFU"
            for program in self.planned
            if program.bound is not None
        )
        return f"fits: {most:.1f} of {tightest.chip.hbm_bytes / GIB:.1f} GiB; {bounds}."

    def _lacking(self, planned: Planned) -> str:
        program, memory = planned.compiled.program, planned.compiled.memory
        limit = planned.chip.hbm_bytes / GIB
        problem = f"{program.name} needs {memory.total / GIB:.1f} of {limit:.1f} GiB"
        tried = [
            f"{described(remedy.changes)} needs {remedy.planned.compiled.memory.total / GIB:.1f}"
            for remedy in self.remedies.get(program.name, ())
        ]
        return f"{problem}: {', '.join(tried)}" if tried else problem

    def to_json(self) -> dict[str, Any]:
        """Returns the output of `--json`."""
        return {
            "topology": self.topology.name,
            "devices": len(self.topology.devices),
            "chip": self.topology.chip.name,
            "programs": [program.row() for program in self.planned],
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
    """Compiles a config's programs for a topology, and looks for remedies if one does not fit.

    Args:
      config: empty where the model alone decides the program; see programs.program_names.
      calibration: of the topology's kind of devices.
      model: of a language model, a name of programs.PRESETS; or one of BARTS.
      only: names of programs; all by default.
    """
    names = chosen(config, only, model)
    planned = {name: _planned(name, config, place(name, config, topology), model) for name in names}
    remedies = {
        name: tuple(_remedies(name, config, place(name, config, topology), model))
        for name, result in planned.items()
        if not result.fits
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
    """Returns the devices that a program runs on: all of a topology, or one host's."""
    one_host = on_one_host(name, config, len(topology.devices))
    return topology.host if one_host else topology


def _planned(name: str, config: ConfigDict, topology: Topology, model: str | None) -> Planned:
    program = make_program(name, config, topology.devices, model)
    _tell(f"compiling {name} for {topology.name} ...")
    return _compiled(program, topology)


def _compiled(program: Program, topology: Topology) -> Planned:
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
    """Lists changes that may fit a program into memory, each kind from little to much."""
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
        if not self.planned.fits or bound is None:
            return 0.0
        return _rate(self.planned.compiled.program, bound)

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
    """Looks for the fastest of mesh x remat x batch (of an engine mesh x slots).

    All settings are traced, which bounds their rates, and compiled from the highest bound on until
    none that is left can be faster: the best is that of a search which compiles all. What cannot
    fit, because another setting does not, is left out.

    Returns:
      The settings that were compiled, the fastest first; of equal ones the first of _settings.
    """
    name = chosen(config, only, model)[0]
    if name in FIXED:
        raise UserError(f"--search: a config has no setting of the program {name}; leave it out.")
    topology = place(name, config, topology)
    config = settled(name, config, topology.devices, model)
    settings = _settings(name, config, len(topology.devices))
    programs: dict[int, Program] = {}
    traces: dict[Any, Program] = {}  # settings without `data` and `fsdp` -> a program of them
    waiting: list[tuple[float, int]] = []  # (-rate at best, number of a setting)
    refused: UserError | None = None
    for number, changes in enumerate(settings):
        _tell(f"tracing {number + 1} of {len(settings)}: {described(changes)}")
        try:
            program = make_program(name, changed(config, changes), topology.devices, model)
            # How rows and weights are split over the same number of devices is in the arguments:
            # such programs have one jaxpr, which takes longest to make.
            others = tuple(item for item in changes.items() if item[0] not in _SPLIT)
            alike = dataclasses.replace(program, trace=traces.setdefault(others, program).trace)
            traced = trace_program(alike, topology.placement(program.placed))
        except UserError as error:  # a batch or heads that the mesh does not divide
            refused = refused or error
            continue
        programs[number] = program
        waiting.append((-_rate(program, least_time(traced, topology.chip)), number))
    waiting.sort()
    compiled: list[tuple[float, int, Found]] = []
    while waiting:
        number = waiting[0][1]
        changes, most = settings[number], len(compiled) + len(waiting)
        _tell(f"compiling {len(compiled) + 1} of {most} at most: {described(changes)}")
        try:
            setting = Found(changes, _compiled(programs[number], topology))
        except UserError as error:  # not for its memory
            refused = refused or error
            del waiting[0]
            continue
        compiled.append((-setting.rate, number, setting))
        if setting.planned.fits:
            waiting = [other for other in waiting[1:] if other < compiled[-1][:2]]
        else:
            hopeless = _hopeless(setting, settings, topology)
            waiting = [other for other in waiting[1:] if settings[other[1]] not in hopeless]
    if not compiled:
        raise UserError(
            f"--search: the config fits no mesh of {topology.name}; of the first: {refused}"
        ) from refused
    return [setting for *_, setting in sorted(compiled)]


def _hopeless(refused: Found, settings: Sequence[Changes], topology: Topology) -> list[Changes]:
    """Finds settings that need at least the memory of one that does not fit.

    On the same mesh these are the same or larger batches. Where what a device holds beside its
    parameters does not fit alone, it does not with `data` and `fsdp` split otherwise either, which
    leaves each device as many rows.
    """
    memory = refused.planned.compiled.memory
    held = memory.parameters + memory.optimizer + memory.cache
    alone = memory.total - held > topology.chip.hbm_bytes
    *_, batch = refused.changes
    free = {batch} | {key for key in refused.changes if alone and key in _SPLIT}
    return [
        setting
        for setting in settings
        if setting[batch] >= refused.changes[batch]
        and all(setting[key] == value for key, value in refused.changes.items() if key not in free)
    ]


def _rate(program: Program, bound: Bound) -> float:
    """Examples per second over all devices."""
    return program.examples / bound.seconds if bound.seconds else 0.0


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


_FACTORS = (1, 2, 4)  # of the config's batch
_SPLIT = ("mesh.data", "mesh.fsdp")


def _settings(name: str, config: ConfigDict, devices: int) -> list[Changes]:
    """Lists what a search may choose: for every mesh and remat the batches, from small to large."""
    key = "inference.batch_size"  # of a copy on each device
    meshes: list[Changes] = [{}]
    if name in ("train", *ENGINE):
        engine = name in ENGINE
        prefix, key = ("model.mesh", "engine.slots") if engine else ("mesh", _BATCH)
        axes = [f"{prefix}.{axis}" for axis in ("data", "fsdp", "tensor")]
        meshes = [dict(zip(axes, split, strict=True)) for split in _splits(devices, engine)]
    section, last = key.split(".")
    batches = [{key: config[section][last] * factor} for factor in _FACTORS]
    remats = _all_remat(name, config)
    return [{**mesh, **remat, **batch} for mesh, remat, batch in product(meshes, remats, batches)]


def _splits(devices: int, engine: bool) -> list[tuple[int, int, int]]:
    """Yields the few meshes (data, fsdp, tensor) that are used in practice."""
    few = min(8, devices)
    if engine:
        return list(dict.fromkeys([(1, 1, devices), (devices // few, 1, few)]))
    whole = [(devices, 1, 1), (1, devices, 1)]
    return list(dict.fromkeys([*whole, (devices // few, few, 1), (1, devices // few, few)]))


def _all_remat(name: str, config: ConfigDict) -> list[Changes]:
    keys = remat_keys(config) if name == "train" else []
    return [dict.fromkeys(keys, remat) for remat in ("none", "dots", "full")] if keys else [{}]
