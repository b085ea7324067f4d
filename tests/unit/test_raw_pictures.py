"""VLP trained on raw pictures: its detector's regions beside the steps, as from `mmqa features`."""

import base64
import contextlib
import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from cli_runs import ROOT, done, flags_with, mmqa, narrow_vlp, quietly, rows_of
from flax import nnx
from test_webqa_reader import image_fact, snippet, write_images
from tiny_detectors import tiny

from mmqa_jax.core.config import load_config
from mmqa_jax.data import region_records
from mmqa_jax.data.batches.packing import RawSource
from mmqa_jax.data.corpus import open_corpus
from mmqa_jax.data.region_records import RegionRecords
from mmqa_jax.data.regions import BOX, FEATURES, X101Features
from mmqa_jax.inference.region_detector import RegionDetector
from mmqa_jax.models.detection.faster_rcnn import FasterRCNN
from mmqa_jax.tasks.registry import read_task
from mmqa_jax.tasks.rerank import Rerank
from mmqa_jax.tasks.task import read_run
from mmqa_jax.weights.folder import save_trained
from tests.drawn_weights import drawn, drawn_starts
from tests.refusals import refuses

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

CLASSES = 7
PICTURES = range(30_000_000, 30_000_004)
BROKEN = PICTURES[3]
# One static shape, few regions: compiling is what costs here.
SMALL = {
    "tokenizer": "corpus:200",
    "model.changes.hidden": 32,
    "model.changes.layers": 1,
    "model.changes.heads": 2,
    "model.changes.mlp": 32,
    "packing.buckets": "((1,48),)",
    "packing.max_question_tokens": 16,
    "packing.max_pair_tokens": 20,
    "batches.batch_size": 4,
    "batches.threads": 2,
    "train.steps": 2,
    "train.log_every": 1,
    "features.slots": 3,
    "features.id_map": "",
}


def datum(number: int) -> dict:
    guid = f"train{number}"
    pictures = [image_fact(p) for p in PICTURES]
    return {
        "Q": f'"What about {guid}?"', "A": [f'"It is {number}."'], "Guid": guid,
        "Keywords_A": f'"{number}"', "Qcate": "color", "split": "train",
        "img_posFacts": pictures[number : number + 1],
        "img_negFacts": pictures[:number] + pictures[number + 1 :],
        "txt_posFacts": [], "txt_negFacts": [snippet(f"{guid}_0", f"Fact of {guid}.")],
    }  # fmt: skip


def encoded(seed: int) -> bytes:
    from test_cli_features import encoded as picture

    return picture((70, 41), seed)


@pytest.fixture(scope="module", autouse=True)
def narrow():
    """7 classes in place of 1601, of which a detector of 2048 features has most of its weights."""
    with narrow_vlp(region_positions=BOX + CLASSES), pytest.MonkeyPatch.context() as patch:
        patch.setitem(region_records._CLASSES, "x101", CLASSES)
        patch.setattr(X101Features, "classes", CLASSES)
        yield


@pytest.fixture(scope="module")
def places(cli_cache, tmp_path_factory):
    """A prepared corpus, a tiny detector with the sizes of VLP's features, and its records."""
    folder = tmp_path_factory.mktemp("raw_pictures")
    raw = folder / "raw"
    raw.mkdir()
    data = [datum(n) for n in range(3)]
    (raw / "WebQA_train_val.json").write_text(json.dumps({d["Guid"]: d for d in data}))
    content = {n: encoded(n) if n != BROKEN else b"no picture" for n in PICTURES}
    write_images(raw, {n: base64.b64encode(data) for n, data in content.items()})
    config = dataclasses.replace(tiny("detectron"), head=FEATURES, classes=CLASSES)
    model = drawn(lambda: FasterRCNN(config, rngs=nnx.Rngs()), seed=3)
    save_trained(folder / "detector", model, nnx.state(model), {})
    with quietly(cli_cache):
        done("prepare", "webqa", f"--raw={raw}", f"--out={folder / 'data'}")
        done(
            "features", f"--model={folder / 'detector'}", f"--data={folder / 'data'}",
            f"--out={folder / 'records'}", "--unrectified", "--sides=60,120",
        )  # fmt: skip
    return folder


CONFIG = "webqa/vlp_select.py:runlocal"


def train(places, run, *more, **changes):
    """`mmqa train`; the losses, and what was said."""
    values = {**SMALL, "data.dir": places / "data", **changes}
    with drawn_starts():
        ended = mmqa(*flags_with("train", CONFIG, run, values), *more)
    assert ended.code == 0, ended.err
    return [row["loss"] for row in rows_of(run / "metrics.jsonl") if "loss" in row], ended.err


def raw(places, **changes):
    return {
        "features.root": "",
        "features.detector": places / "detector",
        "features.detection.sides": "(60,120)",
        **changes,
    }


def batches(places, run, **changes):
    """The inputs of the first two batches of such a training, in the order of its losses."""
    values = {**SMALL, "data.dir": str(places / "data"), "batches.threads": 0, **changes}
    config = load_config(f"{ROOT}/configs/{CONFIG}", [f"{k}={v}" for k, v in values.items()])
    task, corpus = read_task(config).in_folder(run), open_corpus(config.data.dir)
    recipe = task.recipe(corpus, task.open_tokenizer(run))
    with contextlib.closing(recipe.batches) as made:
        return [next(made)["inputs"] for _ in range(2)]


def test_raw_pictures_train_as_their_records_do(places, tmp_path, monkeypatch):
    looked, find = [], RegionDetector.find

    def counting(self, sizes, *more):
        looked.append(len(sizes))
        return find(self, sizes, *more)

    monkeypatch.setattr(RegionDetector, "find", counting)
    losses, said = train(places, tmp_path / "raw", **raw(places))
    assert len(losses) == 2
    assert sum(looked) == len(PICTURES) - 1  # each once, whatever the threads
    cache = tmp_path / "raw/region_cache"
    for name in ("again", "records"):
        (tmp_path / name).mkdir()
        shutil.copy(tmp_path / "raw/tokenizer.json", tmp_path / name)
    again = batches(places, tmp_path / "again", **raw(places, **{"features.cache": cache}))
    of_records = batches(places, tmp_path / "records", **{"features.root": str(places / "records")})
    assert any(np.asarray(inputs.region_features).any() for inputs in of_records)
    jax.tree.map(np.testing.assert_array_equal, again, of_records)
    assert sum(looked) == len(PICTURES) - 1
    assert "pictures without region features, read as their captions alone: 1" in said
    with pytest.raises(AssertionError, match="holds a trained run"):
        train(places, tmp_path / "raw", "--only_start", **raw(places))

    # In use the run's own detector and cache serve; the records are the same to the bit.
    task, tokenizer = read_run(tmp_path / "raw", (Rerank,))
    corpus = open_corpus(places / "data")
    reader, records = task.source_reader(corpus, tokenizer), RegionRecords(places / "records")
    rows = [corpus.row[name] for name in records.pictures]
    reader.look_ahead(rows)
    assert sum(looked) == len(PICTURES) - 1
    for row, name in zip(rows, records.pictures, strict=True):
        found = reader.regions(RawSource("", row=row))
        np.testing.assert_array_equal(found[0], records.read(name).features[:3])

    monkeypatch.setattr(RegionDetector, "fingerprint", "another")
    task, tokenizer = read_run(tmp_path / "raw", (Rerank,))
    refuses("detector: is another detector than the", task.open_vlp, tmp_path / "raw", tokenizer)
