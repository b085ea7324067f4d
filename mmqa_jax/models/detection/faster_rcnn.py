"""Faster R-CNN (Ren et al. 2015) as three detectors have it whose regions the models here read.

VLP's is a ResNeXt-101-FPN of Detectron, VinVL's a ResNeXt-152-C4 of maskrcnn-benchmark, bottom-up
attention's a ResNet-101-C4 of Caffe. One network serves all; what differs is in the configuration,
and told in ORIGINALS.md with its sources.

A picture's regions depend on nothing but the picture: not on the padding of its batch, nor on the
pictures beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common.config_checks import check_known
from mmqa_jax.models.common.layers import Embedding, Linear
from mmqa_jax.models.detection.boxes import BoxCoder, areas, clip
from mmqa_jax.models.detection.convolution import within
from mmqa_jax.models.detection.region_pooling import pyramid_align, roi_align, roi_pool
from mmqa_jax.models.detection.resnext import FPN, ResNeXt, ResNeXtConfig, Stage
from mmqa_jax.models.detection.rpn import RPN, RPNConfig
from mmqa_jax.models.detection.selection import RegionRule, class_confidence, select

_POOLINGS = ("align", "pool")
_LABELS = ("confident", "likeliest")
_REGIONS = 64  # whose features are computed at a time
_CANONICAL_SIDE, _CANONICAL_LEVEL = 224, 4  # a box of that side is read from that level (FPN, 1)


class Pictures(NamedTuple):
    """A batch of pictures that data.detector_pictures prepared.

    Attributes:
      pixels: [B, H, W, 3] float32, blue first, less the mean; each in the upper left corner.
      sizes: [B, 2] int32, height and width of each in `pixels`.
      originals: [B, 2] int32, height and width before resizing.
      scales: [B] float32, pixels of `pixels` per pixel of the original.
    """

    pixels: jax.Array
    sizes: jax.Array
    originals: jax.Array
    scales: jax.Array


class Regions(NamedTuple):
    """What was found: up to K regions of each picture, padded at the end.

    Attributes:
      boxes: [B, K, 4] float32, left, top, right and bottom in pixels of the original picture.
      features: [B, K, F] float32.
      scores: [B, K] float32, see RegionRule.
      labels: [B, K] int32; 0 is the background.
      logits: [B, K, classes] float32, the background first; their softmax are probabilities.
      attributes: [B, K, attributes] float32, logits, nothing first; None: the detector has none.
      valid: [B, K] bool, which regions there are; the others are zeros.
    """

    boxes: jax.Array
    features: jax.Array
    scores: jax.Array
    labels: jax.Array
    logits: jax.Array
    attributes: jax.Array | None
    valid: jax.Array


@dataclasses.dataclass(frozen=True)
class DetectorConfig:
    """The network and its rules.

    Attributes:
      backbone: of the feature maps; without a pyramid its res5 is the head of regions.
      rpn: of the proposals.
      rule: of the regions that are kept.
      classes: with the background.
      attributes: with "nothing", which comes first; 0: the detector knows none.
      attribute_labels: rows of the table of class embeddings that attributes are told by.
      attribute_embedding, attribute_hidden: sizes of the attribute head.
      labels: whether a region's class is that of its confidence (`confident`) or the most probable
        one but the background (`likeliest`). VinVL's attributes are told by the former,
        bottom-up attention's by the most probable one of all.
      pyramid: channels of the feature pyramid; 0: none, one map of stride 16.
      head: values of the two linears behind a pyramid, fc6 and fc7; features are those of fc6.
      rectified: whether these features are taken behind the ReLU, as Caffe2's blob fc6 is, or in
        front of it, as WebQA's fc1_features are.
      pooling: `align` or `pool`.
      bins: of a side of a pooled region.
      samples: see roi_align.
      divisor: sides of pictures are padded to multiples of this before the network sees them, as
        each original pads a single picture.
      padded_size: whether proposals are clipped to the padded size (Detectron) or the picture's.
    """

    backbone: ResNeXtConfig
    rpn: RPNConfig
    rule: RegionRule
    classes: int
    attributes: int = 0
    attribute_labels: int = 0
    attribute_embedding: int = 256
    attribute_hidden: int = 512
    labels: str = "confident"
    pyramid: int = 0
    head: int = 0
    rectified: bool = True
    pooling: str = "align"
    bins: int = 14
    samples: int = 0
    divisor: int = 1
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
                f"{self.config.divisor}; pad them with data.detector_pictures."
            )
        maps, extents = self.levels(pictures.pixels, pictures.sizes)
        found = [self.rpn(*level) for level in zip(maps, extents, strict=True)]
        return jax.vmap(self._of_picture)(maps, extents, found, pictures)

    def _padded(self, sizes: jax.Array) -> jax.Array:
        return -(-sizes // self.config.divisor) * self.config.divisor

    def _of_picture(
        self,
        maps: list[jax.Array],
        extents: list[jax.Array],
        found: list[tuple[jax.Array, jax.Array]],
        picture: Pictures,
    ) -> Regions:
        """Selects the regions of one picture; arguments as those of `regions`, without a batch."""
        boxes, valid = self.proposals(extents, found, picture)
        features, trunk = self.region_features(maps, extents, boxes)
        return self.kept(boxes, valid, features, trunk, picture)

    def proposals(
        self,
        extents: list[jax.Array],
        found: list[tuple[jax.Array, jax.Array]],
        picture: Pictures,
    ) -> tuple[jax.Array, jax.Array]:
        """Boxes [R, 4] of one picture, in pixels of the resized one, and which there are [R] bool.

        Args:
          extents: [2] of each level.
          found: what the RPN says of each level.
          picture: one of a batch.
        """
        clipped_to = self._padded(picture.sizes) if self.config.padded_size else picture.sizes
        levels = [(*scored, extent) for scored, extent in zip(found, extents, strict=True)]
        return self.rpn.proposals(levels, clipped_to, picture.scales)

    def kept(
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
        own = boxes / picture.scales if rule.original else boxes
        if rule.regressed:
            deltas = self.deltas(trunk).reshape(-1, config.classes, 4)
            own = BoxCoder((10.0, 10.0, 5.0, 5.0)).decode(deltas, own[:, None])
            own = clip(own, picture.originals if rule.original else picture.sizes, 1)
        probabilities = jax.nn.softmax(logits, axis=-1)
        scores, confident = class_confidence(rule, own, probabilities, valid)
        order, there = select(rule, scores, valid)
        if rule.regressed:  # a region that is kept in no class has no box
            own = jnp.where((scores > 0)[:, None], own[jnp.arange(own.shape[0]), confident], 0.0)
        if not rule.original:
            own = own * jnp.tile((picture.originals / picture.sizes)[::-1], 2)
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
            boxes=taken(own),
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
        found = jax.lax.map(of_boxes, parts)
        features, trunk = (
            x.reshape(-1, x.shape[-1])[: boxes.shape[0]].astype(jnp.float32) for x in found
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
