"""Checkpoints of detectors: Detectron (VLP), maskrcnn-benchmark (VinVL), detectron2 (bottom-up).

Each project names the same bottlenecks in its own way, and counts the first block of a stage with
the others; `_Layout` says how. A pyramid is Detectron's, Caffe's first pool bottom-up attention's,
the rest maskrcnn-benchmark's: so a config shows under which keys it is published.
"""

import dataclasses
import re
from pathlib import Path

import numpy as np
from flax import nnx

from mmqa_jax.core.array_pickle import load_arrays
from mmqa_jax.core.errors import UserError
from mmqa_jax.models.detection.faster_rcnn import (
    DetectorConfig,
    bottom_up_r101,
    vinvl_x152c4,
    vlp_x101,
)
from mmqa_jax.weights import keymap, layouts
from mmqa_jax.weights.formats.safetensors import ArraySource, TensorSource

_STATISTICS = {
    "weight": "scale",
    "bias": "bias",
    "running_mean": "mean",
    "running_var": "variance",
}
_ATTRIBUTE_CONV = "roi_heads.attribute.feature_extractor.head."


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How a project names its tensors."""

    stem: tuple[str, str]  # of the first convolution, and of its norm
    blocks: str  # the prefix of a bottleneck, with `{stage}` (of res2: 0) and `{block}`
    first_stage: int  # what the project calls res2
    head_blocks: str  # that of res5 where it is the head of regions
    # Our conv1, conv2, conv3 and shortcut -> the convolution, and its norm.
    parts: dict[str, tuple[str, str]]
    weight: str  # ending of a convolution
    norm: dict[str, str]  # ending of a norm -> ours
    # score, hidden, rows: keys whose shapes show the classes, the RPN's channels and the number of
    # class embeddings.
    score: str
    hidden: str
    objectness: str
    rows: str
    attributes: str
    ignore: tuple[str, ...]  # see KeyMap


_DETECTRON = _Layout(
    stem=("conv1", "res_conv1_bn"),
    blocks="res{stage}_{block}_",
    first_stage=2,
    head_blocks="",
    parts={
        "conv1": ("branch2a", "branch2a_bn"),
        "conv2": ("branch2b", "branch2b_bn"),
        "conv3": ("branch2c", "branch2c_bn"),
        "shortcut": ("branch1", "branch1_bn"),
    },
    weight="_w",
    norm={"_s": "scale", "_b": "bias"},
    score="cls_score_w",
    hidden="conv_rpn_fpn2_w",
    objectness="rpn_cls_logits_fpn2_w",
    rows="",
    attributes="",
    ignore=(r"_momentum$", r"^lr$", r"^weight_order$"),
)
_MASKRCNN = _Layout(
    stem=("backbone.body.stem.conv1", "backbone.body.stem.bn1"),
    blocks="backbone.body.layer{stage}.{block}.",
    first_stage=1,
    head_blocks="roi_heads.box.feature_extractor.head.layer4.{block}.",
    parts={
        "conv1": ("conv1", "bn1"),
        "conv2": ("conv2", "bn2"),
        "conv3": ("conv3", "bn3"),
        "shortcut": ("downsample.0", "downsample.1"),
    },
    weight=".weight",
    norm={f".{theirs}": ours for theirs, ours in _STATISTICS.items()},
    score="roi_heads.box.predictor.cls_score.weight",
    hidden="rpn.head.conv.weight",
    objectness="rpn.head.cls_logits.weight",
    rows="roi_heads.attribute.predictor.cls_embedding.weight",
    attributes="roi_heads.attribute.predictor.attr_score.weight",
    ignore=(r"^rpn\.anchor_generator\.",),
)
_DETECTRON2 = _Layout(
    stem=("backbone.stem.conv1", "backbone.stem.conv1.norm"),
    blocks="backbone.res{stage}.{block}.",
    first_stage=2,
    head_blocks="roi_heads.res5.{block}.",
    parts={name: (name, f"{name}.norm") for name in ("conv1", "conv2", "conv3", "shortcut")},
    weight=".weight",
    norm={f".{theirs}": ours for theirs, ours in _STATISTICS.items()},
    score="roi_heads.box_predictor.cls_score.weight",
    hidden="proposal_generator.rpn_head.conv.weight",
    objectness="proposal_generator.rpn_head.objectness_logits.weight",
    rows="roi_heads.box_predictor.cls_embed.weight",
    attributes="roi_heads.box_predictor.attr_linear2.weight",
    ignore=(
        r"^pixel_(mean|std)$",
        r"^proposal_generator\.anchor_generator\.",
        r"\.num_batches_tracked$",
    ),
)


def open_detector(path: Path) -> layouts.Checkpoint:
    """A detector of Detectron, maskrcnn-benchmark (VinVL) or detectron2 (bottom-up)."""
    if path.suffix == ".caffemodel":
        raise UserError(
            f"{path}: Caffe's files are not read; give detectron2's file of the same weights, "
            "bua-caffe-frcn-r101_with_attributes.pth of MILVLG/bottom-up-attention.pytorch."
        )
    source = open_detector_source(path)
    config = layouts.read_own_config(DetectorConfig, path) or detector_config(source)
    return layouts.Checkpoint(config, detector_key_map, source, _name(config))


def publish_detector(config: DetectorConfig, state: nnx.State) -> layouts.Published:
    """The project's keys (see the module)."""
    source = keymap.untied_source(state, detector_key_map(config))
    return layouts.Published(
        layouts.with_prefixes(source, _prefixes(config)), layouts.own_config("detector", config)
    )


def detector_config(source: TensorSource) -> DetectorConfig:
    """The preset of a checkpoint's project, with the sizes that its shapes determine."""
    shapes = layouts.shapes_of(source, [(r"^module\.", "")])
    if _DETECTRON.stem[0] + "_w" in shapes:
        layout, preset = _DETECTRON, vlp_x101()
        needed = ["fc6_w", "fc7_w", "fpn_inner_res5_2_sum_w"]
    elif _MASKRCNN.stem[0] + ".weight" in shapes:
        layout, preset, needed = _MASKRCNN, vinvl_x152c4(), []
    else:
        layout, preset, needed = _DETECTRON2, bottom_up_r101(), []
    stem = layout.stem[0] + layout.weight
    needed += [stem, layout.score, layout.hidden, layout.objectness]
    needed += filter(None, (layout.rows, layout.attributes))
    blocks = tuple(_count(shapes, layout, stage, preset) for stage in range(4))
    if layout is _DETECTRON and blocks[3]:
        needed[2] = f"fpn_inner_res5_{blocks[3] - 1}_sum_w"
    layouts.require_keys(
        shapes, needed, source, "VLP's detector, VinVL's or bottom-up attention's (detectron2)"
    )
    if min(blocks) < 1:
        raise UserError(
            f"{source.name}: lacks bottlenecks of res{blocks.index(0) + 2}; give the whole "
            "checkpoint of a detector."
        )
    first = layout.blocks.format(stage=layout.first_stage, block=0)
    inner = first + layout.parts["conv2"][0] + layout.weight
    outer = first + layout.parts["conv3"][0] + layout.weight
    layouts.require_keys(shapes, [inner, outer], source, "a detector with bottlenecks")
    per_group = shapes[inner][1]
    backbone = dataclasses.replace(
        preset.backbone,
        blocks=blocks,
        stem=shapes[stem][0],
        width=shapes[outer][0],
        groups=shapes[inner][0] // per_group,
        width_per_group=per_group,
    )
    rpn = dataclasses.replace(preset.rpn, hidden=shapes[layout.hidden][0])
    scores = rpn.anchors * (2 if rpn.paired else 1)
    if shapes[layout.objectness][0] != scores:
        raise UserError(
            f"{source.name}: {layout.objectness} has {shapes[layout.objectness][0]} scores of a "
            f"cell, the anchors of this detector {scores}; put a config.json with its anchors "
            "beside it (`mmqa convert --export=hf` writes one)."
        )
    sizes = {"classes": shapes[layout.score][0]}
    if layout is _DETECTRON:
        sizes |= {"pyramid": shapes[needed[2]][0], "head": shapes["fc6_w"][0]}
    else:
        rows, embedding = shapes[layout.rows]
        attributes, hidden = shapes[layout.attributes]
        sizes |= {
            "attributes": attributes,
            "attribute_labels": rows,
            "attribute_embedding": embedding,
            "attribute_hidden": hidden,
        }
    return dataclasses.replace(preset, backbone=backbone, rpn=rpn, **sizes)


def detector_key_map(config: DetectorConfig) -> keymap.KeyMap:
    """Key map of the project that a config is of."""
    layout = _layout(config)
    rules = _conv_rules(layout, *layout.stem, "backbone/conv1", "backbone/bn1")
    for stage in range(4):
        path = f"backbone/stages/{stage}" if stage < 3 or config.pyramid else "head/res5"
        for part, (conv, norm) in layout.parts.items():
            ours = {"shortcut": "shortcut_bn"}.get(part, part.replace("conv", "bn"))
            names = (f"stage{stage}.first.{conv}", f"stage{stage}.first.{norm}")
            rules += _conv_rules(layout, *names, f"{path}/first/{part}", f"{path}/first/{ours}")
            if part != "shortcut":
                names = tuple(name.replace("first", "rest.{layer}", 1) for name in names)
                rules += _conv_rules(layout, *names, f"{path}/rest/{part}", f"{path}/rest/{ours}")
    tied: list[tuple[str, str]] = []
    if layout is _DETECTRON:
        rules += _pyramid_rules(config)
    elif layout is _MASKRCNN:
        rules += _maskrcnn_rules()
        # The attribute head reads the same res5, and the file has it twice.
        for block in range(config.backbone.blocks[3]):
            theirs = f"{_ATTRIBUTE_CONV}layer4.{block}."
            for part, (conv, norm) in layout.parts.items():
                if part == "shortcut" and block:
                    continue
                endings = [conv + layout.weight, *(norm + ending for ending in layout.norm)]
                ours = f"stage3.rest.{block - 1}." if block else "stage3.first."
                tied += [(theirs + ending, ours + ending) for ending in endings]
    else:
        rules += _detectron2_rules()
    return keymap.KeyMap(
        rules=rules,
        rename=[(r"^module\.", ""), *layouts.renames(_prefixes(config))],
        ignore=layout.ignore,
        tied=tied,
    )


def _layout(config: DetectorConfig) -> _Layout:
    if config.pyramid:
        return _DETECTRON
    return _DETECTRON2 if config.backbone.stem_pool == "caffe" else _MASKRCNN


def _name(config: DetectorConfig) -> str:
    names = ((_DETECTRON, "detectron"), (_MASKRCNN, "maskrcnn-benchmark"))
    return next((name for layout, name in names if layout is _layout(config)), "detectron2")


def _block(layout: _Layout, pyramid: int, stage: int) -> str:
    """Prefix of a stage's bottlenecks, with `{block}`."""
    if stage == 3 and not pyramid:
        return layout.head_blocks
    return layout.blocks.replace("{stage}", str(layout.first_stage + stage))


def _count(shapes: layouts.Shapes, layout: _Layout, stage: int, preset: DetectorConfig) -> int:
    """How many bottlenecks of a stage a file has."""
    prefix = re.escape(_block(layout, preset.pyramid, stage)).replace(r"\{block\}", r"(\d{1,4})")
    matches = [re.match(prefix, key) for key in shapes]
    return max((int(match[1]) + 1 for match in matches if match), default=0)


def _prefixes(config: DetectorConfig) -> dict[str, str]:
    """Block 0 of a stage is separate, block n is slice n - 1 of the stack."""
    layout, table = _layout(config), {}
    for stage, blocks in enumerate(config.backbone.blocks):
        for block in range(blocks):
            ours = f"stage{stage}.rest.{block - 1}." if block else f"stage{stage}.first."
            prefix = _block(layout, config.pyramid, stage)
            table[prefix.replace("{block}", str(block))] = ours
    return table


def _conv_rules(
    layout: _Layout, conv: str, norm: str, path: str, norm_path: str
) -> list[keymap.Rule]:
    rules = [keymap.Rule(conv + layout.weight, f"{path}/kernel", keymap.CONV)]
    return rules + [
        keymap.Rule(norm + ending, f"{norm_path}/{ours}") for ending, ours in layout.norm.items()
    ]


def _with_bias(weight: str, bias: str, path: str, transform: keymap.Transform) -> list[keymap.Rule]:
    return [keymap.Rule(weight, f"{path}/kernel", transform), keymap.Rule(bias, f"{path}/bias")]


def _pyramid_rules(config: DetectorConfig) -> list[keymap.Rule]:
    """Detectron's: the pyramid, its RPN, and the two linears."""
    rules = []
    for stage, blocks in enumerate(config.backbone.blocks):
        name = f"res{stage + 2}_{blocks - 1}_sum"
        inner = f"fpn_inner_{name}" + ("" if stage == 3 else "_lateral")
        rules += _with_bias(f"{inner}_w", f"{inner}_b", f"fpn/lateral/{stage}", keymap.CONV)
        rules += _with_bias(f"fpn_{name}_w", f"fpn_{name}_b", f"fpn/output/{stage}", keymap.CONV)
    bins, channels = config.bins, config.pyramid

    # A pooled region is flattened channel by channel there, cell by cell here.
    fc6 = keymap.Transform(
        lambda x: x.reshape(-1, channels, bins, bins).transpose(2, 3, 1, 0).reshape(-1, x.shape[0]),
        lambda x: x.reshape(bins, bins, channels, -1).transpose(3, 2, 0, 1).reshape(x.shape[1], -1),
    )
    for theirs, ours, transform in (
        ("conv_rpn_fpn2", "rpn/conv", keymap.CONV),
        ("rpn_cls_logits_fpn2", "rpn/objectness", keymap.CONV_1X1),
        ("rpn_bbox_pred_fpn2", "rpn/deltas", keymap.CONV_1X1),
        ("fc6", "head/fc6", fc6),
        ("fc7", "head/fc7", keymap.TRANSPOSE),
        ("cls_score", "score", keymap.TRANSPOSE),
        ("bbox_pred", "deltas", keymap.TRANSPOSE),
    ):
        rules += _with_bias(f"{theirs}_w", f"{theirs}_b", ours, transform)
    return rules


def _rpn_rules(conv: str, scores: str, deltas: str) -> list[keymap.Rule]:
    rules = []
    names = (
        (conv, "conv", keymap.CONV),
        (scores, "objectness", keymap.CONV_1X1),
        (deltas, "deltas", keymap.CONV_1X1),
    )
    for theirs, ours, transform in names:
        rules += _with_bias(f"{theirs}.weight", f"{theirs}.bias", f"rpn/{ours}", transform)
    return rules


def _maskrcnn_rules() -> list[keymap.Rule]:
    attribute = "roi_heads.attribute.predictor."
    return [
        *_rpn_rules("rpn.head.conv", "rpn.head.cls_logits", "rpn.head.bbox_pred"),
        *keymap.linear_rules("roi_heads.box.predictor.cls_score", "score"),
        *keymap.linear_rules("roi_heads.box.predictor.bbox_pred", "deltas"),
        keymap.Rule(f"{attribute}cls_embedding.weight", "attributes/classes/table"),
        *keymap.linear_rules(f"{attribute}fc_attr", "attributes/hidden"),
        *keymap.linear_rules(f"{attribute}attr_score", "attributes/score"),
    ]


def _detectron2_rules() -> list[keymap.Rule]:
    rpn, box = "proposal_generator.rpn_head.", "roi_heads.box_predictor."
    return [
        *_rpn_rules(f"{rpn}conv", f"{rpn}objectness_logits", f"{rpn}anchor_deltas"),
        *keymap.linear_rules(f"{box}cls_score", "score"),
        *keymap.linear_rules(f"{box}bbox_pred", "deltas"),
        keymap.Rule(f"{box}cls_embed.weight", "attributes/classes/table"),
        *keymap.linear_rules(f"{box}attr_linear1", "attributes/hidden"),
        *keymap.linear_rules(f"{box}attr_linear2", "attributes/score"),
    ]


# Pickles of detectors' weights: Detectron's and detectron2's, read as arrays only.


# What torch.save's format before 1.6 begins with: a pickle of a number of ten bytes.
_LEGACY_TORCH = b"\x8a\x0a"
_HELD_IN = ("blobs", "model")  # by Detectron, and by detectron2


def open_detector_source(path: Path) -> TensorSource:
    """The tensors of a detector's checkpoint.

    It is a pickle of arrays by name, alone or as Detectron's `blobs` or detectron2's `model`, or
    what `open_source` reads.
    """
    if not path.is_file() or layouts.read_magic(path) != "torch" or _by_torch(path):
        return layouts.open_source(path)
    content = load_arrays(path, encoding="latin1")  # Detectron runs on Python 2
    for key in _HELD_IN:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    arrays = content.items() if isinstance(content, dict) else ()
    tensors = {
        key: value
        for key, value in arrays
        if isinstance(key, str) and isinstance(value, np.ndarray) and value.dtype.kind == "f"
    }
    if not tensors:
        raise UserError(
            f"{path}: holds no arrays by name, neither as `blobs` nor as `model`; give Detectron's "
            "or detectron2's file of weights."
        )
    return ArraySource(tensors, str(path))


def _by_torch(path: Path) -> bool:
    """Whether torch wrote it: a zip archive, or its older format."""
    with open(path, "rb") as file:
        head = file.read(4)
    return head.startswith(b"PK") or head[2:] == _LEGACY_TORCH
