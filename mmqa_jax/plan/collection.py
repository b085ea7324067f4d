"""`mmqa plan --sources`: what embedding, indexing and searching so many sources takes."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import sys
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from mmqa_jax.core.chips import GIB
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.flops import jaxpr_flops
from mmqa_jax.plan.program import Planned, Program, compile_program, shard_bytes
from mmqa_jax.plan.programs import make_program, program_names
from mmqa_jax.plan.topology import Topology
from mmqa_jax.retrieval.indexes.index import IndexSize, index_sizes
from mmqa_jax.retrieval.indexes.mesh import abstract_search
from mmqa_jax.tasks.registry import read_task

_TOP_K = 100
_TIMES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}
_COUNT = re.compile(r"(\d{1,18}(?:\.\d+)?)([kmbg]?)", re.IGNORECASE)
_MOST = 2**31 - 1  # rows are int32


@dataclasses.dataclass(frozen=True)
class CollectionPlan:
    """A number of sources on a topology.

    Attributes:
      embed: the program that embeds a batch on one host's devices.
      hosts: kinds of index outside of accelerators.
      mesh: kind of index -> its search over all devices; top 100 of a batch of queries.
    """

    sources: int
    dim: int
    topology: Topology
    embed: Planned
    hosts: tuple[IndexSize, ...]
    mesh: dict[str, Planned]

    @property
    def embed_seconds(self) -> float | None:
        """Returns the seconds on all devices, by the roofline; None: the batch does not fit."""
        if self.embed.bound is None:
            return None
        calls = self.sources / self.embed.compiled.program.examples
        hosts = len(self.topology.devices) / self.embed.compiled.program.devices
        return calls * self.embed.bound.seconds / hosts

    def devices_needed(self, kind: str) -> int:
        """How many such devices hold a mesh index: its vectors, and what one search adds."""
        memory = self.mesh[kind].compiled.memory
        whole = memory.parameters * len(self.topology.devices)
        added = memory.temporaries or 0.0
        return math.ceil(whole / max(self.topology.chip.hbm_bytes - added, 1.0))

    def to_json(self) -> dict[str, Any]:
        """An entry of `collections` in `--json`."""
        seconds, chip, devices = self.embed_seconds, self.topology.chip, len(self.topology.devices)
        hours = None if seconds is None else seconds / 3600
        return {
            "sources": self.sources,
            "dim": self.dim,
            "embed": {
                "hours_bound": hours,
                "chip_hours_bound": None if hours is None else hours * devices / chip.of_chip,
                "bound_by": self.embed.bound and self.embed.bound.by,
                "embeddings_gib": self.sources * self.dim * 4 / GIB,
            },
            "indexes": [
                *(
                    {
                        "kind": host.kind,
                        "place": host.place,
                        "held_gib": host.held / GIB,
                        "read_gib": None if host.read is None else host.read / GIB,
                        "read_per": "batch" if host.shared else "query",
                    }
                    for host in self.hosts
                ),
                *(
                    {
                        "kind": kind,
                        "place": "HBM",
                        "held_gib": host.compiled.memory.parameters * devices / GIB,
                        "device_gib": host.compiled.memory.total / GIB,
                        "fits": host.fits,
                        "devices_needed": self.devices_needed(kind),
                        "batch": host.compiled.program.examples,
                        "seconds_bound": host.bound and host.bound.seconds,
                        "bound_by": host.bound and host.bound.by,
                    }
                    for kind, host in self.mesh.items()
                ),
            ],
        }


def plan_collections(
    config: ConfigDict, topology: Topology, sizes: Sequence[int]
) -> list[CollectionPlan]:
    """Plans of so many sources, embedded by a config's encoder."""
    if "task" not in config or "embed" not in program_names(config):
        raise UserError(
            "--sources: the config trains no encoder of sources; name one of the task contrastive, "
            "such as configs/webqa/contrastive.py."
        )
    model = read_task(config).planned_config()
    host = topology.host
    embed = _compiled(make_program("embed", config, host.devices), host)
    return [_planned(size, model.embed_dim, topology, embed) for size in sizes]


def read_sizes(text: str) -> list[int]:
    """Parses `10M,100M,1B` as numbers of sources; UserError for anything else."""
    sizes = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        size = match and round(float(match[1]) * _TIMES[match[2].lower()])
        if not size or size > _MOST:
            raise UserError(
                f"--sources={text}: {part.strip()!r} is not a number of sources from 1 to 2.1B; "
                "write 250000, 10M or 1B, several with commas."
            )
        sizes.append(size)
    return sizes


def _planned(sources: int, dim: int, topology: Topology, embed: Planned) -> CollectionPlan:
    mesh = {
        kind: _compiled(search_program(kind, sources, dim, topology), topology)
        for kind in ("mesh", "mesh_approx")
    }
    return CollectionPlan(sources, dim, topology, embed, index_sizes(sources, dim), mesh)


def search_program(kind: str, sources: int, dim: int, topology: Topology) -> Program:
    """The search of an index over all devices, `mesh` or `mesh_approx`."""
    approximate = kind == "mesh_approx"
    trace, mesh, arguments = abstract_search(
        topology.devices, sources, dim, min(_TOP_K, sources), approximate=approximate
    )
    queries, held = arguments["queries"], shard_bytes((arguments["vectors"], arguments["mask"]))
    # A product writes its float32 scores to memory, where the best of them are read.
    scores = queries.shape[0] * arguments["mask"].size / len(topology.devices) * 4
    return Program(
        name=f"search of {sources:,} by {kind}",
        trace=functools.cache(trace),
        mesh=dict(mesh.shape),
        placed=tuple(mesh.devices.flat),
        model_flops=lambda: jaxpr_flops(trace().jaxpr.jaxpr),
        parameters=held,
        floor_bytes=held + 2 * scores,
        examples=queries.shape[0],
        unit="queries",
        input_bytes=queries.size * queries.dtype.itemsize,
    )


def _compiled(program: Program, topology: Topology) -> Planned:
    print(f"compiling {program.name} for {topology.name} ...", file=sys.stderr, flush=True)
    return Planned.of(compile_program(program, topology.placement(program.placed)), topology.chip)
