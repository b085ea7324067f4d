"""Compiles a batch of prompts of a model with recurrent layers for TPUs, and prints its facts as
JSON; see test_recurrent_program.py.

A process of its own, where JAX's platform is the CPU.
"""

from __future__ import annotations

import json
import re
from typing import Any

import jax

from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.decoding.sizes import engine_programs
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.llama.config import RELATIVES
from mmqa_jax.plan.topology import open_topology
from tests.hlo.counts import count
from tests.hlo.kept import facts_of

# A layer of each kind in Qwen3.6-27B's sizes: where matrices are small XLA gathers these instead.
CONFIG = RELATIVES["qwen35_27b"](
    layers=2, kinds=("linear", "full"), vocab_size=1024, dtype="bfloat16"
)
SIZES = EngineConfig(slots=16, length=1024, buckets=(512,), prefill_tokens=2048)


def main() -> None:
    mesh = make_mesh({"tensor": 8}, devices=open_topology("v5e:2x4").devices)
    program = engine_programs(CONFIG, SIZES, mesh)["prefill"]
    with jax.set_mesh(mesh):
        lowered = program.function.lower(*program.arguments)
        print(json.dumps(facts_of("recurrent_prefill", lowered, measure, __file__)))


def measure(compiled: jax.stages.Compiled) -> dict[str, Any]:
    """What the compiled program exchanges, and which kernels of XLA's own it calls."""
    text = compiled.as_text()
    exchanged: dict[str, float] = {}
    for group, (_, size, _) in count(text).collectives.items():
        exchanged[group.kind] = exchanged.get(group.kind, 0) + size
    return {
        "exchanged": exchanged,  # bytes
        "called": sorted(set(re.findall(r'custom_call_target="([^"]+)"', text))),
    }


if __name__ == "__main__":
    main()
