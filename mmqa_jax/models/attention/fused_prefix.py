"""Attention of a search's beams over cached columns, in one Pallas kernel for TPU.

What `layers.prefix_attention` computes, for the caches of mask_appending.py. The kernel reads its
layer's columns where they lie in the caches of all layers, once for all beams of a question, and
scores never leave the chip. As in fused.py a head is a part of a register's lanes.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from mmqa_jax.core.mesh import partition_spec
from mmqa_jax.models.attention.fused import LANES, MEMORY, fill_registers
from mmqa_jax.models.attention.masked import MASKED

Columns = tuple[jax.Array, jax.Array]


def fused_prefix_fits(heads: int, size: int, columns: int) -> bool:
    """Whether `fused_prefix_attention` takes so many heads, their size and cached columns."""
    held = 2 * 4 * columns * heads * size  # keys, values: bfloat16, twice
    return fill_registers(heads, size) and held <= MEMORY


def fused_prefix_attention(
    layer: jax.Array,
    query: jax.Array,
    prefix: Columns,
    prefix_mask: jax.Array,
    past: Columns,
    own: Columns,
    mask: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Attention of R rows a question over its prefix, past columns and the rows themselves.

    Args:
      layer: int, which of the caches' layers.
      query: [B, R, heads, D].
      prefix: keys and values [layers, B, L, heads * D]; prefix_mask bool [B, L].
      past: keys and values [layers, B, P, heads * D] of generated tokens.
      own: keys and values [B, R, heads, D] of the rows.
      mask: bool [B, R, P + R]: which past and own columns a row sees, at least one.
      interpret: run without a TPU, slowly, for tests.

    Returns [B, R, heads, D]. On the mesh of `jax.set_mesh` questions are split as a batch is.
    """
    questions, rows, heads, size = query.shape
    group = max(size, LANES)
    each = group // size  # heads in a register
    width, number = heads * size, past[0].shape[2]
    lanes = jnp.arange(width) % group // size == jnp.arange(each)[:, None]  # [each, H]

    def flat(x):
        return x.reshape(questions, rows, width)

    # The rows once for each head of a register, the other heads' lanes zero: [B, each * R, H].
    apart = jnp.where(lanes[:, None], flat(query)[:, None], 0).reshape(questions, -1, width)
    seen = jnp.tile(mask, (1, each, 1)).astype(jnp.int8)
    arrays = (
        apart,
        *prefix,
        *past,
        *map(flat, own),
        prefix_mask[:, None].astype(jnp.int8),
        seen[:, :, :number],
        seen[:, :, number:],
    )

    def attend(layer, *arrays):
        return _call(layer, arrays, size, interpret)

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.shape and not mesh.manual_axes:  # XLA does not split a kernel by itself
        of_rows = partition_spec(("batch",), (questions,), mesh)
        cached = PartitionSpec(None, *of_rows)
        attend = jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(PartitionSpec(), of_rows, *(cached,) * 4, *(of_rows,) * 5),
            out_specs=of_rows,
            check_vma=False,
        )
    read = attend(layer.reshape(1), *arrays).reshape(questions, each, rows, width)
    read = jnp.where(lanes[:, None], read, 0).sum(axis=1).astype(query.dtype)
    return read.reshape(query.shape)


def _call(layer, arrays, size, interpret):
    """Runs the kernel over questions: [B, each * R, H] of which a head's lanes count."""
    questions, _, width = arrays[0].shape

    def block(x):
        if x.ndim == 3:
            return pl.BlockSpec((1, *x.shape[1:]), lambda row, layer: (row, 0, 0))
        return pl.BlockSpec((1, 1, *x.shape[2:]), lambda row, layer: (layer[0], row, 0, 0))

    columns = sum(x.shape[-2] for x in (arrays[1], arrays[3], arrays[5]))
    flops = 4 * questions * arrays[5].shape[1] * columns * width
    read = sum(x.size // (1 if x.ndim == 3 else len(x)) * x.dtype.itemsize for x in arrays)
    return pl.pallas_call(
        functools.partial(_kernel, size),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(questions,),
            in_specs=[block(x) for x in arrays],
            out_specs=block(arrays[0]),
        ),
        out_shape=jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype),
        cost_estimate=pl.CostEstimate(
            flops=flops, transcendentals=flops // (4 * size), bytes_accessed=read
        ),
        interpret=interpret,
        name="fused_prefix_attention",
    )(layer, *arrays)


def _kernel(size, layer, query, *refs):
    """Body of the kernel: one question."""
    del layer  # the blocks are of it
    keys, values, masks, out = refs[0:6:2], refs[1:6:2], refs[6:9], refs[9]
    seen = [x[0].astype(jnp.int32) != 0 for x in masks]  # [1 or rows, columns] each
    group = max(size, LANES)

    def one(number, _):
        lanes = pl.ds(number * group, group)
        scores = []
        for key, there in zip(keys, seen, strict=True):
            score = jax.lax.dot_general(
                query[0, :, lanes],
                _read(key, lanes),
                (((1,), (1,)), ((), ())),
                preferred_element_type=jnp.float32,
            )  # [rows, columns]
            scores.append(jnp.where(there, score, MASKED))
        tops = [score.max(axis=1, keepdims=True) for score in scores]
        top = functools.reduce(jnp.maximum, tops)
        weights = [jnp.exp((score - top) * size**-0.5) for score in scores]
        total = sum(weight.sum(axis=1, keepdims=True) for weight in weights)
        read = sum(
            jnp.dot(
                weight.astype(query.dtype), _read(value, lanes), preferred_element_type=jnp.float32
            )
            for weight, value in zip(weights, values, strict=True)
        )
        out[0, :, lanes] = (read / total).astype(out.dtype)
        return _

    jax.lax.fori_loop(0, query.shape[2] // group, one, 0)


def _read(ref, lanes):
    """The columns [L, lanes] of a block [1, L, H] or [1, 1, L, H]."""
    return ref[0, :, lanes] if len(ref.shape) == 3 else ref[0, 0, :, lanes]
