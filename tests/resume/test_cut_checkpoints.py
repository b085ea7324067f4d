"""A checkpoint that was interrupted at any byte is never the latest, a damaged one never restored.

The files of the newest checkpoint are deleted, or cut at sampled bytes.
"""

import asyncio
import os
import random
import shutil
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_run
from orbax.checkpoint._src.handlers.json_checkpoint_handler import JsonCheckpointHandler
from orbax.checkpoint._src.path import async_path

from mmqa_jax.core.checkpoints.checkpoint import Checkpoints
from mmqa_jax.core.errors import UserError

OLD, NEW = 10, 20
CUTS = 25


def arrays(step):
    """Parameters and optimizer state that tell the step."""
    rng = np.random.default_rng(step)
    params = {"kernel": rng.normal(size=(40, 30)).astype("f4"), "bias": np.full(7, step, "f4")}
    train = {"step": np.int32(step), "moment": rng.normal(size=(40, 30)).astype("f4")}
    return jax.tree.map(jax.numpy.asarray, {"params": params, "train": train})


def save(folder, *steps):
    with Checkpoints(folder, fingerprint="same") as checkpoints:
        for step in steps:
            meta = {"seed": 7, "window": {"sums": {"loss": step / 3}, "count": 2}}
            checkpoints.save(step, **arrays(step), iterator=tiny_run.pipeline(), meta=meta)
            checkpoints.wait()


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """Copies of the folder before each renaming of a save, and the whole one at last."""
    folder = tmp_path_factory.mktemp("made") / "checkpoints"
    save(folder, OLD)
    copies = []
    rename = os.rename

    def copied(source, target, **named):
        if folder in Path(target).parents:
            copies.append(folder.with_name(f"before{len(copies)}"))
            shutil.copytree(folder, copies[-1])
        return rename(source, target, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", copied)
        save(folder, NEW)
    assert copies
    return [*copies, folder]


def resume(folder):
    """The step that a run resumes from, None at a UserError; fails if it is not that step's all."""
    refused = None
    try:
        with Checkpoints(folder, fingerprint="same") as checkpoints:
            found = checkpoints.restore_latest(**arrays(0), iterator=tiny_run.pipeline())
    except UserError as error:
        refused = str(error)
    if refused is not None:
        assert f"{folder}/{NEW}" in refused
        assert f"add --skip_damaged to set this one aside (as {NEW}.damaged)" in refused
        return None
    jax.tree.map(
        np.testing.assert_array_equal,
        {"params": found.params, "train": found.train},
        arrays(found.step),
    )
    assert found.meta["window"] == {"sums": {"loss": found.step / 3}, "count": 2}
    return found.step


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def cut(path, at):
    """Keeps the first bytes of a file, or with None not even its name."""
    if at is None:
        path.unlink()
    else:
        os.truncate(path, at)


def places(path):
    """Where a file is cut."""
    size = path.stat().st_size
    return dict.fromkeys((None, 0, 1, size // 2, size - 1))


def test_an_uncommitted_checkpoint_is_never_the_latest(states, tmp_path):
    chance = random.Random(0)
    for number, state in enumerate(states[:-1]):
        for damage in (number % 2, 2 + number % 2):
            folder = shutil.copytree(state, tmp_path / f"{number}-{damage}")
            (begun,) = (path for path in folder.iterdir() if path.name != str(OLD))
            written = files(begun)
            assert len(written) > 5
            for path in chance.sample(written, damage * len(written) // 3):
                cut(path, chance.choice([*places(path)]))
            assert resume(folder) == OLD
            assert [path.name for path in folder.iterdir()] == [str(OLD)]  # the rest is removed


def test_an_uncommitted_checkpoint_is_gone_once_the_run_is_open(states, tmp_path, monkeypatch):
    """However long the store takes to remove it."""
    folder = shutil.copytree(states[0], tmp_path / "checkpoints")
    assert len(list(folder.iterdir())) == 2
    remove = async_path.rmtree

    async def slow(path):
        await asyncio.sleep(0.5)
        await remove(path)

    monkeypatch.setattr(async_path, "rmtree", slow)
    with Checkpoints(folder, fingerprint="same"):
        assert [path.name for path in folder.iterdir()] == [str(OLD)]


def test_a_damaged_checkpoint_is_refused_or_does_not_need_the_file(states, tmp_path):
    """Never wrong values: `resume` compares them."""
    names = [path.relative_to(states[-1]) for path in files(states[-1] / str(NEW))]
    cuts = [(name, at) for name in names for at in places(states[-1] / name)]
    found = {}
    for number, (name, at) in enumerate(random.Random(1).sample(cuts, CUTS)):
        folder = shutil.copytree(states[-1], tmp_path / str(number))
        cut(folder / name, at)
        found[name, at] = resume(folder)
    assert set(found.values()) <= {None, OLD, NEW}
    assert list(found.values()).count(None) > CUTS // 3, found


def test_metadata_is_that_of_the_save(tmp_path, monkeypatch):
    """Orbax writes it in the background, while the run goes on."""
    changed = threading.Event()
    write = JsonCheckpointHandler._save_fn

    async def late(self, value, directory):
        assert changed.wait(60)
        return await write(self, value, directory)

    monkeypatch.setattr(JsonCheckpointHandler, "_save_fn", late)
    sums = {"loss": 1.0}
    with Checkpoints(tmp_path, fingerprint="same") as checkpoints:
        meta = {"window": {"sums": sums}}
        checkpoints.save(NEW, **arrays(NEW), iterator=tiny_run.pipeline(), meta=meta)
        sums["loss"] = 2.0
        changed.set()
        checkpoints.wait()
        found = checkpoints.restore_latest(**arrays(0), iterator=tiny_run.pipeline())
    assert found.meta["window"] == {"sums": {"loss": 1.0}}


def test_a_kill_while_a_step_that_is_no_longer_kept_is_removed(tmp_path, monkeypatch):
    """It leaves its place at once; what is left of it elsewhere is no damage."""
    folder, left = tmp_path / "checkpoints", []

    def killed(deleted, **_):
        for step in deleted.iterdir() if deleted.exists() else ():
            left.append(step.name)
            next(file for file in step.rglob("*") if file.is_file()).unlink()

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        save(folder, 10, 20, 30)
    assert left[0] == "10"
    assert {path.name for path in folder.iterdir()} == {"20", "30", "deleted"}
    save(folder, 40)
    assert {path.name for path in folder.iterdir()} == {"30", "40"}
