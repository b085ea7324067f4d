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
from mmqa_jax.core.errors import RunError
from mmqa_jax.core.metrics import METRICS
from mmqa_jax.core.paths import in_store
from mmqa_jax.weights.record import RUN_FILES


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


# A workdir that is deleted or moved while its run goes on.

_NAMES = ("config.json", METRICS, *RUN_FILES)


class StillThere:
    """Tells whether the files that a run began with are still in its workdir; on process 0.

    Nearly all that a run writes makes the folder anew, and a run that went on would end without
    the files that it wrote at its start. As a context manager it also explains the errors of what
    fails since the folder is gone.

    Args:
      folder: the workdir; the run's first files are in it when the context is entered.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._files: list[Path] = []

    def __enter__(self) -> Self:
        names = _NAMES if jax.process_index() == 0 else ()
        self._files = [file for name in names if (file := self._folder / name).exists()]
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, Exception):
            self.check()

    def check(self, *, often: bool = False) -> None:
        """Call it before anything is written.

        Args:
          often: called so often that objects in a store are not asked for.

        Raises:
          RunError: a file is gone.
        """
        if often and in_store(self._folder):
            return
        gone = next((file for file in self._files if not file.exists()), None)
        if gone is not None:
            raise RunError(
                f"{gone}: is gone, deleted or moved while the run went on, which ends here; put "
                "the workdir back and start the same command again, or train anew."
            )
