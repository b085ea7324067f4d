"""A TPU's product with a matrix in codes: a Pallas kernel that reads the codes from main memory.

A block of codes becomes bfloat16 inside the chip's memory, where the matrix unit multiplies it.
Codes of 8 and 4 bits are exact in bfloat16, so that scales multiply the float32 sums of their
groups, and nothing is rounded but the result. XLA computes such a matrix on the vector unit, number
by number in float32.

A file of its own because Pallas takes half a second to import.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_LANES, _SUBLANES = 128, 8  # of a register of the vector unit
_DEPTH = 128  # inputs that a matrix unit adds up at once: smaller groups leave it idle
_BLOCK = 2**20  # bytes of codes that are moved at once
_UNROLLED = 8  # groups of inputs whose products are written out one after the other
_MEMORY = 56 * 2**20  # bytes of the chip's memory; of TPUs in use v7x has the least, 64 MiB


def fits(inputs: int, outputs: int, groups: int) -> bool:
    """Whether `multiply` takes matrices of these sizes, whose inputs have so many groups."""
    return outputs % _LANES == 0 and inputs % (groups * _DEPTH) == 0


def multiply(
    x: jax.Array,
    kernel: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    layer: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """x @ ((kernel[layer] - zero[layer]) * scale[layer]), on one device.

    Args:
      x: bfloat16 [M, K].
      kernel: codes [N, K, O] of a stack of matrices, of 4 or 8 bits.
      scale: float32 or bfloat16 [N, G, O], each of K / G inputs.
      zero: int8 [N, G, O], beside integers; None: all are 0.
      layer: int32 [], of the stack's N.
      interpret: run without a TPU, slowly, for tests.

    Returns:
      bfloat16 [M, O].
    """
    (rows, inputs), (groups, outputs) = x.shape, scale.shape[1:]
    tile = _outputs_at_once(inputs, outputs, kernel.dtype)

    def of_layer(array: jax.Array) -> pl.BlockSpec:
        block = None, array.shape[1], tile
        return pl.BlockSpec(block, lambda n, layer: (layer[0] % array.shape[0], 0, n))

    shared = (scale,) if zero is None else (scale, zero)  # by the inputs of a group
    if groups % _SUBLANES:  # XLA lays such a stack otherwise, and would copy all of it
        shared = tuple(jax.lax.dynamic_index_in_dim(array, layer, 0) for array in shared)
    elif not interpret:  # XLA else moves the stacks of all layers into the chip's memory
        shared = tuple(pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in shared)
    if not interpret:
        kernel = pltpu.with_memory_space_constraint(kernel, pltpu.HBM)
    bits = jax.dtypes.itemsize_bits(kernel.dtype)
    call = pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct((rows, outputs), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(outputs // tile,),
            in_specs=[
                pl.BlockSpec((rows, inputs), lambda n, _: (0, 0)),
                *map(of_layer, (kernel, *shared)),
            ],
            out_specs=pl.BlockSpec((rows, tile), lambda n, _: (0, n)),
            scratch_shapes=[
                pltpu.VMEM((rows, tile), jnp.float32),  # sums
                *[pltpu.VMEM((groups, tile), jnp.float32)] * len(shared),
            ],
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * inputs * outputs,
            transcendentals=0,
            bytes_accessed=inputs * outputs * bits // 8
            + groups * outputs * (scale.dtype.itemsize + (zero is not None))
            + x.nbytes
            + 2 * rows * outputs,
        ),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_MEMORY),
        interpret=interpret,
        name="codes",
    )
    return call(layer[None], x, kernel, *shared)


def _outputs_at_once(inputs: int, outputs: int, dtype: jnp.dtype) -> int:
    """Columns of a block of codes."""
    most = max(_LANES, _BLOCK * 8 // jax.dtypes.itemsize_bits(dtype) // inputs)
    return max(n for n in range(_LANES, outputs + 1, _LANES) if outputs % n == 0 and n <= most)


def _kernel(layer_ref: Any, x_ref: Any, code_ref: Any, *refs: Any) -> None:
    """One block of columns: x [M, K], codes [K, O], scale and perhaps zero [G, O] -> [M, O]."""
    del layer_ref  # blocks are of this layer
    count = len(refs) // 2 - 1  # of scale and zero
    shared_refs, (out_ref, sum_ref, *row_refs) = refs[:count], refs[count:]
    for held, rows in zip(shared_refs, row_refs, strict=True):
        rows[...] = held[...].astype(jnp.float32)  # of smaller types a row is not read by itself
    groups, inputs = row_refs[0].shape[0], x_ref.shape[1]
    size, together = inputs // groups, math.gcd(groups, _UNROLLED)
    sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.loop(0, groups // together)
    def _(part: jax.Array) -> None:
        total = sum_ref[...]
        for n in range(together):
            group = part * together + n
            inputs_of_group = pl.ds(pl.multiple_of(group * size, _LANES), size)
            codes = code_ref[inputs_of_group, :].astype(jnp.float32)
            scale, *zero = (rows[pl.ds(group, 1), :] for rows in row_refs)
            if zero:
                codes -= zero[0]
            y = jnp.dot(
                x_ref[:, inputs_of_group],
                codes.astype(jnp.bfloat16),
                preferred_element_type=jnp.float32,
            )
            total += y * scale
        sum_ref[...] = total

    out_ref[...] = sum_ref[...].astype(out_ref.dtype)
