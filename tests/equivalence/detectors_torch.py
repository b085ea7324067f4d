"""The three detectors in plain torch, of one picture at its own size, under published keys.

Written from the originals; tensors are drawn when they are first asked for.
"""

import dataclasses

import numpy as np
import torch
import torch.nn.functional as F

from mmqa_jax.models.detection.boxes import cell_anchors
from mmqa_jax.models.detection.faster_rcnn import DetectorConfig
from tests.equivalence.detection_torch import clip, decode, nms, roi_align, roi_pool

BRANCH = {"conv1": "branch2a", "conv2": "branch2b", "conv3": "branch2c", "shortcut": "branch1"}
PARTS = {"conv1": "bn1", "conv2": "bn2", "conv3": "bn3"}


@dataclasses.dataclass
class Found:
    boxes: np.ndarray
    features: np.ndarray
    scores: np.ndarray
    labels: np.ndarray
    logits: np.ndarray
    attributes: np.ndarray | None


class TorchDetector:
    """`kind`: detectron (VLP), maskrcnn (VinVL) or detectron2 (bottom-up attention)."""

    def __init__(self, kind: str, config: DetectorConfig, seed: int = 0):
        self.kind, self.config = kind, config
        self.tensors: dict[str, torch.Tensor] = {}
        self.generator = torch.Generator().manual_seed(seed)

    # Tensors.

    def tensor(self, key: str, *shape: int, std: float = 1.0, mean: float = 0.0):
        if key not in self.tensors:
            self.tensors[key] = mean + std * torch.randn(shape, generator=self.generator)
        assert self.tensors[key].shape == shape, key
        return self.tensors[key]

    def conv(
        self, key: str, x, out: int, size: int, *, bias: str = "", gain: float = 2.0, **options
    ):
        fan_in = x.shape[1] // options.get("groups", 1) * size**2
        weight = self.tensor(key, out, fan_in // size**2, size, size, std=(gain / fan_in) ** 0.5)
        added = self.tensor(bias, out, std=0.1) if bias else None
        return F.conv2d(x, weight, added, **options)

    def linear(self, key: str, x, out: int, gain: float = 2.0):
        w, b = ("_w", "_b") if self.kind == "detectron" else (".weight", ".bias")
        weight = self.tensor(key + w, out, x.shape[-1], std=(gain / x.shape[-1]) ** 0.5)
        return F.linear(x, weight, self.tensor(key + b, out, std=0.1))

    def norm(self, key: str, x, mean: float = 1.0):
        size, shape = x.shape[1], (1, -1, 1, 1)
        if self.kind == "detectron":
            scale = self.tensor(f"{key}_s", size, std=0.2, mean=mean)
            shift = self.tensor(f"{key}_b", size, std=0.2)
        else:
            if f"{key}.running_var" not in self.tensors:
                variance = 0.5 + torch.rand(size, generator=self.generator)
                self.tensors[f"{key}.running_var"] = variance
            scale = self.tensor(f"{key}.weight", size, std=0.2, mean=mean)
            eps = 0.0 if self.kind == "maskrcnn" else 1e-5
            scale = scale * (self.tensors[f"{key}.running_var"] + eps).rsqrt()
            shift = self.tensor(f"{key}.bias", size, std=0.2)
            shift = shift - self.tensor(f"{key}.running_mean", size, std=0.3) * scale
        return x * scale.view(shape) + shift.view(shape)

    def block_keys(self, stage: int, block: int, part: str) -> tuple[str, str]:
        if self.kind == "detectron":
            name = f"res{stage + 2}_{block}_{BRANCH[part]}"
            return f"{name}_w", f"{name}_bn"
        if self.kind == "maskrcnn":
            head = "roi_heads.box.feature_extractor.head."
            prefix = (head if stage == 3 else "backbone.body.") + f"layer{stage + 1}.{block}."
            if part == "shortcut":
                return f"{prefix}downsample.0.weight", f"{prefix}downsample.1"
            return f"{prefix}{part}.weight", prefix + PARTS[part]
        prefix = "roi_heads.res5." if stage == 3 else f"backbone.res{stage + 2}."
        return f"{prefix}{block}.{part}.weight", f"{prefix}{block}.{part}.norm"

    # Network.

    def stage(self, x, stage: int):
        c = self.config.backbone
        out, inner = c.width * 2**stage, c.groups * c.width_per_group * 2**stage
        dilation = c.dilation if stage == 3 else 1
        for block in range(c.blocks[stage]):
            stride = 2 if block == 0 and stage > 0 and dilation == 1 else 1
            first, second = (stride, 1) if c.stride_in_1x1 else (1, stride)
            keys = {part: self.block_keys(stage, block, part) for part in BRANCH}

            def step(part, x, out, size, mean=1.0, *, keys=keys, **options):
                return self.norm(
                    keys[part][1], self.conv(keys[part][0], x, out, size, **options), mean
                )

            y = step("conv1", x, inner, 1, stride=first).relu()
            y = step(
                "conv2",
                y,
                inner,
                3,
                stride=second,
                padding=dilation,
                dilation=dilation,
                groups=c.groups,
            ).relu()
            y = step("conv3", y, out, 1, mean=0.4)
            x = step("shortcut", x, out, 1, mean=0.5, stride=stride) if block == 0 else x
            x = (x + y).relu()
        return x

    def maps(self, pixels: np.ndarray):
        """pixels [H, W, 3] -> maps [1, C, h, w] that proposals are made of."""
        c, divisor = self.config, self.config.divisor
        height, width = pixels.shape[:2]
        x = torch.from_numpy(pixels).permute(2, 0, 1)[None]
        x = F.pad(x, (0, -width % divisor, 0, -height % divisor))
        stem = {
            "detectron": ("conv1_w", "res_conv1_bn"),
            "maskrcnn": ("backbone.body.stem.conv1.weight", "backbone.body.stem.bn1"),
            "detectron2": ("backbone.stem.conv1.weight", "backbone.stem.conv1.norm"),
        }[self.kind]
        x = self.norm(
            stem[1], self.conv(stem[0], x, c.backbone.stem, 7, stride=2, padding=3)
        ).relu()
        if self.kind == "detectron2":
            x = F.max_pool2d(x, 3, 2, 0, ceil_mode=True)
        else:
            x = F.max_pool2d(x, 3, 2, 1)
        if self.kind != "detectron":
            for stage in range(3):
                x = self.stage(x, stage)
            return [x]
        found = []
        for stage in range(4):
            x = self.stage(x, stage)
            found.append(x)
        names = [f"res{s + 2}_{c.backbone.blocks[s] - 1}_sum" for s in range(4)]
        summed = [None] * 4
        for s in (3, 2, 1, 0):
            key = f"fpn_inner_{names[s]}" + ("" if s == 3 else "_lateral")
            summed[s] = self.conv(f"{key}_w", found[s], c.pyramid, 1, bias=f"{key}_b", gain=1.0)
            if s < 3:
                summed[s] = summed[s] + F.interpolate(summed[s + 1], scale_factor=2)
        levels = [
            self.conv(f"fpn_{n}_w", x, c.pyramid, 3, bias=f"fpn_{n}_b", gain=1.0, padding=1)
            for n, x in zip(names, summed, strict=True)
        ]
        return [*levels, F.max_pool2d(levels[-1], 1, 2)]

    def proposals(self, levels, clip_to: tuple[int, int], scale: float):
        c = self.config.rpn
        names = {
            "detectron": [f"{n}_fpn2" for n in ("conv_rpn", "rpn_cls_logits", "rpn_bbox_pred")],
            "maskrcnn": [f"rpn.head.{n}" for n in ("conv", "cls_logits", "bbox_pred")],
            "detectron2": [
                f"proposal_generator.rpn_head.{n}"
                for n in ("conv", "objectness_logits", "anchor_deltas")
            ],
        }[self.kind]
        w, b = ("_w", "_b") if self.kind == "detectron" else (".weight", ".bias")
        boxes, scores = [], []
        for index, x in enumerate(levels):
            hidden = self.conv(names[0] + w, x, c.hidden, 3, bias=names[0] + b, padding=1).relu()
            anchors = c.anchors * (2 if c.paired else 1)
            logits = self.conv(names[1] + w, hidden, anchors, 1, bias=names[1] + b, gain=4.0)
            deltas = self.conv(names[2] + w, hidden, 4 * c.anchors, 1, bias=names[2] + b, gain=0.1)
            if c.paired:  # the first half is for nothing
                probability = logits.view(2, c.anchors, *x.shape[2:]).softmax(0)[1]
            else:
                probability = logits.sigmoid()[0]
            score = probability.permute(1, 2, 0).reshape(-1).numpy()
            delta = deltas[0].permute(1, 2, 0).reshape(-1, 4)
            stride = c.strides[index]
            cell = cell_anchors(stride, c.sizes[index], c.ratios)
            rows, columns = np.indices(x.shape[2:])
            shift = np.stack([columns, rows, columns, rows], -1).reshape(-1, 1, 4) * stride
            anchor = torch.from_numpy((cell + shift).reshape(-1, 4).astype("f4"))
            box = decode(delta, anchor, (1, 1, 1, 1), end_pixel=c.end_pixel, bounded=c.bounded)
            box = clip(box, *clip_to).numpy()
            sides = box[:, 2:] - box[:, :2] + 1
            fits = (sides >= c.smallest * np.float32(scale)).all(axis=1)
            order = np.argsort(-score, kind="stable")
            if c.small_first:
                order = order[fits[order]][: c.before]
            else:
                order = order[: c.before]
                order = order[fits[order]]
            kept = nms(box[order], score[order], c.threshold, inclusive=c.inclusive, last_pixel=1)
            boxes.append(box[order][kept[: c.after]])
            scores.append(score[order][kept[: c.after]])
        boxes, scores = np.concatenate(boxes), np.concatenate(scores)
        if len(levels) > 1:
            boxes = boxes[np.argsort(-scores, kind="stable")[: c.after]]
        return boxes

    def head(self, levels, boxes: np.ndarray):
        """Features, and what classes are told by."""
        c = self.config
        if self.kind == "detectron2":
            pooled = roi_pool(levels[0][0], boxes, c.bins, 1 / 16)
        elif self.kind == "maskrcnn":
            pooled = roi_align(levels[0][0], boxes, c.bins, 1 / 16, 0, aligned=False)
        else:
            area = np.prod(boxes[:, 2:] - boxes[:, :2] + 1, axis=1)
            of = np.clip(np.floor(4 + np.log2(np.sqrt(area) / 224 + 1e-6)), 2, 5).astype(int)
            pooled = torch.zeros(len(boxes), c.pyramid, c.bins, c.bins)
            for level in set(of):
                plane = levels[level - 2][0]
                part = roi_align(plane, boxes[of == level], c.bins, 1 / 2**level, 2, aligned=False)
                pooled[of == level] = part
            fc6 = self.linear("fc6", pooled.flatten(1), c.head).relu()
            return fc6, self.linear("fc7", fc6, c.head).relu()
        x = self.stage(pooled, 3).mean(dim=(2, 3))
        return x, x

    def __call__(self, pixels: np.ndarray, original: tuple[int, int], scale: float) -> Found:
        with torch.no_grad():
            return self._detect(pixels, original, scale)

    def _detect(self, pixels: np.ndarray, original: tuple[int, int], scale: float) -> Found:
        c = self.config
        size = pixels.shape[:2]
        levels = self.maps(pixels)
        padded = tuple(-(-n // c.divisor) * c.divisor for n in size)
        rois = self.proposals(levels, padded, scale)
        features, trunk = self.head(levels, rois)
        box = {"detectron": "", "maskrcnn": "roi_heads.box.predictor."}
        prefix = box.get(self.kind, "roi_heads.box_predictor.")
        logits = self.linear(f"{prefix}cls_score", trunk, c.classes, gain=3.0)
        deltas = self.linear(f"{prefix}bbox_pred", trunk, 4 * c.classes, gain=0.5)
        probabilities = logits.softmax(-1).numpy()
        rule = c.rule
        if self.kind == "maskrcnn":
            index, scores, labels = vinvl_regions(rois, probabilities, rule)
            ratio = np.array([original[1] / size[1], original[0] / size[0]] * 2, "f4")
            boxes = rois[index] * ratio
        elif self.kind == "detectron2":
            unscaled = rois / np.float32(scale)
            index, scores = bottom_up_regions(unscaled, probabilities, rule)
            boxes, labels = unscaled[index], probabilities[index][:, 1:].argmax(1) + 1
        else:
            unscaled = torch.from_numpy(rois / np.float32(scale))
            per_class = decode(
                deltas.view(len(rois), -1, 4),
                unscaled[:, None],
                (10, 10, 5, 5),
                end_pixel=1,
                bounded=True,
            )
            per_class = clip(per_class, *original).numpy()
            index, scores, labels, boxes = vlp_regions(per_class, probabilities, rule)
        attributes = None
        if c.attributes:
            names = {
                "maskrcnn": ("cls_embedding", "fc_attr", "attr_score"),
                "detectron2": ("cls_embed", "attr_linear1", "attr_linear2"),
            }[self.kind]
            prefix = "roi_heads.attribute.predictor." if self.kind == "maskrcnn" else prefix
            table = self.tensor(
                f"{prefix}{names[0]}.weight", c.attribute_labels, c.attribute_embedding
            )
            told_by = labels if self.kind == "maskrcnn" else logits[index].argmax(1).numpy()
            joined = torch.cat([features[index], table[told_by]], dim=1)
            hidden = self.linear(prefix + names[1], joined, c.attribute_hidden).relu()
            attributes = self.linear(prefix + names[2], hidden, c.attributes).numpy()
        return Found(
            boxes, features[index].numpy(), scores, labels, logits[index].numpy(), attributes
        )


# Which regions are kept, each as its original has it.


def bottom_up_regions(boxes, probabilities, rule):
    """bottom-up-attention tools/generate_tsv.py, get_detections_from_im."""
    max_conf = np.zeros(len(boxes), "f4")
    for cls in range(1, probabilities.shape[1]):
        scores = probabilities[:, cls]
        keep = nms(boxes, scores, rule.threshold, inclusive=True, last_pixel=1)
        max_conf[keep] = np.where(scores[keep] > max_conf[keep], scores[keep], max_conf[keep])
    kept = np.where(max_conf >= rule.confidence)[0]
    if len(kept) < rule.fewest:
        kept = np.argsort(-max_conf, kind="stable")[: rule.fewest]
    elif len(kept) > rule.most:
        kept = np.argsort(-max_conf, kind="stable")[: rule.most]
    return kept, max_conf[kept]


def vlp_regions(per_class, probabilities, rule):
    """detectron-vlp tools/extract_features.py, get_detections_from_im."""
    count = len(probabilities)
    max_conf, max_cls = np.zeros(count, "f4"), np.zeros(count, int)
    max_box = np.zeros((count, 4), "f4")
    for cls in range(1, probabilities.shape[1]):
        scores = probabilities[:, cls]
        keep = np.array(
            nms(per_class[:, cls], scores, rule.threshold, inclusive=True, last_pixel=1), int
        )
        better = keep[scores[keep] > max_conf[keep]]
        max_conf[better], max_cls[better] = scores[better], cls
        max_box[better] = per_class[better, cls]
    kept = np.where(max_conf > rule.confidence)[0]
    if len(kept) < rule.fewest:
        kept = np.argsort(-max_conf, kind="stable")[: rule.fewest]
    elif len(kept) > rule.most:
        kept = np.argsort(-max_conf, kind="stable")[: rule.most]
    return kept, max_conf[kept], max_cls[kept], max_box[kept]


def vinvl_regions(boxes, probabilities, rule):
    """scene_graph_benchmark roi_heads/box_head/inference.py, filter_results_peter."""
    mask = np.zeros_like(probabilities)
    for cls in range(1, probabilities.shape[1]):
        kept = nms(boxes, probabilities[:, cls], rule.threshold, inclusive=False, last_pixel=1)
        mask[kept, cls] = 1
    scores, labels = (mask * probabilities).max(1), (mask * probabilities).argmax(1)
    there = np.flatnonzero(scores)
    order = there[np.argsort(-scores[there], kind="stable")]
    count = int((scores[there] >= rule.confidence).sum())
    order = order[: min(max(count, rule.fewest), rule.most)]
    return order, scores[order], labels[order]
