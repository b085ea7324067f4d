"""Progress of long work on stderr: rate, percentage and time left.

On a terminal a live bar; elsewhere (a log file, a batch job) one plain line at most every 15
seconds. The environment variable MMQA_PROGRESS=off turns it off.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.segment import Segment
from rich.text import Text

from mmqa_jax.core.terminal import escape_streams, escaped

_SECONDS_BETWEEN_LINES = 15.0

# What is shown of a larger work that the current one belongs to, see `within`.
_whole: contextvars.ContextVar[Callable[[float | None], str] | None] = contextvars.ContextVar(
    "whole", default=None
)


class Screen(Console):
    """Rich's console for texts from outside: they are shown as they are, control characters
    escaped, and none is read as markup or as the name of an emoji.

    Args:
      stderr: not stdout.
      options: further ones of rich.console.Console.
    """

    def __init__(self, *, stderr: bool = True, **options: Any):
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False, **options)

    @Console.file.getter
    def file(self) -> Any:
        """The stream to write to, below those that escape, since rich's own is escaped."""
        file = Console.file.fget(self)
        while (
            below := getattr(file, "unescaped", getattr(file, "rich_proxied_file", file))
        ) is not file:
            file = below
        return file

    def render_str(self, text: str, **options: Any) -> Text:
        """Lays out a text, as rich's Console does; control characters are escaped first."""
        return super().render_str(escaped(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Escapes the printed texts; segments with `control` are rich's own sequences."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escaped(segment.text), segment.style)


class _Bar(RichProgress):
    """Rich's bar, whose stand-ins for stdout and stderr would read escape sequences of texts."""

    def start(self) -> None:
        super().start()
        escape_streams()


@contextlib.contextmanager
def within(whole: Callable[[float | None], str]) -> Iterator[None]:
    """Shows the state of a larger work behind every progress in the block.

    Of blocks within each other the outermost's is shown.

    `whole`: from the seconds left of the work that is shown (None: unknown) to a text, such as
    `about 12 min left of the demo`.
    """
    token = _whole.set(_whole.get() or whole)
    try:
        yield
    finally:
        _whole.reset(token)


def announce(text: str) -> None:
    """Prints a line on stderr, where progress is shown."""
    if os.environ.get("MMQA_PROGRESS") != "off":
        Screen().print(text, soft_wrap=True)


class Progress:
    """Shows how far a piece of work is.

        with Progress("Training reader", total=500, unit="steps") as progress:
            progress.advance(loss=1.25)
            with progress.paused():   # this time counts neither in the rate nor in the time left
                evaluate()

    Under way the rate is measured from the first `advance` on, since the first step also compiles;
    the closing line's is that of the whole time.

    Args:
      title: of the work, e.g. "Training reader".
      total: number of units, None if unknown.
      unit: name of a unit, plural.
      start: units done by an earlier attempt; they count in the percentage, not in the rate.
      quiet: show nothing (default: MMQA_PROGRESS=off).
      console, clock: for tests.
    """

    def __init__(
        self,
        title: str,
        total: int | None = None,
        unit: str = "items",
        *,
        start: int = 0,
        quiet: bool | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._title, self._total, self._unit = title, total, unit
        self._quiet = os.environ.get("MMQA_PROGRESS") == "off" if quiet is None else quiet
        self._console = console or Screen()
        self._clock = clock
        self._done = self._start = start
        self._values: dict[str, Any] = {}
        self._began = self._last_line = clock()
        self._idle = 0.0  # seconds paused
        self._first: tuple[int, float] | None = None  # (units, active seconds) at the first advance
        self._bar: _Bar | None = None
        self._task: Any = None

    def __enter__(self) -> Self:
        self._began = self._last_line = self._clock()
        if not self._quiet and self._console.is_terminal:
            self._bar = _Bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[text]}", markup=False),
                console=self._console,
                refresh_per_second=4,
            )
            self._task = self._bar.add_task(
                self._title, total=self._total, completed=self._done, text=""
            )
            self._bar.start()
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.update(self._task, text=self.summary() if kind is None else self.text())
            self._bar.stop()
        elif not self._quiet:
            self._line(self.summary() if kind is None else f"{self.text()}, stopped")

    def advance(self, n: int = 1, **values: Any) -> None:
        """Counts `n` more units; `values` (such as loss=1.2) are shown behind the rate.

        A value of None is no longer shown.
        """
        self._done += n
        self._values.update(values)
        if self._first is None:
            self._first = (self._done, self.active_seconds())
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, text=self.text())
        elif self._clock() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._line(self.text())

    def reach(self, done: int, total: int) -> None:
        """Sets the units done and their total (for work that does its own counting)."""
        if total != self._total:
            self._total = total
            if self._bar is not None:
                self._bar.update(self._task, total=total)
        self.advance(done - self._done)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock and clears the bar, so that other work can show its own progress."""
        began = self._clock()
        if self._bar is not None:
            self._bar.stop()
        try:
            yield
        finally:
            self._idle += self._clock() - began
            if self._bar is not None:
                self._bar.start()

    def active_seconds(self) -> float:
        """Seconds since the start, pauses left out."""
        return self._clock() - self._began - self._idle

    def rate(self) -> float | None:
        """Units per second, None before there are two readings."""
        if self._first is None or self._done == self._first[0]:
            return None
        seconds = self.active_seconds() - self._first[1]
        return (self._done - self._first[0]) / seconds if seconds > 0 else None

    def seconds_left(self) -> float | None:
        """Estimate of the time left without pauses, None if there is none yet."""
        rate = self.rate()
        if rate is None or self._total is None:
            return None
        return max(self._total - self._done, 0) / rate

    def text(self) -> str:
        """`120/500 steps (24%), 3.2 steps/s, 1:59 left, loss 1.25`."""
        if self._total is None:
            parts = [f"{self._done} {self._unit}"]
        else:
            share = 100 * self._done // self._total if self._total else 100
            parts = [f"{self._done}/{self._total} {self._unit} ({share}%)"]
        if (rate := self.rate()) is not None:
            parts.append(_speed(rate, self._unit))
        if (left := self.seconds_left()) is not None:
            parts.append(f"{duration(left)} left")
        parts += self._shown_values()
        if (whole := _whole.get()) is not None:
            parts.append(whole(left))
        return ", ".join(parts)

    def summary(self) -> str:
        """Summarizes the progress at the end: `500 steps in 2:36, 3.2 steps/s, loss 0.7`."""
        seconds, made = self.active_seconds(), self._done - self._start
        earlier = f" ({self._start} of them earlier)" if self._start else ""
        parts = [f"{self._done} {self._unit}{earlier} in {duration(seconds)}"]
        if made > 0 and seconds > 0:
            parts.append(_speed(made / seconds, self._unit))
        return ", ".join(parts + self._shown_values())

    def _shown_values(self) -> list[str]:
        return [
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in self._values.items()
            if value is not None
        ]

    def _line(self, text: str) -> None:
        self._last_line = self._clock()
        self._console.print(f"{self._title}: {text}", soft_wrap=True)


def duration(seconds: float) -> str:
    """`0:07`, `12:05`, `3:00:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _speed(rate: float, unit: str) -> str:
    return f"{rate:.1f} {unit}/s" if rate >= 1 else f"{1 / rate:.1f} s per {unit.removesuffix('s')}"
