"""The detectors' operations beside loops over single boxes (detection_torch.py)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from compare import LAYER, compiled, forward
from detection_torch import clip as torch_clip
from detection_torch import decode, nms, roi_align, roi_pool
from flax import nnx

from mmqa_jax.core.mesh import platform
from mmqa_jax.models.detection import boxes as detection_boxes
from mmqa_jax.models.detection.boxes import (
    BoxCoder,
    Overlap,
    areas,
    cell_anchors,
    clip,
    grid_anchors,
    keep_in_class,
    keep_one_by_one,
    large_enough,
    overlaps,
    pyramid_align,
    suppress,
)
from mmqa_jax.models.detection.boxes import roi_align as our_align
from mmqa_jax.models.detection.boxes import roi_pool as our_pool
from mmqa_jax.models.detection.faster_rcnn import keep_in_classes
from mmqa_jax.models.detection.resnext import Conv, block_diagonal
from tests.drawn_weights import drawn


def random_boxes(count: int, width: float, height: float, seed: int = 0) -> np.ndarray:
    """Within a picture; some of a line, a point or the whole picture."""
    rng = np.random.default_rng(seed)
    x = np.sort(rng.uniform(0, width - 1, (count, 2)), axis=1)
    y = np.sort(rng.uniform(0, height - 1, (count, 2)), axis=1)
    boxes = np.stack([x[:, 0], y[:, 0], x[:, 1], y[:, 1]], axis=1).astype("f4")
    boxes[0] = 0, 0, width - 1, height - 1
    boxes[1, 2:] = boxes[1, :2]
    boxes[2, 3] = boxes[2, 1]
    boxes[3] = 0, 0, 0, 0
    return boxes


class Crowd:
    """Boxes of four objects, many on top of each other, some equal, with equal scores."""

    def __init__(self, count: int, seed: int = 0):
        rng = np.random.default_rng(seed)
        corner = rng.choice([0, 12, 30, 60], count)[:, None] + rng.uniform(0, 6, (count, 2))
        self.boxes = np.concatenate([corner, corner + rng.uniform(8, 30, (count, 2))], 1)
        self.boxes = np.round(self.boxes * 2).astype("f4") / 2  # thresholds are met exactly
        self.boxes[1::7] = self.boxes[0]
        self.scores = rng.integers(1, 40, count).astype("f4") / 40
        self.valid = rng.uniform(size=count) < 0.9


@pytest.mark.parametrize(("inclusive", "last_pixel"), [(True, 1), (False, 0)])
def test_suppression_keeps_the_same_boxes_in_the_same_order(inclusive, last_pixel):
    """700 boxes are three blocks; the limit is reached, and not."""
    overlap = Overlap(0.5, inclusive, last_pixel)
    run = jax.jit(suppress, static_argnums=(3, 4))
    for seed, limit in ((0, 700), (1, 12)):
        crowd = Crowd(700, seed)
        there = np.flatnonzero(crowd.valid)
        want = there[
            nms(
                crowd.boxes[there],
                crowd.scores[there],
                0.5,
                inclusive=inclusive,
                last_pixel=last_pixel,
            )
        ]
        assert 12 < len(want) < 600
        chosen, kept = run(crowd.boxes, crowd.scores, crowd.valid, overlap, limit)
        assert chosen.shape == kept.shape == (limit,)
        np.testing.assert_array_equal(np.asarray(chosen)[np.asarray(kept)], want[:limit])


def test_the_threshold_itself():
    """Boxes that share exactly half of their union."""
    boxes = np.array([[0, 0, 2, 0], [0, 0, 5, 0]], "f4")  # 3 and 6 pixels
    scores, valid = np.array([0.9, 0.8], "f4"), np.ones(2, bool)
    for inclusive, want in ((True, [True, False]), (False, [True, True])):
        _, kept = jax.jit(suppress, static_argnums=(3, 4))(
            boxes, scores, valid, Overlap(0.5, inclusive, 1), 2
        )
        assert kept.tolist() == want


def test_suppression_of_few_none_and_invalid_boxes():
    crowd = Crowd(9)
    overlap = Overlap(0.3, False, 0)
    run = jax.jit(suppress, static_argnums=(3, 4))
    chosen, kept = run(crowd.boxes, crowd.scores, np.zeros(9, bool), overlap, 4)
    assert not kept.any()
    want = nms(crowd.boxes, crowd.scores, 0.3, inclusive=False, last_pixel=0)
    chosen, kept = map(np.asarray, run(crowd.boxes, crowd.scores, np.ones(9, bool), overlap, 20))
    assert chosen.shape == (20,)
    assert chosen[kept].tolist() == want


@pytest.mark.parametrize("keep", [keep_in_class, keep_one_by_one])
def test_suppression_in_classes(keep):
    """As masks, all classes at once."""
    crowd = Crowd(40)
    overlap = Overlap(0.3, False, 0)
    scores = np.random.default_rng(0).integers(0, 9, (5, 40)).astype("f4")
    run = jax.jit(jax.vmap(keep, (None, 0, None, None)), static_argnums=3)
    for valid in (crowd.valid, np.zeros(40, bool)):
        got = run(crowd.boxes, scores, valid, overlap)
        there = np.flatnonzero(valid)
        for mask, line in zip(got, scores, strict=True):
            want = nms(crowd.boxes[there], line[there], 0.3, inclusive=False, last_pixel=0)
            assert np.flatnonzero(mask).tolist() == sorted(there[want])


@pytest.mark.parametrize(("shared", "inclusive"), [(True, False), (False, True)])
def test_the_kernel_of_suppression(shared, inclusive):
    """As `keep_in_class`: equal scores, boxes twice, without area, just at the threshold, invalid."""
    rng = np.random.default_rng(0)
    pictures, classes, count = 2, 3, 40
    shape = (pictures, count, 4) if shared else (pictures, count, classes, 4)
    corner = rng.integers(0, 12, (2, *shape[:-1], 2)).astype("f4")
    boxes = np.concatenate([corner.min(0), corner.max(0)], axis=-1)
    boxes[:, 5] = boxes[:, 9]
    boxes[:, 6] = 3, 3, 2, 2
    boxes[:, 7], boxes[:, 8] = (0, 20, 9, 20), (0, 20, 2, 20)  # 10 and 3 pixels
    scores = rng.integers(0, 9, (pictures, classes, count)).astype("f4")
    valid = rng.random((pictures, count)) > 0.2
    valid[1] = False
    overlap = Overlap(0.3, inclusive, 1)

    @jax.jit
    def kept(boxes, scores, valid):
        return jax.vmap(lambda *x: keep_in_classes(*x, overlap, interpret=platform() != "gpu"))(
            boxes, scores, valid
        )

    def of_picture(boxes, scores, valid):
        keep = jax.vmap(keep_in_class, (None if shared else 1, 0, None, None))
        return keep(boxes, scores, valid, overlap)

    want = np.asarray(jax.jit(jax.vmap(of_picture))(boxes, scores, valid))
    assert 0 < want[0].sum() < valid[0].sum() * classes
    np.testing.assert_array_equal(kept(boxes, scores, valid), want)


def whole_and_padded(read, features, boxes):
    """What is read of a map, and of it within a larger one, by one program."""
    padded = jnp.pad(features, ((0, 3), (0, 5), (0, 0)), constant_values=9)
    return read(features, boxes), read(padded, boxes, extent=np.array(features.shape[:2]))


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("samples", [0, 2])
def test_roi_align(aligned, samples):
    features = np.random.default_rng(0).normal(size=(9, 13, 3)).astype("f4")
    boxes = random_boxes(12, 13 * 16, 9 * 16)
    want = roi_align(
        torch.from_numpy(features.transpose(2, 0, 1).copy()),
        boxes,
        3,
        1 / 16,
        samples,
        aligned=aligned,
    )
    options = {"size": 3, "scale": 1 / 16, "samples": samples, "aligned": aligned}
    align = functools.partial(our_align, **options)
    for got in jax.jit(whole_and_padded, static_argnums=0)(align, features, boxes):
        np.testing.assert_allclose(got, want.permute(0, 2, 3, 1), **LAYER)


@pytest.mark.parametrize("kind", ["gpu", "tpu"])
def test_roi_align_of_a_pyramid(kind, monkeypatch):
    """Each box reads its own level, by cells or by products, and nothing beyond the picture."""
    monkeypatch.setattr(detection_boxes, "platform", lambda: kind)
    rng = np.random.default_rng(0)
    extents, strides = ((18, 26), (9, 13)), (8, 16)
    maps = [rng.normal(size=(*extent, 3)).astype("f4") for extent in extents]
    boxes = random_boxes(24, 13 * 16, 9 * 16)
    boxes[3] = 0, 0, 13 * 16 - 1, 9 * 16 - 1
    level = rng.integers(0, 2, 24)
    assert 0 < level.sum() < 24
    want = np.zeros((24, 3, 3, 3), "f4")
    for index, stride in enumerate(strides):
        plane = torch.from_numpy(maps[index].transpose(2, 0, 1).copy())
        grid = roi_align(plane, boxes[level == index], 3, 1 / stride, 2, aligned=False)
        want[level == index] = grid.permute(0, 2, 3, 1)
    padded = [np.pad(x, ((0, 3), (0, 5), (0, 0)), constant_values=9) for x in maps]

    @jax.jit
    def read(padded, extents, boxes, level):
        scales = [1 / stride for stride in strides]
        return pyramid_align(padded, extents, scales, size=3, samples=2)(boxes, level)

    np.testing.assert_allclose(read(padded, np.array(extents), boxes, level), want, **LAYER)


@pytest.mark.parametrize("size", [4, 14])
def test_roi_pool(size):
    """Multiples of a fourteenth are not exact in float32, and decide which cells are looked at."""
    features = np.random.default_rng(0).normal(size=(9, 13, 3)).astype("f4")
    boxes = random_boxes(40, 13 * 16, 9 * 16)
    boxes[4] = 8, 24, 40, 56  # halves of cells
    boxes[5] = 7.9999995, 24, 39.999996, 56
    want = roi_pool(torch.from_numpy(features.transpose(2, 0, 1).copy()), boxes, size, 1 / 16)
    want = want.permute(0, 2, 3, 1).numpy()
    pool = functools.partial(our_pool, size=size, scale=1 / 16)
    for got in jax.jit(whole_and_padded, static_argnums=0)(pool, features, boxes):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("end_pixel", "bounded"), [(1, True), (0, False)])
def test_regression_of_boxes(end_pixel, bounded):
    boxes = random_boxes(50, 300, 200)
    deltas = np.random.default_rng(1).normal(size=(50, 4)).astype("f4")
    deltas[7] = 1, 1, 30, 25  # grows beyond the bound
    weights = (10.0, 9.0, 5.0, 4.0)
    coder = BoxCoder(weights, end_pixel=end_pixel, bounded=bounded)
    got = np.asarray(jax.jit(coder.decode)(deltas, boxes))
    want = decode(deltas, boxes, weights, end_pixel=end_pixel, bounded=bounded)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3)
    within = jax.jit(clip, static_argnums=2)(got, np.array([200, 300]), 1)
    np.testing.assert_allclose(within, torch_clip(want, 200, 300), atol=1e-3)
    usual = np.flatnonzero(np.abs(deltas).max(axis=1) < 3)
    both = jax.jit(lambda to, given: coder.decode(coder.encode(to, given), given))
    again = both(got[usual], boxes[usual])
    np.testing.assert_allclose(again, got[usual], rtol=1e-5, atol=1e-2)


def test_sizes_and_overlaps():
    a, b = np.array([[0, 0, 9, 4]], "f4"), np.array([[5, 0, 14, 4], [20, 20, 22, 22]], "f4")

    @jax.jit
    def measured(a, b):
        return [(areas(a, n), overlaps(a, b, n)) for n in (1, 0)], large_enough(b, 4, 1)

    sizes, large = measured(a, b)
    for (area, shared), of_area, of_both in zip(sizes, (50, 36), (25 / 75, 16 / 56), strict=True):
        assert area.tolist() == [of_area]
        np.testing.assert_allclose(shared, [[of_both, 0]], rtol=1e-6)
    assert large.tolist() == [True, False]


def test_anchors_are_the_published_ones():
    """py-faster-rcnn's comment in generate_anchors.py lists them, there counted from pixel 1."""
    got = cell_anchors(16, (128, 256, 512), (0.5, 1, 2))
    assert got.tolist() == [
        [-84, -40, 99, 55],
        [-176, -88, 191, 103],
        [-360, -184, 375, 199],
        [-56, -56, 71, 71],
        [-120, -120, 135, 135],
        [-248, -248, 263, 263],
        [-36, -80, 51, 95],
        [-80, -168, 95, 183],
        [-168, -344, 183, 359],
    ]
    grid = grid_anchors(got, 2, 3, 16)
    assert grid.shape == (2, 3, 9, 4)
    assert grid[1, 2, 0].tolist() == [-84 + 32, -40 + 16, 99 + 32, 55 + 16]


@pytest.mark.parametrize(
    ("size", "groups", "options"),
    [
        (3, 16, {}),  # two blocks of eight groups of four channels
        (3, 8, {"stride": 2}),
        (3, 2, {}),  # as large as a block
        (3, 1, {"dilation": 2}),
        (1, 1, {"stride": 2}),
        (7, 1, {"stride": 2, "use_bias": True}),
    ],
)
def test_convolutions(size, groups, options):
    conv = drawn(
        lambda: Conv(64, 64, size, ("embed", "mlp"), rngs=nnx.Rngs(), groups=groups, **options)
    )
    x = np.random.default_rng(0).normal(size=(2, 9, 12, 64)).astype("f4")
    bias = None
    if conv.bias is not None:
        conv.bias[...] = np.linspace(-1, 1, 64, dtype="f4")
        bias = torch.from_numpy(np.array(conv.bias[...]))
    options = {name: options[name] for name in ("stride", "dilation") if name in options}
    want = torch.nn.functional.conv2d(
        torch.from_numpy(x.transpose(0, 3, 1, 2).copy()),
        torch.from_numpy(np.array(conv.kernel[...]).transpose(3, 2, 0, 1).copy()),
        bias,
        padding=options.get("dilation", 1) * (size - 1) // 2,
        groups=groups,
        **options,
    )
    np.testing.assert_allclose(compiled(conv, forward)(x), want.permute(0, 2, 3, 1), **LAYER)


def test_groups_joined_by_zeros():
    """As TPUs multiply them, with other numbers of inputs and outputs of a group."""
    rng = np.random.default_rng(1)
    x, kernel = (rng.normal(size=size).astype("f4") for size in ((1, 6, 7, 24), (3, 3, 3, 40)))

    def convolved(x, kernel, groups):
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    @jax.jit
    def both(x, kernel):
        joined = [convolved(x, block_diagonal(kernel, 8, count), 8 // count) for count in (2, 4, 8)]
        return convolved(x, kernel, 8), joined

    want, joined = both(x, kernel)
    for got in joined:
        np.testing.assert_allclose(got, want, **LAYER)
