"""Checkpoints that do not fit the run, or are damaged where no checksum tells: refused by place."""

from __future__ import annotations

import json
import re
import shutil

import jax
import numpy as np
import pytest

from mmqa_jax.core.checkpoint import Checkpoints
from mmqa_jax.core.checksums import SUMS
from mmqa_jax.core.errors import UserError

OLD, NEW = 10, 20
DELETE = "delete that folder to continue without it"


class Batches:
    """An iterator whose position is a number."""

    def __init__(self):
        self.position = 0

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


def arrays(kernel=(4, 3), **more):
    """Parameters and optimizer state."""
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
        (
            {name: np.ones(3, "f4") for name in "abcde"},
            "a is missing; b is missing; c is missing and 2 more",
        ),
    ],
)
def test_another_model(folder, wanted, problem):
    message = f"{folder}/{NEW}/params: is a checkpoint of another model: {problem}; use the config"
    with pytest.raises(UserError, match=re.escape(message)):
        restore(folder, **wanted)


def test_damage_with_a_whole_checkpoint_before(folder):
    largest(folder / str(NEW)).write_bytes(b"")
    with pytest.raises(UserError, match=rf"/{NEW}: .* checkpoint {OLD} is whole: add --skip_dam"):
        restore(folder)


def test_damage_since_the_run_began(folder):
    with Checkpoints(folder, fingerprint="same") as checkpoints:
        file = largest(folder / str(OLD) / "params")
        file.write_bytes(file.read_bytes()[:-1])
        name = file.relative_to(folder / str(OLD))
        with pytest.raises(UserError, match=rf"/{OLD}: {name} is damaged .*; {DELETE}"):
            checkpoints.restore_params(OLD, arrays()["params"])


@pytest.mark.parametrize("item", ["params", "train"])
def test_damage_of_a_checkpoint_without_checksums(unsealed, item):
    message = rf"/{NEW}: files in it are missing, truncated or damaged; {DELETE}"
    largest(unsealed / str(NEW) / item).write_bytes(b"")
    with pytest.raises(UserError, match=message):
        restore(unsealed)
    shutil.rmtree(unsealed / str(NEW) / item)
    with pytest.raises(UserError, match=message):
        restore(unsealed)


@pytest.mark.parametrize("item", ["meta", "iterator"])
@pytest.mark.parametrize("text", ["{}", "[]"])
def test_json_of_another_shape_without_checksums(unsealed, item, text):
    (unsealed / str(NEW) / item / "metadata").write_text(text)
    message = rf"/{NEW}: files in it are missing, truncated or damaged; {DELETE}"
    with pytest.raises(UserError, match=message):
        restore(unsealed)


def test_processes_at_different_positions(unsealed):
    """Of the data; the same position in all of them may be continued by one."""
    file = unsealed / str(NEW) / "iterator" / "metadata"
    states = [json.dumps({"position": position}) for position in (3, 4)]
    file.write_text(json.dumps({str(n): f"json:{state}" for n, state in enumerate(states)}))
    message = rf"/{NEW}: was written by 2 processes .* positions; continue with 2 processes, not 1"
    with pytest.raises(UserError, match=message):
        restore(unsealed)
    file.write_text(json.dumps({str(n): f"json:{states[0]}" for n in range(2)}))
    assert restore(unsealed).step == NEW
