"""Checkpoints that do not fit the run, or are damaged where no checksum tells: refused by place."""

import json
import re
import shutil

import jax
import numpy as np
import pytest

from mmqa_jax.core.checkpoints.checkpoint import Checkpoints, _open_local
from mmqa_jax.core.checkpoints.checksums import SUMS, write_sums
from mmqa_jax.core.checkpoints.local_checkpoints import local_folder
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.hosts import distributed
from tests.refusals import refuses

OLD, NEW = 10, 20
DELETE = "delete that folder to continue without it"


class Batches:
    def __init__(self):
        self.position = 0

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


def arrays(kernel=(4, 3), **more):
    params = {"kernel": np.ones(kernel, "f4"), **more}
    return jax.tree.map(jax.numpy.asarray, {"params": params, "train": {"step": np.int32(7)}})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    with Checkpoints(folder, fingerprint="same") as checkpoints:
        for step in (OLD, NEW):
            checkpoints.save(step, **arrays(), iterator=Batches(), meta={})
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


@pytest.fixture
def unsealed(folder):
    """As older versions wrote them, without checksums."""
    for sums in folder.rglob(SUMS):
        sums.unlink()
    return folder


FIVE = {name: np.ones(3, "f4") for name in "abcde"}


def restore(folder, **wanted):
    with Checkpoints(folder, fingerprint="same") as checkpoints:
        return checkpoints.restore_latest(**arrays(**wanted), iterator=Batches())


def largest(folder):
    return max(folder.rglob("d/*"), key=lambda file: file.stat().st_size)


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ({"kernel": (4, 5)}, "kernel is [4, 3], this model has [4, 5]"),
        ({"bias": np.ones(3, "f4")}, "bias is missing"),
        (FIVE, "a is missing; b is missing; c is missing and 2 more"),
    ],
)
def test_another_model(folder, wanted, problem):
    message = f"{folder}/{NEW}/params: is a checkpoint of another model: {problem}; use the config"
    refuses(re.escape(message), restore, folder, **wanted)


def test_damage_with_a_whole_checkpoint_before(folder):
    largest(folder / str(NEW)).write_bytes(b"")
    refuses(rf"/{NEW}: .* checkpoint {OLD} is whole: add --skip_dam", restore, folder)


def test_damage_since_the_run_began(folder):
    with Checkpoints(folder, fingerprint="same") as checkpoints:
        file = largest(folder / str(OLD) / "params")
        file.write_bytes(file.read_bytes()[:-1])
        name = file.relative_to(folder / str(OLD))
        with pytest.raises(UserError, match=rf"/{OLD}: {name} is damaged .*; {DELETE}"):
            checkpoints.restore_params(OLD, arrays()["params"])


@pytest.mark.parametrize(
    ("item", "damage"),
    [
        ("params", lambda item: largest(item).write_bytes(b"")),
        ("train", lambda item: largest(item).write_bytes(b"")),
        ("params", shutil.rmtree),
        ("train", shutil.rmtree),
        ("meta", lambda item: (item / "metadata").write_text("{}")),
        ("meta", lambda item: (item / "metadata").write_text("[]")),
        ("iterator", lambda item: (item / "metadata").write_text("{}")),
        ("iterator", lambda item: (item / "metadata").write_text("[]")),
    ],
)
def test_damage_of_a_checkpoint_without_checksums(unsealed, item, damage):
    damage(unsealed / str(NEW) / item)
    message = rf"/{NEW}: files in it are missing, truncated or damaged; {DELETE}"
    refuses(message, restore, unsealed)


@pytest.fixture
def local(folder, tmp_path):
    """A folder of local checkpoints 22 and 24, beside that of the others."""
    place, batches = tmp_path / "local", Batches()
    with Checkpoints(folder, fingerprint="same", local=place) as checkpoints:
        for step in (21, 22, 24):
            batches.position = step
            state = arrays(kernel=(4, step), bias=np.full(3, step, "bfloat16"))
            checkpoints.save_local(step, **state, iterator=batches, meta={"step": step})
    return place


def resumed(folder, local, step, fingerprint="same"):
    batches, wanted = Batches(), arrays(kernel=(4, step), bias=np.zeros(3, "bfloat16"))
    with Checkpoints(folder, fingerprint=fingerprint, local=local) as checkpoints:
        return checkpoints.restore_latest(**wanted, iterator=batches), batches.position


def test_the_newest_checkpoint_is_a_local_one(folder, local):
    found, position = resumed(folder, local, 24)
    assert (found.step, found.meta["step"], position) == (24, 24, 24)
    for name, array in arrays(kernel=(4, 24), bias=np.full(3, 24, "bfloat16"))["params"].items():
        assert found.params[name].dtype == array.dtype
        np.testing.assert_array_equal(found.params[name], array)
    assert found.train["step"] == 7


def test_two_local_checkpoints_are_on_the_disk_at_most(local):
    assert sorted(copy.name.split("-")[0] for copy in local.glob("*/*")) == ["22", "24"]


def copy_of(local, step):
    (copy,) = local.glob(f"*/{step}-*")
    return copy


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def drop_a_block(copy):
    index = json.loads((copy / "index.json").read_text())
    index["arrays"]["params/kernel"][2].pop()
    (copy / "index.json").write_text(json.dumps(index))
    write_sums(copy)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda copy: flip(copy / "arrays"), "arrays is damaged"),
        (lambda copy: flip(copy / "index.json"), "index.json is damaged"),
        (lambda copy: flip(copy / SUMS), ".* is damaged|.* is missing"),
        (lambda copy: (copy / SUMS).unlink(), f"{SUMS} is missing"),
        (lambda copy: (copy / "arrays").write_bytes(b""), "arrays is damaged"),
        (lambda copy: (copy / "index.json").unlink(), "index.json is missing"),
        (lambda copy: copy.rename(copy.with_name(f"{copy.name}.unfinished")), None),  # kill -9
        (lambda copy: shutil.rmtree(copy), None),  # a host that was replaced
        (drop_a_block, None),
    ],
)
def test_a_local_checkpoint_that_is_not_whole_is_left_out(
    folder, local, capsys, damage, named, monkeypatch
):
    monkeypatch.delenv("MMQA_PROGRESS", raising=False)  # which other files of a worker set
    copy = copy_of(local, 24)
    damage(copy)
    found, position = resumed(folder, local, 22)
    assert (found.step, position) == (22, 22)
    assert not list(local.glob("*/*.unfinished"))
    if named:
        said = " ".join(capsys.readouterr().err.split())
        assert re.search(rf"{re.escape(str(copy))}: ({named}).*this local checkpoint", said), said


def test_a_checkpoint_of_the_workdir_that_is_newer_is_taken(folder, local):
    with Checkpoints(folder, fingerprint="same", local=local) as checkpoints:
        checkpoints.save(30, **arrays(), iterator=Batches(), meta={})
        assert checkpoints.restore_latest(**arrays(), iterator=Batches()).step == 30


def test_local_checkpoints_of_a_run_that_begins_anew_are_not_taken(folder, local):
    shutil.rmtree(folder)
    assert resumed(folder, local, 24) == (None, 0)


def test_a_local_checkpoint_of_another_config_is_refused(folder, local):
    with pytest.raises(UserError, match=rf"{local}.* is a checkpoint of another config"):
        resumed(folder, local, 24, fingerprint="other")


def test_a_local_folder_that_one_process_lacks(folder, local, monkeypatch):
    monkeypatch.setattr(distributed, "gather", lambda name, value: [value, not value])
    refuses("process 1 has no MMQA_LOCAL_CHECKPOINTS and others have", _open_local, folder, local)


@pytest.mark.parametrize(
    ("place", "every", "message"),
    [
        ("", 5, "train.checkpoint_local_every=5: set MMQA_LOCAL_CHECKPOINTS on every host"),
        ("ram", 0, "MMQA_LOCAL_CHECKPOINTS=ram: an absolute path"),
        ("gs://bucket/ram", 5, "MMQA_LOCAL_CHECKPOINTS=gs://bucket/ram: an absolute path"),
        ("/dev/null/ram", 5, "MMQA_LOCAL_CHECKPOINTS=/dev/null/ram: the folder cannot be made"),
    ],
)
def test_a_local_folder_that_cannot_be_used(place, every, message):
    refuses(re.escape(message), local_folder, {"MMQA_LOCAL_CHECKPOINTS": place}, every)


def test_processes_at_different_positions(unsealed):
    """Of the data; the same position in all of them may be continued by one."""
    file = unsealed / str(NEW) / "iterator" / "metadata"
    states = [json.dumps({"position": position}) for position in (3, 4)]
    file.write_text(json.dumps({str(n): f"json:{state}" for n, state in enumerate(states)}))
    message = rf"/{NEW}: was written by 2 processes .* positions; continue with 2 processes, not 1"
    refuses(message, restore, unsealed)
    file.write_text(json.dumps({str(n): f"json:{states[0]}" for n in range(2)}))
    assert restore(unsealed).step == NEW
