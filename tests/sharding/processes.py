"""Starts the processes of one launch on this machine, for tests."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.fake_devices import fake_devices
from tests.forks import Fork, server

ROOT = Path(__file__).parents[2]


TINY = str(Path(__file__).with_name("tiny_launch.py"))
TRAIN = {"steps": 25, "log_every": 1, "checkpoint_every": 25, "evaluate_every": 25}
FEW = {**TRAIN, "steps": 5, "evaluate_every": 0}


def start(
    *command: str, devices: int = 1, fresh: bool = False, **environment: str
) -> subprocess.Popen | Fork:
    """One process with that many fake devices.

    Args:
      command: Python, and its arguments.
      fresh: a process of its own instead of a fork (tests.forks says how they differ).
    """
    words = list(map(str, command))
    variables = (
        os.environ
        | fake_devices(devices)
        | {"PYTHONPATH": str(ROOT), "MMQA_PROGRESS": "off"}
        | environment
    )
    if not fresh:
        return server().start(words[1:], variables)
    return subprocess.Popen(
        words,
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def launch(
    count: int, *command: str, devices: int = 1, differing: tuple = (), fresh: bool = False
) -> list:
    """The processes of one launch.

    Args:
      count: how many.
      devices: fake devices of each.
      differing: further arguments of the last process.
      fresh: the last process is none of the forks (`start`), so that it hashes strings otherwise.
    """
    if count == 1:
        return [start(*command, devices=devices, fresh=fresh)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return [
        start(
            *command,
            *(differing if process == count - 1 else ()),
            devices=devices,
            fresh=fresh and process == count - 1,
            JAX_COORDINATOR_ADDRESS=address,
            MMQA_COORDINATOR_BIND="127.0.0.1",
            JAX_NUM_PROCESSES=str(count),
            JAX_PROCESS_ID=str(process),
        )
        for process in range(count)
    ]


def outcomes(processes: list, timeout: int = 600) -> list[tuple[int, str]]:
    """Exit code and output of each; none is left running."""
    try:
        printed = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
    return [(process.returncode, out) for process, out in zip(processes, printed, strict=True)]


def finish(processes: list, code: int = 0, timeout: int = 600) -> list[str]:
    """The outputs, after all have ended with that exit code."""
    found = outcomes(processes, timeout)
    assert [ended for ended, _ in found] == [code] * len(processes), found
    return [out for _, out in found]


def program_facts(script: str, *arguments: str) -> list[dict]:
    """What a script of this folder that compiles for accelerators prints, a line of JSON each."""
    file = str(Path(__file__).with_name(script))
    # Nobody is asked where this host is, and another process may have the compiler open.
    alone = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    (printed,) = finish([start(sys.executable, file, *arguments, **alone)])
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def tiny(count: int, workdir: Path, *, devices: int = 1, **options) -> list:
    """The processes of a launch of tiny_launch.py, with its options."""
    return tiny_runs(count, {workdir: options}, devices=devices)


def tiny_runs(count: int, runs: dict[Path, dict], *, devices: int = 1) -> list:
    """The processes of a launch that makes several runs of tiny_launch.py, by their workdirs."""
    words = [
        word
        for workdir, options in runs.items()
        for word in (str(workdir), json.dumps({"train": TRAIN, **options}))
    ]
    return launch(count, sys.executable, TINY, *words, devices=devices)


def curve(workdir: Path) -> dict[int, float]:
    """The losses of a run of tiny_launch.py by step."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}
