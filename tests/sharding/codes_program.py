"""Compiles an engine's programs for weights in codes for TPUs and prints their facts as JSON, a line
each; see test_codes_program.py.

A process of its own, where JAX's platform is the CPU.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import jax
from flax import nnx

from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.decoding.sizes import engine_programs
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.plan.program import shard_bytes
from mmqa_jax.plan.programs import PRESETS
from mmqa_jax.plan.topology import open_topology
from tests.hlo.counts import count
from tests.hlo.kept import facts_of

LAYERS = 4
CASES = (  # form, model, mesh, slots and programs
    ("mxfp4", "gpt_oss_20b", {"data": 2, "tensor": 4}, 256, ("decode",)),
    ("int4", "qwen3_8b", {"tensor": 8}, 64, ("decode", "prefill")),
    ("fp8", "qwen3_8b", {"tensor": 8}, 64, ("decode",)),
)


def main() -> None:
    devices = open_topology("v5e:2x4").devices
    for weights, model, shape, slots, names in CASES:
        mesh = make_mesh(shape, devices=devices)
        config = PRESETS[model]()
        changes = {"windows": config.windows[:LAYERS], "dtype": "bfloat16"}
        config = dataclasses.replace(config, layers=LAYERS, **changes)
        sizes = EngineConfig(slots=slots, length=1024, weights=weights, prefill_tokens=2048)
        programs = engine_programs(config, sizes, mesh)
        for name, program in ((name, programs[name]) for name in names):
            with jax.set_mesh(mesh):
                lowered = program.function.lower(*program.arguments)
                facts = facts_of(f"codes_{name}_{weights}", lowered, measure, __file__)
            state, cache = program.arguments[:2]
            floor = shard_bytes(state) - shard_bytes(nnx.to_pure_dict(state)["tokens"])
            row = {"program": name, "weights": weights, "floor": floor + shard_bytes(cache)}
            print(json.dumps({**row, **facts}), flush=True)


def measure(compiled: jax.stages.Compiled) -> dict[str, Any]:
    """What the compiled program does on one device."""
    text = compiled.as_text()
    counted = count(text)
    return {
        "bytes": counted.bytes,
        "loops": counted.loops,
        "kernels": len(re.findall(r"%(?:codes|mxfp4)[.\d]* = ", text)),
    }


if __name__ == "__main__":
    main()
