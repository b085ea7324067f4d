"""The detectors beside torch restatements with random weights, from files as they are published.

Tiny sizes; each picture by itself in torch, all of them padded in one batch here.
"""

import dataclasses
import functools
import pickle
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from compare import abstract, compiled, names_its_axes, with_config
from detectors_torch import TorchDetector, bottom_up_regions, vinvl_regions, vlp_regions
from flax import nnx
from tiny_detectors import CHANGES, PRESETS, tiny

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.detection import faster_rcnn
from mmqa_jax.models.detection.faster_rcnn import FasterRCNN, Pictures, class_confidence, select
from mmqa_jax.models.detection.keys import detector_config, open_detector_source, publish_detector
from mmqa_jax.weights.formats.safetensors import ArraySource, write_sharded
from mmqa_jax.weights.published import load_published
from tests.refusals import refuses

# Height and width before resizing, and the scale: odd sizes, and a line, of one pixel where the
# original takes it; Caffe's first pool leaves nothing of less than 3 rows.
PICTURES = {
    kind: [((41, 70), 1.3), ((60, 33), 1.5), line]
    for kind, line in {
        "detectron": ((1, 61), 1.0),
        "maskrcnn": ((1, 61), 1.0),
        "detectron2": ((2, 60), 1.5),
    }.items()
}


def batch(kind: str) -> tuple[list[np.ndarray], Pictures]:
    """Pictures by themselves, and padded to 96 x 128."""
    pictures = PICTURES[kind]
    rng = np.random.default_rng(0)
    sizes = [tuple(round(n * scale) for n in original) for original, scale in pictures]
    single = [rng.normal(size=(*size, 3)).astype("f4") for size in sizes]
    pixels = np.full((len(single), 96, 128, 3), 7, "f4")  # what lies outside does not count
    for padded, picture in zip(pixels, single, strict=True):
        padded[: picture.shape[0], : picture.shape[1]] = picture
    originals = np.array([original for original, _ in pictures], "i4")
    scales = np.array([scale for _, scale in pictures], "f4")
    return single, Pictures(pixels, np.array(sizes, "i4"), originals, scales)


def write(kind: str, tensors: dict[str, torch.Tensor], folder) -> str:
    """A file as the project publishes it."""
    path = folder / {"detectron": "vlp.pkl", "maskrcnn": "vinvl.pth"}.get(kind, "bua.pkl")
    if kind == "maskrcnn":
        shared = "roi_heads.box.feature_extractor."
        twice = {
            k.replace(shared, "roi_heads.attribute.feature_extractor."): v
            for k, v in tensors.items()
            if k.startswith(shared)
        }
        anchors = {"rpn.anchor_generator.cell_anchors.0": torch.zeros(15, 4)}
        content = {f"module.{k}": v for k, v in {**tensors, **twice, **anchors}.items()}
        torch.save({"model": content, "iteration": 3, "optimizer": {"state": {}}}, path)
        return path
    arrays = {k: v.numpy() for k, v in tensors.items()}
    if kind == "detectron":
        arrays |= {"fc6_w_momentum": arrays["fc6_w"], "lr": np.float32([0.1])}
        content = {"blobs": arrays, "cfg": "MODEL: {}"}
    else:
        arrays |= {"pixel_mean": np.zeros(3, "f4")}
        content = {"model": arrays, "__author__": "tests"}
    with open(path, "wb") as file:
        pickle.dump(content, file, protocol=2)
    return path


@pytest.fixture(scope="module", params=list(PRESETS))
def case(request, tmp_path_factory):
    kind = request.param
    theirs = TorchDetector(kind, tiny(kind), seed=3)
    single, pictures = batch(kind)
    found = [
        theirs(x, original, scale)
        for x, (original, scale) in zip(single, PICTURES[kind], strict=True)
    ]
    path = write(kind, theirs.tensors, tmp_path_factory.mktemp(kind))
    ours = load_published("detector", path, **CHANGES[kind])
    return SimpleNamespace(
        kind=kind,
        theirs=theirs,
        ours=ours,
        single=single,
        pictures=pictures,
        found=found,
        path=path,
    )


def test_the_same_regions_in_the_same_order(case):
    assert case.ours.config == tiny(case.kind)
    got = compiled(case.ours, lambda model, pictures: model.regions(pictures))(case.pictures)
    counts = [len(found.boxes) for found in case.found]
    assert got.valid.sum(axis=1).tolist() == counts
    assert max(counts) > 3
    for n, want in enumerate(case.found):
        rows = slice(0, counts[n])
        for name in ("boxes", "features", "scores", "labels", "logits", "attributes"):
            theirs, values = getattr(want, name), getattr(got, name)
            if theirs is None:
                assert values is None
                continue
            tolerance = {"boxes": 1e-2, "labels": 0}.get(name, 1e-4)
            message = f"{case.kind}, picture {n}, {name}"
            np.testing.assert_allclose(
                values[n][rows], theirs, rtol=0, atol=tolerance, err_msg=message
            )
            assert not np.asarray(values[n][counts[n] :]).any()
    spread = np.concatenate([found.features for found in case.found])
    assert spread.std() > 0.1  # tolerances say something
    areas = np.concatenate([np.prod(f.boxes[:, 2:] - f.boxes[:, :2], axis=1) for f in case.found])
    assert areas.std() > 50


@pytest.mark.parametrize("case", ["maskrcnn"], indirect=True)  # one network is enough
def test_maps_in_bfloat16_stay_near(case):
    config = case.ours.config
    half = dataclasses.replace(
        config, backbone=dataclasses.replace(config.backbone, dtype="bfloat16")
    )

    def run(model):
        return model.levels(case.pictures.pixels, case.pictures.sizes)[0][0]

    got = compiled(with_config(case.ours, half), run)()
    want = case.theirs.maps(case.single[0])[0][0].permute(1, 2, 0).numpy()
    assert got.dtype == "bfloat16"
    got = np.asarray(got[0, : want.shape[0], : want.shape[1]], "f4")
    assert 1e-3 < np.abs(got - want).max() < 0.05 * np.abs(want).max()


@pytest.mark.parametrize("case", ["detectron"], indirect=True)  # the others have no fc6
def test_features_in_front_of_the_relu(case):
    """WebQA's fc1_features are those of VLP's detector before fc6's ReLU."""
    config = dataclasses.replace(case.ours.config, rectified=False)
    pooled = np.random.default_rng(2).normal(size=(5, config.bins, config.bins, 12)).astype("f4")
    planes = torch.from_numpy(pooled.transpose(0, 3, 1, 2).copy())
    fc6 = case.theirs.linear("fc6", planes.flatten(1), config.head)
    fc7 = case.theirs.linear("fc7", fc6.relu(), config.head).relu()
    features, trunk = with_config(case.ours, config).head(pooled)
    assert (fc6 < 0).any()
    np.testing.assert_allclose(features, fc6, atol=1e-4)
    np.testing.assert_allclose(trunk, fc7, atol=1e-4)
    np.testing.assert_allclose(case.ours.head(pooled)[0], fc6.relu(), atol=1e-4)


def test_exported_under_the_published_keys(case, tmp_path):
    published = publish_detector(case.ours.config, nnx.state(case.ours))
    written = {key: published.source.read(key) for key in published.source.specs()}
    assert written.keys() == case.theirs.tensors.keys()
    for key, value in case.theirs.tensors.items():
        np.testing.assert_array_equal(written[key], value.numpy(), err_msg=key)
    write_sharded(tmp_path, published.source)
    again = load_published("detector", tmp_path / "model.safetensors", **CHANGES[case.kind])
    assert again.config == case.ours.config
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(case.ours))


def test_damaged_and_foreign_checkpoints_are_refused_by_name(case, tmp_path):
    tensors = dict(case.theirs.tensors)
    unknown = {"detectron": "fc8_w"}.get(case.kind, "roi_heads.mask.weight")
    with pytest.raises(UserError, match=f"keys without a rule: .*{unknown}"):
        load_published("detector", write(case.kind, {**tensors, unknown: torch.zeros(2)}, tmp_path))
    score = next(key for key in tensors if "cls_score" in key)
    tensors.pop(score)
    with pytest.raises(UserError, match=r"it lacks .*cls_score"):
        load_published("detector", write(case.kind, tensors, tmp_path))
    with open(tmp_path / "code.pkl", "wb") as file:
        pickle.dump({"blobs": {"conv1_w": SimpleNamespace()}}, file, protocol=2)
    refuses("SimpleNamespace", load_published, "detector", tmp_path / "code.pkl")


def test_shapes_that_no_preset_has_are_refused_by_name(case):
    shapes = {key: np.empty(value.shape) for key, value in case.theirs.tensors.items()}
    stage = {"detectron": "res4_", "maskrcnn": ".layer3.", "detectron2": "res4."}[case.kind]
    without = {key: value for key, value in shapes.items() if stage not in key}
    with pytest.raises(UserError, match=r"x: lacks bottlenecks of res4; give the whole checkpoint"):
        detector_config(ArraySource(without, "x"))
    key = next(key for key in shapes if re.search(r"(objectness_logits|cls_logits.*)[._]w", key))
    with pytest.raises(UserError, match=rf"x: {key} has 7 scores of a cell, the anchors .*; put a"):
        detector_config(ArraySource({**shapes, key: np.empty((7, 1, 1, 1))}, "x"))


@pytest.mark.parametrize("content", [{"blobs": {"conv1_w": 3}}, {"model": {}}, [np.ones(3)]])
def test_pickles_without_arrays_are_refused(content, tmp_path):
    (tmp_path / "empty.pkl").write_bytes(pickle.dumps(content, protocol=2))
    refuses(r"empty\.pkl: holds no arrays .*; give", open_detector_source, tmp_path / "empty.pkl")


@pytest.mark.parametrize("case", ["detectron"], indirect=True)  # detectron2 runs on Python 3
def test_python_2_wrote_detectrons_pickles(case, tmp_path):
    """Its strings are bytes in the pickle, those of arrays beyond ASCII."""
    values = np.float32([-1.7, 2.3e-5])

    class Python2(pickle._Pickler):
        dispatch = dict(pickle._Pickler.dispatch)  # noqa: RUF012

        def save_bytes(self, data):
            self.write(pickle.BINSTRING + len(data).to_bytes(4, "little") + data)

        dispatch[bytes] = save_bytes

    with open(tmp_path / "old.pkl", "wb") as file:
        Python2(file, protocol=2).dump({"blobs": {"conv1_w": values}})
    source = open_detector_source(tmp_path / "old.pkl")
    np.testing.assert_array_equal(source.read("conv1_w"), values)


def test_rules_of_selection():
    """All are confident, some, none; more and fewer than the bounds, and than there are."""
    rng = np.random.default_rng(1)
    corner = rng.uniform(0, 40, (30, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(5, 40, (30, 2))], -1).astype("f4")
    per_class = boxes[:, None] + rng.normal(size=(30, 5, 4)).astype("f4")
    logits = rng.normal(size=(30, 5)) * 3
    probabilities = (np.exp(logits) / np.exp(logits).sum(1, keepdims=True)).astype("f4")
    valid = np.ones(30, bool)
    for function, preset in (
        (bottom_up_regions, faster_rcnn.bottom_up_r101),
        (vinvl_regions, faster_rcnn.vinvl_x152c4),
        (vlp_regions, faster_rcnn.vlp_x101),
    ):
        rule = preset().rule
        own = per_class if rule.regressed else boxes
        confident = jax.jit(class_confidence, static_argnums=0)
        scores, labels = map(np.asarray, confident(rule, own, probabilities, valid))
        assert 0 < (scores == 0).sum() < 20  # some are kept in no class
        rules = [
            dataclasses.replace(rule, confidence=confidence, fewest=fewest, most=most)
            for confidence in (0.0, float(np.median(scores)), 0.999)
            for fewest, most in ((3, 6), (10, 30), (5, 30), (40, 40))
        ]

        @jax.jit
        def selected(scores, valid, rules=tuple(rules)):
            return [select(changed, scores, valid) for changed in rules]

        for changed, found in zip(rules, selected(scores, valid), strict=True):
            want = function(own, probabilities, changed)
            order, there = map(np.asarray, found)
            assert order.shape == there.shape == (changed.most,)
            assert order[there].tolist() == want[0].tolist(), (function, changed)
            np.testing.assert_array_equal(scores[want[0]], want[1])
            if len(want) > 2:
                np.testing.assert_array_equal(labels[want[0]], want[2])


def test_presets_have_the_published_sizes():
    """Trunks: torchvision's counts less its last linear (2,049,000); ResNeXt-152 is not there."""

    make = functools.cache(lambda config: abstract(FasterRCNN, config))

    def trunk(config) -> int:
        model = make(config)
        parts = [model.backbone] + ([] if config.pyramid else [model.head.res5])
        leaves = [leaf for p in parts for leaf in jax.tree.leaves(nnx.state(p, nnx.Param))]
        return sum(int(np.prod(leaf.shape)) for leaf in leaves)

    vlp, vinvl = faster_rcnn.vlp_x101(), faster_rcnn.vinvl_x152c4()
    bottom_up = faster_rcnn.bottom_up_r101()
    assert trunk(vlp) == 83_455_272 - 2_049_000  # resnext101_64x4d
    assert trunk(bottom_up) == 44_549_160 - 2_049_000  # resnet101
    shorter = dataclasses.replace(vinvl.backbone, blocks=(3, 4, 23, 3))
    assert vinvl.backbone.blocks == (3, 8, 36, 3)
    assert trunk(dataclasses.replace(vinvl, backbone=shorter)) == 88_791_336 - 2_049_000

    shapes = {}
    for config in (vlp, vinvl, bottom_up):
        model = make(config)
        names_its_axes(model, stacks=("rest",))
        source = publish_detector(config, nnx.state(model)).source
        shapes |= {key: spec.shape for key, spec in source.specs().items()}
    box, attribute = "roi_heads.box_predictor.", "roi_heads.attribute.predictor."
    assert {
        "fc6_w": (2048, 512 * 49),
        "fc7_w": (2048, 2048),
        "cls_score_w": (1601, 2048),
        "bbox_pred_w": (6404, 2048),
        "fpn_inner_res4_22_sum_lateral_w": (512, 1024, 1, 1),
        "rpn_cls_logits_fpn2_w": (3, 512, 1, 1),
        "rpn.head.cls_logits.weight": (15, 1024, 1, 1),
        f"{attribute}attr_score.weight": (525, 512),
        f"{attribute}fc_attr.weight": (512, 2048 + 256),
        f"{box}cls_score.weight": (1601, 2048),
        f"{box}attr_linear2.weight": (401, 512),
        "proposal_generator.rpn_head.objectness_logits.weight": (24, 512, 1, 1),
        "proposal_generator.rpn_head.conv.weight": (512, 1024, 3, 3),
    }.items() <= shapes.items()


def test_mistakes_are_named(case):
    pictures = case.pictures._replace(pixels=case.pictures.pixels[:, :90])
    if case.kind == "detectron":
        refuses(r"padded to 90 x 128, expected multiples of 32", case.ours.regions, pictures)
    config = case.ours.config
    refuses("from 5 to 4 regions", dataclasses.replace, config.rule, fewest=5, most=4)
    refuses("pooling", dataclasses.replace, config, pooling="mean")
    refuses("give both or neither", dataclasses.replace, config, pyramid=32, head=0)
    refuses("as many sizes as strides", dataclasses.replace, config.rpn, strides=(2, 4, 8))
    refuses("four numbers from 1 to 200", dataclasses.replace, config.backbone, blocks=(1, 2, 3))
