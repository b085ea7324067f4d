"""The Slurm path from end to end, with stubs of srun and scontrol: slurm.sbatch starts the tasks,
they find each other as JAX does under Slurm, fail, are restarted and queued again."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runs import ROOT

from tests.fake_devices import fake_devices

pytestmark = pytest.mark.slow

# What srun tells each task. Some time after the first has ended it kills those that are left
# (--wait), it passes TERM on, and its exit code is the highest. STUB_NO_PREFLIGHT=1 takes the
# preflight's word for it.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys, time
words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
if os.environ.get("STUB_NO_PREFLIGHT") and "launch/preflight.sh" in words:
    sys.exit(0)
count = int(os.environ["SLURM_NTASKS"])
for word in sys.argv[1:-len(words)]:
    if word.startswith("--ntasks="):
        count = int(word.partition("=")[2])
tasks = [
    subprocess.Popen(words, env=os.environ | {{
        "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_NUM_NODES": "1",
        "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task),
    }})
    for task in range(count)
]
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
ended = None
while any(task.poll() is None for task in tasks):
    if ended is None and any(task.poll() is not None for task in tasks):
        ended = time.monotonic()
    if ended is not None and time.monotonic() > ended + float(os.environ["STUB_WAIT"]):
        [task.kill() for task in tasks if task.poll() is None]
    time.sleep(0.05)
codes = [task.returncode for task in tasks]
sys.exit(max(128 - code if code < 0 else code for code in codes))
"""
# The nodes that are up: lines of a file.
SINFO = '#!/bin/sh\ncat "$STUB_NODES"\n'
SCONTROL = '#!/bin/sh\necho "$@" > "$STUB_REQUEUED"\n'


@pytest.fixture
def slurm(tmp_path):
    """Starts slurm.sbatch as Slurm does: a copy of it, in the folder of submission."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("sinfo", SINFO)):
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    copy = tmp_path / "slurm_script"
    copy.write_text((ROOT / "launch" / "slurm.sbatch").read_text())
    path = [str(stubs), str(Path(sys.executable).parent), os.environ["PATH"]]

    started = []

    def start(*command: str, **environment: str) -> subprocess.Popen:
        process = subprocess.Popen(
            ["bash", str(copy), *command],
            cwd=tmp_path,
            env=os.environ
            | fake_devices(1)
            | {
                "PATH": os.pathsep.join(path),
                "PYTHONPATH": str(ROOT),
                "MMQA_PROGRESS": "off",
                "SLURM_SUBMIT_DIR": str(ROOT),
                "SLURM_JOB_ID": str(free_job()),
                "SLURM_NTASKS": "2",
                "STUB_WAIT": "60",
                "STUB_REQUEUED": str(tmp_path / "requeued"),
            }
            | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:  # with its tasks, if the test gave up
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def free_job() -> int:
    """A job number whose port, which JAX derives from it, is free."""
    for job in range(os.getpid(), os.getpid() + 4096):
        with socket.socket() as port:
            if port.connect_ex(("127.0.0.1", 65536 - 4096 + job % 4096)):
                return job
    raise AssertionError("no free port")


def test_two_tasks_check_the_machine_and_join(slurm, cli_cache, tmp_path):
    """As a run's tasks do; steps of two processes are test_two_processes.py's."""
    run = (  # one write each: the tasks' lines do not mix
        "import jax, os; from mmqa_jax.core.hosts import distributed as d; d.start(); "
        "line = f'task {d.gather(\"of\", d.process_index())} {len(jax.devices())}\\n'; "
        "os.write(1, line.encode())"
    )
    folders = (f"--workdir={tmp_path / 'run'}", f"--data={ROOT / 'launch'}")
    process = slurm(sys.executable, "-c", run, *folders, MMQA_CACHE=str(cli_cache))
    output = process.communicate(timeout=570)[0]
    assert process.returncode == 0, output
    checked = ("joined    2 processes", "versions", "devices   2 x cpu", "sum", "data", "clocks")
    for name in checked:
        assert f"ok    {name}" in output
    assert re.search(rf"(ok   |warn ) disk  .* {tmp_path}/run: writes \d+ MB/s", output)
    assert output.count("task [0, 1] 2") == 2


def test_a_run_goes_on_with_the_nodes_that_are_left(slurm, tmp_path):
    """One of two dies, and comes back while the run goes on without it."""
    nodes, lines = tmp_path / "nodes", tmp_path / "lines"
    nodes.write_text("n1\nn2\n")
    script = f"""
        trap 'exit 143' TERM
        echo $MMQA_MEMBERS $SLURM_PROCID >> {lines}
        case $(grep -c . {lines}) in
          1) exec sleep 60 ;;
          2) sleep 0.2; echo n2 > {nodes}; exit 1 ;;
          3) sleep 0.2; printf 'n1\\nn2\\n' > {nodes}; while :; do sleep 0.1; done ;;
        esac
    """
    stub = {"STUB_NO_PREFLIGHT": "1", "STUB_WAIT": "0.5", "MMQA_BACKOFF": "1"}
    stub |= {"MMQA_MEMBERS_EVERY": "1"} | {
        "STUB_NODES": str(nodes),
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_JOB_NODELIST": "n[1-2]",
    }
    process = slurm("--elastic=2,1", "bash", "-c", script, **stub)
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 0, output
    attempts = lines.read_text().split("\n")
    assert sorted(attempts[:2]) == sorted(attempts[3:5]) == ["n1,n2 0", "n1,n2 1"]
    assert attempts[2] == "n2 0"


@pytest.mark.parametrize(
    ("task_0", "task_1", "restarted", "wanted"),
    [
        ("exec sleep 60", "exit 1", True, 0),  # it waits for the one that crashed, and is killed
        ("exit 2", "exit 2", False, 2),  # the user's mistake: all see it
    ],
)
def test_a_run_that_fails_starts_again_unless_the_input_is_wrong(
    slurm, tmp_path, task_0, task_1, restarted, wanted
):
    first = 'case "$SLURM_PROCID" in 0) ' + task_0 + ";; *) " + task_1 + ";; esac"
    script = f'mark={tmp_path}/mark$SLURM_PROCID; [ -e "$mark" ] && exit 0; touch "$mark"; {first}'
    stub = {"STUB_NO_PREFLIGHT": "1", "STUB_WAIT": "0.5", "MMQA_BACKOFF": "1"}
    process = slurm("bash", "-c", script, **stub)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == wanted, output
    assert ("restart 1 of 20" in output) == restarted
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_ahead_of_the_time_limit_the_run_saves_and_is_queued_again(
    slurm, tmp_path, number, requeued
):
    script = "trap 'echo saved; exit 143' TERM; echo ready; while :; do sleep 0.1; done"
    with slurm("bash", "-c", script, STUB_NO_PREFLIGHT="1", SLURM_JOB_ID="4711") as process:
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        process.send_signal(number)
        output = process.communicate(timeout=30)[0]
    assert output.splitlines().count("saved") == 2
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 4711\n"
    else:
        assert process.returncode == 143
