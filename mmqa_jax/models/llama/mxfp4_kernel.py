"""A TPU's product of experts whose matrices are in MXFP4, as gpt-oss is published.

Eight codes of 4 bits (sign, two of the exponent, one of the mantissa) lie in a word. Four pairs of
bfloat16 are made of it by shifts and masks alone, with the group's scale, a power of two, added to
their exponents, so that the matrix unit multiplies the exact matrix. XLA computes it number by
number in float32. The pairs are not in the order of the inputs: states are brought into theirs.

A file of its own because Pallas takes half a second to import.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

GROUP = 32  # inputs that share a scale
_BLOCK = 64  # inputs whose codes are one register of words, [8, 128]
_LANES, _SUBLANES = 128, 8  # of a register of the vector unit
_WIDEST = 3072  # outputs that are computed at once, where their number is no multiple of 128
_MEMORY = 56 * 2**20  # bytes of the chip's memory; of TPUs in use v7x has the least, 64 MiB
_EXPONENT = 7  # the place of its first bit in bfloat16
_FOURTH = 2  # what it counts, since exponents 0 to 3 of codes become 124 to 127 in bfloat16
_SMALLEST, _LARGEST = -59, 120  # scales by which no exponent leaves bfloat16


def fits(inputs: int, outputs: int, groups: int) -> bool:
    """Whether `multiply` takes matrices of these sizes, whose inputs have so many groups."""
    in_blocks = inputs % _BLOCK == 0 and inputs == groups * GROUP
    return in_blocks and (outputs % _LANES == 0 or outputs <= _WIDEST)


def multiply(
    x: jax.Array,
    kernels: jax.Array,
    scale: jax.Array,
    layer: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """x times the matrix of each expert of a layer, on one device.

    Args:
      x: bfloat16 [M, K], or of each expert its own [E, M, K].
      kernels: float4_e2m1fn [N, E, K, O] of a stack of layers.
      scale: bfloat16 powers of two [N, E, K / 32, O].
      layer: int32 [], of the stack's N.
      interpret: run without a TPU, slowly, for tests.

    Returns:
      bfloat16 [E, M, O].
    """
    _, experts, inputs, outputs = kernels.shape
    rows, groups = x.shape[-2], inputs // GROUP
    tile = _outputs_at_once(outputs)
    if groups % _SUBLANES:  # XLA lays such a stack otherwise, and would copy all of it
        scale = jax.lax.dynamic_index_in_dim(scale, layer, 0)
    elif not interpret:
        scale = pltpu.with_memory_space_constraint(scale, pltpu.HBM)
    if interpret:  # Python's numbers of 4 bits are bytes
        kernels = jax.lax.bitcast_convert_type(kernels, jnp.int4)
    else:  # XLA else moves the stack of all layers into the chip's memory
        kernels = pltpu.with_memory_space_constraint(kernels, pltpu.HBM)

    def of_layer(array: jax.Array) -> pl.BlockSpec:
        block = None, None, array.shape[2], tile
        return pl.BlockSpec(block, lambda e, n, layer: (layer[0] % array.shape[0], e, 0, n))

    rows_per_expert = x.ndim == 3
    states = (
        pl.BlockSpec((None, rows, inputs), lambda e, n, _: (e, 0, 0))
        if rows_per_expert
        else pl.BlockSpec((rows, inputs), lambda e, n, _: (0, 0))
    )
    call = pl.pallas_call(
        functools.partial(_kernel, rows_per_expert=rows_per_expert),
        out_shape=jax.ShapeDtypeStruct((experts, rows, outputs), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(experts, outputs // tile),
            in_specs=[states, of_layer(kernels), of_layer(scale)],
            out_specs=pl.BlockSpec((None, rows, tile), lambda e, n, _: (e, 0, n)),
            scratch_shapes=[
                pltpu.VMEM((rows, inputs), x.dtype),  # states in the order of the pairs
                pltpu.VMEM((groups, tile), jnp.int32),  # what is added to pairs
                pltpu.VMEM((rows, tile), jnp.float32),  # sums
            ],
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * experts * rows * inputs * outputs,
            transcendentals=0,
            bytes_accessed=experts * outputs * (inputs // 2 + 2 * groups)
            + x.nbytes
            + 2 * experts * rows * outputs,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 2, vmem_limit_bytes=_MEMORY
        ),
        interpret=interpret,
        name="mxfp4",
    )
    return call(layer[None], x, kernels, scale)


def _outputs_at_once(outputs: int) -> int:
    """Columns of a block of codes."""
    if outputs <= _WIDEST:
        return outputs
    return max(n for n in range(_LANES, _WIDEST + 1, _LANES) if outputs % n == 0)


def _order(size: int) -> jax.Array:
    """A permutation as a matrix bfloat16 [size, size]: from the order of inputs to that of pairs.

    Of 64 inputs, 8 * word + n + 4 * half is in a half of the pair n of a word.
    """
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    word, n, half = row >> 3 & 7, row & 3, row >> 2 & 1
    place = (row >> 6) * _BLOCK + n * 16 + word * 2 + half
    return (place == column).astype(jnp.float32).astype(jnp.bfloat16)


def _kernel(
    layer_ref: Any,
    x_ref: Any,
    code_ref: Any,
    scale_ref: Any,
    out_ref: Any,
    state_ref: Any,
    added_ref: Any,
    sum_ref: Any,
    *,
    rows_per_expert: bool,
) -> None:
    """One block of an expert's columns: x [M, K], codes [K, O], scale [K / 32, O] -> [M, O]."""
    del layer_ref  # blocks are of this layer
    inputs = x_ref.shape[1]
    whole, rest = divmod(inputs, 2 * _BLOCK)

    def of_chunk(number: Any, length: int) -> Any:
        return slice(None), pl.ds(pl.multiple_of(number * 2 * _BLOCK, 2 * _BLOCK), length)

    def each_chunk(run: Callable[[Any, int], None]) -> None:
        if whole:
            pl.loop(0, whole)(lambda number: run(number, 2 * _BLOCK))
        if rest:
            run(whole, rest)

    @pl.when((pl.program_id(1) == 0) & (rows_per_expert | (pl.program_id(0) == 0)))
    def _() -> None:
        def ordered(number: Any, length: int) -> None:
            place = of_chunk(number, length)
            y = jnp.dot(x_ref[place], _order(length), preferred_element_type=jnp.float32)
            state_ref[place] = y.astype(state_ref.dtype)

        each_chunk(ordered)

    bits = jax.lax.bitcast_convert_type(scale_ref[...].astype(jnp.float32), jnp.int32)
    exponent = jnp.clip((bits >> 23) - 127, _SMALLEST, _LARGEST) + _FOURTH
    added_ref[...] = _both(0x1E00) + (exponent << _EXPONENT) + (exponent << 16 + _EXPONENT)
    sum_ref[...] = jnp.zeros_like(sum_ref)

    def multiplied(number: Any, length: int) -> None:
        matrix = []
        for n in range(length // _BLOCK):
            block = number * 2 + n
            of_block = pl.ds(pl.multiple_of(block * _BLOCK, _BLOCK), _BLOCK)
            words = pltpu.bitcast(code_ref[of_block, :], jnp.int32)  # [8, O]
            first, second = (added_ref[pl.ds(block * 2 + half, 1), :] for half in (0, 1))
            is_first = jax.lax.broadcasted_iota(jnp.int32, words.shape, 0) < 4
            matrix += _pairs(words, jnp.where(is_first, first, second))
        matrix = jnp.concatenate(matrix, axis=0)  # [length, O]
        states = state_ref[of_chunk(number, length)]
        sum_ref[...] += jnp.dot(states, matrix, preferred_element_type=jnp.float32)

    each_chunk(multiplied)
    out_ref[...] = sum_ref[...].astype(out_ref.dtype)


def _pairs(words: jax.Array, added: jax.Array) -> list[jax.Array]:
    """Numbers of eight codes a word, int32 [8, O] -> four bfloat16 [16, O].

    A code 0eem has the exponent 124 + ee and the mantissa m, but that the exponent 0 has no
    mantissa: 001 is half of 010. Of 000 a bit of the exponent is left out, so that 2^-64 of 001
    stands for 0: less than float32's rounding of any sum with a number of the group.
    """
    shifted = jax.lax.shift_right_logical
    has_exponent = shifted(words, _int32(1)) | shifted(words, _int32(2))
    codes = words & (has_exponent | _int32(0xEEEEEEEE))
    not_zero = (has_exponent | words) & _int32(0x11111111)
    signs = (words & _int32(0x88888888)) | (not_zero << 1)
    pairs = []
    for n in range(4):
        shift = 6 - 4 * n
        moved = codes << shift if shift > 0 else shifted(codes, _int32(-shift))
        pair = (moved & _both(0x01C0)) | (signs << 12 - 4 * n & _both(0xA000))
        pairs.append(pltpu.bitcast(pair + added, jnp.bfloat16))
    return pairs


def _both(bits: int) -> jax.Array:
    """The bits in both halves of a word."""
    return _int32(bits << 16 | bits)


def _int32(bits: int) -> jax.Array:
    return jnp.int32(np.uint32(bits).astype(np.int32))
