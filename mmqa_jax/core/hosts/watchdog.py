"""Ends a run that stands still, since one of its hosts hangs, so that the launcher restarts it."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from mmqa_jax.core.errors import EXIT_HANGING, UserError
from mmqa_jax.core.hosts import distributed

DEFAULT_LIMIT_SECONDS = 1800
_VARIABLE = "MMQA_HANG_SECONDS"
_SHOWN = 8


class Watchdog:
    """Ends the process with EXIT_HANGING if no `beat` comes for `limit` seconds.

    Every process has one. Before it ends, it prints which processes of the launch are behind the
    others, with host, step and what they were doing, and the stacks of its own threads: the process
    that hangs in Python prints the reason itself. If another process has failed, it ends at once
    with that one's exit code, rather than wait for it.

        with Watchdog(limit) as watchdog:
            for step in ...:
                watchdog.beat(step, "reading the batch")

    A process that was suspended as a whole, or whose clock jumped, does not count as hanging.

    Args:
      limit: in seconds, longer than the longest compilation and evaluation; 0: never.
      resumes: the step that a restart continues from, which is told if another process is lost.
      end: ends the process with an exit code (for tests).
    """

    def __init__(
        self,
        limit: float,
        *,
        resumes: Callable[[], int | None] | None = None,
        end: Callable[[int], Any] = os._exit,
    ):
        self._limit, self._resumes, self._end = limit, resumes, end
        self._tick = min(5.0, limit / 10) if limit else 5.0
        self._at, self._idle = (0, "starting"), 0.0
        self._stop = threading.Event()

    def __enter__(self) -> Self:
        if self._limit:
            for work in (self._watch, self._hear):
                threading.Thread(target=work, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def beat(self, step: int, doing: str) -> None:
        """The run moves: all processes make the same beats in the same order."""
        self._at = step, doing
        self._idle = 0.0
        distributed.at(step, doing, self._resumes)

    def rest(self) -> None:
        """There is no limit until the next beat."""
        self._idle = float("-inf")

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(self._tick):
            now = time.monotonic()
            self._idle += min(now - last, 2 * self._tick)
            last = now
            if self._idle > self._limit:
                self._report()
                self._end(EXIT_HANGING)
                return

    def _hear(self) -> None:
        """Asks in a thread of its own, which blocks while process 0 does not answer."""
        while not self._stop.wait(self._tick):
            failure = None
            with contextlib.suppress(RuntimeError):  # JAX's: process 0 is lost, which is told
                if self._idle > min(10.0, self._limit / 2):
                    failure = distributed.others_failure()
            if failure is not None:
                print(f"mmqa: {failure}", file=sys.stderr, flush=True)
                self._end(2 if isinstance(failure, UserError) else 1)

    def _report(self) -> None:
        lines = [f"mmqa: the run hangs: nothing has moved for {self._limit:.0f} seconds."]
        if (others := distributed.peers()) is not None:
            if (states := others.states()) is None:
                lines.append("process 0, which knows the steps of all, does not answer: it hangs.")
            else:
                lines += last_seen(states, others.count)
        step, doing = self._at
        lines.append(
            f"This process was at step {step}, {doing}; it ends with exit code {EXIT_HANGING}, "
            f"start the launch again ({_VARIABLE} is the limit). Its stacks:"
        )
        print("\n".join(lines), file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)


def last_seen(states: Mapping[int, tuple[str, int, int, str]], processes: int) -> list[str]:
    """Returns lines that say where the processes are, the slowest first.

    Args:
      states: host name, how often it moved, step and what it is doing, by process.
      processes: how many there are; those that were not heard are named.
    """
    silent = [f"process {n}" for n in range(processes) if n not in states]
    lines = [f"nothing was heard from {', '.join(silent[:_SHOWN])}"] if silent else []
    furthest = max((moves for _, moves, _, _ in states.values()), default=0)
    order = sorted(states.items(), key=lambda item: (item[1][1], item[0]))
    for process, (host, moves, step, doing) in order[:_SHOWN]:
        behind = ", behind the others" if moves < furthest else ""
        lines.append(f"process {process} on {host}: step {step}, {doing}{behind}")
    if len(order) > _SHOWN:
        lines.append(f"and {len(order) - _SHOWN} more processes")
    return lines


def hang_limit(environment: Mapping[str, str]) -> float:
    """The limit in seconds: MMQA_HANG_SECONDS, or else half an hour.

    It is a property of the cluster and not of the experiment: a run resumes with another one.
    """
    text = environment.get(_VARIABLE, "")
    if not text:
        return DEFAULT_LIMIT_SECONDS
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not limit >= 0:
        raise UserError(f"environment: {_VARIABLE}={text}: seconds were expected, 0 for no limit.")
    return limit
