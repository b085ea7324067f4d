"""`mmqa features`: from pictures to records, exports and drawings; killed, shared and refused."""

import dataclasses
import io
import pickle

import numpy as np
import pytest
from cli_runs import done, mmqa, quietly, write_documents
from flax import nnx
from PIL import Image
from test_region_records import shards
from tiny_detectors import tiny

from mmqa_jax.core.chunks import Shard
from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.data.pictures.decode import decode
from mmqa_jax.data.pictures.resize import BOTTOM_UP, detector_picture
from mmqa_jax.data.records import record_shards
from mmqa_jax.data.region_records import RegionRecords
from mmqa_jax.inference.region_detector import DetectorChoice, open_detector
from mmqa_jax.models.detection.faster_rcnn import FasterRCNN
from mmqa_jax.models.detection.keys import publish_detector
from mmqa_jax.runs.verbs.region_features import (
    NamedPictures,
    RegionOptions,
    open_pictures,
    write_regions,
)
from mmqa_jax.weights.folder import save_trained
from tests.drawn_weights import drawn
from tests.refusals import refuses

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

SIDES = "--sides=60,120"  # one padded size for all pictures, one program
SIZES = {"val/COCO_000000000042": (70, 41), "a": (1, 1), "b": (33, 64), "c": (64, 64)}


def encoded(size, seed=0, form="png"):
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    made = io.BytesIO()
    Image.fromarray(values).save(made, form)
    return made.getvalue()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Odd sizes, a single pixel, one that is no picture, and what is not looked at."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "val").mkdir()
    for seed, (name, size) in enumerate(SIZES.items()):
        (folder / f"{name}.png").write_bytes(encoded(size, seed))
    (folder / "broken.jpg").write_bytes(b"no picture")
    (folder / "notes.txt").write_text("x")
    (folder / "ATTRIBUTION.txt").write_text("Noise, by <us>")
    (folder / ".hidden.png").write_bytes(encoded((8, 8)))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random detector as `mmqa convert` writes it."""
    folder = tmp_path_factory.mktemp("detector")
    made = drawn(lambda: FasterRCNN(tiny("detectron2"), rngs=nnx.Rngs()), stddev=0.1)
    save_trained(folder, made, nnx.state(made), {})
    return folder, made


@pytest.fixture(scope="module")
def first(pictures, model, cli_cache, tmp_path_factory):
    out = tmp_path_factory.mktemp("features") / "regions"
    words = out.parent / "words.txt"
    words.write_text("".join(f"word {n}\n" for n in range(6)))
    kinds = out.parent / "kinds.txt"
    kinds.write_text("red\ntall\nwet\nold\n")
    with quietly(cli_cache):
        result = done(
            "features", f"--model={model[0]}", f"--data={pictures}", f"--out={out}", SIDES,
            f"--names={words}", f"--attribute_names={kinds}", "--attributes=0", "--regions=3,7",
            "--chunk=2", "--batch_size=2", "--precision=float32", "--export=vinvl",
            "--draw=2",
        )  # fmt: skip
    return out, result


def test_from_pictures_to_records(first, pictures, detector):
    out, result = first
    assert {k: result[k] for k in ("pictures", "broken_pictures", "detector", "random")} == {
        "pictures": 5, "broken_pictures": 1, "detector": "bottom_up_r101", "random": False,
    }  # fmt: skip
    records = RegionRecords(out)
    assert records.pictures == tuple(sorted(SIZES))
    assert records.facts.class_names[:2] == ("word 0", "word 1")
    images = [decode((pictures / f"{name}.png").read_bytes()) for name in SIZES]
    for name, want in zip(SIZES, detector(images), strict=True):
        got = records.read(name)
        assert got.size == SIZES[name][::-1]
        # Caffe's proposals of less than 16 pixels do not count: a single pixel has none.
        assert (0 if name == "a" else 3) <= len(got) == len(want) <= (0 if name == "a" else 7)
        for field in ("boxes", "features", "scores", "labels", "logits", "attributes"):
            np.testing.assert_allclose(
                getattr(got, field), getattr(want, field), atol=1e-4, err_msg=field
            )
    np.testing.assert_array_equal(
        records.read(42).boxes, records.read("val/COCO_000000000042").boxes
    )


def test_exports_and_drawings(first):
    out, result = first
    assert set(result["exports"]) == {"vinvl"}
    assert (out / "exports/vinvl/labels.tsv").read_text().count("\n") == 4
    page = (out / "drawn/index.html").read_text()
    assert page.count("<figure>") == 2
    assert page.count("<p>Noise, by &lt;us&gt;</p>") == 1
    assert (out / "exports/vinvl/ATTRIBUTION.txt").read_text() == "Noise, by <us>\n"
    assert Image.open(out / "drawn/0001.png").size == (8 * 33, 8 * 64)


def test_finished_records_need_no_model(first):
    out, _ = first
    assert done("features", f"--out={out}", "--export=vinvl")["exports"] == {
        "vinvl": str(out / "exports/vinvl")
    }
    ended = mmqa("features", f"--out={out}")
    assert ended.code == 2
    assert "--model: is missing; name a detector, or give --export or --draw" in ended.err
    ended = mmqa("features", f"--out={out}", "--export=vinvl", "--regions=3")
    assert "--regions: is used with --model alone" in ended.err
    for flags, message in (
        (("--draw=2",), "--data: is missing; give a folder of `mmqa prepare`, or of pictures."),
        (("--draw=-1", "--data=x"), "--draw=-1: a number of pictures was expected; give one."),
    ):
        ended = mmqa("features", f"--out={out}", *flags)
        assert (ended.code, ended.err) == (2, f"mmqa: {message}\n")


@pytest.fixture(scope="module")
def detector(model):
    choice = DetectorChoice(str(model[0]), regions=(3, 7), sides=(60, 120))
    return open_detector(choice, batch_size=2)


class Killed(BaseException):
    pass


def named(count=7, broken=(), fail_at=None):
    def read(name):
        if name == fail_at:
            raise Killed
        number = int(name)
        return b"no picture" if number in broken else encoded((40 + number, 50), number)

    return NamedPictures({str(n): str(n) for n in range(count)}, read, "same")


def test_killed_shared_and_whole_jobs_write_the_same(detector, tmp_path):
    options = RegionOptions(chunk=2)
    killed, whole, shared = (tmp_path / name for name in ("killed", "whole", "shared"))
    with pytest.raises(Killed):
        write_regions(named(fail_at="5"), detector, killed, options)
    assert not (killed / "manifest.json").exists()
    for folder in (killed, whole):
        write_regions(named(), detector, folder, options)
    first = write_regions(
        named(), detector, shared, dataclasses.replace(options, shard=Shard(1, 2))
    )
    assert "waiting_for_other_shards" in first
    status = done("status", str(shared))
    assert not status["complete"]
    assert status["missing"] == [0, 2]
    assert (status["items"], status["items_done"], status["parts"]) == (7, 3, 4)
    assert [s["items_done"] for s in status["shards"]] == [0, 3]
    ended = mmqa("merge", str(shared))
    assert ended.code == 2
    assert "who writes the last of the records finishes them; see with `mmqa" in ended.err
    second = write_regions(
        named(), detector, shared, dataclasses.replace(options, shard=Shard(0, 2))
    )
    assert "waiting_for_other_shards" not in second
    assert (first["pictures"], second["pictures"]) == (3, 4)
    assert done("status", str(shared))["complete"]
    want = shards(whole)
    assert len(want) == 4
    assert shards(killed) == shards(shared) == want
    assert detector._find._cache_size() == 1
    with pytest.raises(UserError, match="of other pictures, another model or other options"):
        write_regions(named(6), detector, whole, options)
    assert shards(whole) == want
    write_regions(named(6), detector, whole, dataclasses.replace(options, overwrite=True))
    assert len(RegionRecords(whole)) == 6
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("x")
    with pytest.raises(UserError, match="holds other files than regions"):
        write_regions(
            named(), detector, tmp_path / "mine", dataclasses.replace(options, overwrite=True)
        )
    assert (tmp_path / "mine/thesis.txt").exists()


def test_a_kill_between_the_last_shard_and_the_manifest(detector, tmp_path, monkeypatch):
    def killed(*_):
        raise Killed

    options = RegionOptions(chunk=4)
    with monkeypatch.context() as patched:
        patched.setattr(record_shards, "write_sealed", killed)
        with pytest.raises(Killed):
            write_regions(named(), detector, tmp_path, options)
    finishes = "7 of 7 items are done; start its command again, which finishes the records.\n"
    assert mmqa("status", tmp_path).out.endswith(f"{finishes}no process is at work on it.\n")
    write_regions(named(fail_at="0"), detector, tmp_path, options)  # nothing is encoded again
    assert done("status", tmp_path)["complete"]


def test_broken_pictures_up_to_the_limit(detector, tmp_path, capsys):
    options = RegionOptions(chunk=2, max_broken_pictures=1)
    found = write_regions(named(broken=(3,)), detector, tmp_path / "one", options)
    assert found["broken_pictures"] == 1
    assert "broken picture 3: 3: not a picture" in capsys.readouterr().err
    assert RegionRecords(tmp_path / "one").pictures == ("0", "1", "2", "4", "5", "6")
    message = r"2 pictures cannot be decoded, more than the 1 allowed \(3, 5\)"
    with pytest.raises(RunError, match=message):
        write_regions(named(broken=(3, 5)), detector, tmp_path / "two", options)


def test_a_published_file_and_its_rules(model, tmp_path):
    """Changes reach the model whether it is converted or published; VLP's alone has fc6."""
    config = dataclasses.replace(tiny("detectron"), bins=7)
    made = drawn(lambda: FasterRCNN(config, rngs=nnx.Rngs()))
    source = publish_detector(made.config, nnx.state(made)).source
    arrays = {key: source.read(key) for key in source.specs()}
    (tmp_path / "vlp.pkl").write_bytes(pickle.dumps({"blobs": arrays}, protocol=2))
    file = str(tmp_path / "vlp.pkl")
    choice = DetectorChoice(file, regions=(36, 36), unrectified=True, dtype="bfloat16")
    found = open_detector(choice)
    assert (found.kind.name, found.config.rectified) == ("vlp_x101", False)
    assert (found.config.rule.fewest, found.config.rule.most) == (36, 36)
    assert found.config.backbone.dtype == "bfloat16"
    assert found.pictures.shorter == 800
    with pytest.raises(UserError, match="--unrectified: bottom_up_r101 has no fc6"):
        open_detector(DetectorChoice(str(model[0]), unrectified=True))


def test_pictures_of_a_corpus(tmp_path):
    raw = write_documents(tmp_path / "raw", [])
    done("prepare", "corpus", f"--raw={raw}", f"--out={tmp_path / 'data'}")
    found = open_pictures(tmp_path / "data")
    assert found.names
    assert list(map(str, found.materials)) == ["Flags of lands, by nobody, CC0"]
    for picture, name in found.names.items():
        image = decode(found.read(name), name)
        assert detector_picture(image, BOTTOM_UP).pixels.ndim == 3, picture
    refuses("its questions have no pictures", open_pictures, tmp_path / "data", "questions")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model=vinvl",), "--model=vinvl: its weights are needed; give their file"),
        (("--model=none.pth",), r"--model=none\.pth: no such file or folder"),
        (("--model={model}", "--random=0"), "--random: is for the names vlp_x101, vinvl, bua"),
        (("--model={model}", "--regions=5,x"), r"--regions=5,x: N or MIN,MAX was expected"),
        (("--model={model}", "--regions=9,2"), r"from 9 to 2 regions"),
        (("--model={model}", "--sides=900,600"), r"--sides=900,600: a short side from 1"),
        (("--model={model}", "--export=coco"), r"--export=coco: use one of vinvl, tags"),
        (("--model={model}", "--engine=ray"), r"--engine=ray: is not for this verb"),
        (("--model={model}", "--attributes=2"), r"--attributes=2\.0: a probability"),
        (("--model={model}", "--attributes=0.1"), r"--attributes: changes --export and"),
        (("--model={model}", "--attributes=0.1", "--draw=1"), r"--attributes: these records do"),
        (("--model={model}", "--export=tags"), r"--export=tags: picture 'a' does not end in"),
        (("--model={model}", "--export=vinvl,webqa"), r"--export=webqa: use one of vinvl, tags"),
        (("--model={model}", "--chunk=0"), r"--chunk=0: at least 1"),
        (("--model={model}", "--names={file}"), r"the detector has 6 class names"),
        (("--model={model}", "--data={empty}"), r"neither a corpus of `mmqa prepare` nor a folder"),
        (("--model={model}", "--data={twins}"), r"a\.jpg and a\.png have the same id 'a'"),
        (("--model={model}", "--data=nowhere"), r"--data=nowhere: no such folder"),
        (("--model={model}", "--out=gs://x/y"), r"takes no place in an object store"),
    ],
)
def test_refusals(flags, message, model, pictures, tmp_path, refused):
    places = {name: tmp_path / name for name in ("file", "empty", "twins")}
    places["file"].write_text("one\n")
    for name in ("empty", "twins"):
        (tmp_path / name).mkdir()
    for ending in ("jpg", "png"):
        (tmp_path / f"twins/a.{ending}").write_bytes(encoded((4, 4)))
    given = [flag.format(model=model[0], **places) for flag in flags]
    defaults = {"--data": f"--data={pictures}", "--out": f"--out={tmp_path / 'out'}"}
    given += [text for flag, text in defaults.items() if not any(g.startswith(flag) for g in given)]
    refused("features", *given, message=message)
