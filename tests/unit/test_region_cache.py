"""Regions that are detected where they are asked for: once, by content; damage, threads, sharing."""

import base64
import contextlib
import dataclasses
import functools
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from cli_runs import ROOT
from tiny_checkpoints import CONFIGS

from mmqa_jax.core.config import load_config
from mmqa_jax.core.errors import RunError
from mmqa_jax.core.store import Store
from mmqa_jax.data.batches.packing import RawSource
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.pictures.decode import BrokenPictures, PictureError
from mmqa_jax.data.pictures.resize import VLP
from mmqa_jax.data.region_records import DetectedRegions, RecordDetections
from mmqa_jax.data.regions import FeatureRegions, RegionError
from mmqa_jax.data.schema import Question, Source
from mmqa_jax.data.tokenizers import minilm_tokenizer
from mmqa_jax.inference import region_detector
from mmqa_jax.inference.batches import answer_inputs, rerank_pairs
from mmqa_jax.runs.verbs.region_features import NamedPictures, RegionOptions, write_regions
from mmqa_jax.tasks import vlp
from mmqa_jax.tasks.registry import check_config, read_task
from mmqa_jax.weights.folder import describe_model
from mmqa_jax.weights.registry import architecture
from tests import pictures
from tests.refusals import refuses

FEATURES, CLASSES, COUNT = 2048, 1601, 3


def encoded(seed: int) -> bytes:
    values = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), np.uint8)
    return pictures.encoded(values)


class Counting:
    """In a detector's place: regions that follow from the pixels; counts what it is asked."""

    def __init__(self, fingerprint: str = "one"):
        self.config = SimpleNamespace(
            features=FEATURES, classes=CLASSES, attributes=0, rectified=False
        )
        self.kind = SimpleNamespace(name="vlp_x101")
        self.pictures = VLP
        self.fingerprint = fingerprint
        self.serving = SimpleNamespace(to_json=dict)
        self.calls: list[int] = []

    def find(self, sizes, load, advance=lambda count: None):
        self.calls.append(len(sizes))
        found = []
        for number, (width, height) in enumerate(sizes):
            try:
                pixels = load(number).pixels
            except PictureError as error:
                found.append(error)
                continue
            rng = np.random.default_rng(hashlib.sha256(pixels.tobytes()).digest()[0])
            corner = rng.uniform(0, 5, (COUNT, 2))
            found.append(
                DetectedRegions(
                    (height, width),
                    np.concatenate([corner, corner + 1], 1).astype("f4"),
                    rng.normal(size=(COUNT, FEATURES)).astype("f4"),
                    rng.uniform(size=COUNT).astype("f4"),
                    np.arange(1, COUNT + 1, dtype="i4"),
                    rng.normal(size=(COUNT, CLASSES)).astype("f4"),
                )
            )
        return found


PICTURES = {
    **{f"{n}.png": encoded(n) for n in range(4)},
    "same.png": encoded(0),
    "broken.png": b"no picture",
}


def corpus(pictures=PICTURES) -> Corpus:
    sources = [Source(id=name, modality="image", text=name, image=name) for name in pictures]
    sources += [
        Source(id="gone", modality="image", text="gone", image="gone.png"),
        Source(id="words", modality="text", text="words"),
    ]
    return Corpus(sources, read_picture=pictures.get)


def opened(folder, detector, precision="float16"):
    cache = region_detector.RegionCache(detector, folder, precision, "the detector")
    return region_detector.CorpusRegions(corpus(), cache), cache


def same(one: DetectedRegions, other: DetectedRegions) -> None:
    for name in ("boxes", "features", "scores", "labels", "logits"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


def test_what_a_batch_lacks_is_detected_together_and_once(tmp_path):
    detector = Counting()
    regions, cache = opened(tmp_path, detector)
    regions.find(["0.png", "1.png", "same.png", "0.png"])
    assert detector.calls == [2]  # one content has one record
    same(regions.read("0.png"), regions.read("same.png"))
    regions.find(["1.png", "2.png"])
    first = regions.read("3.png")  # without having been announced
    assert detector.calls == [2, 1, 1]
    again, reopened = opened(tmp_path, Counting())  # a later run
    again.find(PICTURES)
    same(again.read("3.png"), first)
    assert reopened.detected == 1  # the broken one, which has no record
    assert cache.detected == 4


def test_another_detector_or_precision_is_not_read(tmp_path):
    opened(tmp_path, Counting())[0].read("0.png")
    for detector, precision in ((Counting("two"), "float16"), (Counting(), "float32")):
        regions, _ = opened(tmp_path, detector, precision)
        regions.read("0.png")
        assert detector.calls == [1]
    unchanged = Counting()
    opened(tmp_path, unchanged)[0].read("0.png")
    assert unchanged.calls == []


@pytest.mark.parametrize("at", [-100, 40])  # in a record, and in the head of a chunk
def test_a_damaged_record_is_detected_again(tmp_path, at):
    regions, _ = opened(tmp_path, Counting())
    regions.find(["0.png"])
    want = regions.read("0.png")
    regions.read("1.png")
    (file,) = (tmp_path / "one-float16").glob("[0-9]*.jsonl")
    content = bytearray(file.read_bytes())
    length = len(content) // 2  # both have one size
    content[at % length] ^= 1
    file.write_bytes(content)
    for detected in ([1], []):
        detector = Counting()
        again, _ = opened(tmp_path, detector)
        same(again.read("0.png"), want)
        again.read("1.png")
        assert detector.calls == detected


def test_what_a_kill_cut_is_detected_again(tmp_path):
    opened(tmp_path, Counting())[0].find(["0.png", "1.png"])
    (file,) = (tmp_path / "one-float16").glob("[0-9]*.jsonl")
    file.write_bytes(file.read_bytes()[:-7])
    detector = Counting()
    opened(tmp_path, detector)[0].find(["0.png", "1.png"])
    assert detector.calls == [2]


def test_threads_and_processes_do_not_detect_twice(tmp_path):
    detector = Counting()
    regions, _ = opened(tmp_path, detector)
    other, _ = opened(tmp_path, other_detector := Counting())  # as of another process
    names = [f"{n}.png" for n in range(4)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: regions.find(names), range(16)))
        list(pool.map(regions.read, names * 8))
    assert detector.calls == [4]
    other.find(names)
    assert other_detector.calls == []


def test_broken_pictures_are_counted_up_to_the_limit(tmp_path):
    detector = Counting()
    found, _ = opened(tmp_path, detector)
    missing = BrokenPictures(7, 1, "run `mmqa prepare` again", "have no region features")
    sources = corpus().sources
    ids = [s.id if s.modality == "image" else None for s in sources]
    regions = FeatureRegions(
        RecordDetections(found, "x101"), ids, slots=2, missing=missing, find=found.find
    )
    regions.look_ahead(range(len(sources)))
    assert detector.calls == [4]  # the broken one has no size to be batched by

    def read(row):
        return regions(RawSource(sources[row].text, row=row))

    features, positions = read(0)
    assert features.shape == (2, FEATURES)
    assert positions.shape == (2, 6 + CLASSES)
    assert read(ids.index(None)) is None
    assert read(ids.index("broken.png")) is None
    assert read(ids.index("broken.png")) is None
    assert missing.names == ["broken.png"]
    with pytest.raises(RunError, match=r"2 pictures have no region features.*gone.*not in the"):
        read(ids.index("gone"))
    assert detector.calls == [4]
    refuses(r"broken\.png: not a picture", found.read, "broken.png", error=RegionError)


def test_what_is_no_record_is_named(tmp_path):
    digest = hashlib.sha256(PICTURES["0.png"]).hexdigest()
    what = {"detector": "one", "precision": "float16"}
    with Store(tmp_path / "one-float16", what) as store:
        store.add({digest: base64.b64encode(b"x").decode()})
    regions, _ = opened(tmp_path, Counting())
    refuses(r"one-float16: regions of 0\.png.*delete the", regions.read, "0.png", error=Exception)


class Large(Counting):
    """Whose features float16 cannot hold."""

    def find(self, sizes, load, advance=lambda count: None):
        found = super().find(sizes, load, advance)
        return [dataclasses.replace(one, features=one.features * np.float32(1e6)) for one in found]


def test_values_that_the_precision_does_not_hold_are_named(tmp_path):
    regions, _ = opened(tmp_path, Large())
    refuses(r"picture 0\.png: features .*; give --precision=float32", regions.read, "0.png")
    assert opened(tmp_path, Large(), "float32")[0].read("0.png").features.max() > 65504


def test_a_disk_that_keeps_nothing_is_named(tmp_path, monkeypatch):
    regions, _ = opened(tmp_path, Counting())
    monkeypatch.setattr(Store, "get", lambda store, digest: None)
    refuses(r"one-float16: .*0\.png: .* just written .*; delete", regions.read, "0.png")


# In a task. tests/unit/test_raw_pictures.py trains with a detector.


whole_minilm = functools.cache(minilm_tokenizer)


def batches_of(task, count=4):
    """The first batches of a run, by the run's threads."""
    questions = [
        Question(f"q{n}", "train", f"what is {n} ?", None, (f"{n} .",), "", "", (f"{n}.png",),
                 (*(name for name in PICTURES if name != f"{n}.png"), "gone", "words"))
        for n in range(4)
    ]  # fmt: skip
    asked = Corpus(corpus().sources, questions, PICTURES.get)
    recipe = task.recipe(asked, whole_minilm())
    with contextlib.closing(recipe.batches) as batches:
        return [next(batches) for _ in range(count)], recipe


def vlp_task(kind, **changes):
    values = {"batches.batch_size": 4, "features.slots": 2, "features.id_map": "",
              "train.evaluate_every": 0, **changes}  # fmt: skip
    return read_task(load_config(f"{ROOT}/configs/webqa/vlp_{kind}.py:runlocal", values))


def test_a_hundredth_of_the_pictures_may_lack_features(tmp_path):
    """Of the pictures: snippets, which have none, do not count."""
    (tmp_path / "dev").mkdir()
    pictures = [Source(str(n), "image", "", image=f"{n}.png") for n in range(2_000)]
    texts = [Source(f"text{n}", "text", "A star.") for n in range(3_000)]
    root = {"features.root": str(tmp_path), "model.frontend": "x101", "features.max_missing": None}
    assert vlp_task("select", **root).regions(Corpus([*pictures, *texts])).missing.limit == 20


@pytest.mark.parametrize("kind", ["select", "qa"])
def test_batches_of_raw_pictures_are_those_of_records(kind, tmp_path, monkeypatch):
    names = {name: name for name in PICTURES}
    pictures = NamedPictures(names, PICTURES.__getitem__, "these")
    write_regions(pictures, Counting(), tmp_path / "records", RegionOptions())
    root = vlp_task(kind, **{"features.root": str(tmp_path / "records")})
    want, recipe = batches_of(root)
    assert recipe.metadata == {}

    detector = Counting()
    monkeypatch.setattr(region_detector, "open_detector", lambda choice, *_, **__: detector)
    flags = {"features.root": "", "features.detector": "the detector"}
    task = vlp_task(kind, **flags).in_folder(tmp_path / "run")
    got, recipe = batches_of(task)
    assert recipe.metadata == {"detector": "one"}
    for one, other in zip(want, got, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)
    assert any(np.any(np.asarray(one["inputs"].region_features)) for one in got)
    detected = sum(detector.calls)
    assert 0 < detected <= 4
    batches_of(task)  # another epoch, validation, ...
    if kind == "select":
        assert detected == 4
        assert sum(detector.calls) == 4
    assert list((tmp_path / "run/region_cache").iterdir()) == [
        tmp_path / "run/region_cache/one-float16"
    ]

    # The best step's weights are used with what the run has found.
    (tmp_path / "run/config.json").touch()
    assert vlp_task(kind, **flags).in_folder(tmp_path / "run/best").features == task.features
    monkeypatch.setattr(vlp, "read_metadata", lambda folder: {"detector": "another"})
    refuses("the detector: is another detector", task.open_vlp, tmp_path / "run", whole_minilm())


def test_trained_models_look_at_a_batch_together(tmp_path, monkeypatch):
    detector, tokenizer = Counting(), whole_minilm()
    monkeypatch.setattr(region_detector, "open_detector", lambda choice, *_, **__: detector)
    flags = {"features.root": "", "features.detector": "the detector"}
    task = vlp_task("qa", **flags).in_folder(tmp_path)
    reader = task.source_reader(corpus(), tokenizer, on_demand=True)
    packer = task.packer(tokenizer, inference=True)
    asked, rows = ["what ?", "who ?"], [[0, 1], [2]]
    for pairs in rerank_pairs(reader, packer, asked, rows, batch_size=4):
        assert np.all(np.any(pairs["region_features"], axis=(1, 2)))
    list(answer_inputs(reader, packer, asked, [[0, 3], [4]], batch_size=4))  # 4 is 0 again
    assert detector.calls == [3, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features.root": "x"}, r"features\.root=x names features that are already there"),
        ({"features.detector": "nowhere.pkl"}, r"detector=nowhere\.pkl: no such file or folder"),
        ({"features.cache": "gs://b/c"}, r"features\.cache=gs://b/c: a folder of a file system"),
        ({"features.detection.sides": "(90,60)"}, r"detection\.sides=\(90, 60\): two numbers"),
        ({"features.detection.regions": "(-1,5)"}, r"detection\.regions=\(-1, 5\): two numbers"),
        ({"features.detection.precision": "int8"}, r"features\.detection\.precision"),
        ({"features.detection.batch_size": "0"}, r"features\.detection\.batch_size=0"),
        ({"features.detector": ""}, r"features\.root is missing"),
        (
            {"features.detector": "", "features.root": "x", "features.cache": "y"},
            r"features\.cache: is used with features\.detector alone",
        ),
        (
            {"features.detector": "", "features.root": "x", "features.detection.sides": "(6,9)"},
            r"features\.detection: is used with features\.detector alone",
        ),
    ],
)
def test_configs_that_are_refused(changes, message, tmp_path):
    (tmp_path / "detector.pkl").touch()
    values = {"features.root": "", "features.detector": str(tmp_path / "detector.pkl")}
    config = load_config(f"{ROOT}/configs/webqa/vlp_select.py:runlocal", {**values, **changes})
    refuses(message, check_config, config)


def test_weights_of_another_model_are_no_detector(tmp_path):
    (tmp_path / "weights").mkdir()
    record = describe_model(architecture("bert", "here"), CONFIGS["bert"], "float32")
    (tmp_path / "model.json").write_text(json.dumps(record))
    choice = region_detector.DetectorChoice(str(tmp_path), key="config key features.detector")
    message = (
        r"features\.detector=.*: holds a model of kind 'bert', .* `mmqa convert --model=detect"
    )
    refuses(message, region_detector.open_detector, choice)


def test_worker_processes_are_refused(tmp_path):
    config = load_config(f"{ROOT}/configs/webqa/vlp_qa.py:vinvl_runlocal")
    config.features.detector, config.batches.workers = str(tmp_path), 2
    refuses(r"batches\.workers=2 processes cannot share the accel", check_config, config)


def test_a_detector_of_another_frontend_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(region_detector, "open_detector", lambda choice, *_, **__: Counting())
    flags = {"features.root": "", "features.detector": "the detector", "model.frontend": "vinvl"}
    task = vlp_task("select", **flags).in_folder(tmp_path)
    refuses(r"2048 features and 1601 classes, model\.frontend=vinvl", task.regions, corpus())
    config = load_config(f"{ROOT}/configs/webqa/vlp_select.py:clip_patches_runlocal")
    config.features.detector = "x"
    refuses(r"model\.frontend=clip reads no detector's regions", check_config, config)
