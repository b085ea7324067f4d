"""torchvision's Faster R-CNN, in the sizes and with the weights of our detectors.

torchvision is no extra of this package and may be absent; see `importable`.
"""

from __future__ import annotations

import functools
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mmqa_jax.core.errors import RunError
from mmqa_jax.models.detection.faster_rcnn import DetectorConfig

# What torchvision can build: strides in 3 x 3 convolutions, ROIAlign, no dilation.
KINDS = ("vlp_x101", "vinvl_x152c4")

_BOX = "roi_heads.box_predictor."
_BLOCK_PARTS = {"branch2a": "1", "branch2b": "2", "branch2c": "3"}
# VLP's keys (Detectron) and VinVL's (maskrcnn-benchmark) -> torchvision's.
_RENAMES = (
    (r"^conv1_w$", "backbone.body.conv1.weight"),
    (r"^res_conv1_bn_([sb])$", r"backbone.body.bn1.\1"),
    (r"^fpn_inner_res(\d)_\d+_sum(?:_lateral)?_([wb])$", r"backbone.fpn.inner_blocks.\1.0.\2"),
    (r"^fpn_res(\d)_\d+_sum_([wb])$", r"backbone.fpn.layer_blocks.\1.0.\2"),
    (r"^conv_rpn_fpn2_([wb])$", r"rpn.head.conv.0.0.\1"),
    (r"^rpn_(cls_logits|bbox_pred)_fpn2_([wb])$", r"rpn.head.\1.\2"),
    (r"^(fc[67])_([wb])$", r"roi_heads.box_head.\1.\2"),
    (r"^(cls_score|bbox_pred)_([wb])$", rf"{_BOX}\1.\2"),
    (r"^backbone\.body\.stem\.", "backbone."),
    (
        r"^backbone\.body\.(layer\d\.)(?=.*\.(weight|bias|running_mean|running_var)$)",
        r"backbone.\1",
    ),
    (r"^rpn\.head\.conv\.(weight|bias)$", r"rpn.head.conv.0.0.\1"),
    (r"^roi_heads\.box\.feature_extractor\.head\.", "roi_heads.box_head."),
    (r"^roi_heads\.box\.predictor\.", _BOX),
)


def importable() -> bool:
    """Whether torchvision is there, with its operators for the PyTorch that is."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):  # the latter without the operators
        return False
    return True


def torchvision_detector(
    config: DetectorConfig, tensors: Mapping[str, torch.Tensor], size: tuple[int, int]
) -> nn.Module:
    """The detector for pictures [3, H, W] that are prepared as for ours.

    It suppresses boxes within all classes, as the originals do: torchvision's default is to look
    at probabilities above .05 alone.

    Args:
      config: of a detector of KINDS.
      tensors: under the published keys; attributes are left out, torchvision has none.
      size: height and width of the pictures.
    """
    from torchvision.models.detection import FasterRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
    from torchvision.models.detection.rpn import RPNHead
    from torchvision.ops import MultiScaleRoIAlign

    rpn, rule = config.rpn, config.rule
    anchors = AnchorGenerator(rpn.sizes, (rpn.ratios,) * len(rpn.sizes))
    backbone, head = _pyramid(config) if config.pyramid else _single_map(config)
    levels = [str(level) for level in range(4 if config.pyramid else 1)]
    model = FasterRCNN(
        backbone,
        min_size=min(size),
        max_size=max(size),
        image_mean=[0.0] * 3,
        image_std=[1.0] * 3,
        rpn_anchor_generator=anchors,
        rpn_head=RPNHead(backbone.out_channels, rpn.anchors),
        rpn_pre_nms_top_n_test=rpn.before,
        rpn_post_nms_top_n_test=rpn.after,
        rpn_nms_thresh=rpn.threshold,
        box_roi_pool=MultiScaleRoIAlign(levels, config.bins, config.samples),
        box_head=head,
        box_predictor=FastRCNNPredictor(config.features, config.classes),
        box_score_thresh=0.0,
        box_nms_thresh=rule.threshold,
        box_detections_per_img=rule.most,
    ).eval()
    renamed = {_renamed(key): value for key, value in tensors.items() if ".attribute." not in key}
    missing, unexpected = model.load_state_dict(renamed, strict=False)
    missing = [key for key in missing if "running_" not in key]  # Detectron's norms have none
    if missing or unexpected:
        raise RunError(f"torchvision's detector: lacks {missing}, does not know {unexpected}.")
    return model


def _renamed(key: str) -> str:
    block = re.fullmatch(r"res(\d)_(\d+)_(branch\w+?)(_bn)?_([wsb])", key)
    if block:
        stage, number, branch, norm, kind = block.groups()
        part = _BLOCK_PARTS.get(branch)
        name = ("bn" if norm else "conv") + part if part else f"downsample.{int(bool(norm))}"
        key = f"backbone.body.layer{int(stage) - 1}.{number}.{name}.{kind}"
    else:
        key = functools.reduce(lambda text, rule: re.sub(*rule, text, count=1), _RENAMES, key)
    key = re.sub(r"(_blocks\.)(\d)", lambda match: match[1] + str(int(match[2]) - 2), key)
    return re.sub(r"\.([wsb])$", lambda match: ".bias" if match[1] == "b" else ".weight", key)


def _trunk(config: DetectorConfig) -> Any:
    from torchvision.models.resnet import Bottleneck, ResNet
    from torchvision.ops import FrozenBatchNorm2d

    backbone = config.backbone
    return ResNet(
        Bottleneck,
        list(backbone.blocks),
        groups=backbone.groups,
        width_per_group=backbone.width_per_group,
        norm_layer=functools.partial(FrozenBatchNorm2d, eps=0.0),
    )


def _pyramid(config: DetectorConfig) -> tuple[nn.Module, nn.Module]:
    from torchvision.models.detection.backbone_utils import BackboneWithFPN
    from torchvision.models.detection.faster_rcnn import TwoMLPHead

    layers = {f"layer{stage + 1}": str(stage) for stage in range(4)}
    channels = [config.backbone.channels(stage) for stage in range(4)]
    backbone = BackboneWithFPN(_trunk(config), layers, channels, config.pyramid)
    return backbone, TwoMLPHead(config.pyramid * config.bins**2, config.head)


def _single_map(config: DetectorConfig) -> tuple[nn.Module, nn.Module]:
    trunk = _trunk(config)
    names = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3")
    backbone = nn.Sequential(OrderedDict((name, getattr(trunk, name)) for name in names))
    backbone.out_channels = config.backbone.channels(2)
    head = OrderedDict(layer4=trunk.layer4, mean=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten())
    return backbone, nn.Sequential(head)
