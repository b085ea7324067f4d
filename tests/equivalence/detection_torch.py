"""The detectors' operations in plain torch and numpy, one box at a time, as the originals' loops.

Written from the originals (each function names its file) without torchvision, which is no
requirement of the tests.
"""

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
    gone, kept = np.zeros(len(boxes), bool), []
    for place, i in enumerate(order):
        if gone[i]:
            continue
        kept.append(i)
        rest = order[place + 1 :]
        w, h = (
            np.minimum(boxes[i, end], boxes[rest, end])
            - np.maximum(boxes[i, end - 2], boxes[rest, end - 2])
            + last_pixel
            for end in (2, 3)
        )
        shared = np.maximum(np.float32(0), w) * np.maximum(np.float32(0), h)
        with np.errstate(invalid="ignore"):
            iou = shared / (area[i] + area[rest] - shared)
        gone[rest] |= (iou > threshold) | (inclusive & (iou == threshold))
    return kept


def bilinear(plane: torch.Tensor, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Caffe2 caffe2/operators/roi_align_op.cc: samples [C, Y, X] of plane [C, H, W]."""
    height, width = plane.shape[1:]
    y, x = y[:, None], x[None]
    inside = (y >= -1) & (y <= height) & (x >= -1) & (x <= width)
    (low_y, high_y, ly), (low_x, high_x, lx) = neighbours(y, height), neighbours(x, width)
    hy, hx, ly, lx = (share.float() for share in (1 - ly, 1 - lx, ly, lx))
    top = hx * plane[:, low_y, low_x] + lx * plane[:, low_y, high_x]
    bottom = hx * plane[:, high_y, low_x] + lx * plane[:, high_y, high_x]
    return torch.where(inside, hy * top + ly * bottom, 0)


def neighbours(at: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """The cells before and behind a place, and the share of the one behind."""
    at = at.clamp(0, size)
    low = at.long().clamp(max=size - 1)
    return low, (low + 1).clamp(max=size - 1), torch.where(low == size - 1, 0, at - low)


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
        if rows > 0 and columns > 0:
            y, x = places(top, height, size, rows), places(left, width, size, columns)
            read = bilinear(plane, y, x).unflatten(2, (size, columns)).unflatten(1, (size, rows))
            out[r] = read.mean(dim=(2, 4))
    return out


def places(start: float, extent: float, size: int, samples: int) -> torch.Tensor:
    """Where a side of a box is read: [size * samples]."""
    cells = torch.arange(size, dtype=torch.float64)[:, None]
    parts = torch.arange(samples, dtype=torch.float64) + 0.5
    return (start + cells * extent / size + parts * extent / size / samples).flatten()


def roi_pool(plane, boxes, size: int, scale: float):
    """py-faster-rcnn's caffe src/caffe/layers/roi_pooling_layer.cpp: [R, C, size, size]."""
    height, width = plane.shape[1:]
    out = torch.zeros(len(boxes), plane.shape[0], size, size)
    for r, box in enumerate(np.asarray(boxes, np.float32)):
        left, top, right, bottom = (int(round_half_away(float(v) * scale)) for v in box)
        rows, columns = bins(top, bottom, size, height), bins(left, right, size, width)
        for p, (y0, y1) in enumerate(rows):
            for q, (x0, x1) in enumerate(columns):
                if y1 > y0 and x1 > x0:
                    out[r, :, p, q] = plane[:, y0:y1, x0:x1].amax(dim=(1, 2))
    return out


def bins(first: int, last: int, size: int, cells: int) -> list[tuple[int, int]]:
    """Where each bin of a side begins and ends."""
    extent = np.float32(max(last - first + 1, 1)) / np.float32(size)
    ends = [(np.floor(n * extent), np.ceil((n + 1) * extent)) for n in range(size)]
    return [tuple(min(max(int(end) + first, 0), cells) for end in pair) for pair in ends]


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
