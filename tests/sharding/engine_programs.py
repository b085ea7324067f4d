"""Compiles the engine's programs for TPUs or GPUs, and prints the facts of each as a line of JSON.

A process of its own, where JAX's platform is the CPU: see test_engine_programs.py. Its argument is
`tpu`, `gpu`, or `gpu_scanned`: what scanned layers would cost on a GPU.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import time
from typing import Any

import jax
from flax import nnx

from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.decoding.sizes import Program, engine_programs
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.llama.config import LlamaConfig, llama2_7b
from mmqa_jax.plan.programs import PRESETS
from mmqa_jax.plan.topology import open_topology
from tests.hlo.counts import count
from tests.hlo.kept import facts_of

# 64 prompts and answers of 2,048 tokens beside the weights: 10.3 of 15.75 GiB of each device.
SIZES = EngineConfig(slots=64, length=2048, buckets=(128, 512), prefill_tokens=4096)
REACHED = 1000  # columns of the longest sequence
LLAMA_7B = llama2_7b(dtype="bfloat16")
# Key heads shared by four queries; a chip of eight has one of them.
LLAMA_8B = LlamaConfig(
    hidden=4096, layers=32, heads=32, kv_heads=8, mlp=14336, vocab_size=128256, dtype="bfloat16"
)
# 2 x 128 tokens behind the longest that a slot holds.
DEFAULT_CHUNKS = EngineConfig(length=2048)
SHORT = EngineConfig(length=1024)  # the same, and all of what the slots hold is read
LLAMA_70B = LlamaConfig(hidden=8192, layers=80, heads=64, kv_heads=8, mlp=28672, dtype="bfloat16")


GPT_OSS = dataclasses.replace(PRESETS["gpt_oss_20b"](), dtype="bfloat16")  # heads of 64
HEADS_OF_80 = LlamaConfig(
    hidden=320, layers=1, heads=4, kv_heads=4, mlp=640, vocab_size=1000, dtype="bfloat16"
)
FOUR_LAYERS = dataclasses.replace(LLAMA_7B, layers=4)
# Slots of 960 columns, which the kernel for decoding on a TPU does not take.
UNALIGNED = EngineConfig(length=960, buckets=(96,), prefill_tokens=192)
# Name, model, topology, mesh, slots and programs; "scanned" scans its layers on a GPU, too, and
# "_int8" caches keys and values in int8.
PROGRAMS = {
    "tpu": (
        ("7b", LLAMA_7B, "v5e:2x4", {"tensor": 8}, 64, ("decode", "prefill")),
        ("7b_int8", LLAMA_7B, "v5e:2x4", {"tensor": 8}, 64, ("decode",)),
        ("unaligned", FOUR_LAYERS, "v5e:2x4", {"tensor": 8}, 16, ("decode",)),
        ("70b", LLAMA_70B, "v5e:4x4", {"tensor": 16}, 16, ("decode", "prefill")),
        ("8b_default", LLAMA_8B, "v5e:2x4", {"tensor": 8}, 64, ("prefill",)),
        ("70b_default", LLAMA_70B, "v5e:4x4", {"tensor": 16}, 16, ("prefill",)),
        ("gpt_oss", GPT_OSS, "v5e:2x4", {"data": 2, "tensor": 4}, 256, ("decode", "prefill")),
    ),
    "gpu": (
        ("7b", LLAMA_7B, "h100:1", {"tensor": 1}, 40, ("decode", "prefill")),
        ("7b_short", LLAMA_7B, "h100:1", {"tensor": 1}, 64, ("decode", "prefill")),
        ("8b_short", LLAMA_8B, "h100:1", {"tensor": 1}, 128, ("decode", "prefill")),
        ("8b_int8", LLAMA_8B, "h100:1", {"tensor": 1}, 128, ("decode",)),
        ("sharded", LLAMA_7B, "h100:8", {"tensor": 8}, 64, ("prefill",)),
        ("heads80", HEADS_OF_80, "h100:1", {"tensor": 1}, 16, ("decode", "prefill")),
    ),
    "gpu_scanned": (
        ("layers", FOUR_LAYERS, "h100:1", {"tensor": 1}, 64, ("decode",)),
        ("scanned", FOUR_LAYERS, "h100:1", {"tensor": 1}, 64, ("decode",)),
    ),
}
# An attention product of one token (`scanned_cache._one_token`) that XLA lowered to multiplications
# and a reduction: in its fusion stands no `convolution`, as XLA for TPUs calls a matrix product.
_VECTOR_PRODUCT = re.compile(r' reduce\([^\n]*op_name="[^"]*(skg[dt],sktd->skg[td])/dot_general"')
_KERNEL = re.compile(r'custom_call_target="(__cudnn[^"]*|tpu_custom_call|__gpu\$xla.gpu.triton)"')


def shard_bytes(arrays: Any) -> int:
    """Bytes of one device's shards of ShapeDtypeStructs."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(arrays)
    )


def weights_moved(text: str, layers: Any) -> int:
    """How often a layer's matrix is taken out of its stack, into on-chip memory (`S(1)`), as it is.

    A product reads its matrix from the stack; one that wants another layout has it moved before.
    """
    shards = {x.sharding.shard_shape(x.shape)[1:] for x in jax.tree.leaves(layers) if x.ndim == 3}
    shapes = "|".join(",".join(map(str, shape)) for shape in shards)
    return len(re.findall(rf" = \w+\[1,(?:{shapes})\]\{{\S*S\(1\)\}} \w+\(", text))


def facts(name: str, program: Program) -> dict[str, Any]:
    """Of one program, per device and call."""
    state, cache = program.arguments[:2]
    parameters = nnx.to_pure_dict(state)
    tokens = parameters["tokens"]  # a step reads one row of it per slot
    lowered, began = program.function.lower(*program.arguments), time.process_time()

    def measure(compiled: jax.stages.Compiled) -> dict[str, Any]:
        seconds = time.process_time() - began
        return {**_of_compiled(compiled, parameters["layers"]), "cpu_seconds": seconds}

    return {
        "name": name,
        "weights": shard_bytes(state),
        "cache": shard_bytes(cache),
        "embedding": shard_bytes(tokens),
        **facts_of(f"engine_{name}", lowered, measure, __file__),
    }


def _of_compiled(compiled: jax.stages.Compiled, layers: Any) -> dict[str, Any]:
    """What a compiled program does on one device."""
    text, memory = compiled.as_text(), compiled.memory_analysis()
    found = count(text)
    return {
        "bytes": found.bytes,
        "copied": found.copied_bytes,
        "loops": found.loops,
        "layers_moved": weights_moved(text, layers),
        "kernels": sorted(set(_KERNEL.findall(text))),
        "on_vector_unit": sorted(set(_VECTOR_PRODUCT.findall(text))),
        "temporaries": memory.temp_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
    }


def main():
    for name, config, topology, shape, slots, wanted in PROGRAMS[sys.argv[1]]:
        mesh = make_mesh(shape, devices=open_topology(topology).devices)
        scan = True if name == "scanned" else None
        own = {"unaligned": UNALIGNED}.get(name)
        own = DEFAULT_CHUNKS if name.endswith("_default") else own
        own = SHORT if name.endswith("_short") else own
        cache = "int8" if name.endswith("_int8") else None
        sizes = dataclasses.replace(own or SIZES, slots=slots, scan_layers=scan, cache_dtype=cache)
        reached = sizes.length if own else REACHED
        programs = engine_programs(config, sizes, mesh, columns=reached)
        for kind in wanted:
            with jax.set_mesh(mesh):
                print(json.dumps(facts(f"{name}_{kind}", programs[kind])), flush=True)


if __name__ == "__main__":
    main()
