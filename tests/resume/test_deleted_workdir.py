"""A workdir that is deleted or moved while the run goes on: an error, and nothing is made anew."""

import shutil
import time

import object_store
import pytest
import tiny_run

from mmqa_jax.core.checkpoints.checkpoint import Checkpoints
from mmqa_jax.core.checkpoints.checksums import find_damage
from mmqa_jax.core.errors import RunError
from mmqa_jax.core.paths import as_path, remove_tree
from mmqa_jax.core.workdir import claim_workdir
from tests.refusals import refuses


def wait_for_save(folder, step):
    """Until that step's save, which goes on beside the run, has ended."""
    ends = time.monotonic() + 60
    while not (folder / "checkpoints" / str(step)).exists():
        assert time.monotonic() < ends
        time.sleep(0.01)


def remove(folder, saved=None):
    """At once, while a save may be writing; with `saved` when that step's save has ended."""
    if saved:
        wait_for_save(folder, saved)
    folder.rename(folder.with_name("deleted"))
    shutil.rmtree(folder.with_name("deleted"), ignore_errors=True)


@pytest.mark.parametrize(
    ("at", "saved", "ends"),
    [(6, None, 8), (10, None, 10), (11, 10, 12), (19, 10, 20)],  # rows are written every 4 steps
    ids=["before a row", "at a save", "between saves", "at the end"],
)
def test_a_deleted_workdir_ends_the_run(tmp_path, at, saved, ends):
    workdir = tmp_path / "run"
    workdir.mkdir()
    (workdir / "config.json").write_text("{}")
    batches = tiny_run.Watched(tiny_run.pipeline(1), at, lambda batch: remove(workdir, saved))
    refuses(r"run/config\.json: is gone,", tiny_run.run, workdir, batches, steps=20, error=RunError)
    assert batches.count == ends
    assert not workdir.exists()


def test_a_workdir_that_is_deleted_after_the_last_save_ends_the_run(tmp_path, monkeypatch):
    workdir, wait = tmp_path / "run", Checkpoints.wait
    workdir.mkdir()
    (workdir / "config.json").write_text("{}")

    def waited(checkpoints):
        wait(checkpoints)
        if checkpoints.latest_step() == 4:
            remove(workdir)

    monkeypatch.setattr(Checkpoints, "wait", waited)
    with pytest.raises(RunError, match=r"run/config\.json: is gone"):
        tiny_run.run(workdir, tiny_run.pipeline(1), steps=4)
    assert not workdir.exists()


def test_a_workdir_that_is_deleted_in_a_save_holds_that_step_whole_or_nothing(tmp_path):
    """The save goes on in a thread, and makes its folders again; the step may be complete."""
    workdir = tmp_path / "run"
    batches = tiny_run.Watched(tiny_run.pipeline(1), 21, lambda batch: remove(workdir))
    refuses("is gone, deleted or moved", tiny_run.run, workdir, batches, steps=30, error=RunError)
    if workdir.exists():
        (step,) = (workdir / "checkpoints").iterdir()
        assert step.name in ("10", "20")  # what was being saved
        assert find_damage(step) is None


def test_a_moved_workdir_ends_the_run_although_another_takes_its_place(tmp_path):
    workdir, another = tmp_path / "run", tmp_path / "another"
    another.mkdir()
    (another / "theirs").touch()

    def move(_):
        wait_for_save(workdir, 10)  # it would make its folders again
        workdir.rename(tmp_path / "elsewhere")
        another.rename(workdir)  # never empty: empty folders of a lost save are removed

    with pytest.raises(RunError, match=r"metrics\.jsonl: is gone"):
        tiny_run.run(workdir, tiny_run.Watched(tiny_run.pipeline(1), 18, move), steps=20)
    assert [path.name for path in workdir.iterdir()] == ["theirs"]
    tiny_run.run(
        tmp_path / "elsewhere", tiny_run.pipeline(1), steps=20
    )  # and goes on where it is now


def test_deleted_objects_end_the_run(tmp_path, monkeypatch):
    with object_store.started(tmp_path / "store", monkeypatch):
        place = as_path(f"gs://{object_store.BUCKET}/run")
        batches = tiny_run.Watched(tiny_run.pipeline(1), 8, lambda batch: remove_tree(place))
        refuses(r"run/metrics\.jsonl: is gone", tiny_run.run, place, batches, error=RunError)
        store = object_store.Objects(tmp_path / "store" / object_store.BUCKET)
        assert not list(store.names("run/"))


def test_other_verbs_fail_too_when_their_workdir_is_gone(tmp_path):
    workdir = tmp_path / "run"
    with (
        pytest.raises(RunError, match=r"config\.json: is gone, the workdir was deleted"),
        claim_workdir(workdir, {"seed": 1}, work=()),
    ):
        shutil.rmtree(workdir)
    assert not workdir.exists()
    with (
        pytest.raises(RunError, match=r"stages/\.index\.running\.json: is gone"),
        claim_workdir(workdir, {"seed": 1}, work=()) as (claimed, _),
        claimed.stage("index"),
    ):
        shutil.rmtree(workdir)
    assert not workdir.exists()
