"""`python -m tests.hlo.max_sim_kernel v5e:2x4 ...`: what MaxSim over all sources costs a TPU.

Bundles of the kernel (one is a cycle) beside the cycles in which the chip's matrix units do its
products, and the seconds in which a slice scores 1,000 questions of 32 tokens and a million pages of
1,024. Nothing is run: see tests/hlo/bundles.py.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmqa_jax.plan.topology import open_topology
from mmqa_jax.retrieval.indexes.max_sim import largest_products
from tests.hlo.bundles import dumping, take

QUERIES, TOKENS, PAGES, LENGTH, DIM = 64, 32, 64, 1024, 128
ALL_QUERIES, ALL_PAGES = 1_000, 1_000_000


def main() -> None:
    flops = 2 * QUERIES * TOKENS * PAGES * LENGTH * DIM
    with dumping() as folder:
        for name in sys.argv[1:]:
            topology = open_topology(name)
            device, chip = topology.devices[0], topology.data_sheet
            whole = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())
            queries, pages = (
                jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole)
                for shape in ((QUERIES * TOKENS, DIM), (PAGES, LENGTH, DIM))
            )
            jax.jit(largest_products).lower(queries, pages).compile()
            bundles = max(kernel.fixed for kernel in take(folder).values())
            products = flops / chip.rates["bf16"] * chip.clock
            share = ALL_QUERIES * ALL_PAGES / (QUERIES * PAGES) / len(topology.devices)
            seconds = share * max(bundles, products) / chip.clock
            bound = share * products / chip.clock
            print(f"| {name} | {bundles:,.0f} | {products:,.0f} | {seconds:.2f} | {bound:.2f} |")


if __name__ == "__main__":
    main()
