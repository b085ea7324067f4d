"""`mmqa embed` with an image tower: grids as Prophet's MCAN reads them, and resumption."""

import json
import shutil

import jax
import numpy as np
import object_store
import pytest
from cli_runs import done, mmqa, png, tree
from flax import nnx
from vqa_files import write_okvqa

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.pictures.bounds import PictureError
from mmqa_jax.data.pictures.decode import BrokenPictures, decode_to_pixels
from mmqa_jax.data.records.grid_records import GridRecords, open_features, write_grids
from mmqa_jax.models.modified_resnet.network import ModifiedResNet, ModifiedResNetConfig
from mmqa_jax.models.two_towers.network import normalize_pixels
from mmqa_jax.runs.verbs.indexing import embed_grids
from mmqa_jax.tasks.vqa import GridModel, PictureFeaturesSection
from mmqa_jax.weights.folder import save_trained
from tests.drawn_weights import drawn
from tests.refusals import refuses

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

CONFIG = ModifiedResNetConfig(8, (1, 1, 1, 1), image_size=64, embed_dim=6)


@pytest.fixture(scope="module")
def tower(tmp_path_factory):
    """A random image tower as `mmqa convert` writes it."""
    folder = tmp_path_factory.mktemp("tower")
    model = drawn(lambda: ModifiedResNet(CONFIG, rngs=nnx.Rngs()))
    save_trained(folder, model, nnx.state(model), {})
    return folder, model


def test_grids_of_a_benchmarks_pictures(tower, tmp_path):
    folder, model = tower
    raw = write_okvqa(tmp_path / "raw", pictures=True)  # pictures 1 and 2 of 1, 2 and 3
    done("prepare", "okvqa", f"--raw={raw}", f"--out={tmp_path / 'data'}")
    result = embed_grids(tmp_path / "data", folder, tmp_path / "grids", side=64)
    found = {"pictures": 2, "shape": [2, 2, 256], "broken_pictures": 0}
    one = {"data": 1, "fsdp": 1, "tensor": 1}
    assert result == {**found, "devices": 1, "mesh": one, "batch_size": 8}
    features = open_features(
        PictureFeaturesSection(root=str(tmp_path / "grids")),
        GridModel(image="grid", trunk="minilm_l6", grid=2, image_features=256),
    )
    pixels = decode_to_pixels(png((1, 2, 3)), 64, "squash", alpha="dropped")
    graphdef, state = nnx.split(model)

    @jax.jit
    def encoded(state, pixels):
        return nnx.merge(graphdef, state).grid_features(normalize_pixels(pixels))

    with jax.default_matmul_precision("highest"):
        grid = encoded(state, pixels[None])
    found = features.batch([2, 3])
    np.testing.assert_allclose(found[0], grid.reshape(4, 256), rtol=2e-3, atol=1e-4)  # float16
    assert not found[1].any()
    assert features.missing.names == ["3"]
    before = tree(tmp_path / "grids")
    assert embed_grids(tmp_path / "data", folder, tmp_path / "grids", side=64) == result
    assert tree(tmp_path / "grids") == before  # a finished job is left as it is


def test_the_verb_chooses_by_the_model(tower, tmp_path, monkeypatch):
    folder, _ = tower
    raw = write_okvqa(tmp_path / "raw")
    done("prepare", "okvqa", f"--raw={raw}", f"--out={tmp_path / 'data'}")
    flags = ("embed", f"--data={tmp_path / 'data'}", f"--model={folder}", f"--out={tmp_path / 'g'}")
    ended = mmqa(*flags)
    assert ended.code == 2
    assert "its questions have no pictures" in ended.err
    ended = mmqa(*flags, "--shard=0/2")
    assert "--shard, --engine and --overwrite: are for the embeddings of sources" in ended.err
    with object_store.started(tmp_path / "store", monkeypatch):
        place = f"s3://{object_store.BUCKET}/grids"
        ended = mmqa(*flags[:-1], f"--out={place}")
    assert ended.code == 2
    assert f"--out={place}: grids are written to the file system only; name" in ended.err


def test_grids_of_another_size_among_the_records(tmp_path):
    for name, side in (("a", 1), ("b", 2)):
        write_grids(
            tmp_path / name, {1: "1.jpg"}, lambda names, side=side: [np.ones((side, side, 3))],
            shape=(side, side, 3), model="m", broken=BrokenPictures(1),
        )  # fmt: skip
    shutil.rmtree(tmp_path / "a/grids")
    shutil.move(tmp_path / "b/grids", tmp_path / "a/grids")
    message = r"a: its grid features cannot be read \(.*; delete the folder and run `mmqa embed` ag"
    with pytest.raises(UserError, match=message):
        GridRecords(tmp_path / "a").read(1)


class Killed(BaseException):
    pass


def test_a_killed_job_goes_on_where_it_was(tmp_path):
    """Each shard is computed once; the result is that of a job that nobody killed."""
    pictures = {n: f"{n}.jpg" for n in range(7)}
    asked: list[str] = []

    def encode(names, limit=None):
        if limit is not None and len(asked) >= limit:
            raise Killed
        asked.extend(names)
        broken = PictureError("3.jpg: broken.")
        return [broken if n == "3.jpg" else np.full((1, 1, 2), int(n[0]), "f4") for n in names]

    def job(folder, limit=None, model="a"):
        broken = BrokenPictures(7, limit=2)
        write_grids(
            folder, pictures, lambda names: encode(names, limit), shape=(1, 1, 2), model=model,
            broken=broken, shard=2,
        )  # fmt: skip
        return broken

    with pytest.raises(Killed):
        job(tmp_path / "a", limit=4)
    assert not (tmp_path / "a/manifest.json").exists()
    assert done("status", tmp_path / "a")["items_done"] == 4
    broken = job(tmp_path / "a")
    assert done("status", tmp_path / "a")["complete"]
    assert asked == [f"{n}.jpg" for n in range(7)]
    assert broken.names == ["3.jpg"]
    found = GridRecords(tmp_path / "a")
    assert len(found) == 6
    assert [float(found.read(n)[0].max()) for n in (0, 1, 2, 4, 5, 6)] == [0, 1, 2, 4, 5, 6]
    refuses("no grid features of picture 3", found.read, 3)
    job(tmp_path / "b")
    names = [name for name in tree(tmp_path / "b") if "array_record" in name]
    assert names
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    asked.clear()
    job(tmp_path / "a")
    assert not asked
    job(tmp_path / "a", model="b")  # another model: everything again
    assert len(asked) == 7
    assert json.loads((tmp_path / "a/manifest.json").read_text())["model"] == "b"
