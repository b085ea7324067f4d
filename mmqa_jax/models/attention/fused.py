"""Attention of short sequences in one Pallas kernel for TPU; scores never leave the chip.

Encoders (CLIP, BERT, VLP) read at most some hundred columns. A head's whole scores, [Lq, Lk] in
float32, then fit the chip's vector memory (VMEM), so that neither a running maximum nor blocks of
keys are needed. Queries, keys and values stay as their linear layers give them, [B, L, heads *
head_dim]: a head is a part of the 128 lanes of a register, chosen by setting the others to zero,
and nothing is transposed. The matrix unit multiplies 128 columns at once, so that the zeros cost
nothing that heads of 64 columns would not.

Reached through `layers.attention(..., implementation="auto")`. A file of its own because Pallas
takes half a second to import.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

from mmqa_jax.core.mesh import partition_spec
from mmqa_jax.models.attention.masked import MASKED

# Random bits of dropout on a TPU, which are a function of the place alone.
#
# JAX's default generator (threefry) takes about 115 operations an element, which XLA for TPUs
# repeats in each fusion that reads the mask. Counters that are mixed twice take a fifth of that,
# in a kernel as outside.


def drop_bits(row_seed: jax.Array, head_seed: jax.Array, length: int, columns: int) -> jax.Array:
    """int32 [..., Lq, Lk] in 0..65535, uniform: a weight of less than `kept` survives dropout.

    Counters mixed twice with a key of 64 bits, made of the two seeds (int32, of any shape that
    broadcasts against [..., Lq, Lk]): a function of the place alone, so that forward and backward
    pass, every mesh and every kind of device agree. Where both halves of the columns are whole
    registers, a place in each shares a counter, whose 32 bits are those of two.
    """
    width = columns if columns % (2 * LANES) else columns // 2
    counter = jax.lax.broadcasted_iota(jnp.int32, (length, width), 0) * columns
    counter = counter + jax.lax.broadcasted_iota(jnp.int32, (length, width), 1)
    bits = _mixed(counter, row_seed, head_seed)
    high = jax.lax.shift_right_logical(bits, 16)
    return high if width == columns else jnp.concatenate([high, bits & 0xFFFF], axis=-1)


def drop_bits_of(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Bits as `drop_bits` has them for an array of any shape: int32 of that shape, in 0..65535.

    Every row along the last axis has a seed of its own, so that no counter passes 32 bits.
    """
    first, second = jax.random.bits(key, (2,)).astype(jnp.int32)
    row = jnp.int32(0)
    for axis, size in enumerate(shape[:-1]):
        row = row * size + jax.lax.broadcasted_iota(jnp.int32, (*shape[:-1], 1), axis)
    counter = jax.lax.broadcasted_iota(jnp.int32, (1, shape[-1]), 1)
    return jax.lax.shift_right_logical(_mixed(counter, _mix(row + first), second), 16)


def _mixed(counter: jax.Array, row_seed: jax.Array, head_seed: jax.Array) -> jax.Array:
    """32 bits of each counter."""
    first = _mix(row_seed ^ _mix(head_seed))
    second = _mix(first + jnp.int32(0x5BD1E995))
    return _mix(_mix(counter ^ first) + second)


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of int32 each of whose bits depends on all bits (Wellons 2018, lowbias32)."""
    x = (x ^ jax.lax.shift_right_logical(x, 16)) * jnp.int32(0x7FEB352D)
    x = (x ^ jax.lax.shift_right_logical(x, 15)) * jnp.int32(0x846CA68B - 2**32)
    return x ^ jax.lax.shift_right_logical(x, 16)


LANES = 128  # columns of a register
MEMORY = 13 * 2**20  # of the 16 MiB of VMEM that a kernel may use by default
_SUBLANES = 16  # rows of a register of bfloat16


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is static in a kernel."""

    size: int  # columns of a head
    is_causal: bool  # a query sees no later key
    surviving: int  # of 65,536, how many attention weights dropout leaves; 65,536 is no dropout
    interpret: bool  # run without a TPU

    @property
    def group(self) -> int:
        """Columns that are multiplied at once: those of the heads in one register's lanes."""
        return max(self.size, LANES)


def fill_registers(heads: int, size: int) -> bool:
    """Whether heads of so many columns, side by side, fill whole registers."""
    return (LANES % size == 0 or size % LANES == 0) and heads * size % LANES == 0


def fused_fits(q: jax.Array, k: jax.Array, mask: jax.Array | None, is_causal: bool) -> bool:
    """Whether `fused_attention` takes these queries [B, Lq, heads, D], keys and mask.

    16-bit floats, heads that fill whole registers, a mask without heads, and scores of one head,
    their gradients and what is read and written for it that fit the chip's memory.
    """
    length, heads, size = q.shape[1:]
    columns = k.shape[1]
    half = q.dtype == k.dtype == jnp.bfloat16
    plain = mask is None or (mask.ndim == 4 and mask.shape[1] == 1)
    aligned = not is_causal or length == columns
    if not (half and fill_registers(heads, size) and plain and aligned and k.shape[2] == heads):
        return False
    group = max(size, LANES)
    return _working_set(length, columns, group, _BACKWARD_ARRAYS, mask is not None) <= MEMORY


def fused_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    mesh: Mesh | None = None,
    biases: tuple[jax.Array, jax.Array, jax.Array] | None = None,
    interpret: bool = False,
) -> jax.Array:
    """softmax(q k / sqrt(D)) v of every head, with its gradient.

    q [B, Lq, heads, D]; k, v [B, Lk, heads, D]; mask bool [B or 1, 1, Lq or 1, Lk]. A row without a
    visible column gives the mean of the values. Dropout acts on the weights (`drop_bits`), as
    `layers.dropout` does. On a mesh (None: that of `jax.set_mesh`) rows
    are split as a batch is, and heads as the model's, where these divide. `biases` [heads * D] each
    were added to q, k and v as constants: they get their gradients here, of which the kernel sums
    each row while it is on the chip (XLA reads them once more for that). `interpret` runs the
    kernel without a TPU, slowly, for tests. Returns [B, Lq, heads, D].
    """
    rows, _, heads, size = q.shape
    surviving = 65536 if dropout_key is None else round((1.0 - dropout_rate) * 65536)
    flat = tuple(x.reshape(*x.shape[:2], heads * size) for x in (q, k, v))
    seeds = drop_seeds(dropout_key, rows, heads) if surviving < 65536 else None
    if mask is not None:
        mask = mask[:, 0].astype(jnp.int8)

    plan, place = _Plan(size, is_causal, surviving, interpret), None
    mesh = mesh or jax.sharding.get_abstract_mesh()
    if mesh.shape and not mesh.manual_axes:  # XLA does not split a kernel by itself
        registers = heads * size // max(size, LANES)
        axes = (*partition_spec(("batch", "heads"), (rows, registers), mesh), None)[:2]
        place = _Place(mesh, *axes)
    return _attend(plan, place, *flat, biases, mask, seeds).reshape(q.shape)


@dataclasses.dataclass(frozen=True)
class _Place:
    """A mesh, and the axes that split rows and heads."""

    mesh: Mesh | jax.sharding.AbstractMesh
    rows: str | tuple[str, ...] | None
    heads: str | tuple[str, ...] | None

    def split(self, function: Callable[..., Any], masked: bool, one_mask: bool, drops: bool) -> Any:
        """`function(arrays, mask, seeds)` for the rows and heads of each device."""
        whole = PartitionSpec(self.rows, None, self.heads)
        mask = PartitionSpec(None if one_mask else self.rows) if masked else None
        seeds = (PartitionSpec(self.rows), PartitionSpec(self.heads)) if drops else None
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(whole, mask, seeds),
            out_specs=whole,
            check_vma=False,
        )


def drop_seeds(key: jax.Array, rows: int, heads: int) -> tuple[jax.Array, jax.Array]:
    """Random int32 of every row [B] and of every head [heads]: what `drop_bits` starts from."""
    of_rows, of_heads = jax.random.split(key)
    drawn = jax.random.bits(of_rows, (rows,)), jax.random.bits(of_heads, (heads,))
    return tuple(bits.astype(jnp.int32) for bits in drawn)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(plan, place, q, k, v, biases, mask, seeds):
    """q [B, Lq, H], k and v [B, Lk, H], mask int8 [B, Lq or 1, Lk] -> [B, Lq, H]."""
    del biases
    return _run(plan, place, _forward, (q, k, v), (q,), mask, seeds)[0]


def _attend_forward(plan, place, q, k, v, biases, mask, seeds):
    saved = q, k, v, None if biases is None else (), mask, seeds
    return _attend(plan, place, q, k, v, biases, mask, seeds), saved


def _attend_backward(plan, place, saved, gradient):
    q, k, v, biased, mask, seeds = saved
    like = (q, k, v)
    if biased is not None:
        like += tuple(jax.ShapeDtypeStruct((len(x), 1, x.shape[2]), jnp.float32) for x in like)
    dq, dk, dv, *sums = _run(plan, place, _backward, (q, k, v, gradient), like, mask, seeds)
    of_biases = tuple(x.sum((0, 1)) for x in sums) or None
    return dq, dk, dv, of_biases, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _run(plan, place, kernel, arrays, like, mask, seeds):
    """`_call` where the arrays lie."""

    def call(arrays, mask, seeds):
        rows, _, width = arrays[0].shape
        shapes = [jax.ShapeDtypeStruct((rows, x.shape[1], width), x.dtype) for x in like]
        return _call(plan, kernel, arrays, shapes, mask, seeds)

    if place is not None:
        one_mask = mask is not None and len(mask) == 1
        call = place.split(call, mask is not None, one_mask, seeds is not None)
    return call(arrays, mask, seeds)


_FORWARD_ARRAYS, _BACKWARD_ARRAYS = 4, 7  # read and written, [B, L, H] each
_SCORES = 6  # arrays [Lq, Lk] of float32 that are alive at once, at most


def _working_set(length: int, columns: int, lanes: int, arrays: int, masked: bool) -> int:
    """Bytes of VMEM for one row's `lanes` columns; all that comes and goes is there twice."""
    longest = -(-max(length, columns) // _SUBLANES) * _SUBLANES
    across = -(-columns // LANES) * LANES
    down = -(-length // _SUBLANES) * _SUBLANES
    return 4 * longest * lanes * arrays + down * across * (4 * _SCORES + 2 * masked)


def _call(plan, kernel, arrays, like, mask, seeds):
    """Runs a kernel over rows and registers of [B, L, H]; returns arrays shaped as `like`."""
    rows, length, width = arrays[0].shape
    columns = arrays[1].shape[1]
    count = len(arrays) + min(len(like), 3)  # sums of rows are small
    fitting = [
        lanes
        for lanes in range(plan.group, width + 1, plan.group)
        if width % lanes == 0
        and _working_set(length, columns, lanes, count, mask is not None) <= MEMORY
    ]
    lanes = max(fitting)

    def block(x):
        return pl.BlockSpec((1, x.shape[1], lanes), lambda row, part: (row, 0, part))

    specs, inputs = [block(x) for x in arrays], list(arrays)
    if mask is not None:
        several = min(len(mask) - 1, 1)
        specs.append(pl.BlockSpec((1, *mask.shape[1:]), lambda row, _: (row * several, 0, 0)))
        inputs.append(mask)
    if seeds is not None:
        specs += [pl.BlockSpec(memory_space=pltpu.SMEM)] * 2
        inputs += seeds
    products = 2 if kernel is _forward else 5
    moved = (math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in (*arrays, *like))
    cost = pl.CostEstimate(
        flops=2 * products * rows * width * length * columns,
        transcendentals=rows * (width // plan.size) * length * columns,
        bytes_accessed=sum(moved),
    )
    return pl.pallas_call(
        functools.partial(kernel, plan, mask is not None, lanes // plan.group),
        grid=(rows, width // lanes),
        in_specs=specs,
        out_specs=[block(x) for x in like],
        out_shape=like,
        cost_estimate=cost,
        interpret=plan.interpret,
        name="fused_attention" if kernel is _forward else "fused_attention_gradient",
    )(*inputs)


def _forward(plan, masked, groups, *refs):
    """Body of the kernel: one row, `groups` registers of heads."""
    seeds, (q, k, v), mask, (out,) = _split(plan, masked, groups, 3, refs)
    seen = _visible(plan, mask, q.shape[1], k.shape[1])

    def attend_group(group, _):
        lanes = pl.ds(group * plan.group, plan.group)
        query, key, value = q[0, :, lanes], k[0, :, lanes], v[0, :, lanes]
        attended = jnp.zeros(query.shape, jnp.float32)
        for head, lane_mask in enumerate(_lanes_of_heads(plan)):
            weights, total = _weights(plan, jnp.where(lane_mask, query, 0), key, seen)
            if plan.surviving < 65536:
                weights = jnp.where(_kept(plan, seeds, group, head, weights), weights, 0)
                total = total * (plan.surviving / 65536)
            read = _product(weights.astype(value.dtype), value)  # [Lq, lanes]
            attended = jnp.where(lane_mask, read / total, attended)
        out[0, :, lanes] = attended.astype(out.dtype)
        return _

    jax.lax.fori_loop(0, groups, attend_group, 0)


def _backward(plan, masked, groups, *refs):
    """Body of the gradient's kernel; the scores are computed again."""
    seeds, (q, k, v, dout), mask, (dq, dk, dv, *sums) = _split(plan, masked, groups, 4, refs)
    seen = _visible(plan, mask, q.shape[1], k.shape[1])

    def differentiate_group(group, _):
        lanes = pl.ds(group * plan.group, plan.group)
        query, key, value, gradient = (x[0, :, lanes] for x in (q, k, v, dout))
        of_query = jnp.zeros(query.shape, jnp.float32)
        of_key = of_value = jnp.zeros(key.shape, jnp.float32)
        for head, lane_mask in enumerate(_lanes_of_heads(plan)):
            weights, total = _weights(plan, jnp.where(lane_mask, query, 0), key, seen)
            weights = weights / total
            of_weights = _product(
                jnp.where(lane_mask, gradient, 0), value, transposed=True
            )  # [Lq, Lk]
            used = weights
            if plan.surviving < 65536:
                survives = _kept(plan, seeds, group, head, weights)
                used = jnp.where(survives, weights * (65536 / plan.surviving), 0)
                of_weights = jnp.where(survives, of_weights * (65536 / plan.surviving), 0)
            mean = jnp.sum(weights * of_weights, axis=1, keepdims=True)
            of_scores = weights * (of_weights - mean) * plan.size**-0.5
            of_scores = of_scores.astype(query.dtype)
            of_value = jnp.where(
                lane_mask, _product(used.astype(gradient.dtype).T, gradient), of_value
            )
            of_query = jnp.where(lane_mask, _product(of_scores, key), of_query)
            of_key = jnp.where(lane_mask, _product(of_scores.T, query), of_key)
        rounded = [x.astype(dq.dtype) for x in (of_query, of_key, of_value)]
        for ref, x in zip((dq, dk, dv), rounded, strict=True):
            ref[0, :, lanes] = x
        for ref, x in zip(sums, rounded, strict=False):  # all or none
            ref[0, :, lanes] = jnp.sum(x.astype(jnp.float32), axis=0, keepdims=True)
        return _

    jax.lax.fori_loop(0, groups, differentiate_group, 0)


def _split(plan, masked, groups, count, refs):
    """A kernel's references as seeds, `count` inputs, mask and outputs.

    The seeds are that of the row, all heads' and the number of the block's first head.
    """
    inputs, refs, mask, seeds = refs[:count], refs[count:], None, None
    if masked:
        mask, refs = refs[0], refs[1:]
    if plan.surviving < 65536:
        first = pl.program_id(1) * groups * (plan.group // plan.size)
        seeds, refs = (refs[0][pl.program_id(0)], refs[1], first), refs[2:]
    return seeds, inputs, mask, refs


def _lanes_of_heads(plan):
    """bool [1, group] of each of the heads in a register: its lanes."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, plan.group), 1)
    return [lane // plan.size == head for head in range(plan.group // plan.size)]


def _weights(plan, query, key, seen):
    """float32 exp(scores - their maximum) [Lq, Lk], and their sums [Lq, 1]."""
    scores = _product(query, key, transposed=True)
    if seen is not None:
        scores = jnp.where(seen, scores, MASKED)
    top = jnp.max(scores, axis=1, keepdims=True)
    weights = jnp.exp((scores - top) * plan.size**-0.5)
    return weights, jnp.sum(weights, axis=1, keepdims=True)


def _kept(plan, seeds, group, head, weights):
    """bool [Lq, Lk]: which weights of a head survive dropout."""
    row_seed, head_seeds, first = seeds
    number = first + group * (plan.group // plan.size) + head
    return drop_bits(row_seed, head_seeds[number], *weights.shape) < plan.surviving


def _product(a, b, *, transposed=False):
    """a [M, K] times b [K, N], or [N, K] transposed: float32 [M, N]."""
    numbers = (((1,), (1 if transposed else 0,)), ((), ()))
    return jax.lax.dot_general(a, b, numbers, preferred_element_type=jnp.float32)


def _visible(plan, mask_ref, length, columns):
    """bool [Lq or 1, Lk] of what queries see, or None where they see all."""
    seen = None if mask_ref is None else mask_ref[0].astype(jnp.int32) != 0
    if plan.is_causal:
        row, column = (jax.lax.broadcasted_iota(jnp.int32, (length, columns), n) for n in (0, 1))
        seen = column <= row if seen is None else seen & (column <= row)
    return seen


# Attention of a search's beams over cached columns, in one Pallas kernel for TPU.
#
# What `layers.prefix_attention` computes, for the caches of mask_appending.py. The kernel reads
# its layer's columns where they lie in the caches of all layers, once for all beams of a
# question, and scores never leave the chip. As in fused.py a head is a part of a register's
# lanes.


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
    columns: Columns,
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
      columns: keys and values [B, R, heads, D] of the rows.
      mask: bool [B, R, P + R]: which past and own columns a row sees, at least one.
      interpret: run without a TPU, slowly, for tests.

    Returns [B, R, heads, D]. On the mesh of `jax.set_mesh` questions are split as a batch is.
    """
    questions, rows, heads, size = query.shape
    number = past[0].shape[2]

    def flat(x):
        return x.reshape(questions, rows, heads * size)

    seen = mask.astype(jnp.int8)
    arrays = (
        flat(query),
        *prefix,
        *past,
        *map(flat, columns),
        prefix_mask[:, None].astype(jnp.int8),
        seen[:, :, :number],
        seen[:, :, number:],
    )

    def attend(layer, *arrays):
        return _prefix_call(layer, arrays, size, interpret)

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
    return attend(layer.reshape(1), *arrays).reshape(query.shape)


def _prefix_call(layer, arrays, size, interpret):
    """Runs the kernel over questions: [B, R, H]."""
    questions, _, width = arrays[0].shape

    def block(x):
        if x.ndim == 3:
            return pl.BlockSpec((1, *x.shape[1:]), lambda row, layer: (row, 0, 0))
        return pl.BlockSpec((1, 1, *x.shape[2:]), lambda row, layer: (layer[0], row, 0, 0))

    columns = sum(x.shape[-2] for x in (arrays[1], arrays[3], arrays[5]))
    flops = 4 * questions * arrays[0].shape[1] * columns * width
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
    group = max(size, LANES)
    each = group // size  # heads in a register
    seen = [x[0].astype(jnp.int32) for x in masks]  # [1 or R, columns] each
    seen = [(x if len(x) == 1 else jnp.concatenate([x] * each)) != 0 for x in seen]
    head = jax.lax.broadcasted_iota(jnp.int32, (query.shape[1], group), 1) // size

    def attend_group(number, _):
        lanes = pl.ds(number * group, group)
        rows, scores = query[0, :, lanes], []
        # The rows once for each head of a register, the other heads' lanes zero: [each * R, group].
        apart = jnp.concatenate([jnp.where(head == n, rows, 0) for n in range(each)])
        for key, there in zip(keys, seen, strict=True):
            score = jax.lax.dot_general(
                apart,
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
        parts = jnp.split(read / total, each)  # [R, group] each, of which its head's lanes count
        merged = sum(jnp.where(head == n, part, 0.0) for n, part in enumerate(parts))
        out[0, :, lanes] = merged.astype(out.dtype)
        return _

    jax.lax.fori_loop(0, query.shape[2] // group, attend_group, 0)


def _read(ref, lanes):
    """The columns [L, lanes] of a block [1, L, H] or [1, 1, L, H]."""
    return ref[0, :, lanes] if len(ref.shape) == 3 else ref[0, 0, :, lanes]
