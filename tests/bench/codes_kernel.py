"""`python -m tests.bench.codes_kernel v5e:2x4 ...`: what products with codes cost a TPU.

Bundles (one is a cycle) of the kernel, and of what XLA makes of the dequantized product, beside the
cycles in which the chip's memory gives the codes with their scales, or its matrix units do the
products. Nothing is run: see tests/hlo/bundles.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmqa_jax.core.chips import Chip
from mmqa_jax.models.llama import codes_kernel, mxfp4_kernel
from mmqa_jax.models.llama.experts import batched_product
from mmqa_jax.models.llama.quantize import FORMS, Form, rounded_product, unrounded
from mmqa_jax.plan.topology import open_topology
from tests.hlo.bundles import dumping, take

LAYERS = 24
MATRICES = {  # experts or none, inputs, outputs
    "int4": ((0, 4096, 1536), (0, 1536, 4096)),  # a chip's part of Qwen3-8B's MLP, tensor=8
    "fp8": ((0, 4096, 1536), (0, 1536, 4096)),
    "mxfp4": ((8, 2880, 2880),),  # of gpt-oss-20b's experts, tensor=4
}
ROWS = (8, 64, 128, 256)


def main() -> None:
    with dumping() as folder:
        for name in sys.argv[1:]:
            topology = open_topology(name)
            print(f"| {name} | rows | bound, cycles | by | kernel, bundles | | XLA, bundles | |")
            print("|---|---:|---:|---|---:|---:|---:|---:|")
            for form, matrices in MATRICES.items():
                for matrix in matrices:
                    for rows in ROWS:
                        sizes = " x ".join(str(size) for size in matrix if size)
                        cycles, by = bound(topology.data_sheet, FORMS[form], rows, *matrix)
                        cells = [f"{form} {sizes}", str(rows), f"{cycles:,.0f}", by]
                        each = counted(topology.devices[0], FORMS[form], folder, rows, *matrix)
                        for bundles in each:
                            cells += [f"{bundles:,.0f}", f"{bundles / cycles:.2f}"]
                        print(f"| {' | '.join(cells)} |", flush=True)


def bound(
    chip: Chip, form: Form, rows: int, experts: int, inputs: int, outputs: int
) -> tuple[float, str]:
    """The least cycles of a product, and what takes them."""
    numbers = max(experts, 1) * inputs * outputs
    of_memory = numbers * form.bytes / chip.hbm_rate
    of_products = 2 * rows * numbers / chip.rates["bf16"]
    by = "memory" if of_memory > of_products else "products"
    return max(of_memory, of_products) * chip.clock, by


def counted(
    device: jax.Device,
    form: Form,
    folder: Path,
    rows: int,
    experts: int,
    inputs: int,
    outputs: int,
) -> Iterator[float]:
    """Bundles of the kernel, and of XLA."""
    whole = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())

    def array(kind: jnp.dtype, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, kind, sharding=whole)

    x, layer = array(jnp.bfloat16, rows, inputs), array(jnp.int32)

    def run(function: Callable[..., jax.Array], *stack: int, layer: tuple = ()) -> float:
        stack = (*stack, experts) if experts else stack
        of_groups = (*stack, inputs // form.group, outputs)
        zero = (array(jnp.int8, *of_groups) if form.zero else None,) if not experts else ()
        codes, scale = array(form.codes, *stack, inputs, outputs), array(form.scale, *of_groups)
        jax.jit(function).lower(x, codes, scale, *zero, *layer).compile()
        return sum(kernel.fixed for name, kernel in take(folder).items() if name != "TLP")

    def dense(x: jax.Array, codes: jax.Array, scale: jax.Array, zero: jax.Array) -> jax.Array:
        return rounded_product(x, codes, scale, 0, zero, jnp.bfloat16)

    def of_experts(x: jax.Array, codes: jax.Array, scale: jax.Array) -> jax.Array:
        x = jnp.broadcast_to(x, (experts, *x.shape))
        return batched_product(x, unrounded(codes, scale, -2, None, jnp.bfloat16))

    kernel = mxfp4_kernel if experts else codes_kernel
    yield run(kernel.multiply, LAYERS, layer=(layer,))
    with jax.set_mesh(whole.mesh):
        yield run(of_experts if experts else dense)


if __name__ == "__main__":
    main()
