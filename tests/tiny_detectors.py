"""The three detectors at sizes of a test."""

from __future__ import annotations

import dataclasses

from mmqa_jax.models.detection import faster_rcnn

PRESETS = {
    "detectron": faster_rcnn.vlp_x101,
    "maskrcnn": faster_rcnn.vinvl_x152c4,
    "detectron2": faster_rcnn.bottom_up_r101,
}
# What no shape shows, at sizes of a test.
CHANGES = {
    "detectron": {"before": 40, "after": 20, "fewest": 6, "most": 9, "bins": 3},
    "maskrcnn": {"before": 60, "after": 20, "fewest": 3, "most": 9, "bins": 4},
    "detectron2": {"before": 60, "after": 20, "fewest": 3, "most": 9, "bins": 4, "smallest": 6},
}


def tiny(kind: str) -> faster_rcnn.DetectorConfig:
    preset, changes = PRESETS[kind](), CHANGES[kind]
    backbone = dataclasses.replace(
        preset.backbone,
        blocks=(1, 2, 3, 2),
        stem=6,
        width=16,
        groups=min(preset.backbone.groups, 2),
        width_per_group=4,
    )
    rpn = {name: changes[name] for name in ("before", "after", "smallest") if name in changes}
    sizes = {"classes": 7, "bins": changes["bins"]}
    if preset.pyramid:
        sizes |= {"pyramid": 12, "head": 20}
    else:
        sizes |= {"attributes": 5, "attribute_labels": 7}
        sizes |= {"attribute_embedding": 6, "attribute_hidden": 10}
    return dataclasses.replace(
        preset,
        backbone=backbone,
        rpn=dataclasses.replace(preset.rpn, hidden=12, **rpn),
        rule=dataclasses.replace(preset.rule, fewest=changes["fewest"], most=changes["most"]),
        **sizes,
    )
