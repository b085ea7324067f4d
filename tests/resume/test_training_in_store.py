"""A training run whose workdir is in an object store, killed and resumed (tests/object_store.py)."""

from __future__ import annotations

import pytest
import tiny_run
from object_store import BUCKET, Objects, started
from test_training_resume import assert_same_run, killed_run, run

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.local_copies import local_copy
from mmqa_jax.core.paths import as_path
from mmqa_jax.weights.folder import read_metadata

WORKDIR = f"gs://{BUCKET}/runs/tiny"


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("MMQA_CACHE", str(tmp_path / "cache"))
    with started(tmp_path / "store", monkeypatch):
        yield Objects(tmp_path / "store" / BUCKET)


def checkpoints(store):
    """The steps of the complete ones."""
    names = (name.split("/") for name in store.names("runs/tiny/checkpoints/"))
    return {int(parts[3]) for parts in names if parts[4:] == ["commit_success.txt"]}


def test_a_killed_run_in_a_store_ends_equal_to_a_local_one(tmp_path, store):
    run(tmp_path / "local", validation=tiny_run.KEEP_BEST)
    killed_run(WORKDIR, "in_save", 20)
    assert 20 not in checkpoints(store)
    killed_run(WORKDIR, "before_best", 2)  # step 30 is saved, the folder is still step 15's
    assert read_metadata(f"{WORKDIR}/best")["step"] == 15
    run(WORKDIR, validation=tiny_run.KEEP_BEST)
    assert checkpoints(store) == {30, 50, 60}
    for name in ("", "/best"):
        ours, theirs = local_copy(WORKDIR + name), tmp_path / f"local{name}"
        assert read_metadata(ours) == read_metadata(theirs)
    assert_same_run(local_copy(WORKDIR), tmp_path / "local")
    events = [name for name in store.names("runs/tiny/") if "/events.out." in name]
    assert len(events) == 3  # one of each attempt


def test_s3_takes_no_checkpoints(store):
    with pytest.raises(UserError, match="Orbax writes checkpoints to file systems and to gs:// on"):
        run(f"s3://{BUCKET}/run")
    assert not as_path(f"s3://{BUCKET}/run").exists()
