"""Records in the originals' formats: read back by our readers, and as the originals' code reads."""

from __future__ import annotations

import base64
import csv
import dataclasses
import importlib.util
import json
import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cli_runs import ROOT
from test_region_records import regions, write

from mmqa_jax.core.config import load_config
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.datasets.coco import read_scored_tsv
from mmqa_jax.data.examples import RawSource
from mmqa_jax.data.grid_records import open_features
from mmqa_jax.data.region_exports import check_exports, export_regions
from mmqa_jax.data.region_records import RecordDetections, RegionFacts, RegionRecords
from mmqa_jax.data.region_words import read_names, region_words
from mmqa_jax.data.regions import (
    FeatureRegions,
    RegionError,
    VinVLFeatures,
    VinVLRows,
    X101Features,
    oscar_regions,
    read_sizes,
    tag_words,
    vlp_positions,
)
from mmqa_jax.data.schema import Source
from mmqa_jax.tasks.reading import read_task

CLASSES = tuple(f"thing {n}" for n in range(1594))
ATTRIBUTES = ("red", "tall", "wet")
VLP = RegionFacts("vlp_x101", "m", features=2048, classes=1601)
WEBQA = dataclasses.replace(VLP, rectified=False)
VINVL = RegionFacts(
    "vinvl_x152c4", "m", features=2048, classes=1595, attributes=4,
    class_names=CLASSES, attribute_names=ATTRIBUTES,
)  # fmt: skip
SMALL = RegionFacts("bottom_up_r101", "m", features=6, classes=5, attributes=4)
DAMP = dataclasses.replace(
    SMALL, class_names=("dog", "cat", "car", "sky"), attribute_names=ATTRIBUTES
)


def records(folder, facts, names=("0", "1", "2"), counts=(3, 1, 4)):
    """Records of pictures with these numbers of regions."""
    found = {
        name: regions(count, seed, facts)
        for seed, (name, count) in enumerate(zip(names, counts, strict=True))
    }
    write(folder, found, facts)
    return RegionRecords(folder)


def same(got, want):
    for name in ("features", "boxes", "scores", "classes", "labels"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-6, err_msg=name)


def test_webqas_pickles(tmp_path):
    names = ("40001234", "40001235", "10000002")
    kept = records(tmp_path / "r", WEBQA, names)
    export_regions(kept, "webqa", tmp_path / "out")
    files, ours = X101Features(tmp_path / "out"), RecordDetections(kept, "x101")
    assert (ours.classes, ours.foreground) == (files.classes, files.foreground)
    for name in names:
        same(ours.read(int(name)), files.read(int(name)))
        assert ours.read(int(name)).image_size == files.read(int(name)).image_size == (700, 1300)
    # webqa_loader.py l.597-623
    with open(tmp_path / "out/train/1/40001234.pkl", "rb") as file:
        theirs = pickle.load(file)
    classes = theirs["cls_features"].detach().cpu().float()
    assert classes.shape == (3, 1601)
    background_last = kept.read("40001234").logits
    np.testing.assert_array_equal(classes[:, -1], background_last[:, 0])
    np.testing.assert_array_equal(classes[:, :-1], background_last[:, 1:])
    assert theirs["pred_boxes"].shape == (3, 4)
    assert theirs["pred_classes"].dtype == torch.int64
    assert (theirs["image_size"], theirs["num_instances"]) == ((700, 1300), 3)


def test_vinvls_tsvs(tmp_path):
    kept = records(tmp_path / "r", VINVL)
    export_regions(kept, "vinvl", tmp_path / "out")
    files, ours = VinVLFeatures({0: tmp_path / "out/features.tsv"}), RecordDetections(kept, "vinvl")
    assert (ours.classes, ours.foreground) == (files.classes, files.foreground)
    for number in range(3):
        same(ours.read(number), files.read(number))
        assert ours.read(number).words == files.read(number).words
        np.testing.assert_allclose(
            vlp_positions(ours.read(number)), vlp_positions(files.read(number)), atol=1e-6
        )
    rows = VinVLRows(tmp_path / "out/features.tsv")
    assert [row.name for row in (rows[0], rows[1], rows[2])] == ["0", "1", "2"]
    assert rows[2].size == (700, 1300)
    assert oscar_regions(rows[0].found, rows[0].size).shape == (3, 2054)
    assert read_sizes(tmp_path / "out/hw.tsv") == dict.fromkeys("012", (700, 1300))
    # scene_graph_benchmark structures/tsv_file.py: seek by the lineidx, strip, split at tabs.
    for table, key in (("features", "2"), ("labels", "2"), ("hw", "2")):
        offset = int((tmp_path / f"out/{table}.lineidx").read_text().split()[2])
        with open(tmp_path / f"out/{table}.tsv") as file:
            file.seek(offset)
            name, text = [s.strip() for s in file.readline().split("\t")]
        assert name == key
        if table == "features":  # label_loader.py
            first = json.loads(text)["objects"][0]
            feature = np.frombuffer(base64.b64decode(first["feature"]), np.float32)
            np.testing.assert_array_equal(feature, kept.read(2).features[0])
            scores = np.frombuffer(base64.b64decode(first["scores_all"]), np.float32)
            np.testing.assert_allclose(scores.sum(), 1, rtol=1e-3)
            best = kept.read(2).attributes[0, 1:]
            assert first["attributes"] == [
                ATTRIBUTES[n] for n in np.argsort(-best) if best[n] > 0.05
            ]
            assert first["attr_scores"] == sorted(first["attr_scores"], reverse=True)
        if table == "labels":
            assert [one["class"] for one in json.loads(text)] == region_words(kept.read(2), VINVL)


def test_bottom_ups_tsv_and_npz(tmp_path):
    names = ("val/COCO_val2014_000000000042", "val/COCO_val2014_000000000043")
    kept = records(tmp_path / "r", SMALL, names, (3, 2))
    export_regions(kept, "bottom_up", tmp_path)
    csv.field_size_limit(sys.maxsize)
    fields = ["image_id", "image_w", "image_h", "num_boxes", "boxes", "features"]
    with open(tmp_path / "features.tsv") as file:  # read_tsv.py
        rows = list(csv.DictReader(file, delimiter="\t", fieldnames=fields))
    assert [int(row["image_id"]) for row in rows] == [42, 43]
    for row, name in zip(rows, names, strict=True):
        want, count = kept.read(name), int(row["num_boxes"])
        assert (int(row["image_h"]), int(row["image_w"])) == want.size
        for field, array in (("boxes", want.boxes), ("features", want.features)):
            found = np.frombuffer(base64.decodebytes(row[field].encode()), np.float32)
            np.testing.assert_array_equal(found.reshape(count, -1), array)
    export_regions(kept, "npz", tmp_path / "npz")
    theirs = np.load(tmp_path / f"npz/{names[0]}.npz")
    np.testing.assert_array_equal(theirs["bbox"], kept.read(42).boxes)
    assert (theirs["num_bbox"], theirs["image_h"], theirs["image_w"]) == (3, 700, 1300)
    np.testing.assert_array_equal(theirs["attrs_id"], kept.read(42).attributes[:, 1:].argmax(1))
    np.testing.assert_array_equal(theirs["objects_id"], kept.read(42).logits[:, 1:].argmax(1))


def test_mcan_reads_records_as_it_reads_files(tmp_path):
    names = ("COCO_val2014_000000000042", "COCO_val2014_000000000043")
    kept = records(tmp_path / "r", SMALL, names, (3, 5))
    export_regions(kept, "npz", tmp_path / "npz")
    (tmp_path / "openvqa").mkdir()
    for name in names:  # openvqa's are transposed
        array = kept.read(name).features.T
        np.savez(tmp_path / f"openvqa/{name}.jpg.npz", x=array)

    def read(root):
        section = SimpleNamespace(root=str(root), max_missing=None, slots=4)
        model = SimpleNamespace(image="regions", region_features=6)
        features = open_features(section, model)
        batch = features.batch([42, 43, 44])
        assert features.missing.names == ["44"]
        return batch

    ours = read(tmp_path / "r")
    np.testing.assert_array_equal(ours[0, :3], kept.read(42).features)
    np.testing.assert_array_equal(ours[1], kept.read(43).features[:4])
    assert not ours[0, 3].any()
    assert not ours[2].any()
    np.testing.assert_array_equal(read(tmp_path / "npz"), ours)
    np.testing.assert_array_equal(read(tmp_path / "openvqa"), ours)
    section = SimpleNamespace(root=str(tmp_path / "r"), max_missing=None, slots=4)
    with pytest.raises(UserError, match=r"holds regions, model\.image=grid reads a grid"):
        open_features(section, SimpleNamespace(image="grid", grid=2, image_features=6))


def test_vlps_hdf5(tmp_path):
    import h5py

    names = ("a/000000581042", "b/000000123042", "b/000000000007")
    kept = records(tmp_path / "r", VLP, names)
    export_regions(kept, "vlp", tmp_path)
    for name in names:  # seq2seq_loader.py l.323-351
        img_id = name.split("/")[-1].split(".")[0]
        prefix = str(tmp_path / "regions")
        with (
            h5py.File(prefix + "_feat" + img_id[-3:] + ".h5", "r") as region_feat_f,
            h5py.File(prefix + "_cls" + img_id[-3:] + ".h5", "r") as region_cls_f,
            h5py.File(prefix + "_bbox.h5", "r") as region_bbox_f,
        ):
            img = torch.from_numpy(region_feat_f[img_id][:]).float()
            cls_label = torch.from_numpy(region_cls_f[img_id][:]).float()
            vis_pe = torch.from_numpy(region_bbox_f[img_id][:])
        want = kept.read(name)
        np.testing.assert_array_equal(img, want.features)
        np.testing.assert_array_equal(cls_label, want.probabilities)
        np.testing.assert_array_equal(vis_pe[:, :4], want.boxes)
        np.testing.assert_array_equal(vis_pe[:, 4], want.labels)
        np.testing.assert_array_equal(vis_pe[:, 5], want.scores)
        assert torch.nn.functional.layer_norm(cls_label, [1601]).shape == (len(want), 1601)


def test_words_with_and_without_attributes(tmp_path):
    kept = records(tmp_path / "r", DAMP, ("COCO_7", "8"), (4, 2))
    found = kept.read(8)
    classes = [DAMP.class_names[n - 1 if n else int(found.logits[row, 1:].argmax())]
               for row, n in enumerate(found.labels)]  # fmt: skip
    assert region_words(found, DAMP) == classes
    best = found.attributes[:, 1:].max(axis=1)
    least = float(best.mean())  # one is above, one below
    shown = region_words(found, DAMP, least)
    for row, word in enumerate(shown):
        attribute = (
            f"{ATTRIBUTES[found.attributes[row, 1:].argmax()]} " if best[row] >= least else ""
        )
        assert word == attribute + classes[row]
    assert sum(" " in word for word in shown) == 1
    export_regions(kept, "tags", tmp_path, least=least)
    tags = read_scored_tsv(tmp_path / "tags.tsv", "class")  # as PICa's are read
    assert list(tags) == [7, 8]
    assert sorted(tag["class"] for tag in tags[8]) == sorted(shown)
    assert [tag["conf"] for tag in tags[8]] == sorted(
        (tag["conf"] for tag in tags[8]), reverse=True
    )
    with pytest.raises(UserError, match="do not name attributes; give --attribute_names"):
        region_words(found, dataclasses.replace(DAMP, attribute_names=()), 0.1)


def test_oscars_text_is_the_exported_word(tmp_path):
    kept = records(tmp_path / "r", VINVL, ("17",), (3,))
    export_regions(kept, "vinvl", tmp_path, least=0.0)
    found = VinVLRows(tmp_path / "features.tsv")[0].found
    assert tag_words(found) == tuple(region_words(kept.read(17), VINVL, 0.0))
    assert all(word.split()[0] in ATTRIBUTES for word in tag_words(found))


@pytest.mark.parametrize(
    ("facts", "names", "kind", "message"),
    [
        (SMALL, ("1",), "webqa", "the detector is bottom_up_r101, and these are files of vlp_x101"),
        (VLP, ("1",), "webqa", "fc1 in front of the ReLU, these records behind it"),
        (WEBQA, ("a",), "webqa", "picture 'a' does not end in a number"),
        (SMALL, ("a",), "bottom_up", "picture 'a' does not end in a number"),
        (DAMP, ("a b",), "tags", "picture 'a b' does not end in a number"),
        (SMALL, ("1",), "tags", "--export=tags: these records do not name .* classes; run `mmqa f"),
        (SMALL, ("../1",), "npz", r"picture '\.\./1' would be written outside of .*; rename it"),
        (SMALL, ("1", "a/../../2"), "npz", r"picture 'a/\.\./\.\./2' would be written outside of"),
        (SMALL, ("/tmp/1",), "npz", "picture '/tmp/1' would be written outside of"),
        (WEBQA, ("a/1", "2", "b/01"), "webqa", "'a/1' and 'b/01' end in the same number, .*rename"),
        (SMALL, ("a_1", "b_1"), "bottom_up", "'a_1' and 'b_1' end in the same number"),
        (DAMP, ("a_1", "b_1"), "tags", "'a_1' and 'b_1' end in the same number"),
    ],
)
def test_what_a_format_cannot_hold(tmp_path, facts, names, kind, message):
    kept = records(tmp_path / "r", facts, names, (2,) * len(names))
    with pytest.raises(UserError, match=message):
        export_regions(kept, kind, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (SMALL, "--attributes: these records do not name .* classes; run `mmqa features` with --names"),
        (dataclasses.replace(DAMP, attribute_names=()), "do not name attributes; give --attribute_n"),
        (dataclasses.replace(DAMP, attributes=0), "do not name attributes; give --attribute_names"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["vinvl", "tags"])
def test_attributes_that_have_no_names(tmp_path, kind, facts, message):
    kept = records(tmp_path / "r", facts, ("1",), (2,))
    with pytest.raises(UserError, match=message):
        export_regions(kept, kind, tmp_path / "out", least=0.1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "package", "message"),
    [
        (
            "vlp",
            "h5py",
            r"--export=vlp: needs the package h5py; run `pip install \"mmqa-jax\[hdf5\]",
        ),
        ("webqa", "torch", "--export=webqa: needs the package torch, .*; run `pip install torch`"),
    ],
)
def test_formats_whose_package_is_missing(kind, package, message, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )
    with pytest.raises(UserError, match=message):
        check_exports([kind])


def test_a_picture_without_regions(tmp_path):
    """It has a file like the others, and is one without features for whoever reads it."""
    names, counts = ("40001234", "40001235"), (2, 0)
    kept = records(tmp_path / "r", WEBQA, names, counts)
    for kind in ("webqa", "bottom_up", "npz"):
        export_regions(kept, kind, tmp_path / kind)
    files = X101Features(tmp_path / "webqa")
    assert len(files.read(40001234).boxes) == 2
    with pytest.raises(RegionError, match=r"40001235\.pkl: holds no regions"):
        files.read(40001235)
    with pytest.raises(RegionError, match="r, picture 40001235: the detector found no regions"):
        RecordDetections(kept, "x101").read(40001235)


def test_what_hdf5_cannot_hold(tmp_path):
    for number, (facts, names, message) in enumerate([
        (SMALL, ("1",), "these are files of vlp_x101"),
        (WEBQA, ("1",), "fc6 behind the ReLU, these records in front of it"),
        (VLP, ("a/1", "b/1"), "two pictures of one name in different folders"),
    ]):  # fmt: skip
        kept = records(tmp_path / str(number), facts, names, (1,) * len(names))
        with pytest.raises(UserError, match=message):
            export_regions(kept, "vlp", tmp_path / "out")


def test_records_of_another_detector_are_refused_by_a_frontend(tmp_path):
    small, behind = records(tmp_path / "a", SMALL), records(tmp_path / "b", VLP)
    with pytest.raises(UserError, match=r"6 features and 5 classes, .*frontend=vinvl takes 2048"):
        RecordDetections(small, "vinvl")
    with pytest.raises(UserError, match=r"reads those in front of it; run .* --unrectified"):
        RecordDetections(behind, "x101")


def test_a_sources_regions_from_records(tmp_path):
    """VLP's reader finds them by the source's own id, whatever it is."""
    kept = records(tmp_path / "r", VINVL, ("flag of Hav",), (3,))
    reader = RecordDetections(kept, "vinvl")
    found = FeatureRegions(reader, [None, "flag of Hav"], slots=2, names=CLASSES)
    assert found(RawSource("", row=0)) is None
    features, positions = found(RawSource("", row=1))
    np.testing.assert_array_equal(features, kept.read("flag of Hav").features[:2])
    assert positions.shape == (2, 1601)
    likeliest = kept.read("flag of Hav").logits[:2, 1:].argmax(axis=1)
    assert found.tags(positions).regions == tuple(CLASSES[n] for n in likeliest)


def test_names_of_classes(tmp_path):
    (tmp_path / "objects_vocab.txt").write_text("Stop sign,stopsign\ntv\ncar\nsky\n")
    assert read_names(tmp_path / "objects_vocab.txt", "class", 4) == (
        "stop sign",
        "tv",
        "car",
        "sky",
    )
    content = {"label_to_idx": {"dog": 2, "cat": 1}, "attribute_to_idx": {"wet": 1}}
    (tmp_path / "vg.json").write_text(json.dumps(content))
    assert read_names(tmp_path / "vg.json", "class", 2) == ("cat", "dog")
    assert read_names(tmp_path / "vg.json", "attribute", 1) == ("wet",)
    for content, message in (
        ("a\nb\n", "2 names, 2 of them not empty; the detector has 4 class names"),
        ("a\n\nb\nc\n", "4 names, 3 of them not empty"),
    ):
        (tmp_path / "n.txt").write_text(content)
        with pytest.raises(UserError, match=message):
            read_names(tmp_path / "n.txt", "class", 4)
    (tmp_path / "n.json").write_text("{}")
    with pytest.raises(UserError, match="has no label_to_idx"):
        read_names(tmp_path / "n.json", "class", 4)


def test_vlps_task_takes_records_by_their_root(tmp_path):
    """In place of files, by the ids of the corpus's own sources; names come from the records."""
    records(tmp_path / "r", VINVL, ("30000005", "a picture"), (3, 2))
    values = {"data.dir": "unused", "features.root": str(tmp_path / "r"), "features.slots": 2}
    task = read_task(load_config(f"{ROOT}/configs/webqa/vlp_select.py:vinvl_runlocal", values))
    task.check(files=False)
    sources = [
        Source("t", "text", "a fact"),
        *(Source(name, "image", "a caption") for name in ("30000005", "a picture", "30000006")),
    ]
    found = task.regions(Corpus(sources))
    features, positions = found(RawSource("a caption", row=1))
    assert (features.shape, positions.shape) == ((2, 2048), (2, 1601))
    assert found(RawSource("a caption", row=2)) is not None
    assert set(found.tags(positions).regions) <= set(CLASSES)
    assert found(RawSource("a caption", row=3)) is None
    assert found.missing.names == ["30000006"]
    with pytest.raises(UserError, match="holds no finished regions"):
        dataclasses.replace(
            task, features=dataclasses.replace(task.features, root=str(tmp_path))
        ).regions(Corpus(sources))
