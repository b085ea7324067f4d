"""A mixture's experts on a TPU, for many tokens: a Pallas kernel that reads them from their stack.

Each expert multiplies the rows of its own tokens alone, in blocks: rows are taken out of the
activations and their sums added up inside the chip's memory, so that nothing is as long as all
copies of all tokens. The matrices come from the stack of layers, of which XLA's own ragged product
first copies a layer.

A file of its own because Pallas takes half a second to import.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mmqa_jax.models.common.activations import ACTIVATIONS

_LANES = 128
_ROWS = 128  # of a block: as many as a matrix unit takes while it is loaded with the next weights
_AT_ONCE = 8  # of them that are moved together
_COPIED = 256  # rows that are brought into the chip's memory at once
_MEMORY = 56 * 2**20  # bytes of it that are used; of TPUs in use v7x has the least, 64 MiB


class Stack(NamedTuple):
    """The matrices of one linear of all experts of all layers."""

    kernels: jax.Array  # [N, E, in, out]
    # Float32 [N, E, out] of int8 kernels; None: they are not rounded.
    scale: jax.Array | None = None


def fits(hidden: int, mlp: int, tokens: int) -> bool:
    """Whether `multiply` takes matrices of these sizes and so many rows."""
    return hidden % _LANES == mlp % _LANES == 0 and _tokens_at_once(tokens, hidden) > 0


def _tokens_at_once(tokens: int, hidden: int) -> int:
    """The most rows, of `tokens`, whose states and sums take two thirds of the memory; 0: none."""
    most = 2 * _MEMORY // 3 // (8 * hidden)
    sizes = (n for n in range(16, min(tokens, most) + 1, 16) if tokens % n == 0)
    return max(sizes, default=0)


def multiply(
    x: jax.Array,
    shares: jax.Array,
    linears: tuple[Stack, Stack, Stack],
    layer: jax.Array,
    *,
    activation: str,
    copies: float,
    interpret: bool = False,
) -> jax.Array:
    """sum over experts e of shares[:, e] * down_e(act(gate_e(x)) * up_e(x)), on one device.

    Args:
      x: [T, H].
      shares: float32 [T, E]; an expert that has a token's share of 0 does not multiply its row.
      linears: gate, up and down.
      layer: int32 [], of the stacks' N.
      activation: its name.
      copies: how many rows all experts together multiply, of which the stated cost is.
      interpret: run without a TPU, slowly, for tests.

    Returns:
      [T, H] in x's type.
    """
    tokens, hidden = x.shape
    gate, _, down = linears
    experts, width = shares.shape[1], down.kernels.shape[2]
    at_once = _tokens_at_once(tokens, hidden)
    tile = _width_of_tile(at_once, hidden, width, down.kernels.dtype.itemsize)
    parts, chunks = tokens // at_once, hidden // _LANES
    of_part = shares.reshape(parts, at_once, experts).swapaxes(1, 2)  # [parts, E, T of a part]
    chosen = of_part != 0
    column = jax.lax.broadcasted_iota(jnp.int32, chosen.shape, 2)
    # Of an expert the chosen first.
    order = jnp.sort(jnp.where(chosen, column, at_once + column), axis=2)
    order %= at_once
    counts = chosen.sum(2, dtype=jnp.int32)  # [parts, E]

    def of_expert(part, e, f, *_):
        return part * experts + e, 0, 0

    listed = pl.BlockSpec((None, 1, at_once), of_expert, memory_space=pltpu.SMEM)
    across = pl.BlockSpec((None, None, hidden, tile), lambda p, e, f, n, _: (n[0], e, 0, f))
    along = pl.BlockSpec((None, None, tile, hidden), lambda p, e, f, n, _: (n[0], e, f, 0))
    scales, of_scales = (), []
    if gate.scale is not None:
        scales = tuple(linear.scale[:, :, None] for linear in linears)  # [N, E, 1, out]
        narrow = pl.BlockSpec((None, None, 1, tile), lambda p, e, f, n, _: (n[0], e, 0, f))
        whole = pl.BlockSpec((None, None, 1, hidden), lambda p, e, f, n, _: (n[0], e, 0, 0))
        of_scales = [narrow, narrow, whole]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    kernels = [linear.kernels for linear in linears]
    item = kernels[0].dtype.itemsize
    call = pl.pallas_call(
        functools.partial(_kernel, activation=ACTIVATIONS[activation], scaled=bool(scales)),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(parts, experts, width // tile),
            in_specs=[listed, listed, anywhere, across, across, along, *of_scales],
            out_specs=anywhere,
            scratch_shapes=[
                pltpu.VMEM((at_once * chunks, _LANES), jnp.float32),  # states
                pltpu.VMEM((at_once * chunks, _LANES), jnp.float32),  # sums
                pltpu.VMEM((_ROWS * chunks, _LANES), jnp.float32),  # a block's rows
                pltpu.VMEM((math.gcd(at_once, _COPIED), hidden), x.dtype),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        cost_estimate=pl.CostEstimate(
            flops=int(6 * copies * hidden * width),
            transcendentals=int(copies * width),
            bytes_accessed=3 * parts * experts * hidden * width * item + 2 * x.nbytes,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 3, vmem_limit_bytes=_MEMORY + 8 * 2**20
        ),
        interpret=interpret,
        name="experts",
    )
    flat = (parts * experts, 1, at_once)
    return call(
        layer[None], counts.reshape(-1), order.reshape(flat), of_part.reshape(flat), x,
        *kernels, *scales,
    )  # fmt: skip


def _width_of_tile(tokens: int, hidden: int, width: int, item: int) -> int:
    """Columns of gate and up that are in memory at once, twice: of this turn and of the next."""
    most = (_MEMORY - 8 * hidden * (tokens + _COPIED)) // (2 * 3 * hidden * item)
    sizes = (n for n in range(_LANES, width + 1, _LANES) if width % n == 0 and n <= most)
    return max(sizes, default=_LANES)


def _kernel(
    _, count_ref, order_ref, share_ref, x_ref, gate_ref, up_ref, down_ref, *refs,
    activation, scaled,
):  # fmt: skip
    """One tile of one expert for a part of the tokens.

    order, share [1, T] of the expert; x and out [.., H] in main memory; gate, up [H, F];
    down [F, H]. Of states, sums and a block's rows the chunks of lanes lie below each other,
    [T * H / 128, 128]: a row is then whole registers.
    """
    scales, (out_ref, state_ref, sum_ref, row_ref, copy_ref, done) = refs[:-6], refs[-6:]
    part, expert, tile = (pl.program_id(axis) for axis in range(3))
    copied, hidden = copy_ref.shape
    chunks, dtype = hidden // _LANES, copy_ref.dtype
    tokens = state_ref.shape[0] // chunks

    def of_chunk(j: int, rows: int, first: jax.Array | int = 0) -> Any:
        return pl.ds(first * chunks + j, rows, stride=chunks), slice(None)

    def of_row(row: jax.Array) -> Any:
        return pl.ds(pl.multiple_of(row * chunks, chunks), chunks), slice(None)

    def lanes(j: int) -> Any:
        return slice(None), slice(j * _LANES, (j + 1) * _LANES)

    @pl.when((expert == 0) & (tile == 0))
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)

        @pl.loop(0, tokens, step=copied)
        def _(first):
            source = x_ref.at[pl.ds(part * tokens + first, copied)]
            copy = pltpu.make_async_copy(source, copy_ref, done)
            copy.start()
            copy.wait()
            for j in range(chunks):
                state_ref[of_chunk(j, copied, first)] = copy_ref[lanes(j)].astype(jnp.float32)

    count = count_ref[part * pl.num_programs(1) + expert]

    def product(x: jax.Array, ref: Any, number: int) -> jax.Array:
        y = jnp.dot(x.astype(dtype), ref[...].astype(dtype), preferred_element_type=jnp.float32)
        return y * scales[number][...] if scaled else y

    @pl.loop(0, pl.cdiv(count, _ROWS))
    def _(block):
        first = block * _ROWS
        groups = pl.cdiv(jnp.minimum(_ROWS, count - first), _AT_ONCE)

        @pl.loop(0, groups)
        def _(group):
            for row in range(_AT_ONCE):
                row = group * _AT_ONCE + row
                row_ref[of_row(row)] = state_ref[of_row(order_ref[0, first + row])]

        chunk = [row_ref[of_chunk(j, _ROWS)].astype(dtype) for j in range(chunks)]
        x = jnp.concatenate(chunk, axis=1)
        inner = activation(product(x, gate_ref, 0)) * product(x, up_ref, 1)
        y = product(inner, down_ref, 2)
        for j in range(chunks):
            row_ref[of_chunk(j, _ROWS)] = y[lanes(j)]

        @pl.loop(0, groups)
        def _(group):  # an expert has a token once: no row's sum waits for another's
            rows = [group * _AT_ONCE + row for row in range(_AT_ONCE)]
            places = [order_ref[0, first + row] for row in rows]
            sums = [sum_ref[of_row(place)] for place in places]
            for row, place, total in zip(rows, places, sums, strict=True):
                share = share_ref[0, place]  # 0: the token is not the expert's
                added = jnp.where(share == 0, 0, row_ref[of_row(row)] * share)
                sum_ref[of_row(place)] = total + added

    @pl.when((expert == pl.num_programs(1) - 1) & (tile == pl.num_programs(2) - 1))
    def _():
        @pl.loop(0, tokens, step=copied)
        def _(first):
            for j in range(chunks):
                copy_ref[lanes(j)] = sum_ref[of_chunk(j, copied, first)].astype(dtype)
            target = out_ref.at[pl.ds(part * tokens + first, copied)]
            copy = pltpu.make_async_copy(copy_ref, target, done)
            copy.start()
            copy.wait()
