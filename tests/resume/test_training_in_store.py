"""A training run whose workdir is in an object store, killed and resumed.

gs:// is tests/object_store.py, s3:// is tests/amazon_store.py.
"""

import json

import amazon_store
import object_store
import pytest
import tiny_run
from test_training_resume import assert_same_run, run

from mmqa_jax.core import paths
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.local_copies import local_copy
from mmqa_jax.training.loop import Resuming
from mmqa_jax.weights.record import read_metadata
from tests.refusals import refuses

NAME = "runs/tiny"
GS, S3 = f"gs://{object_store.BUCKET}/{NAME}", f"s3://{amazon_store.BUCKET}/{NAME}"


def checkpoints(store):
    """The steps of the complete ones."""
    names = (name.split("/") for name in store.names(f"{NAME}/checkpoints/"))
    return {
        int(parts[3])
        for parts in names
        if parts[3].isdigit() and parts[4:] == ["commit_success.txt"]
    }


def test_a_killed_and_damaged_run_in_gs_ends_equal_to_a_local_one(
    tmp_path, monkeypatch, uninterrupted, fresh_cache, killed_run
):
    monkeypatch.setenv("MMQA_CACHE", str(fresh_cache))
    with object_store.started(tmp_path / "store", monkeypatch):
        store = object_store.Objects(tmp_path / "store" / object_store.BUCKET)
        killed_run(GS, "before_best", 2)  # step 30 is saved, the folder is still step 15's
        assert read_metadata(f"{GS}/best")["step"] == 15
        stop = tiny_run.Watched(tiny_run.pipeline(), 4, tiny_run.raise_signal(15))
        with pytest.raises(SystemExit):
            run(GS, stop, validation=tiny_run.KEEP_BEST)
        assert read_metadata(f"{GS}/best")["step"] == 30
        store.put(f"{NAME}/checkpoints/34/meta/metadata", b"{}")
        with pytest.raises(UserError, match=r"34: meta/metadata is damaged .*checkpoint 30"):
            run(GS, validation=tiny_run.KEEP_BEST)
        run(GS, validation=tiny_run.KEEP_BEST, resuming=Resuming(skip_damaged=True))
        names = {name.split("/")[3] for name in store.names(f"{NAME}/checkpoints/")}
        assert names == {"30", "34.damaged", "50", "60"}
        assert checkpoints(store) == {30, 50, 60}
        for name in ("", "/best"):
            ours, theirs = local_copy(GS + name), f"{uninterrupted}{name}"
            assert read_metadata(ours) == read_metadata(theirs)
        assert_same_run(local_copy(GS), uninterrupted)
        events = [name for name in store.names(NAME) if "/events.out." in name]
        assert len(events) == 3  # one of each attempt that took a step


def test_a_killed_run_in_s3_ends_equal_to_a_local_one(
    tmp_path, monkeypatch, fresh_cache, attempt, killed_run
):
    monkeypatch.setenv("MMQA_CACHE", str(fresh_cache))
    # A save takes the server half a second.
    short = {"steps": 10, "checkpoint_every": 5, "evaluate_every": 0, "keep": 1}
    local = tmp_path / "local"
    run(local, **short)
    with amazon_store.started(monkeypatch) as store:
        killed_run(S3, "in_save", 10, json.dumps(short))
        assert checkpoints(store) == {5}
        ended = attempt(S3, "to_end", 0, json.dumps(short))
        assert ended.code == 0, ended.said
        assert checkpoints(store) == {10}
        names = [name for name in store.names(NAME) if "/checkpoints/" not in name]
        store.download(names, NAME, tmp_path / "copy")
    assert read_metadata(tmp_path / "copy") == read_metadata(local)
    assert_same_run(tmp_path / "copy", local)


def test_an_orbax_that_cannot_be_taught_s3_is_named(monkeypatch):
    from orbax.checkpoint._src.serialization import tensorstore_utils

    monkeypatch.delattr(tensorstore_utils, "_use_gcs_driver")
    refuses(r"orbax-checkpoint [\d.]+ .*tensorstore_utils._use_gcs", paths.teach_orbax_s3)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {}),
        (
            {"AWS_ENDPOINT_URL": "http://one", "AWS_ENDPOINT_URL_S3": "http://two"},
            {"endpoint": "http://two"},
        ),
        (
            {"AWS_DEFAULT_REGION": "eu-west-1", "AWS_ACCESS_KEY_ID": "key"},
            {"aws_region": "eu-west-1", "aws_credentials": {"type": "environment"}},
        ),
    ],
)
def test_the_environment_says_where_s3_is(monkeypatch, environment, expected):
    for name in ("ENDPOINT_URL", "ENDPOINT_URL_S3", "REGION", "DEFAULT_REGION", "ACCESS_KEY_ID"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    spec = {"driver": "s3", "bucket": "b", "path": "a/c"}
    assert paths.kvstore_spec("s3://b/a/c") == spec | expected
