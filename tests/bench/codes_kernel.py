"""`python -m tests.bench.codes_kernel v5e:2x4 ...`: what products with codes cost a TPU.

Bundles (one is a cycle) of the kernel, and of what XLA makes of the dequantized product, beside the
cycles in which the chip's memory gives the codes with their scales, or its matrix units do the
products. Nothing is run: see tests/hlo/bundles.py.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmqa_jax.core.chips import Chip
from mmqa_jax.models.llama.codes_kernel import multiply
from mmqa_jax.models.llama.quantize import FORMS, Form, rounded_product
from mmqa_jax.plan.topology import open_topology
from tests.hlo.bundles import dumping, take

LAYERS = 36
MATRICES = ((4096, 1536), (1536, 4096))  # of a chip's part of Qwen3-8B's MLP, tensor=8
ROWS = (8, 64, 128, 256)


def main() -> None:
    with dumping() as folder:
        for name in sys.argv[1:]:
            topology = open_topology(name)
            print(f"| {name} | rows | bound, cycles | by | kernel, bundles | | XLA, bundles | |")
            print("|---|---:|---:|---|---:|---:|---:|---:|")
            for form in ("int4", "fp8"):
                for inputs, outputs in MATRICES:
                    for rows in ROWS:
                        sizes = rows, inputs, outputs
                        cells = [f"{form} {inputs} x {outputs}", str(rows)]
                        cycles, by = bound(topology.data_sheet, FORMS[form], *sizes)
                        cells += [f"{cycles:,.0f}", by]
                        for bundles in counted(topology.devices[0], FORMS[form], folder, *sizes):
                            cells += [f"{bundles:,.0f}", f"{bundles / cycles:.2f}"]
                        print(f"| {' | '.join(cells)} |", flush=True)


def bound(chip: Chip, form: Form, rows: int, inputs: int, outputs: int) -> tuple[float, str]:
    """The least cycles of a product, and what takes them."""
    of_memory = inputs * outputs * form.bytes / chip.hbm_rate
    of_products = 2 * rows * inputs * outputs / chip.rates["bf16"]
    by = "memory" if of_memory > of_products else "products"
    return max(of_memory, of_products) * chip.clock, by


def counted(
    device: jax.Device, form: Form, folder: Path, rows: int, inputs: int, outputs: int
) -> Iterator[float]:
    """Bundles of the kernel, and of XLA."""
    whole = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())

    def array(kind: jnp.dtype, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, kind, sharding=whole)

    groups = inputs // form.group
    x = array(jnp.bfloat16, rows, inputs)

    def run(function: Callable[..., jax.Array], *stack: int) -> float:
        zero = array(jnp.int8, *stack, groups, outputs) if form.zero else None
        scale = array(form.scale, *stack, groups, outputs)
        codes = array(form.codes, *stack, inputs, outputs)
        layer = (array(jnp.int32),) if stack else ()
        jax.jit(function).lower(x, codes, scale, zero, *layer).compile()
        return sum(kernel.fixed for name, kernel in take(folder).items() if name != "TLP")

    yield run(multiply, LAYERS)
    inside = functools.partial(rounded_product, inside=jnp.bfloat16)
    yield run(lambda x, codes, scale, zero: inside(x, codes, scale, 0, zero))


if __name__ == "__main__":
    main()
