"""Compiles training steps for several TPU slices, and prints what crosses them: a line of JSON each.

A script for test_slices_program.py. XLA makes of a collective over several slices one within each
slice, and one of its runtime "megascale" over the data-center network: a send of each chip, whose
attributes name the collective and the slices.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from training_programs import ADAM, language_model

from mmqa_jax.core.chips import sent_bytes
from mmqa_jax.core.mesh import DEFAULT_RULES, make_mesh, slice_of
from mmqa_jax.plan.program import Program, trace_program
from mmqa_jax.plan.topology import open_topology
from mmqa_jax.training.optimizer import make_optimizer
from mmqa_jax.training.state import abstract_state, make_step, split_model
from tests.hlo.kept import facts_of

# Name -> topology and mesh.
PROGRAMS: dict[str, tuple[str, dict[str, int]]] = {
    "data": ("2xv5e:4x4", {"data": 2, "fsdp": 16}),
    "fsdp": ("2xv5e:4x4", {"fsdp": 32}),
    "both": ("4xv5p:2x2x2", {"data": 2, "fsdp": 8, "tensor": 2}),
}
_BYTES = {"bf16": 2, "f32": 4, "s32": 4}
# The target names slices, and all devices of each; or pairs of devices, slice n's from n * 100,000.
_SEND = re.compile(
    r"= \((\w+)\[([\d,]*)\]\S*, .* send\(.*_xla_megascale_target=(\S+),_xla_megascale_\S*?"
    r"transfer_type=\"(\w+)\""
)
_OF_SLICE = 100_000
_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")


def facts(name: str) -> dict[str, Any]:
    """What of a step of a layer crosses slices, and what `mmqa plan` says that must."""
    topology, shape = PROGRAMS[name]
    slices = open_topology(topology)
    mesh = make_mesh(shape, slices.devices)
    made = language_model(layers=1)
    optimizer, schedule = make_optimizer(ADAM, steps=100)
    model = split_model(made["task"], 0)
    abstract = abstract_state(model, optimizer, mesh, DEFAULT_RULES)
    step = make_step(
        *(made["task"], model, optimizer, schedule),
        **{"seed": 0, "accumulate": 1, "abstract": abstract, "mesh": mesh},
    )
    rows = 2 * mesh.shape["data"] * mesh.shape["fsdp"]
    batch = {
        key: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for key, x in made["batch"].items()
    }
    program = Program.of(
        *("train", step.jitted, step.abstract_arguments(batch), mesh),
        **{"weights": abstract.params, "trained": jax.tree.leaves(abstract.params)},
        **{"parameters": 0, "floor_bytes": 0},
    )
    planned = trace_program(program, slices.placement(program.placed)).exchanges
    owners = np.vectorize(slice_of)(mesh.devices).ravel().tolist()
    compiled = facts_of(
        f"slices_{name}",
        step.lower(batch),
        lambda compiled: {**_of_compiled(compiled.as_text(), mesh), "slices": owners},
        __file__,
    )
    return {
        "name": name,
        "mesh": dict(mesh.shape),
        "owners": owners,
        "planned": {
            f"{one.kind} {one.axis}": one.network_bytes for one in planned if one.slices > 1
        },
        **compiled,
    }


def _of_compiled(text: str, mesh: Mesh) -> dict[str, Any]:
    """What crosses slices and what does not.

    Returns:
      `sent`: collective and mesh axes (but for "one-to-one", a permute) -> bytes that a chip sends;
      `last_device`: the largest number in a group of collectives within slices, which number the
      devices of theirs from 0.
    """
    place = {device.id: at for at, device in np.ndenumerate(mesh.devices)}
    sent: Counter[str] = Counter()
    for kind, shape, target, transfer in _SEND.findall(text):
        collective = transfer.lower().replace("_", "-")
        size = _BYTES[kind] * math.prod(int(n) for n in shape.split(",") if n)
        if transfer == "ONE_TO_ONE":
            sent["one-to-one"] += size
            continue
        listed = [[int(n) for n in group.split(",")] for group in re.findall(r"{([\d,]+)}", target)]
        if target.startswith('"'):
            listed = [[n * _OF_SLICE for n in listed[0]]]
        members = len(listed[0])
        if collective == "all-gather":
            size *= members
        axes = [
            axis
            for n, axis in enumerate(mesh.axis_names)
            if any(len({place[device][n] for device in group}) > 1 for group in listed)
        ]
        sent[f"{collective} {'+'.join(axes)}"] += sent_bytes(collective, members, size)
    numbers = {int(n) for group in _GROUPS.findall(text) for n in re.findall(r"\d+", group)}
    return {"sent": dict(sent), "last_device": max(numbers)}


if __name__ == "__main__":
    for name in sys.argv[1:] or PROGRAMS:
        print(json.dumps(facts(name)))
