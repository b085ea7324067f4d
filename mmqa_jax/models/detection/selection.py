"""Which regions of a picture are kept: bottom-up attention's rule and its two descendants.

Boxes are suppressed within each class, so that a region is kept in some classes and not in others.
Its confidence is the best probability among the classes in which it is kept; regions of enough
confidence are taken, but not too few and not too many (Anderson et al. 2018, section 3.1;
tools/generate_tsv.py of bottom-up-attention, tools/extract_features.py of detectron-vlp,
`filter_results_peter` of scene_graph_benchmark).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import platform
from mmqa_jax.models.detection.boxes import Overlap
from mmqa_jax.models.detection.suppression import keep_in_class, keep_one_by_one

_CLASSES = 32  # whose suppression runs at a time


@dataclasses.dataclass(frozen=True)
class RegionRule:
    """The rule; the defaults are bottom-up attention's for 10 to 100 regions.

    Attributes:
      confidence: that is enough.
      reached: whether that confidence itself is enough.
      fewest, most: regions of a picture, while there are as many proposals.
      threshold: intersection over union of the suppression.
      inclusive: see Overlap.
      ranked: whether regions are always in the order of their confidence. Otherwise they are in
        the order of the proposals where the number of confident ones is within bounds, as in
        generate_tsv.py and extract_features.py.
      unkept: whether regions that are kept in no class may fill up to `fewest`.
      regressed: whether a region has a box of its own in each class, by regression, and ends with
        that of its best class. Otherwise its box is the proposal's.
      original: whether boxes are suppressed in pixels of the original picture, or of the resized.
    """

    confidence: float = 0.2
    reached: bool = True
    fewest: int = 10
    most: int = 100
    threshold: float = 0.3
    inclusive: bool = True
    ranked: bool = False
    unkept: bool = True
    regressed: bool = False
    original: bool = True

    def __post_init__(self):
        if not 0 <= self.fewest <= self.most or self.most < 1:
            raise UserError(
                f"detector: from {self.fewest} to {self.most} regions of a picture; give a number "
                "from 0 and one from 1 that is not below it."
            )


def class_confidence(
    rule: RegionRule, boxes: jax.Array, probabilities: jax.Array, valid: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Each region's best probability among the classes in which it is kept.

    Args:
      rule: of the detector.
      boxes: [R, 4], or [R, C, 4] where each class has its own.
      probabilities: [R, C], of the background first, which is no class.
      valid: [R] bool, the regions that there are.

    Returns:
      Confidence [R], 0 where a region is kept in no class, and the class [R] int32, then 0.
    """
    overlap = Overlap(rule.threshold, rule.inclusive, 1)
    by_class = probabilities.T[1:]  # [C - 1, R]
    if platform() == "gpu":
        own = boxes if boxes.ndim == 2 else boxes[:, 1:]
        kept = jnp.where(keep_in_classes(own, by_class, valid, overlap), by_class, 0.0)
    else:
        kept = _kept_by_turns(boxes, by_class, valid, overlap)
    confidence = jnp.max(kept, axis=0)
    label = jnp.argmax(kept, axis=0).astype(jnp.int32) + 1
    return confidence, jnp.where(confidence > 0, label, 0)


def _kept_by_turns(
    boxes: jax.Array, scores: jax.Array, valid: jax.Array, overlap: Overlap
) -> jax.Array:
    """Scores [C - 1, R] where a region is kept, else 0, a few classes at a time."""
    # Where each class has its own boxes, CPUs are quicker without matrices of pairs.
    alone = boxes.ndim == 3 and platform() == "cpu"
    suppressed = keep_one_by_one if alone else keep_in_class

    def keep(inputs):
        index, of_class = inputs
        own = boxes if boxes.ndim == 2 else boxes[:, index]
        return jnp.where(suppressed(own, of_class, valid, overlap), of_class, 0.0)

    classes = jnp.arange(1, scores.shape[0] + 1)
    return jax.lax.map(keep, (classes, scores), batch_size=None if alone else _CLASSES)


def select(
    rule: RegionRule, confidence: jax.Array, valid: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Indices [most] of the regions taken, and [most] bool, which of them there are.

    Of equal confidence the first comes first.
    """
    if not rule.unkept:
        valid = valid & (confidence > 0)
    confident = confidence >= rule.confidence if rule.reached else confidence > rule.confidence
    confident &= valid
    count = jnp.sum(confident)
    order = jnp.argsort(jnp.where(valid, -confidence, jnp.inf), stable=True)
    if not rule.ranked:
        in_place = jnp.argsort(~confident, stable=True)
        within = (count >= rule.fewest) & (count <= rule.most)
        order = jnp.where(within, in_place, order)
    wanted = jnp.minimum(jnp.clip(count, rule.fewest, rule.most), jnp.sum(valid))
    missing = max(0, rule.most - order.shape[0])
    order = jnp.pad(order, (0, missing))[: rule.most]
    return order, jnp.arange(rule.most) < wanted


# Greedy suppression in classes as one Pallas kernel for NVIDIA GPUs (Triton).
#
# A program takes one class of one picture: the best box that is left is kept, and those that
# overlap it go, until none is left. Boxes and scores stay in registers, so that nothing but them
# and the result goes through memory, and the work is that of the boxes that are kept. Rounds over
# matrices of pairs (suppression.py) read a byte a pair in every round instead, 25.6 GB for 16
# pictures of 1,000 boxes in 1,600 classes.
#
# A file of its own because Pallas takes half a second to import.


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
