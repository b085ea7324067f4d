"""The detectors' operations in plain torch and numpy, one box at a time, as the originals' loops.

Written from the originals (each function names its file) without torchvision, which is no
requirement of the tests.
"""

from __future__ import annotations

import math

import numpy as np
import torch


def round_half_away(x: float) -> float:
    return math.copysign(math.floor(abs(x) + 0.5), x)


def nms(boxes, scores, threshold: float, *, inclusive: bool, last_pixel: int) -> list[int]:
    """Detectron lib/utils/cython_nms.pyx (inclusive), torchvision csrc/ops/cpu/nms_kernel.cpp."""
    boxes, scores = np.asarray(boxes, np.float32), np.asarray(scores)
    order = [int(i) for i in np.argsort(-scores, kind="stable")]
    area = (boxes[:, 2] - boxes[:, 0] + last_pixel) * (boxes[:, 3] - boxes[:, 1] + last_pixel)
    gone, kept = set(), []
    for place, i in enumerate(order):
        if i in gone:
            continue
        kept.append(i)
        for j in order[place + 1 :]:
            w = min(boxes[i, 2], boxes[j, 2]) - max(boxes[i, 0], boxes[j, 0]) + last_pixel
            h = min(boxes[i, 3], boxes[j, 3]) - max(boxes[i, 1], boxes[j, 1]) + last_pixel
            shared = max(np.float32(0), w) * max(np.float32(0), h)
            with np.errstate(invalid="ignore"):
                iou = np.float32(shared) / (area[i] + area[j] - shared)
            if iou > threshold or (inclusive and iou == threshold):
                gone.add(j)
    return kept


def bilinear(plane: torch.Tensor, y: float, x: float) -> torch.Tensor:
    """Caffe2 caffe2/operators/roi_align_op.cc: a sample of plane [C, H, W]."""
    height, width = plane.shape[1:]
    if y < -1 or y > height or x < -1 or x > width:
        return torch.zeros(plane.shape[0])
    y, x = max(y, 0.0), max(x, 0.0)
    low_y, low_x = int(y), int(x)
    if low_y >= height - 1:
        low_y = high_y = height - 1
        y = float(low_y)
    else:
        high_y = low_y + 1
    if low_x >= width - 1:
        low_x = high_x = width - 1
        x = float(low_x)
    else:
        high_x = low_x + 1
    ly, lx = y - low_y, x - low_x
    top = (1 - lx) * plane[:, low_y, low_x] + lx * plane[:, low_y, high_x]
    bottom = (1 - lx) * plane[:, high_y, low_x] + lx * plane[:, high_y, high_x]
    return (1 - ly) * top + ly * bottom


def roi_align(plane, boxes, size: int, scale: float, samples: int, *, aligned: bool):
    """Caffe2 roi_align_op.cc; `aligned` of detectron2 layers/csrc/ROIAlign: [R, C, size, size]."""
    out = torch.zeros(len(boxes), plane.shape[0], size, size)
    for r, box in enumerate(np.asarray(boxes, np.float32)):
        left, top, right, bottom = (float(v) * scale - 0.5 * aligned for v in box)
        width, height = right - left, bottom - top
        if not aligned:
            width, height = max(width, 1.0), max(height, 1.0)
        rows = samples or math.ceil(height / size)
        columns = samples or math.ceil(width / size)
        for p in range(size):
            for q in range(size):
                for i in range(rows):
                    y = top + p * height / size + (i + 0.5) * height / size / rows
                    for j in range(columns):
                        x = left + q * width / size + (j + 0.5) * width / size / columns
                        out[r, :, p, q] += bilinear(plane, y, x)
        out[r] /= max(rows * columns, 1)
    return out


def roi_pool(plane, boxes, size: int, scale: float):
    """py-faster-rcnn's caffe src/caffe/layers/roi_pooling_layer.cpp: [R, C, size, size]."""
    height, width = plane.shape[1:]
    out = torch.zeros(len(boxes), plane.shape[0], size, size)
    for r, box in enumerate(np.asarray(boxes, np.float32)):
        left, top, right, bottom = (int(round_half_away(float(v) * scale)) for v in box)
        bin_h = np.float32(max(bottom - top + 1, 1)) / np.float32(size)
        bin_w = np.float32(max(right - left + 1, 1)) / np.float32(size)
        for p in range(size):
            for q in range(size):
                y0 = min(max(int(np.floor(p * bin_h)) + top, 0), height)
                y1 = min(max(int(np.ceil((p + 1) * bin_h)) + top, 0), height)
                x0 = min(max(int(np.floor(q * bin_w)) + left, 0), width)
                x1 = min(max(int(np.ceil((q + 1) * bin_w)) + left, 0), width)
                if y1 > y0 and x1 > x0:
                    out[r, :, p, q] = plane[:, y0:y1, x0:x1].amax(dim=(1, 2))
    return out


def decode(deltas, boxes, weights, *, end_pixel: int, bounded: bool):
    """Detectron lib/utils/boxes.py bbox_transform; end_pixel 0, unbounded: py-faster-rcnn's."""
    boxes, deltas = torch.as_tensor(boxes), torch.as_tensor(deltas)
    w, h = boxes[..., 2] - boxes[..., 0] + 1, boxes[..., 3] - boxes[..., 1] + 1
    dx, dy, dw, dh = (deltas[..., n] / weights[n] for n in range(4))
    if bounded:
        dw, dh = dw.clamp(max=math.log(1000 / 16)), dh.clamp(max=math.log(1000 / 16))
    x, y = dx * w + boxes[..., 0] + 0.5 * w, dy * h + boxes[..., 1] + 0.5 * h
    w, h = dw.exp() * w, dh.exp() * h
    parts = (x - 0.5 * w, y - 0.5 * h, x + 0.5 * w - end_pixel, y + 0.5 * h - end_pixel)
    return torch.stack(parts, dim=-1)


def clip(boxes, height: int, width: int):
    """Detectron clip_tiled_boxes, maskrcnn-benchmark BoxList.clip_to_image."""
    boxes = boxes.clone()
    boxes[..., 0::2] = boxes[..., 0::2].clamp(0, width - 1)
    boxes[..., 1::2] = boxes[..., 1::2].clamp(0, height - 1)
    return boxes
