"""Faster R-CNN (Ren et al. 2015) as three detectors have it whose regions the models here read.

VLP's is a ResNeXt-101-FPN of Detectron, VinVL's a ResNeXt-152-C4 of maskrcnn-benchmark, bottom-up
attention's a ResNet-101-C4 of Caffe. One network serves all; what differs is in the configuration,
and told in ORIGINALS.md with its sources.

A picture's regions depend on nothing but the picture: not on the padding of its batch, nor on the
pictures beside it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import platform
from mmqa_jax.models.common.config_checks import check_known
from mmqa_jax.models.common.layers import Embedding, Linear
from mmqa_jax.models.detection.boxes import (
    RPN,
    BoxCoder,
    Overlap,
    RPNConfig,
    areas,
    clip,
    keep_in_class,
    keep_one_by_one,
    pyramid_align,
    roi_align,
    roi_pool,
)
from mmqa_jax.models.detection.resnext import FPN, ResNeXt, ResNeXtConfig, Stage, within

_POOLINGS = ("align", "pool")
_LABELS = ("confident", "likeliest")
_REGIONS = 64  # whose features are computed at a time
_CANONICAL_SIDE, _CANONICAL_LEVEL = 224, 4  # a box of that side is read from that level (FPN, 1)


class Pictures(NamedTuple):
    """A batch of pictures that data.pictures.resize prepared."""

    # [B, H, W, 3] float32, blue first, less the mean; each in the upper left corner.
    pixels: jax.Array
    sizes: jax.Array  # [B, 2] int32, height and width of each in `pixels`
    originals: jax.Array  # [B, 2] int32, height and width before resizing
    scales: jax.Array  # [B] float32, pixels of `pixels` per pixel of the original


class Regions(NamedTuple):
    """What was found: up to K regions of each picture, padded at the end."""

    # [B, K, 4] float32, left, top, right and bottom in pixels of the original picture.
    boxes: jax.Array
    features: jax.Array  # [B, K, F] float32
    scores: jax.Array  # [B, K] float32, see RegionRule
    labels: jax.Array  # [B, K] int32; 0 is the background
    # [B, K, classes] float32, the background first; their softmax are probabilities.
    logits: jax.Array
    # [B, K, attributes] float32, logits, nothing first; None: the detector has none.
    attributes: jax.Array | None
    valid: jax.Array  # [B, K] bool, which regions there are; the others are zeros


@dataclasses.dataclass(frozen=True)
class DetectorConfig:
    """The network and its rules."""

    # Of the feature maps; without a pyramid its res5 is the head of regions.
    backbone: ResNeXtConfig
    rpn: RPNConfig  # of the proposals
    rule: RegionRule  # of the regions that are kept
    classes: int  # with the background
    attributes: int = 0  # with "nothing", which comes first; 0: the detector knows none
    attribute_labels: int = 0  # rows of the table of class embeddings that attributes are told by
    # attribute_embedding, attribute_hidden: sizes of the attribute head.
    attribute_embedding: int = 256
    attribute_hidden: int = 512
    # Whether a region's class is that of its confidence (`confident`) or the most probable one but
    # the background (`likeliest`). VinVL's attributes are told by the former, bottom-up attention's
    # by the most probable one of all.
    labels: str = "confident"
    pyramid: int = 0  # channels of the feature pyramid; 0: none, one map of stride 16
    # Values of the two linears behind a pyramid, fc6 and fc7; features are those of fc6.
    head: int = 0
    # Whether these features are taken behind the ReLU, as Caffe2's blob fc6 is, or in front of it,
    # as WebQA's fc1_features are.
    rectified: bool = True
    pooling: str = "align"  # `align` or `pool`
    bins: int = 14  # of a side of a pooled region
    samples: int = 0  # see roi_align
    # Sides of pictures are padded to multiples of this before the network sees them, as each
    # original pads a single picture.
    divisor: int = 1
    # Whether proposals are clipped to the padded size (Detectron) or the picture's.
    padded_size: bool = False

    def __post_init__(self):
        check_known("detector.pooling", self.pooling, _POOLINGS)
        check_known("detector.labels", self.labels, _LABELS)
        if bool(self.pyramid) != bool(self.head):
            raise UserError(
                f"detector: pyramid {self.pyramid} and head {self.head}; give both or neither, "
                "the two linears read a pyramid."
            )
        if self.pyramid and self.divisor % 32:
            raise UserError(
                f"detector: divisor {self.divisor} with a pyramid, whose levels halve five times; "
                "give a multiple of 32."
            )
        if len(self.rpn.strides) != (5 if self.pyramid else 1):
            raise UserError(
                f"detector: proposals of {len(self.rpn.strides)} levels; a pyramid has 5, a "
                "network without one has 1."
            )
        if self.attributes and self.attribute_labels < self.classes:
            raise UserError(
                f"detector: {self.attribute_labels} class embeddings for {self.classes} classes; "
                "give at least as many."
            )

    @property
    def features(self) -> int:
        """Values of a region."""
        return self.head or self.backbone.channels(3)


def vlp_x101(**changes) -> DetectorConfig:
    """VLP's detector (e2e_faster_rcnn_X-101-64x4d-FPN_2x-vlp): 1,600 classes, 100 regions."""
    config = DetectorConfig(
        backbone=ResNeXtConfig(groups=64, width_per_group=4, stride_in_1x1=False, norm="affine"),
        rpn=RPNConfig(
            strides=(4, 8, 16, 32, 64),
            sizes=((32,), (64,), (128,), (256,), (512,)),
            hidden=512,
            before=1000,
            after=1000,
            inclusive=True,
        ),
        rule=RegionRule(reached=False, fewest=100, regressed=True),
        classes=1601,
        pyramid=512,
        head=2048,
        bins=7,
        samples=2,
        divisor=32,
        padded_size=True,
    )
    return dataclasses.replace(config, **changes)


def vinvl_x152c4(**changes) -> DetectorConfig:
    """VinVL's detector (vinvl_vg_x152c4): 1,594 classes, 524 attributes, 10 to 100 regions."""
    config = DetectorConfig(
        backbone=ResNeXtConfig(
            (3, 8, 36, 3), groups=32, width_per_group=8, stride_in_1x1=False, eps=0.0
        ),
        rpn=RPNConfig(),
        rule=RegionRule(inclusive=False, ranked=True, unkept=False, original=False),
        classes=1595,
        attributes=525,
        attribute_labels=1595,
    )
    return dataclasses.replace(config, **changes)


def bottom_up_r101(**changes) -> DetectorConfig:
    """Bottom-up attention's detector: 1,600 classes, 400 attributes, 10 to 100 regions."""
    config = DetectorConfig(
        backbone=ResNeXtConfig(dilation=2, stem_pool="caffe"),
        rpn=RPNConfig(
            sizes=((64, 128, 256, 512),),
            hidden=512,
            paired=True,
            inclusive=True,
            smallest=16,
            small_first=True,
            end_pixel=0,
            bounded=False,
        ),
        rule=RegionRule(),
        classes=1601,
        attributes=401,
        attribute_labels=1601,
        labels="likeliest",
        pooling="pool",
    )
    return dataclasses.replace(config, **changes)


class RegionMLP(nnx.Module):
    """fc6 and fc7: the head behind a pyramid."""

    def __init__(self, config: DetectorConfig, *, rngs: nnx.Rngs):
        pooled = config.bins**2 * config.pyramid
        self.fc6 = Linear(pooled, config.head, ("embed", "mlp"), rngs=rngs)
        self.fc7 = Linear(config.head, config.head, ("mlp", "embed"), rngs=rngs)
        self.rectified = config.rectified

    def __call__(self, pooled: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[R, P, P, C] -> features [R, head] and what classes are told by [R, head]."""
        linear = self.fc6(pooled.reshape(pooled.shape[0], -1))
        rectified = jax.nn.relu(linear)
        return rectified if self.rectified else linear, jax.nn.relu(self.fc7(rectified))


class RegionConv(nnx.Module):
    """res5 on a region's grid, then the mean: the head of C4 networks."""

    def __init__(self, config: DetectorConfig, *, rngs: nnx.Rngs):
        self.res5 = Stage(config.backbone, 3, rngs=rngs)

    def __call__(self, pooled: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[R, P, P, C] -> features [R, 2 C], twice."""
        features = self.res5(pooled)[0].astype(jnp.float32).mean(axis=(1, 2))
        return features, features


class AttributeHead(nnx.Module):
    """Attributes by a region's features and the embedding of its class."""

    def __init__(self, config: DetectorConfig, *, rngs: nnx.Rngs):
        width = config.attribute_embedding
        self.classes = Embedding(config.attribute_labels, width, ("vocab", "embed"), rngs=rngs)
        joined = config.features + width
        self.hidden = Linear(joined, config.attribute_hidden, ("embed", "mlp"), rngs=rngs)
        self.score = Linear(config.attribute_hidden, config.attributes, ("mlp", "proj"), rngs=rngs)

    def __call__(self, features: jax.Array, labels: jax.Array) -> jax.Array:
        """Features [R, F], classes [R] -> logits [R, attributes]."""
        joined = jnp.concatenate([features, self.classes(labels)], axis=-1)
        return self.score(jax.nn.relu(self.hidden(joined)))


class FasterRCNN(nnx.Module):
    """The detector; `regions` finds what is in a batch of pictures."""

    def __init__(self, config: DetectorConfig, *, rngs: nnx.Rngs):
        backbone = config.backbone
        self.backbone = ResNeXt(backbone, 4 if config.pyramid else 3, rngs=rngs)
        maps = [backbone.channels(stage) for stage in range(4)]
        self.fpn = FPN(maps, config.pyramid, rngs=rngs) if config.pyramid else None
        self.rpn = RPN(config.rpn, config.pyramid or maps[2], rngs=rngs)
        head = RegionMLP if config.pyramid else RegionConv
        self.head = head(config, rngs=rngs)
        self.score = Linear(config.features, config.classes, ("embed", "vocab"), rngs=rngs)
        self.deltas = Linear(config.features, 4 * config.classes, ("embed", "vocab"), rngs=rngs)
        self.attributes = AttributeHead(config, rngs=rngs) if config.attributes else None
        self.config = config

    def levels(self, pixels: jax.Array, sizes: jax.Array) -> tuple[list, list]:
        """Feature maps that proposals are made of, with extents [B, 2]; see `Pictures`."""
        maps, extents = self.backbone(within(pixels, sizes), self._padded(sizes))
        if self.fpn is not None:
            return self.fpn(maps, extents)
        return maps[-1:], extents[-1:]

    def regions(self, pictures: Pictures) -> Regions:
        """The regions of each picture."""
        height, width = pictures.pixels.shape[1:3]
        if height % self.config.divisor or width % self.config.divisor:
            raise UserError(
                f"detector: pictures padded to {height} x {width}, expected multiples of "
                f"{self.config.divisor}; pad them with data.pictures.resize."
            )
        maps, extents = self.levels(pictures.pixels, pictures.sizes)
        scored = [self.rpn(*level) for level in zip(maps, extents, strict=True)]
        return jax.vmap(self._of_picture)(maps, extents, scored, pictures)

    def _padded(self, sizes: jax.Array) -> jax.Array:
        return -(-sizes // self.config.divisor) * self.config.divisor

    def _of_picture(
        self,
        maps: list[jax.Array],
        extents: list[jax.Array],
        scored: list[tuple[jax.Array, jax.Array]],
        picture: Pictures,
    ) -> Regions:
        """Selects the regions of one picture; arguments as those of `regions`, without a batch."""
        boxes, valid = self.proposals(extents, scored, picture)
        features, trunk = self.region_features(maps, extents, boxes)
        return self.select_regions(boxes, valid, features, trunk, picture)

    def proposals(
        self,
        extents: list[jax.Array],
        scored: list[tuple[jax.Array, jax.Array]],
        picture: Pictures,
    ) -> tuple[jax.Array, jax.Array]:
        """Boxes [R, 4] of one picture, in pixels of the resized one, and which there are [R] bool.

        Args:
          extents: [2] of each level.
          scored: what the RPN says of each level.
          picture: one of a batch.
        """
        clipped_to = self._padded(picture.sizes) if self.config.padded_size else picture.sizes
        levels = [(*level, extent) for level, extent in zip(scored, extents, strict=True)]
        return self.rpn.proposals(levels, clipped_to, picture.scales)

    def select_regions(
        self,
        boxes: jax.Array,
        valid: jax.Array,
        features: jax.Array,
        trunk: jax.Array,
        picture: Pictures,
    ) -> Regions:
        """What is kept of one picture's proposals: classes, suppression in each, selection.

        Args:
          boxes, valid: of `proposals`.
          features, trunk: of `region_features`.
          picture: one of a batch.
        """
        config, rule = self.config, self.config.rule
        logits = self.score(trunk)
        regions = boxes / picture.scales if rule.original else boxes
        if rule.regressed:
            deltas = self.deltas(trunk).reshape(-1, config.classes, 4)
            regions = BoxCoder((10.0, 10.0, 5.0, 5.0)).decode(deltas, regions[:, None])
            regions = clip(regions, picture.originals if rule.original else picture.sizes, 1)
        probabilities = jax.nn.softmax(logits, axis=-1)
        scores, confident = class_confidence(rule, regions, probabilities, valid)
        order, there = select(rule, scores, valid)
        if rule.regressed:  # a region that is kept in no class has no box
            regions = jnp.where(
                (scores > 0)[:, None],
                regions[jnp.arange(regions.shape[0]), confident],
                0.0,
            )
        if not rule.original:
            regions = regions * jnp.tile((picture.originals / picture.sizes)[::-1], 2)
        labels = confident
        if config.labels == "likeliest":
            labels = jnp.argmax(logits[:, 1:], axis=-1).astype(jnp.int32) + 1
        attributes = None
        if self.attributes is not None:
            told_by = confident if config.labels == "confident" else jnp.argmax(logits, axis=-1)
            attributes = self.attributes(features, told_by)

        def taken(x):
            return jnp.where(there.reshape(-1, *(1,) * (x.ndim - 1)), x[order], 0)

        return Regions(
            boxes=taken(regions),
            features=taken(features),
            scores=taken(scores),
            labels=taken(labels),
            logits=taken(logits),
            attributes=None if attributes is None else taken(attributes),
            valid=there,
        )

    def region_features(
        self, maps: list[jax.Array], extents: list[jax.Array], boxes: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Features of boxes of one picture.

        Args:
          maps: [H, W, C] of each level; the last of a pyramid only makes proposals.
          extents: [2] of each level.
          boxes: [R, 4] in pixels of the resized picture.

        Returns:
          Features [R, F] and what classes are told by [R, F], both float32. A few at a time are
          computed: their grids are large.
        """

        pooled = self._pooling(maps, extents)

        def of_boxes(boxes):  # [r, 4]
            return self.head(pooled(boxes))

        size = min(_REGIONS, boxes.shape[0])
        missing = -boxes.shape[0] % size
        parts = jnp.pad(boxes, ((0, missing), (0, 0))).reshape(-1, size, 4)
        batches = jax.lax.map(of_boxes, parts)
        features, trunk = (
            x.reshape(-1, x.shape[-1])[: boxes.shape[0]].astype(jnp.float32) for x in batches
        )
        return features, trunk

    def _pooling(self, maps, extents) -> Callable[[jax.Array], jax.Array]:
        """Boxes [R, 4] -> their grids [R, P, P, C], on one picture's maps."""
        config = self.config
        scales = [1 / stride for stride in config.rpn.strides]
        options = {"size": config.bins, "scale": scales[0], "extent": extents[0]}
        if config.pooling == "pool":
            return lambda boxes: roi_pool(maps[0], boxes, **options)
        options |= {"samples": config.samples, "aligned": False}
        if not config.pyramid:
            return lambda boxes: roi_align(maps[0], boxes, **options)
        read = pyramid_align(
            maps[:4], extents[:4], scales[:4], size=config.bins, samples=config.samples
        )

        def of_pyramid(boxes: jax.Array) -> jax.Array:
            side = jnp.sqrt(areas(boxes, 1))
            level = jnp.floor(_CANONICAL_LEVEL + jnp.log2(side / _CANONICAL_SIDE + 1e-6))
            return read(boxes, jnp.clip(level, 2, 5).astype(jnp.int32) - 2)

        return of_pyramid


# Which regions of a picture are kept: bottom-up attention's rule and its two descendants.
#
# Boxes are suppressed within each class, so that a region is kept in some classes and not in
# others. Its confidence is the best probability among the classes in which it is kept; regions of
# enough confidence are taken, but not too few and not too many (Anderson et al. 2018, section
# 3.1; tools/generate_tsv.py of bottom-up-attention, tools/extract_features.py of detectron-vlp,
# `filter_results_peter` of scene_graph_benchmark).


_CLASSES = 32  # whose suppression runs at a time


@dataclasses.dataclass(frozen=True)
class RegionRule:
    """The rule; the defaults are bottom-up attention's for 10 to 100 regions."""

    confidence: float = 0.2  # that is enough
    reached: bool = True  # whether that confidence itself is enough
    # fewest, most: regions of a picture, while there are as many proposals.
    fewest: int = 10
    most: int = 100
    threshold: float = 0.3  # intersection over union of the suppression
    inclusive: bool = True  # see Overlap
    # Whether regions are always in the order of their confidence. Otherwise they are in the order
    # of the proposals where the number of confident ones is within bounds, as in generate_tsv.py
    # and extract_features.py.
    ranked: bool = False
    unkept: bool = True  # whether regions that are kept in no class may fill up to `fewest`
    # Whether a region has a box of its own in each class, by regression, and ends with that of its
    # best class. Otherwise its box is the proposal's.
    regressed: bool = False
    # Whether boxes are suppressed in pixels of the original picture, or of the resized.
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
        class_boxes = boxes if boxes.ndim == 2 else boxes[:, 1:]
        surviving = jnp.where(keep_in_classes(class_boxes, by_class, valid, overlap), by_class, 0.0)
    else:
        surviving = _kept_by_turns(boxes, by_class, valid, overlap)
    confidence = jnp.max(surviving, axis=0)
    label = jnp.argmax(surviving, axis=0).astype(jnp.int32) + 1
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
        class_boxes = boxes if boxes.ndim == 2 else boxes[:, index]
        return jnp.where(suppressed(class_boxes, of_class, valid, overlap), of_class, 0.0)

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
# matrices of pairs (boxes.py) read a byte a pair in every round instead, 25.6 GB for 16
# pictures of 1,000 boxes in 1,600 classes.

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
    surviving = pl.pallas_call(
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
    return surviving[:, :count] > 0


def _class(corner_ref: Any, score_ref: Any, kept_ref: Any, *, overlap: Overlap, divide: Any):
    """One class: corners [4, N], scores [N] of the boxes that take part, else minus infinity."""
    corners = tuple(corner_ref[n, :] for n in range(4))
    place = jnp.arange(score_ref.shape[0])

    def unfinished(state):
        _, _, best = state
        return best > -jnp.inf

    def keep_best(state):
        left, surviving, best = state
        at = jnp.min(jnp.where(left == best, place, place.size))
        best_corners = tuple(corner_ref[n, at] for n in range(4))
        surviving = jnp.where(place == at, 1, surviving)
        gone = overlap.of_corners(best_corners, corners, divide) | (place == at)
        left = jnp.where(gone, -jnp.inf, left)
        return left, surviving, jnp.max(left)

    left = score_ref[...]
    start = left, jnp.zeros(left.shape, jnp.int32), jnp.max(left)
    _, surviving, _ = jax.lax.while_loop(unfinished, keep_best, start)
    kept_ref[...] = surviving.astype(jnp.int8)


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
