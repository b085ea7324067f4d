"""Compiles LLaVA's tower for a TPU slice and prints its facts as JSON; see test_tower_program.py.

A process of its own, where JAX's platform is the CPU. Its arguments are `small` or `7b`, and a
folder for the programs' texts, if they are wanted.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax

from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.decoding.sizes import feature_bytes, tower_programs
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llava.config import LlavaConfig, llava_1_5_7b
from mmqa_jax.models.two_towers.config import VisionConfig
from mmqa_jax.plan.topology import open_topology
from tests.hlo.counts import count
from tests.hlo.kept import facts_of

# 64 patches; a device's share of a feature fills the 128 lanes.
SMALL = LlavaConfig(
    VisionConfig(image_size=128, width=256, layers=4, heads=4, mlp_width=1024, dtype="bfloat16"),
    LlamaConfig(hidden=1024, layers=2, heads=8, kv_heads=8, mlp=512, dtype="bfloat16"),
)
_7B = llava_1_5_7b()
MODELS = {
    "small": SMALL,
    "7b": dataclasses.replace(
        _7B,
        vision=dataclasses.replace(_7B.vision, dtype="bfloat16"),
        llama=dataclasses.replace(_7B.llama, dtype="bfloat16"),
    ),
}
SIZES = EngineConfig(slots=64, length=1024)
_COLLECTIVE = re.compile(
    r" (all-(?:reduce|gather|to-all)|reduce-scatter|collective-permute)(?:-start)?\("
)


def main(name: str, out: Path | None = None) -> None:
    config = MODELS[name]
    mesh = make_mesh({"data": 2, "tensor": 4}, devices=open_topology("v5e:2x4").devices)
    found = {"features": feature_bytes(config, SIZES, mesh, pictures=2)}
    for kind, program in tower_programs(config, SIZES, mesh).items():
        with jax.set_mesh(mesh):
            lowered = program.function.lower(*program.arguments)
            file = out and out / f"{name}_{kind}.txt"
            compiled = facts_of(
                f"tower_{name}_{kind}", lowered, functools.partial(measure, file), __file__
            )
        found[kind] = {
            **compiled,
            "parameters": sum(
                math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(program.arguments[0])
            ),
            "batch": program.arguments[1].shape[0],
        }
    print(json.dumps(found))


def measure(file: Path | None, compiled: jax.stages.Compiled) -> dict[str, Any]:
    """What a compiled program does on one device."""
    text, memory = compiled.as_text(), compiled.memory_analysis()
    if file is not None:
        file.write_text(text, encoding="utf-8")
    counts = count(text)
    return {
        "flops": sum(counts.flops.values()),
        "bytes": counts.bytes,
        "loops": counts.loops,
        "collectives": Counter(_COLLECTIVE.findall(text)),
        "arguments": memory.argument_size_in_bytes,
        "output": memory.output_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
    }


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
