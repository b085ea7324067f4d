"""Training is the same on one, two and four processes, wherever the rows of a batch lie."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from processes import finish, launch

TINY = str(Path(__file__).with_name("tiny_launch.py"))
TRAIN = {"steps": 50, "log_every": 1, "checkpoint_every": 25, "evaluate_every": 25}


def tiny(count, workdir, *, devices=1, differing=(), **options):
    """The processes of a launch of tiny_launch.py."""
    options = {"train": TRAIN, **options}
    command = sys.executable, TINY, str(workdir), json.dumps(options)
    return launch(count, *command, devices=devices, differing=differing)


def curve(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of one process with four devices."""
    workdir = tmp_path_factory.mktemp("alone")
    finish(tiny(1, workdir, devices=4, mesh={"data": 4}))
    return curve(workdir)


@pytest.mark.parametrize(
    ("count", "mesh", "order"),
    [
        (2, {"data": 4}, [0, 2, 3, 1]),  # process 0 has the first and the last rows
        (4, {"fsdp": 2, "tensor": 2}, [0, 3, 1, 2]),  # two processes need the same rows
        (2, {"data": 1, "tensor": 4}, [0, 1, 2, 3]),  # all need all of them
    ],
)
def test_losses_do_not_depend_on_the_processes(alone, tmp_path, count, mesh, order):
    finish(tiny(count, tmp_path, devices=4 // count, mesh=mesh, order=order))
    losses = curve(tmp_path)
    assert sorted(losses) == list(range(1, 51))
    assert losses == pytest.approx(alone, abs=1e-6)
