"""Bottom-up attention's .caffemodel, written by protobuf's own runtime, beside detectron2's .pkl."""

from __future__ import annotations

import contextlib

import jax
import numpy as np
import pytest
import torch
from detectors_torch import TorchDetector
from flax import nnx
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from test_detectors import CHANGES, PICTURES, batch, tiny, write

from mmqa_jax.core.errors import UserError
from mmqa_jax.weights.formats.caffemodel import read_caffemodel
from mmqa_jax.weights.published import load_published

PARTS = {"shortcut": "1", "conv1": "2a", "conv2": "2b", "conv3": "2c"}
OTHERS = {
    "proposal_generator.rpn_head.conv": "rpn_conv/3x3",
    "proposal_generator.rpn_head.objectness_logits": "rpn_cls_score",
    "proposal_generator.rpn_head.anchor_deltas": "rpn_bbox_pred",
    "roi_heads.box_predictor.cls_score": "cls_score",
    "roi_heads.box_predictor.bbox_pred": "bbox_pred",
    "roi_heads.box_predictor.cls_embed": "cls_embedding",
    "roi_heads.box_predictor.attr_linear1": "fc_attr",
    "roi_heads.box_predictor.attr_linear2": "attr_score",
}
COUNT = 4.0  # by which Caffe's sums of means and variances are divided


def messages(old: bool) -> type:
    """NetParameter as caffe.proto has it: fields that are needed, and some that are skipped."""
    file = descriptor_pb2.FileDescriptorProto(name=f"caffe{old}.proto", package=f"caffe{old}")

    def message(name, *fields):
        made = file.message_type.add(name=name)
        for field, number, kind, repeated, packed in fields:
            one = made.field.add(name=field, number=number, label=3 if repeated else 1)
            if isinstance(kind, str):
                one.type, one.type_name = 11, f".{file.package}.{kind}"
            else:
                one.type = kind
            if packed:
                one.options.packed = True

    string, number, single, double = 9, 3, 2, 1
    message("BlobShape", ("dim", 1, number, True, True))
    message(
        "BlobProto",
        *((side, n, 5, False, False) for n, side in enumerate(("num", "channels"), 1)),
        *((side, n, 5, False, False) for n, side in enumerate(("height", "width"), 3)),
        ("data", 5, single, True, not old),
        ("diff", 6, single, True, True),
        ("shape", 7, "BlobShape", False, False),
        ("double_data", 8, double, True, True),
    )
    name, blobs = (4, 6) if old else (1, 7)
    message(
        "LayerParameter",
        ("name", name, string, False, False),
        ("bottom", 3, string, True, False),
        ("blobs", blobs, "BlobProto", True, False),
        ("loss_weight", 15, single, True, False),
    )
    message(
        "NetParameter",
        ("name", 9, string, False, False),
        ("layer", 2 if old else 100, "LayerParameter", True, False),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(
        pool.FindMessageTypeByName(f"{file.package}.NetParameter")
    )


def layers(tensors: dict[str, torch.Tensor]) -> dict[str, list[np.ndarray]]:
    """Detectron2's tensors as Caffe's layers."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for key, value in tensors.items():
        module, _, ending = key.rpartition(".")
        norm = module.endswith(".norm")
        module = module.removesuffix(".norm")
        if module in OTHERS:
            layer = OTHERS[module]
        elif module == "backbone.stem.conv1":
            layer = "conv1"
        else:
            stage, block, part = module.split(".")[-3:]
            letters = "abc"[int(block)] if stage != "res4" or block == "0" else f"b{block}"
            layer = f"{stage[3:]}{letters}_branch{PARTS[part]}"
        if norm:
            kind = "bn" if ending.startswith("running") else "scale"
            layer = f"{kind}_{layer}" if layer == "conv1" else kind + layer
        elif layer[0].isdigit():
            layer = "res" + layer
        found.setdefault(layer, {})[ending] = value.numpy()
    order = ("running_mean", "running_var", "weight", "bias")
    made = {layer: [own[n] for n in order if n in own] for layer, own in found.items()}
    for layer, blobs in made.items():
        if layer.startswith("bn"):
            blobs[:] = [*(blob * np.float32(COUNT) for blob in blobs), np.float32([COUNT])]
    return made


def caffemodel(path, tensors: dict[str, torch.Tensor], old: bool = False):
    net = messages(old)(name="ResNet-101")
    net.layer.add(name="data", bottom=["x"], loss_weight=[0.5])
    for layer, blobs in layers(tensors).items():
        one = net.layer.add(name=layer)
        for blob in blobs:
            made = one.blobs.add(data=blob.ravel().tolist(), diff=[1.0])
            if old:
                sides = (1,) * (4 - blob.ndim) + blob.shape
                made.num, made.channels, made.height, made.width = sides
            else:
                made.shape.dim.extend(blob.shape)
    path.write_bytes(net.SerializeToString())
    return path


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    theirs = TorchDetector("detectron2", tiny("detectron2"), seed=5)
    single, _ = batch("detectron2")
    theirs(single[0], *PICTURES["detectron2"][0])  # draws its tensors
    folder = tmp_path_factory.mktemp("caffe")
    path = write("detectron2", theirs.tensors, folder)
    return theirs.tensors, load_published("detector", path, **CHANGES["detectron2"])


@pytest.mark.parametrize("old", [False, True])
def test_the_same_weights(case, old, tmp_path):
    """With packed values and a shape, and as files before 2014 have them."""
    tensors, want = case
    path = caffemodel(tmp_path / "net.caffemodel", tensors, old)
    ours = load_published("detector", path, **CHANGES["detectron2"])
    assert ours.config == want.config
    jax.tree.map(np.testing.assert_array_equal, nnx.state(ours), nnx.state(want))


def test_damaged_files_are_refused_by_name(case, tmp_path):
    tensors, _ = case
    path = caffemodel(tmp_path / "net.caffemodel", tensors)
    whole = path.read_bytes()
    for length in (1, 50, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"net\.caffemodel"):
            read_caffemodel(path)
    rng = np.random.default_rng(0)
    for _ in range(300):  # whatever is flipped is read, or refused
        broken = bytearray(whole[:4000])
        for at in rng.integers(0, len(broken), 3):
            broken[at] = rng.integers(256)
        path.write_bytes(broken)
        with contextlib.suppress(UserError):
            read_caffemodel(path)


def without_values(layer: str, *shapes: list[int]) -> bytes:
    """A net with a layer of blobs of these shapes that hold nothing."""
    net = messages(False)()
    blobs = net.layer.add(name=layer).blobs
    for shape in shapes:
        blobs.add().shape.dim.extend(shape)
    return net.SerializeToString()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"\x0a\x03net", "holds no layer with values"),
        (b"\xff" * 30, "a number without an end"),
        (b"\xa2\x06\xff\xff\xff\xff\x0f", "field 100 of 4,294,967,295 bytes, of 0"),
        (b"\x0b\x0c", "a field of wire type 3"),
        # Shapes without values: large ones, many sides, sides of 0 and of billions.
        (
            without_values("a", [2**24]),
            r"layer 'a': has 0 bytes of values for the shape \(16777216,\)",
        ),
        (
            without_values("a", [2**40]),
            r"layer 'a': has a shape of 1 sides, the longest 1099511627776; it is no",
        ),
        (
            without_values("a", [0] * 33),
            r"layer 'a': has a shape of 33 sides, the longest 0; it is no .caffemod",
        ),
        (
            without_values("a", [0, *[2**31 - 1] * 3]),
            r"layer 'a': has the shape \(0, 2147483647, .*\); it is no",
        ),
        (b"\xa2\x06\x09\x0a\x01a\x3a\x04\x42\x02\x00\x00", "in doubles"),
        (b"\xa2\x06\x07\x0a\x01a\x3a\x02\x3a\x00", "layer 'a': has 0 bytes of values"),
        (b"\xa0\x06\x07", "a number as field 100"),
    ],
)
def test_foreign_files_are_refused_by_name(content, message, tmp_path):
    path = tmp_path / "other.caffemodel"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_caffemodel(path)


def test_layers_that_are_none_of_the_detectors(case, tmp_path):
    tensors, _ = case
    sums = "backbone.stem.conv1.norm.running_var"
    lacking = {key: value for key, value in tensors.items() if key != sums}
    with pytest.raises(UserError, match="layer 'bn_conv1': has 2 arrays"):
        load_published("detector", caffemodel(tmp_path / "lacking.caffemodel", lacking))
    (tmp_path / "three.caffemodel").write_bytes(without_values("fc6", [0], [0], [0]))
    with pytest.raises(UserError, match="layer 'fc6': has 3 arrays, 2 were expected; give bottom"):
        load_published("detector", tmp_path / "three.caffemodel")
    path = caffemodel(tmp_path / "more.caffemodel", tensors)
    net = messages(False).FromString(path.read_bytes())
    net.layer.add(name="fc8").blobs.add(data=[1.0]).shape.dim.append(1)
    path.write_bytes(net.SerializeToString())
    with pytest.raises(UserError, match=r"keys without a rule: .*fc8\.weight"):
        load_published("detector", path)
    twice = net.layer.add(name="fc8").blobs.add(data=[1.0])
    twice.shape.dim.append(1)
    path.write_bytes(net.SerializeToString())
    with pytest.raises(UserError, match="two layers 'fc8'"):
        load_published("detector", path)
