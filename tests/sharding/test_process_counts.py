"""Training is the same on one, two and four processes and on two slices, wherever its rows lie."""

from __future__ import annotations

import re

import pytest
from processes import FEW, TRAIN, curve, finish, outcomes, tiny, tiny_runs

CROSSED_BY_FSDP = {"data": 2, "fsdp": 2, "dcn_fsdp": 2}


@pytest.fixture(scope="module")
def pair(alone, tmp_path_factory):
    """The workdirs of runs by one pair of processes with two devices each, and how both ended."""
    folder = tmp_path_factory.mktemp("by_two")
    nan = {"what": "nan", "process": 1, "batch": 9}
    runs = {
        # Process 0 has the first and the last rows.
        "outer_rows": {"mesh": {"data": 4}, "order": [0, 2, 3, 1]},
        # All need all of them.
        "same_rows": {"mesh": {"data": 1, "tensor": 4}, "order": [0, 1, 2, 3]},
        "started": {"mesh": {"tensor": 4, "data": 1}, "start": str(alone), "train": FEW},
        "spoiled": {"mesh": {"data": 2, "tensor": 2}, "happen": nan},
    }
    places = {folder / name: run for name, run in runs.items()}
    return folder, outcomes(tiny_runs(2, places, devices=2))


@pytest.fixture(scope="module")
def by_two(pair):
    """The workdirs."""
    folder, ended = pair
    assert (folder / "spoiled").exists(), ended
    return folder


def assert_as_alone(workdir, alone):
    losses = curve(workdir)
    assert sorted(losses) == list(range(1, TRAIN["steps"] + 1))
    assert losses == pytest.approx(curve(alone), abs=1e-6)


@pytest.mark.parametrize("name", ["outer_rows", "same_rows"])
def test_losses_do_not_depend_on_two_processes(alone, by_two, name):
    assert_as_alone(by_two / name, alone)


def test_losses_do_not_depend_on_four_processes(alone, tmp_path):
    """Two of them need the same rows."""
    finish(tiny(4, tmp_path, mesh={"fsdp": 2, "tensor": 2}, order=[0, 3, 1, 2]))
    assert_as_alone(tmp_path, alone)


def test_pretrained_weights_start_a_run_on_processes_too(alone, by_one, by_two):
    """Each process reads them onto its own devices; the parameters are split over both."""
    one, two = curve(by_one / "started"), curve(by_two / "started")
    assert sorted(one) == list(range(1, 6))
    assert two == pytest.approx(one, abs=1e-6)
    assert abs(one[1] - curve(alone)[1]) > 0.01  # it did not start from scratch


def test_rows_that_spoil_a_step_are_named_by_the_process_that_has_them(pair):
    folder, ended = pair
    assert [code for code, _ in ended] == [1, 1], ended
    assert all("step 9: loss is nan on the batch with index" in out for _, out in ended)
    assert not list((folder / "spoiled" / "checkpoints").glob("[0-9]*"))


@pytest.fixture
def _processes_are_slices(monkeypatch):
    monkeypatch.setenv("MMQA_PROCESS_IS_SLICE", "1")


@pytest.mark.usefixtures("_processes_are_slices")
def test_losses_do_not_depend_on_slices(alone, tmp_path):
    """A process has rows of both halves of a batch where `fsdp` crosses, else of one half."""
    runs = {tmp_path / "data": {"mesh": {"data": 4}}, tmp_path / "fsdp": {"mesh": CROSSED_BY_FSDP}}
    finish(tiny_runs(2, runs, devices=2))
    for workdir in runs:
        assert_as_alone(workdir, alone)


def test_a_run_goes_from_two_slices_to_one_and_back(alone, tmp_path, monkeypatch):
    """One of the slices is killed, and the launch that follows it."""
    monkeypatch.setenv("MMQA_HEARTBEAT_SECONDS", "8")
    train = {**TRAIN, "checkpoint_every": 5}
    ended = []
    for slices, mesh, batch in (("1", CROSSED_BY_FSDP, 8), ("0", {"data": 4}, 8)):
        monkeypatch.setenv("MMQA_PROCESS_IS_SLICE", slices)
        happen = {"what": "SIGKILL", "process": 1, "batch": batch}
        options = {"mesh": mesh, "happen": happen, "train": train}
        ended.append(outcomes(tiny(2, tmp_path, devices=2, **options)))
        assert [code for code, _ in ended[-1]] == [1, -9], ended
    monkeypatch.setenv("MMQA_PROCESS_IS_SLICE", "1")
    finish(tiny(2, tmp_path, devices=2, mesh=CROSSED_BY_FSDP, train=train))
    # A kill may come before the last save is committed.
    for _, said in (launch[0] for launch in ended):
        assert re.search(r"resumes from step (5|10)\b|no checkpoint was saved yet", said), ended
    assert_as_alone(tmp_path, alone)
