"""Bottom-up attention's own .caffemodel, under the keys that detectron2's port of it has.

Layers as models/vg/ResNet-101/faster_rcnn_end2end_final/test.prototxt names them. Caffe's BatchNorm
keeps sums: mean and variance are its first two blobs over the third (batch_norm_layer.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.weights.formats.caffemodel import read_caffemodel
from mmqa_jax.weights.formats.safetensors import ArraySource, TensorSource

CAFFEMODEL = ".caffemodel"
# A norm is two layers, bn2a_branch1 and scale2a_branch1; blocks are a, b, c or a, b1, b2, ...
_BLOCK = re.compile(r"(res|bn|scale)([2-5])([a-z])(\d{0,4})_branch(1|2[abc])")
_PARTS = {"1": "shortcut", "2a": "conv1", "2b": "conv2", "2c": "conv3"}
_STEM = {"conv1": "res", "bn_conv1": "bn", "scale_conv1": "scale"}
_OTHERS = {
    "rpn_conv/3x3": "proposal_generator.rpn_head.conv",
    "rpn_cls_score": "proposal_generator.rpn_head.objectness_logits",
    "rpn_bbox_pred": "proposal_generator.rpn_head.anchor_deltas",
    "cls_score": "roi_heads.box_predictor.cls_score",
    "bbox_pred": "roi_heads.box_predictor.bbox_pred",
    "cls_embedding": "roi_heads.box_predictor.cls_embed",
    "fc_attr": "roi_heads.box_predictor.attr_linear1",
    "attr_score": "roi_heads.box_predictor.attr_linear2",
}
# Blobs of a layer, by their endings.
_ENDINGS = {
    "res": ("weight",),
    "bn": ("norm.running_mean", "norm.running_var"),
    "scale": ("norm.weight", "norm.bias"),
}


def open_caffemodel(path: Path) -> TensorSource:
    """The tensors of a .caffemodel by detectron2's keys; other layers keep their names."""
    arrays: dict[str, np.ndarray] = {}
    for layer, blobs in read_caffemodel(path).items():
        prefix, kind = _place(layer)
        if kind == "bn":
            blobs = _averaged(blobs, f"{path}, layer {layer!r}")
        endings = _ENDINGS.get(kind, ("weight", "bias")[: len(blobs)])
        if len(blobs) != len(endings):
            raise UserError(
                f"{path}, layer {layer!r}: has {len(blobs)} arrays, {len(endings)} were expected; "
                "give bottom-up attention's resnet101_faster_rcnn_final.caffemodel."
            )
        for ending, blob in zip(endings, blobs, strict=True):
            square = ending == "weight" and kind in ("res", "rpn")
            arrays[f"{prefix}.{ending}"] = blob if square else _without_ones(blob, ending)
    return ArraySource(arrays, str(path))


def _place(layer: str) -> tuple[str, str]:
    """Detectron2's prefix of a layer, and its kind: res, bn, scale, rpn or another."""
    if layer in _STEM:
        return "backbone.stem.conv1", _STEM[layer]
    found = _BLOCK.fullmatch(layer)
    if found is None:
        return _OTHERS.get(layer, layer), "rpn" if layer.startswith("rpn_") else "linear"
    kind, stage, letter, number, branch = found.groups()
    block = int(number) if number else ord(letter) - ord("a")
    trunk = "roi_heads.res5" if stage == "5" else f"backbone.res{stage}"
    return f"{trunk}.{block}.{_PARTS[branch]}", kind


def _averaged(blobs: Sequence[np.ndarray], place: str) -> list[np.ndarray]:
    """Mean and variance of a BatchNorm's sums; a count of 0 makes both 0, as in Caffe."""
    if len(blobs) != 3 or blobs[2].size != 1:
        raise UserError(
            f"{place}: has {len(blobs)} arrays, sums of mean and variance and their count were "
            "expected; give the file that Caffe wrote."
        )
    count = blobs[2].reshape(())
    factor = np.float32(0) if count == 0 else np.float32(1) / count
    return [blobs[0] * factor, blobs[1] * factor]


def _without_ones(blob: np.ndarray, ending: str) -> np.ndarray:
    """A vector, or a matrix, that old files have with four sides."""
    rank = 2 if ending == "weight" else 1
    if blob.ndim > rank and set(blob.shape[:-rank]) == {1}:
        return blob.reshape(blob.shape[-rank:])
    return blob
