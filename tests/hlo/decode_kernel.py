"""`python -m tests.hlo.decode_kernel v5e:2x2 ...`: what a block costs the TPU's decode kernel.

Bundles (one is a cycle) beside the cycles in which the chip's memory gives the block's bytes, for
the heads that one chip of `auto`'s meshes has. Nothing is run: see tests/hlo/bundles.py.
"""

from __future__ import annotations

import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmqa_jax.core.chips import Chip
from mmqa_jax.decoding.ragged_attention import ragged_attention
from mmqa_jax.decoding.scanned_cache import ScannedCache
from mmqa_jax.plan.topology import open_topology
from tests.hlo.bundles import Bundles, dumping, take

SLOTS, PAGE, PAGES, SIZE = 64, 128, 8, 128
# Heads and key heads of a chip: Qwen3-8B and LLaMA-3.1-8B over eight, 7B over eight, 8B and 7B whole.
HEADS = ((4, 1), (4, 4), (32, 8), (32, 32))


def compiled(device: jax.Device, dtype: str, heads: int, kv_heads: int, tokens: int) -> None:
    """Compiles the kernel for one chip of slots of 1,024 columns."""
    whole = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())

    def array(kind: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, kind, sharding=whole)

    held = (2, SLOTS * PAGES, kv_heads, PAGE)
    scale = array("float32", *held) if dtype == "int8" else None
    cache = ScannedCache(*[array(dtype, *held, SIZE)] * 2, scale, scale)
    q, k = (array("bfloat16", SLOTS, tokens, count, SIZE) for count in (heads, kv_heads))
    turns, layer = array("float32", SLOTS, tokens, 2, SIZE), array("int32")
    table, positions = array("int32", SLOTS, PAGES), array("int32", SLOTS)

    @jax.jit(donate_argnums=4)
    def attend(q, k, v, turns, cache, layer, table, positions):
        rest = {"read": PAGE * PAGES, "cores": device.num_cores}
        return ragged_attention(q, k, v, turns, cache, layer, None, None, table, positions, **rest)

    attend.lower(q, k, k, turns, cache, layer, table, positions).compile()


def line(chip: Chip, name: str, counted: Bundles, cores: int) -> str:
    """A row of the table."""
    memory = counted.moved / chip.hbm_rate * chip.clock * cores
    bound = "memory" if memory > counted.turn else "instructions"
    return (
        f"| {name} | {counted.moved / 1e6:.2f} MB | {memory:,.0f} | {counted.turn:,.0f} | {bound} |"
    )


def main() -> None:
    tokens = 1
    with dumping() as folder:
        for name in sys.argv[1:]:
            topology = open_topology(name)
            device = topology.devices[0]
            print(f"| {name} | bytes a block | cycles of memory | bundles | bound |")
            print("|---|---:|---:|---:|---|")
            for heads, kv_heads in HEADS:
                for dtype in ("bfloat16", "int8"):
                    compiled(device, dtype, heads, kv_heads, tokens)
                    kernels = take(folder)
                    (counted,) = (x for key, x in kernels.items() if key.startswith("ragged"))
                    label = f"{dtype} {heads}/{kv_heads}"
                    print(line(topology.chip, label, counted, device.num_cores), flush=True)


if __name__ == "__main__":
    main()
