"""Greedy suppression in classes as one Pallas kernel for NVIDIA GPUs (Triton).

A program takes one class of one picture: the best box that is left is kept, and those that overlap
it go, until none is left. Boxes and scores stay in registers, so that nothing but them and the
result goes through memory, and the work is that of the boxes that are kept. Rounds over matrices
of pairs (suppression.py) read a byte a pair in every round instead, 25.6 GB for 16 pictures of
1,000 boxes in 1,600 classes.

A file of its own because Pallas takes half a second to import.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from mmqa_jax.models.detection.boxes import Overlap

_BOXES_OF_WARP = 128  # four in each thread, with their corners


def keep_in_classes(
    boxes: jax.Array,
    scores: jax.Array,
    valid: jax.Array,
    overlap: Overlap,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Which boxes of each class are kept.

    Args:
      boxes: [R, 4], or [R, C, 4] where each class has its own.
      scores: float32 [C, R], above minus infinity; of equal ones the first is better.
      valid: [R] bool; other boxes neither are kept nor suppress any.
      overlap: when two are of one object.
      interpret: run without a GPU, slowly, for tests.

    Returns:
      [C, R] bool.
    """
    count = scores.shape[1]
    held = pl.next_power_of_2(max(count, 32))
    corners = boxes.T[None] if boxes.ndim == 2 else boxes.transpose(1, 2, 0)  # [1 or C, 4, R]
    corners = jnp.pad(corners, ((0, 0), (0, 0), (0, held - count)))
    left = jnp.where(valid, scores, -jnp.inf)
    left = jnp.pad(left, ((0, 0), (0, held - count)), constant_values=-jnp.inf)
    shared, of_class = boxes.ndim == 2, pl.BlockSpec((None, held), lambda c: (c, 0))
    divide = jnp.divide if interpret else _rounded_quotient
    kept = pl.pallas_call(
        functools.partial(_class, overlap=overlap, divide=divide),
        grid=(len(left),),
        in_specs=[
            pl.BlockSpec((None, 4, held), lambda c: (0 if shared else c, 0, 0)),
            of_class,
        ],
        out_specs=of_class,
        out_shape=jax.ShapeDtypeStruct(left.shape, jnp.int8),
        compiler_params=plgpu.CompilerParams(
            num_warps=min(16, max(1, held // _BOXES_OF_WARP)), num_stages=1
        ),
        interpret=interpret,
        name="keep_in_classes",
    )(corners, left)
    return kept[:, :count] > 0


def _class(corner_ref: Any, score_ref: Any, kept_ref: Any, *, overlap: Overlap, divide: Any):
    """One class: corners [4, N], scores [N] of the boxes that take part, else minus infinity."""
    corners = tuple(corner_ref[n, :] for n in range(4))
    place = jnp.arange(score_ref.shape[0])

    def unfinished(state):
        _, _, best = state
        return best > -jnp.inf

    def keep_best(state):
        left, kept, best = state
        at = jnp.min(jnp.where(left == best, place, place.size))
        own = tuple(corner_ref[n, at] for n in range(4))
        kept = jnp.where(place == at, 1, kept)
        gone = overlap.of_corners(own, corners, divide) | (place == at)
        left = jnp.where(gone, -jnp.inf, left)
        return left, kept, jnp.max(left)

    left = score_ref[...]
    start = left, jnp.zeros(left.shape, jnp.int32), jnp.max(left)
    _, kept, _ = jax.lax.while_loop(unfinished, keep_best, start)
    kept_ref[...] = kept.astype(jnp.int8)


def _rounded_quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    """a / b as IEEE rounds it: Triton's own division may miss a threshold that is just reached."""
    [quotient] = plgpu.elementwise_inline_asm(
        "div.rn.f32 $0, $1, $2;",
        args=[a, b],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(a.shape, jnp.float32)],
    )
    return quotient
