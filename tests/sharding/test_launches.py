"""Launches of two processes that differ, are stopped, hang or go wrong on one of them."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import pytest
from processes import TRAIN, curve, finish, launch, outcomes, tiny

from mmqa_jax.core.errors import EXIT_HANGING

EXCHANGE = str(Path(__file__).with_name("exchange.py"))
PROXY = "http://127.0.0.1:9"  # where nobody listens
TWO = {"devices": 2, "mesh": {"data": 2, "tensor": 2}}


def saved(workdir):
    names = [folder.name for folder in (workdir / "checkpoints").iterdir()]
    return sorted(int(name) for name in names if name.isdigit())


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory):
    """What both processes of exchange.py found, in an environment with proxies."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("http_proxy", "HTTPS_PROXY", "grpc_proxy"):
            patch.setenv(name, PROXY)
        for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
            patch.delenv(name, raising=False)
        printed = finish(launch(2, sys.executable, EXCHANGE, tmp_path_factory.mktemp("exchange")))
    return [json.loads(out.splitlines()[-1]) for out in printed]


def test_a_proxy_is_not_asked_for_the_way_to_process_0(exchanged):
    for found in exchanged:
        assert found["proxies"] == [PROXY, PROXY]  # for what follows


def test_processes_tell_each_other_what_they_are(exchanged):
    zero, one = exchanged
    for found in (zero, one):
        assert found["gathered"] == [[[0, 0], [1, 0]], [[0, 1], [1, 1]]]
        assert found["same"] is None
        assert found["shared"] is None
        assert "config key train.steps is 5 on process 0" in found["differing"]
        assert "and 6 on process 1" in found["differing"]
        assert "the version of jax is" in found["differing"]
        assert "'0.0.1' on process 1" in found["differing"]
        assert "seed" not in found["differing"]
        assert "workdir" not in found["differing"]
        assert "process 1" in found["not_shared"]
        assert "has another folder" in found["not_shared"]
        assert "cannot be written on process 1" in found["unwritable"]
        assert "No such file" in found["unwritable"]
        assert found["left"] == []
    assert zero["failed"].startswith("process 1 on ")
    assert zero["failed"].endswith(one["failed"])
    assert "p.jpg" in one["failed"]


def test_sigterm_of_one_host_stops_all_and_another_number_goes_on(alone, tmp_path):
    """Both save the same step; one process resumes on another mesh, with the same losses."""
    happen = {"what": "SIGTERM", "process": 1, "batch": 9}
    printed = finish(tiny(2, tmp_path, **TWO, happen=happen), code=128 + signal.SIGTERM)
    assert all("stopped after step" in out for out in printed)
    (step,) = saved(tmp_path)
    assert 9 <= step < 25
    finish(tiny(1, tmp_path, devices=4, mesh={"fsdp": 4}))
    assert curve(tmp_path) == pytest.approx(curve(alone), abs=1e-6)
    assert len(curve(tmp_path)) == TRAIN["steps"]


def test_a_host_that_hangs_is_named_and_the_others_end(tmp_path, monkeypatch):
    monkeypatch.setenv("MMQA_HANG_SECONDS", "12")
    happen = {"what": "SIGSTOP", "process": 1, "batch": 9}
    first, second = tiny(2, tmp_path, **TWO, happen=happen)
    try:
        out = first.communicate(timeout=300)[0]
    finally:
        for process in (first, second):
            process.kill()
        second.communicate()
    assert first.returncode == EXIT_HANGING, out
    named = next(line for line in out.splitlines() if line.startswith("process 1 on "))
    assert named.endswith("behind the others")
    assert "training/loop.py" in out  # the stack of the one that waits


@pytest.mark.parametrize(
    ("count", "lost", "how", "batch"),
    [
        (2, 0, "SIGKILL", 9),  # in a collective
        (2, 1, "SIGKILL", 1),  # the others compile
        (3, 1, "SIGKILL", 6),  # step 5 is being saved
        (2, 0, "SIGSTOP", 9),
        (2, 1, "SIGSTOP", 9),
    ],
)
def test_a_lost_host_is_named_by_all_others(tmp_path, monkeypatch, count, lost, how, batch):
    """In their last line, with exit code 1, and with the step that the same command resumes.

    One that was only stopped says of itself that it was away, once it goes on.
    """
    monkeypatch.setenv("MMQA_HEARTBEAT_SECONDS", "8")
    happen = {"what": how, "process": lost, "batch": batch}
    train = {**TRAIN, "steps": 400, "checkpoint_every": 5, "evaluate_every": 0}
    processes = tiny(count, tmp_path, mesh={"data": count}, train=train, happen=happen)
    others = [process for process in processes if process is not processes[lost]]
    printed = []
    try:
        for process in others:
            printed.append(process.communicate(timeout=200)[0])
        steps = saved(tmp_path) if (tmp_path / "checkpoints").exists() else []
        if how == "SIGSTOP":
            processes[lost].send_signal(signal.SIGCONT)
            its_own = processes[lost].communicate(timeout=100)[0]
            assert processes[lost].returncode == 1, its_own
            assert re.match(
                r"mmqa: this process was itself away for \d+ s \(stopped, or its machine was\), and "
                rf"is lost to the others; this process {lost} was at step \d+, ",
                its_own.splitlines()[-1],
            )
            assert " is lost: " not in its_own
    finally:
        for process in processes:
            process.kill()
        processes[lost].communicate()
    assert [process.returncode for process in others] == [1] * len(others), printed
    for out in printed:
        assert "Traceback" not in out
        assert "stack trace" not in out
        last = out.splitlines()[-1]
        assert re.match(
            rf"mmqa: process {lost} on \S+ \(last seen at step \d+, .+\) is lost: ", last
        )
        assert re.search(r"this process \d was at step \d+, ", last)
        resumes = f"it resumes from step {steps[-1]}." if steps else "start the launch again"
        assert resumes in last


def test_a_process_with_a_bug_is_named_by_the_other(tmp_path, monkeypatch):
    """Process 0, through which they hear of each other; `exchange.py` fails on process 1."""
    monkeypatch.setenv("MMQA_HEARTBEAT_SECONDS", "8")  # process 0 ends when the other is missed
    process = 0
    happen = {"what": "bug", "process": process, "batch": 9}
    found = outcomes(tiny(2, tmp_path, mesh={"data": 2}, happen=happen), timeout=200)
    assert [code for code, _ in found] == [1, 1], found
    assert "KeyError: 'no such entry'" in found[process][1]
    other = found[1 - process][1]
    assert re.search(
        rf"process {process} on \S+: KeyError: 'no such entry'", other.splitlines()[-1]
    )
    assert "Traceback" not in other
