"""Faster R-CNN: regions of pictures."""

from mmqa_jax.weights.registry import OWN_KEYS, Architecture

FAMILIES = (
    Architecture(
        name="detector",
        title="Faster R-CNN of VLP, VinVL and bottom-up attention",
        model="detection.faster_rcnn.FasterRCNN",
        config="detection.faster_rcnn.DetectorConfig",
        layouts=(
            "Detectron's .pkl (VLP's X-101-64x4d-FPN)",
            "maskrcnn-benchmark's .pth (vinvl_vg_x152c4.pth)",
            "detectron2's .pth or .pkl (bua-caffe-frcn-r101_with_attributes.pth)",
        ),
        exports=OWN_KEYS,
    ),
)
