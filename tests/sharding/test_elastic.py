"""A slice that dies and comes back: the run goes on with what is left, then with all again."""

from __future__ import annotations

import json
import shutil
import signal

import jax
import numpy as np
import pytest
from flax import nnx
from processes import curve, finish, outcomes, tiny

from mmqa_jax.core.trees import flatten_named
from mmqa_jax.training.attempts import goodput, read_attempts
from mmqa_jax.weights.folder import load_weights
from tests.resume import tiny_run

pytestmark = pytest.mark.slow
STEPS = 24
TRAIN = {"steps": STEPS, "log_every": 1, "checkpoint_every": 10, "evaluate_every": 0}


def attempt(workdir, folder, slices, name, happen=None, within="fsdp"):
    """One launch: a process of two devices for each of the slices, each with its own disk.

    Args:
      within: the axis of the mesh that a slice's devices are on.
    """
    return tiny(
        len(slices),
        workdir,
        devices=2,
        mesh={"data": -1, within: 2},
        train={**TRAIN, "checkpoint_local_every": 2},
        local=str(folder / "disks"),
        slices=slices,
        ids=str(folder / name),
        happen=happen,
    )


def batches(folder, name, first):
    """Step -> the examples of its batch in order, as the processes of an attempt read them."""
    found = {}
    for file in folder.glob(f"{name}.*"):
        for step, line in enumerate(file.read_text().splitlines(), start=first + 1):
            places, examples = json.loads(line)
            found.setdefault(step, {}).update(zip(places, examples, strict=True))
    return {
        step: [rows[place] for place in sorted(rows)]
        for step, rows in found.items()
        if len(rows) == tiny_run.BATCH
    }


def weights(workdir):
    wanted = nnx.eval_shape(lambda: nnx.state(tiny_run.MLP(jax.random.key(0)), nnx.Param))
    return {
        name: np.asarray(leaf)
        for name, leaf in flatten_named(load_weights(workdir, wanted)).items()
    }


def test_a_slice_dies_and_comes_back(tmp_path, monkeypatch):
    monkeypatch.setenv("MMQA_PROCESS_IS_SLICE", "1")
    monkeypatch.setenv("MMQA_HEARTBEAT_SECONDS", "8")
    whole, run = tmp_path / "whole", tmp_path / "run"
    finish(attempt(whole, tmp_path, [0, 1], "whole"))
    assert not list((tmp_path / "disks").glob("*/*"))  # the run has ended: they are free again

    killed = {"what": "SIGKILL", "process": 0, "batch": 14}
    dead, left = outcomes(attempt(run, tmp_path, [0, 1], "both", killed), timeout=200)
    assert (dead[0], left[0]) == (-signal.SIGKILL, 1), (dead, left)
    assert " is lost: " in left[1].splitlines()[-1]
    assert left[1].splitlines()[-1].endswith("it resumes from step 12.")  # it has all of it

    killed = {"what": "SIGKILL", "process": 0, "batch": 5}
    (alone,) = outcomes(attempt(run, tmp_path, [1], "alone", killed, "tensor"), timeout=200)
    assert alone[0] == -signal.SIGKILL, alone

    shutil.rmtree(tmp_path / "disks" / "0")  # the slice that comes back is another machine
    finish(attempt(run, tmp_path, [0, 1], "again"))

    rows = read_attempts(run)
    starts = [row for row in rows if row["event"] == "start"]
    first, second, third = (row["step"] for row in starts)
    assert (first, second) == (0, 12)  # of the workdir's checkpoints 10 was the newest
    assert third in (14, 16)  # which slice 1 alone has
    assert [row["devices"] for row in starts] == [4, 2, 4]
    expected = batches(tmp_path, "whole", 0)
    assert sorted(expected) == list(range(1, STEPS + 1))
    for name, start, end in (("both", 0, 12), ("alone", second, third), ("again", third, STEPS)):
        read = batches(tmp_path, name, start)
        for step in range(start + 1, end + 1):
            assert read[step] == expected[step], (name, step)
    assert len(curve(run)) == STEPS
    assert curve(run) == pytest.approx(curve(whole), abs=1e-6)
    for name, value in weights(whole).items():
        np.testing.assert_allclose(weights(run)[name], value, atol=2e-6, err_msg=name)

    found = goodput(rows)
    assert found.attempts == 3
    last = [rows[rows.index(start) - 1]["step"] for start in starts[1:]]
    assert found.lost_steps == (last[0] - second) + (last[1] - third)
    assert found.fewer_devices_seconds == rows[rows.index(starts[2]) - 1]["elapsed"]
    assert sum(found.seconds.values()) == pytest.approx(rows[-1]["time"] - rows[0]["time"], abs=0.1)
