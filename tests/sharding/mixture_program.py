"""Compiles a mixture's step of decoding and its chunks of prompts for TPUs and prints their facts
as JSON, a line each for weights as given and in int8; see test_mixture_program.py.

A process of its own, where JAX's platform is the CPU.
"""

from __future__ import annotations

import json
import math
from typing import Any

import jax
from flax import nnx

from mmqa_jax.core.flops import jaxpr_flops
from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.decoding.sizes import engine_programs
from mmqa_jax.decoding.slot_runner import EngineConfig, columns_read
from mmqa_jax.models.llama.config import RELATIVES
from mmqa_jax.plan.program import shard_bytes
from mmqa_jax.plan.topology import open_topology
from tests.hlo.counts import count
from tests.hlo.kept import facts_of

LAYERS, REACHED = 4, 1000  # columns of the longest sequence
CONFIG = RELATIVES["qwen3_30b_a3b"](layers=LAYERS, dtype="bfloat16")


def main() -> None:
    mesh = make_mesh({"tensor": 8}, devices=open_topology("v5e:2x4").devices)
    for weights in ("given", "int8"):
        sizes = EngineConfig(slots=64, length=2048, weights=weights, prefill_tokens=2048)
        for name, program in engine_programs(CONFIG, sizes, mesh, columns=REACHED).items():
            state, cache = program.arguments[:2]
            unread = shard_bytes(nnx.to_pure_dict(state)["tokens"])
            used = shard_bytes(cache) * columns_read(REACHED, sizes.length, 128) / sizes.length
            if name == "prefill":  # the head, too, belongs to `begin`
                unread, used = 2 * unread, used * sizes.rows(sizes.buckets[-1]) / sizes.slots
            with jax.set_mesh(mesh):
                traced = program.function.trace(*program.arguments)
                facts = facts_of(f"mixture_{name}_{weights}", traced.lower(), measure, __file__)
            row = {"program": name, "weights": weights, "floor": shard_bytes(state) - unread + used}
            own = jaxpr_flops(traced.jaxpr.jaxpr) / mesh.size
            print(json.dumps({**row, "model_flops": own, **facts}), flush=True)


def measure(compiled: jax.stages.Compiled) -> dict[str, Any]:
    """What the compiled program does on one device."""
    found = count(compiled.as_text())
    return {
        "bytes": found.bytes,
        "flops": found.total_flops,
        "loops": found.loops,
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        "matrix": math.prod((CONFIG.experts, CONFIG.hidden, CONFIG.mlp)) * 2 / 8,
    }


if __name__ == "__main__":
    main()
