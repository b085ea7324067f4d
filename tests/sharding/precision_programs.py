"""Compiles training steps that round their products to 8 bits, and one whose parameters lie on the
host, for accelerators that are not there; prints their facts as JSON, a line each.

A process of its own, where JAX's platform is the CPU; see test_precision_programs.py.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from training_programs import ADAM, language_model

from mmqa_jax.core.mesh import DEFAULT_RULES, make_mesh
from mmqa_jax.plan import topology
from mmqa_jax.plan.program import shard_bytes
from mmqa_jax.training.optimizer import make_optimizer
from mmqa_jax.training.options import Precision
from mmqa_jax.training.state import abstract_state, make_step, split_model
from tests.hlo.counts import count
from tests.hlo.kept import facts_of
from tests.hlo.text import parse

_H100 = Path(topology.__file__).parent / "targets/h100.txtpb"


def h100() -> list[Any]:
    """One H100 with CUDA 12.9, of whose version the compiler asks before it multiplies in fp8."""
    described = _H100.read_text() + "runtime_version { major: 12 minor: 9 }\n"
    found = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology="1x1x1", target_config=described
    )
    return found.devices


def make(devices: list[Any], task: Any, kind: str = "", offload: str = "") -> tuple[Any, Any]:
    """The task's step, and its state's shapes."""
    mesh, (optimizer, schedule) = make_mesh({"fsdp": -1}, devices), make_optimizer(ADAM, steps=100)
    model = split_model(task, 0, Precision(products=kind), offload=offload)
    abstract = abstract_state(model, optimizer, mesh, DEFAULT_RULES)
    options = {"seed": 0, "accumulate": 1, "abstract": abstract, "mesh": mesh}
    return make_step(task, model, optimizer, schedule, **options), abstract


def measure(compiled: jax.stages.Compiled) -> dict[str, Any]:
    """What a compiled step does on one device: `products` by what multiplies which types."""
    text, memory, products = compiled.as_text(), compiled.memory_analysis(), Counter()
    for computation in parse(text).computations.values():
        for one in computation.instructions.values():
            name = one.attribute(r'custom_call_target="([^"]*)"') or one.opcode
            if name in ("dot", "convolution") or "matmul" in name:
                factors = [computation.operand(one, n).arrays[0].kind for n in (0, 1)]
                products[" ".join([name, *factors])] += 1
    return {
        "products": products,
        "flops": count(text).flops,
        "arguments": memory.argument_size_in_bytes,
        "results": memory.output_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
    }


def main(name: str) -> None:
    """Prints what one program does, and its share of the parameters of layers' matrices."""
    # Further layers than those that the TPU's compiler takes out of a loop that reads the host.
    made = language_model(layers=16 if name in ("optimizer", "parameters") else 4)
    task, batch = made["task"], made["batch"]
    if name == "fp8":
        step, abstract = make(h100(), task, name)
        # A GPU that is there is asked which kernel is the fastest; this compiler takes Triton's.
        compiled = step.lower(batch).compile({"xla_gpu_enable_triton_gemm": False})
        facts = measure(compiled)
    else:
        devices = topology.open_topology("v5e:2x4").devices
        kind, offload = (name, "") if name == "int8" else ("", name)
        step, abstract = make(list(devices), task, kind, offload)
        facts = facts_of(f"precision_{name}", step.lower(batch), measure, __file__)
    layers = abstract.params["layers"]
    stacks = shard_bytes(layers) + shard_bytes(layers, on_host=True)
    print(json.dumps({**facts, "stacks": stacks}))


if __name__ == "__main__":
    for program in sys.argv[1:]:
        main(program)
