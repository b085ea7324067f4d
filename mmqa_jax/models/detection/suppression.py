"""Greedy non-maximum suppression in static shapes, with torchvision's order and ties.

From the best score down, a box is kept unless it overlaps one that was kept. Of equal scores the
first in the list counts as better, as torchvision's stable sort has it.

Which boxes are kept is the one set in which a box is kept exactly if nothing kept and better
overlaps it. It is found by repetition: starting from all boxes, drop those that a kept one
suppresses, look again with what is left, until nothing changes. After n rounds the n best are
right, most often all after three or four; each round is one product of a mask and a matrix. In
hundreds of classes GPUs have a kernel instead (selection.py).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mmqa_jax.models.detection.boxes import Overlap

_BLOCK = 256  # boxes whose mutual suppression is settled at a time


def survivors(suppresses: jax.Array, alive: jax.Array) -> jax.Array:
    """Which boxes greedy suppression keeps.

    Args:
      suppresses: [N, N] bool, whether box i is better than box j and overlaps it.
      alive: [N] bool, the boxes that take part.

    Returns:
      [N] bool.
    """

    def look_again(state):
        kept, _ = state
        beaten = jnp.any(suppresses & kept[:, None], axis=0)
        again = alive & ~beaten
        return again, jnp.any(again != kept)

    return jax.lax.while_loop(lambda state: state[1], look_again, (alive, jnp.any(alive)))[0]


def suppress(
    boxes: jax.Array, scores: jax.Array, valid: jax.Array, overlap: Overlap, limit: int
) -> tuple[jax.Array, jax.Array]:
    """The best boxes that do not overlap.

    Args:
      boxes: [N, 4].
      scores: [N].
      valid: [N] bool; other boxes neither are kept nor suppress any.
      overlap: when two are of one object.
      limit: how many are wanted; the search ends there.

    Returns:
      Indices [limit] of kept boxes, best first, and [limit] bool, which of them there are.
    """
    count = boxes.shape[0]
    blocks = -(-count // _BLOCK)
    padding = blocks * _BLOCK - count
    order = jnp.argsort(jnp.where(valid, -scores, jnp.inf), stable=True)
    ranked = jnp.pad(boxes[order], ((0, padding), (0, 0)))
    alive = jnp.pad(valid[order], (0, padding))
    place = jnp.arange(blocks * _BLOCK)

    def unfinished(state):
        block, alive = state
        kept = jnp.sum(alive & (place < block * _BLOCK))
        return (block < blocks) & (kept < limit) & jnp.any(alive & (place >= block * _BLOCK))

    def settle(state):
        block, alive = state
        start = block * _BLOCK
        own = jax.lax.dynamic_slice_in_dim(ranked, start, _BLOCK)
        too_near = overlap.between(own, ranked)  # [_BLOCK, all]
        among = jax.lax.dynamic_slice_in_dim(too_near, start, _BLOCK, axis=1)
        kept = survivors(jnp.triu(among, k=1), jax.lax.dynamic_slice_in_dim(alive, start, _BLOCK))
        beaten = jnp.any(too_near & kept[:, None], axis=0) & (place >= start + _BLOCK)
        alive = jax.lax.dynamic_update_slice_in_dim(alive & ~beaten, kept, start, axis=0)
        return block + 1, alive

    settled, alive = jax.lax.while_loop(unfinished, settle, (jnp.int32(0), alive))
    kept = alive & (place < settled * _BLOCK)
    # Kept boxes first, in the order of their scores.
    first = jnp.argsort(~kept, stable=True)[:limit]
    chosen, there = jnp.pad(order, (0, padding))[first], kept[first]
    missing = limit - chosen.shape[0]
    if missing > 0:  # more are wanted than there are boxes
        chosen, there = jnp.pad(chosen, (0, missing)), jnp.pad(there, (0, missing))
    return chosen, there


def keep_in_class(
    boxes: jax.Array, scores: jax.Array, valid: jax.Array, overlap: Overlap
) -> jax.Array:
    """Which boxes of one class are kept: as `suppress`, but as a mask [N] in the given order."""
    better = scores[:, None] > scores[None]
    place = jnp.arange(scores.shape[0])
    better |= (scores[:, None] == scores[None]) & (place[:, None] < place[None])
    return survivors(overlap.between(boxes, boxes) & better, valid)


def keep_one_by_one(
    boxes: jax.Array, scores: jax.Array, valid: jax.Array, overlap: Overlap
) -> jax.Array:
    """`keep_in_class` from the best box down, one beside all at a time: no pairs are stored."""
    order = jnp.argsort(jnp.where(valid, -scores, jnp.inf), stable=True)
    ranked = boxes[order]
    place = jnp.arange(scores.shape[0])

    def settle(best, alive):
        own = jax.lax.dynamic_slice_in_dim(ranked, best, 1)
        beaten = overlap.between(own, ranked)[0] & (place > best)
        return alive & ~(beaten & alive[best])

    alive = jax.lax.fori_loop(0, scores.shape[0], settle, valid[order])
    return jnp.zeros_like(valid).at[order].set(alive)
