"""Fair measurements: sides timed in turn, what the device can do at best, memory of a process."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmqa_jax.core.errors import RunError

ROOT = Path(__file__).parents[2]  # of the repository
_FEWEST_ROUNDS = 3  # of work that exceeds its budget
_SHORTEST = 0.1  # seconds that one reading lasts at least; quicker work is repeated
# Lets the threads of one library, which spin for a while after their work, fall asleep before
# the other library is timed.
_PAUSE = 0.02


def interleave(
    sides: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    repeat: bool = True,
    clock: Callable[[], float] = time.perf_counter,
    budget: float | None = None,
) -> dict[str, list[float]]:
    """Times several ways to do the same work, in turn, so that a busy moment hits all of them.

    Args:
      sides: functions that return when their work is done; already compiled.
      rounds: readings of each side; every other round goes through the sides backwards.
      repeat: repeats quick work in a reading; each side runs once more to see how long it takes.
      clock: what measures the time.
      budget: seconds that all rounds may take; long work gets fewer rounds, at least three. None
        is no limit; without `repeat` it is not known beforehand how long the work takes.

    Returns:
      Seconds per call of each side, one reading a round, in order.
    """
    calls = dict.fromkeys(sides, 1)
    if repeat:
        whole = 0.0  # seconds of a round
        for name, work in sides.items():
            seconds = max(_seconds(work, 1, clock), 1e-9)
            calls[name] = max(1, round(_SHORTEST / seconds))
            whole += calls[name] * seconds
        if budget is not None:
            rounds = min(rounds, max(_FEWEST_ROUNDS, int(budget / max(whole, 1e-9))))
    durations: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            time.sleep(_PAUSE)
            durations[name].append(_seconds(sides[name], calls[name], clock) / calls[name])
    return durations


def _seconds(work: Callable[[], Any], calls: int, clock: Callable[[], float]) -> float:
    began = clock()
    for _ in range(calls):
        work()
    return clock() - began


class Ratio(NamedTuple):
    """How many times as fast as the peer we are: the median over the rounds, and its range."""

    median: float
    low: float
    high: float


def speed_ratio(ours: Sequence[float], peer: Sequence[float]) -> Ratio:
    """From seconds of the same rounds. The median of ratios is less sensitive to a noisy round than
    the ratio of medians."""
    ratios = [theirs / mine for mine, theirs in zip(ours, peer, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def stolen_share() -> Callable[[], float]:
    """Starts to watch the processors. The function it returns gives the share of their time that
    the hypervisor has given to others since; 0 where the system does not report it."""
    before = _processor_ticks()

    def share() -> float:
        spent = [now - then for now, then in zip(_processor_ticks(), before, strict=True)]
        return spent[7] / sum(spent) if sum(spent) else 0.0

    return share


def _processor_ticks() -> list[int]:
    """user, nice, system, idle, iowait, irq, softirq, steal (proc_stat(5))."""
    try:
        line = Path("/proc/stat").read_text().partition("\n")[0]
    except OSError:
        return [0] * 8
    return [int(field) for field in line.split()[1:9]]


def child_environment(**variables: str) -> dict[str, str]:
    """This process's environment, in which a child finds the repository's packages."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **variables}


class Child(NamedTuple):
    """A process that has ended."""

    seconds: float
    peak_bytes: int  # most memory that it held at once
    output: str  # its stdout
    processor_seconds: float = 0.0  # of all its threads


def run_child(command: Sequence[str], env: Mapping[str, str] | None = None) -> Child:
    """Runs a command to its end and returns its peak memory.

    The system counts what the parent held when it started the command as the command's own: call
    this from a process that has loaded nothing large.

    Args:
      command: the program and its arguments; its stderr is passed on.
      env: variables that differ from this process's.

    Raises:
      RunError: it failed.
    """
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=child_environment(**(env or {}))
    ) as process:
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RunError(
            f"{' '.join(command[:4])} ...: ended with {process.returncode}; see its message above."
        )
    scale = 1 if platform.system() == "Darwin" else 1024
    processor_seconds = usage.ru_utime + usage.ru_stime
    return Child(time.perf_counter() - began, usage.ru_maxrss * scale, output, processor_seconds)
