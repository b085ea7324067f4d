"""Where the wall time of a training run goes."""

from __future__ import annotations

import time
from collections.abc import Callable

# What the host can be at. `compute` is all that is nothing else: dispatching a step, waiting for
# one, writing a log row.
PHASES = ("input", "compile", "compute", "checkpoint", "evaluate")


class TimeSplit:
    """Seconds by phase, which add up to the wall time.

        split.lap("compute")     # what was before the batch was asked for
        batch = next(batches)
        split.lap("input")       # what it took

    Steps run asynchronously: what matters is when the host waits. Waiting for a step is `compute`,
    and so is waiting for a batch while the devices still have a step to compute; the caller knows.

    Args:
      clock: for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._began = self._last = clock()
        self._window = dict.fromkeys(PHASES, 0.0)
        self.total = dict.fromkeys(PHASES, 0.0)

    def lap(self, phase: str) -> None:
        """The time since the last call was spent in that phase."""
        now = self._clock()
        self._window[phase] += now - self._last
        self.total[phase] += now - self._last
        self._last = now

    def take(self) -> dict[str, float]:
        """Seconds by phase from the last `take` to the last `lap`."""
        taken, self._window = self._window, dict.fromkeys(PHASES, 0.0)
        return taken
