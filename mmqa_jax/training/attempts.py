"""Goodput: the share of a run's wall time, restarts included, that went into steps that count.

Process 0 keeps attempts.jsonl in the workdir, a row at the start of every attempt, at every
checkpoint (of the local ones the last two), at the end, and for the time since then at the last
step that is known of:

    {"event": "start" | "save" | "local" | "stop" | "end" | "step", "time": seconds since the epoch,
     "step": n, "elapsed": seconds of this attempt, "seconds": {phase: seconds of this attempt}}

A start also has "devices", their number, which another number of slices changes.

Rows of earlier attempts stay, so that what a kill interrupted is in it as well. An attempt that
starts from step n says which steps of the earlier ones count: those up to n.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmqa_jax.core.files import write_jsonl
from mmqa_jax.core.progress import duration

FILE = "attempts.jsonl"
_SECONDS_BETWEEN_ROWS = 30.0
_MOST_STEPS = 2**53
_LONGEST_SECONDS = 1e12


class Attempts:
    """Writes the rows of one attempt.

    Args:
      folder: workdir of the run.
      clock, now: seconds that pass, and since the epoch (for tests).
    """

    def __init__(
        self,
        folder: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ):
        self._folder, self._clock, self._now = folder, clock, now
        self._began, self._started = clock(), now()
        self._rows: list[dict[str, Any]] = []
        self._last = self._began

    def start(self, step: int) -> None:
        """The attempt starts from that step, as of when this object was made."""
        import jax  # here, as `mmqa status` reads these files without it

        if jax.process_index() == 0:
            self._rows = read_attempts(self._folder)
            devices = jax.device_count()
            self._write("start", step, self._started, self._began, {}, devices=devices)

    def note(self, event: str, step: int, seconds: Mapping[str, float]) -> None:
        """A row; one of the event `step` at most every 30 seconds, in place of the last one.

        One of the event `local` takes the place of the last but one: no restart goes back further.

        `seconds`: of this attempt so far, by phase (TimeSplit.total).
        """
        now = self._clock()
        if not self._rows or (event == "step" and now - self._last < _SECONDS_BETWEEN_ROWS):
            return
        if self._rows[-1]["event"] == "step":
            del self._rows[-1]
        if event == "local":
            events = [row["event"] for row in self._rows]
            first = max(place for place, event in enumerate(events) if event == "start")
            local = [place for place in range(first, len(events)) if events[place] == "local"]
            for place in local[-2:-1]:
                del self._rows[place]
        self._write(event, step, self._now(), now, seconds)

    def goodput(self) -> Goodput | None:
        """Of the run so far; None on other processes than 0."""
        return goodput(self._rows)

    def _write(
        self,
        event: str,
        step: int,
        at: float,
        now: float,
        seconds: Mapping[str, float],
        **further: int,
    ) -> None:
        self._last = now
        self._rows.append(
            {
                "event": event,
                "time": round(at, 3),
                "step": step,
                "elapsed": round(now - self._began, 3),
                "seconds": {name: round(value, 3) for name, value in seconds.items()},
                **further,
            }
        )
        try:  # whole: the folder may be in a store that cannot append
            write_jsonl(self._folder / FILE, self._rows)
        except (IsADirectoryError, PermissionError) as error:
            _warn(self._folder / FILE, f"cannot be written ({error.strerror})")


@dataclasses.dataclass(frozen=True)
class Goodput:
    """What became of a run's wall time."""

    share: float  # of `wall_seconds`, that steps which count were computed in
    wall_seconds: float  # from the first start to the last row
    attempts: int  # how often the run was started
    lost_steps: int  # computed, but not in the checkpoint that the next attempt started from
    # What the time went into; the values add up to `wall_seconds`. `counted`: computing steps that
    # count; `lost`: those that do not; `input`, `compile`, `checkpoint`, `evaluate`; `start`: all
    # else of an attempt, mostly before its first step; `between`: from an attempt's last row to the
    # next start, where the time is in which a lost host was not yet missed.
    seconds: Mapping[str, float]
    fewer_devices_seconds: float = 0.0  # of attempts on fewer devices than others of this run had

    def as_json(self) -> dict[str, Any]:
        """JSON values, seconds to three digits behind the point."""
        return {
            "share": round(self.share, 4),
            "wall_seconds": round(self.wall_seconds, 3),
            "attempts": self.attempts,
            "lost_steps": self.lost_steps,
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "fewer_devices_seconds": round(self.fewer_devices_seconds, 3),
        }

    def text(self) -> str:
        """`93 % of 1:02:10 in steps that count (checkpoint 3 %, start 2 %), 2 attempts`."""
        rest = {k: v for k, v in self.seconds.items() if k != "counted"}
        shares = [
            f"{name} {100 * value / self.wall_seconds:.0f} %"
            for name, value in sorted(rest.items(), key=lambda pair: -pair[1])
            if value >= 0.005 * self.wall_seconds
        ]
        other = f" ({', '.join(shares)})" if shares else ""
        attempts = f", {self.attempts} attempts" if self.attempts > 1 else ""
        lost = f", {self.lost_steps} steps lost" if self.lost_steps else ""
        fewer = self.fewer_devices_seconds
        reduced = f", {duration(fewer)} on fewer devices" if fewer else ""
        whole = f"{100 * self.share:.0f} % of {duration(self.wall_seconds)}"
        return f"{whole} in steps that count{other}{attempts}{lost}{reduced}"


def goodput(rows: Sequence[Mapping[str, Any]]) -> Goodput | None:
    """Of the rows of `read_attempts`; None if no time has passed in them."""
    attempts: list[list[Mapping[str, Any]]] = []
    for row in rows:
        if row["event"] == "start":
            attempts.append([])
        attempts[-1].append(row)
    seconds = dict.fromkeys(("counted", "lost", *PHASES, "start", "between"), 0.0)
    del seconds["compute"]
    lost_steps, fewer = 0, 0.0
    most = max((attempt[0].get("devices", 0) for attempt in attempts), default=0)
    for number, attempt in enumerate(attempts):
        last = attempt[-1]
        spent = dict.fromkeys(PHASES, 0.0) | last["seconds"]
        resumed = min((later[0]["step"] for later in attempts[number + 1 :]), default=last["step"])
        counting = [row for row in attempt if row["step"] <= resumed]
        # A later attempt may have been set back before the start of this one.
        counted = counting[-1]["seconds"].get("compute", 0.0) if counting else 0.0
        seconds["counted"] += counted
        seconds["lost"] += spent["compute"] - counted
        lost_steps += last["step"] - min(max(resumed, attempt[0]["step"]), last["step"])
        for phase in PHASES:
            if phase != "compute":
                seconds[phase] += spent[phase]
        if attempt[0].get("devices", most) < most:
            fewer += last["elapsed"]
        seconds["start"] += max(0.0, last["elapsed"] - sum(spent.values()))
        if number + 1 < len(attempts):
            seconds["between"] += max(0.0, attempts[number + 1][0]["time"] - last["time"])
    wall = sum(seconds.values())
    if wall <= 0:
        return None
    return Goodput(seconds["counted"] / wall, wall, len(attempts), lost_steps, seconds, fewer)


def read_attempts(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's attempts.jsonl that can be read; none if there is no file.

    What a crash, a full disk or an edit has damaged is left out with a warning: goodput is not
    worth a training run.
    """
    path = folder / FILE
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        _warn(path, f"cannot be read ({error.strerror})")
        return []
    rows: list[dict[str, Any]] = []
    damaged = []
    for number, line in enumerate(lines, start=1):
        row = _row(line)
        # What comes before the first start belongs to no attempt.
        if row is None or (not rows and row["event"] != "start"):
            damaged.append(number)
        else:
            rows.append(row)
    if damaged:
        which = f"line {damaged[0]}" if len(damaged) == 1 else f"{len(damaged)} lines"
        _warn(path, f"{which} of {len(lines)} cannot be read")
    return rows


def _warn(path: Path, what: str) -> None:
    logging.getLogger(__name__).warning("%s: %s; goodput is counted from the rest.", path, what)


def _row(line: bytes) -> dict[str, Any] | None:
    """A row of the file; None if it is not one."""
    try:
        row = json.loads(line)
        sound = (
            isinstance(row["event"], str)
            and type(row["step"]) is int
            and 0 <= row["step"] < _MOST_STEPS
            and type(row.get("devices", 0)) is int
            and all(map(_is_time, (row["time"], row["elapsed"], *row["seconds"].values())))
        )
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None
    return row if sound else None


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < _LONGEST_SECONDS


# Where the wall time of a training run goes.

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

    `clock`: for tests.
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
