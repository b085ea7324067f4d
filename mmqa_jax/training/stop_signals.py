"""SIGTERM, SIGHUP and Ctrl-C, which end a training run after the step that it is in."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, Self

import jax

from mmqa_jax.core.checkpoint import Checkpoints


class StopSignals:
    """Turns SIGTERM and the first Ctrl-C into a request to stop; a second Ctrl-C stops at once.

    So does SIGHUP, which comes when a terminal is closed or its connection lost; not under nohup.
    """

    def __init__(self) -> None:
        self._signal: int | None = None
        self._before: dict[int, Any] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> Self:
        # On several hosts jax's preemption service takes SIGTERM, so that all agree on a step.
        if threading.current_thread() is threading.main_thread() and jax.process_count() == 1:
            self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: Any) -> None:
        self._signal = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if number == signal.SIGHUP:  # what is said to the terminal would be an error
            for descriptor in self._terminals:
                with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), descriptor)

    def received(self, checkpoints: Checkpoints, step: int) -> bool:
        """Whether the run is to stop after this step; the same on all hosts."""
        if jax.process_count() > 1 and checkpoints.reached_preemption(step):
            self._signal = signal.SIGTERM
        return self._signal is not None

    def leave(self, title: str, step: int, folder: Path) -> None:
        """Ends the process with the signal's exit code."""
        print(
            f"{title}: stopped after step {step} and saved; start it again with the same workdir "
            f"to resume ({folder}).",
            file=sys.stderr,
        )
        raise SystemExit(128 + (self._signal or signal.SIGTERM))
