"""`mmqa train` with its workdir and its data in an object store."""

from pathlib import Path

import numpy as np
import object_store
import pytest
from cli_runs import done, mmqa, quietly, train_flags, weights_of

from mmqa_jax.core.files import read_json
from mmqa_jax.core.local_copies import local_copy

pytestmark = pytest.mark.slow


def test_training_in_a_store_equals_a_local_one(
    data, models, cli_cache, tmp_path, monkeypatch, capfd
):
    bucket = f"gs://{object_store.BUCKET}"
    flags = train_flags("rerank", f"{bucket}/data", f"{bucket}/runs/rerank")
    with quietly(cli_cache), object_store.started(tmp_path / "store", monkeypatch):
        store = object_store.Objects(tmp_path / "store" / object_store.BUCKET)
        for file in filter(Path.is_file, data.rglob("*")):
            store.put(f"data/{file.relative_to(data)}", file.read_bytes())
        result = done("train", *flags, initializers=True)  # as the local one
        assert result.pop("goodput")["attempts"] == 1
        assert result == {"task": "rerank", "steps": 2, "workdir": f"{bucket}/runs/rerank"}
        config = read_json(f"{bucket}/runs/rerank/config.json")["config"]
        assert config["data"]["dir"] == f"{bucket}/data"
        found = local_copy(f"{bucket}/runs/rerank")
        ours, theirs = weights_of(found), weights_of(models / "rerank")
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            np.testing.assert_array_equal(ours[name], value, err_msg=name)
        for name in ("tokenizer.json", "model.json"):
            assert (found / name).read_bytes() == (models / "rerank" / name).read_bytes()
        before = {name: store.version(name) for name in store.names()}
        again = done("train", *flags)  # nothing is left to do
        assert {**again, "goodput": None} == {**result, "goodput": None}
        assert {name: store.version(name) for name in store.names()} == before
        ended = mmqa("train", *flags, "--config.train.steps=3")
        assert ended.code == 2
        assert "train.steps=3: the run began with 2" in ended.err
        ended = mmqa("train", *flags, "--config.data.dir=gs://nowhere/data")
        assert ended.code == 2
        assert "there is no bucket nowhere" in ended.err
        assert not [name for name in store.names() if ".lock" in name]
        assert {name: store.version(name) for name in store.names()} == before


@pytest.mark.usefixtures("quiet")
def test_a_refused_run_leaves_nothing_in_the_store(data, tmp_path, monkeypatch):
    with object_store.started(tmp_path / "store", monkeypatch):
        flags = train_flags("rerank", data, f"gs://{object_store.BUCKET}/run")
        ended = mmqa("train", *flags, "--config.tokenizer=words")
        assert ended.code == 2, ended.err
        store = object_store.Objects(tmp_path / "store" / object_store.BUCKET)
        assert store.names() == []
