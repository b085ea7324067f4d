"""Records in the originals' formats: read back by our readers, and as the originals' code reads."""

import base64
import dataclasses
import json
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cli_runs import ROOT
from test_region_records import regions, write

from mmqa_jax.core.config import load_config
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.batches.packing import RawSource
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.formats.coco import read_scored_tsv
from mmqa_jax.data.records.grid_records import open_features
from mmqa_jax.data.region_records import (
    RecordDetections,
    RegionFacts,
    RegionRecords,
    export_regions,
    read_names,
    region_words,
)
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
from mmqa_jax.tasks.registry import read_task
from tests.refusals import refuses

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


def write_pickles(records, folder, names):
    """Files of WebQA_x101fpn's featureExtraction.py: torch tensors, the background last."""
    for name in names:
        regions = records.read(name)
        classes = np.concatenate([regions.logits[:, 1:], regions.logits[:, :1]], axis=1)
        arrays = {
            "pred_boxes": regions.boxes,
            "scores": regions.scores,
            "pred_classes": regions.labels - 1,
            "fc1_features": regions.features,
            "cls_features": classes,
        }
        content = {"image_size": regions.size, "num_instances": len(regions)}
        content |= {key: torch.from_numpy(np.array(array)) for key, array in arrays.items()}
        path = folder / "train" / name[1:5].lstrip("0") / f"{name}.pkl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(content, protocol=3))


def test_records_read_as_webqas_pickles(tmp_path):
    names = ("40001234", "40001235", "40002002")
    kept = records(tmp_path / "r", WEBQA, names)
    write_pickles(kept, tmp_path / "out", names)
    files, ours = X101Features(tmp_path / "out"), RecordDetections(kept, "x101")
    assert (ours.classes, ours.foreground) == (files.classes, files.foreground)
    for name in names:
        same(ours.read(int(name)), files.read(int(name)))
        assert ours.read(int(name)).image_size == files.read(int(name)).image_size == (700, 1300)


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
    assert oscar_regions(rows[0].detections, rows[0].size).shape == (3, 2054)
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


def test_mcan_reads_records_as_it_reads_files(tmp_path):
    names = ("COCO_val2014_000000000042", "COCO_val2014_000000000043")
    kept = records(tmp_path / "r", SMALL, names, (3, 5))
    for folder in ("npz", "openvqa"):
        (tmp_path / folder).mkdir()
    for name in names:
        features = kept.read(name).features
        np.savez(tmp_path / f"npz/{name}.npz", x=features)
        np.savez(tmp_path / f"openvqa/{name}.jpg.npz", x=features.T)  # openvqa's are transposed

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
    found = VinVLRows(tmp_path / "features.tsv")[0].detections
    assert tag_words(found) == tuple(region_words(kept.read(17), VINVL, 0.0))
    assert all(word.split()[0] in ATTRIBUTES for word in tag_words(found))


@pytest.mark.parametrize(
    ("facts", "names", "kind", "message"),
    [
        (DAMP, ("a b",), "tags", "picture 'a b' does not end in a number"),
        (SMALL, ("1",), "tags", "--export=tags: these records do not name .* classes; run `mmqa f"),
        (DAMP, ("a_1", "b_1"), "tags", "'a_1' and 'b_1' end in the same number"),
    ],
)
def test_what_a_format_cannot_hold(tmp_path, facts, names, kind, message):
    kept = records(tmp_path / "r", facts, names, (2,) * len(names))
    refuses(message, export_regions, kept, kind, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (
            SMALL,
            "--attributes: these records do not name .* classes; run `mmqa features` with --names",
        ),
        (
            dataclasses.replace(DAMP, attribute_names=()),
            "do not name attributes; give --attribute_n",
        ),
        (dataclasses.replace(DAMP, attributes=0), "do not name attributes; give --attribute_names"),
    ],
)
@pytest.mark.parametrize("kind", ["vinvl", "tags"])
def test_attributes_that_have_no_names(tmp_path, kind, facts, message):
    kept = records(tmp_path / "r", facts, ("1",), (2,))
    refuses(message, export_regions, kept, kind, tmp_path / "out", least=0.1)
    assert not (tmp_path / "out").exists()


def test_a_picture_without_regions(tmp_path):
    """It is one without features for whoever reads it."""
    kept = records(tmp_path / "r", WEBQA, ("40001234", "40001235"), (2, 0))
    assert len(RecordDetections(kept, "x101").read(40001234).boxes) == 2
    with pytest.raises(RegionError, match="r, picture 40001235: the detector found no regions"):
        RecordDetections(kept, "x101").read(40001235)


def test_records_of_another_detector_are_refused_by_a_frontend(tmp_path):
    small, behind = records(tmp_path / "a", SMALL), records(tmp_path / "b", VLP)
    with pytest.raises(UserError, match=r"6 features and 5 classes, .*frontend=vinvl takes 2048"):
        RecordDetections(small, "vinvl")
    refuses(r"reads those in front of it; run .* --unrectified", RecordDetections, behind, "x101")


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
        refuses(message, read_names, tmp_path / "n.txt", "class", 4)
    (tmp_path / "n.json").write_text("{}")
    refuses("has no label_to_idx", read_names, tmp_path / "n.json", "class", 4)


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
