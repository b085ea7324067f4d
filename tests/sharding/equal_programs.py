"""Compiles the engine's programs for 1, 2, 4 and 8 copies of the weights, with equal slots and
prompts of each, for a TPU or GPUs, and prints what decides an answer's bits.

A process of its own, where JAX's platform is the CPU: see test_equal_programs.py. Its argument is
`equal` (a TPU) or `equal_gpu`.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter
from typing import Any

import jax

from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.decoding.sizes import engine_programs
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.plan.topology import open_topology
from tests.hlo.kept import facts_of
from tests.hlo.text import Instruction, parse

COPIES = (1, 2, 4, 8)
_TOPOLOGIES = {"equal": "v5e:2x4", "equal_gpu": "h100:8"}  # by the beginning of the facts' names
_MODEL = LlamaConfig(
    hidden=1024, layers=2, heads=8, kv_heads=8, mlp=2048, vocab_size=4096, dtype="bfloat16"
)
_SLOTS, _TOKENS, _LENGTH = 16, 256, 1024  # of a copy, and of each slot

_FLOATS = ("f32", "bf16", "f16")
_COLLECTIVE = re.compile(r"(all-gather|all-reduce|all-to-all|reduce-scatter|collective-\w+)")
# These move numbers, or choose among them, and round nothing.
_MOVES = re.compile(
    r"("
    r"parameter|constant|tuple|get-tuple-element|bitcast|bitcast-convert|copy|"
    r"copy-start|copy-done|broadcast|reshape|transpose|slice|dynamic-slice|"
    r"dynamic-update-slice|concatenate|pad|gather|scatter|select|compare|"
    r"iota|maximum|minimum|negate|abs|fusion|while|conditional|call|"
    r"optimization-barrier|async-start|async-update|async-done|custom-call"
    r")$"
)
_DECIDING = re.compile(
    r"\b(dim_labels|window|dimensions|[lr]hs_\w+_dims|operand_precision|custom_call_target)"
    r"=(\{[^{}]*\}|[^\s,]+)"
)
# Kernels of Pallas, and of a GPU's libraries: products (cuBLAS) and attention (cuDNN).
_KERNEL = re.compile(r'custom_call_target="(tpu_custom_call|__cu[^"]*|__gpu\$[^"]*)"')
# What XLA chose for a fusion that is a kernel of Triton on a GPU: tiles, in whose order it sums.
_TILES = re.compile(r'"fusion_backend_config":(\{.*?"kind":"__triton.*?),"force_earliest_schedule"')


def arithmetic(text: str) -> Counter[str]:
    """How often each rounding instruction stands in a program, with its shape and what it sums
    over; a kernel by the hash of its code, a fusion of Triton with its tiles too."""
    counted: Counter[str] = Counter()
    for computation in parse(text).computations.values():
        for one in computation.instructions.values():
            if _KERNEL.search(one.attributes):
                code = one.attributes.partition("backend_config=")[2]
                counted[f"kernel {hashlib.sha256(code.encode()).hexdigest()[:16]}"] += 1
            elif tiles := one.attribute(_TILES):
                counted[f"{_described(one)} {tiles}"] += 1
            elif (
                not _MOVES.match(one.opcode) and not _COLLECTIVE.match(one.opcode) and _rounds(one)
            ):
                counted[_described(one)] += 1
    return counted


def exchanged(text: str) -> list[str]:
    """The program's collectives with their shapes, sorted."""
    return sorted(
        _described(one)
        for computation in parse(text).computations.values()
        for one in computation.instructions.values()
        if _COLLECTIVE.match(one.opcode) and not one.opcode.endswith("-done")
    )


def _rounds(one: Instruction) -> bool:
    # Scalars are the bodies of reductions.
    return any(array.kind in _FLOATS and array.shape for array in one.arrays)


def _described(one: Instruction) -> str:
    shapes = " ".join(f"{array.kind}{list(array.shape)}" for array in one.arrays)
    deciding = " ".join("=".join(pair) for pair in sorted(_DECIDING.findall(one.attributes)))
    return f"{one.opcode} {shapes} {deciding}".strip()


def _of_compiled(compiled: jax.stages.Compiled) -> dict[str, Any]:
    text = compiled.as_text()
    counted = sorted(arithmetic(text).items())
    return {
        "roundings": sum(count for _, count in counted),
        "kernels": sum(count for name, count in counted if name.startswith("kernel")),
        "arithmetic": hashlib.sha256(json.dumps(counted).encode()).hexdigest(),
        "exchanged": exchanged(text),
    }


def main():
    prefix = sys.argv[1]
    devices = open_topology(_TOPOLOGIES[prefix]).devices
    for copies in COPIES:
        mesh = make_mesh({"data": copies}, devices=devices[:copies])
        sizes = EngineConfig(
            slots=_SLOTS * copies,
            length=_LENGTH,
            buckets=(128,),
            prefill_tokens=_TOKENS * copies,
        )
        programs = engine_programs(_MODEL, sizes, mesh, columns=_LENGTH)
        for kind, program in programs.items():
            name = f"{prefix}_{kind}_{copies}"
            with jax.set_mesh(mesh):
                lowered = program.function.lower(*program.arguments)
            found = facts_of(name, lowered, _of_compiled, __file__)
            print(json.dumps({"name": f"{kind} {copies}", **found}), flush=True)


if __name__ == "__main__":
    main()
