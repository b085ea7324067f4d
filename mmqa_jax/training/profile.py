"""A trace of some steps of a run, `mmqa train --profile=START:END`, for xprof or TensorBoard."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.paths import in_store, upload
from mmqa_jax.core.progress import announce

FOLDER = "profile"


class Steps(NamedTuple):
    """The steps from `first` to `last`, both included."""

    first: int
    last: int


def parse_steps(text: str, steps: int) -> Steps:
    """START:END of a run of so many steps; UserError if it is none."""
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text)
    if match is None:
        raise UserError(
            f"--profile={text}: START:END was expected, the first and the last step to trace, such "
            "as --profile=20:24."
        )
    first, last = int(match[1]), int(match[2])
    if not 1 <= first <= last <= steps:
        raise UserError(
            f"--profile={text}: steps from 1 to {steps} (train.steps) were expected, the first not "
            "behind the last; correct the range."
        )
    return Steps(first, last)


class Profile:
    """Traces the steps of a range.

        with Profile(steps, workdir) as profile:
            for step in ...:
                with profile.step(step, wait):
                    ...

    Every process writes its own trace: of several, process N into profile/process_N.

    Args:
      steps: None: nothing is traced. An attempt that starts behind the first step traces those of
        the range that are left.
      workdir: of the run.
    """

    def __init__(self, steps: Steps | None, workdir: Path):
        self._steps, self._tracing = steps, False
        self.folder = workdir / FOLDER
        if jax.process_count() > 1:
            self.folder /= f"process_{jax.process_index()}"
        self._here = self.folder  # where the profiler writes, which knows files only
        self._temporary: tempfile.TemporaryDirectory | None = None
        if steps is not None and in_store(workdir):
            self._temporary = tempfile.TemporaryDirectory(prefix="mmqa-profile-")
            self._here = Path(self._temporary.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @contextlib.contextmanager
    def _traced(self, step: int, wait: Callable[[], Any]) -> Any:
        if not self._tracing:
            wait()  # for the steps before: they are not to be seen
            jax.profiler.start_trace(str(self._here))
            self._tracing = True
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield
        if step == self._steps.last:
            wait()
            self._stop()

    def step(self, step: int, wait: Callable[[], Any]) -> AbstractContextManager:
        """Wraps a step, its batch's reading included; `wait` returns when all steps so far are
        computed.
        """
        if self._steps is None or not self._steps.first <= step <= self._steps.last:
            return contextlib.nullcontext()
        return self._traced(step, wait)

    def _stop(self) -> None:
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
            if self._temporary is not None:
                for file in filter(Path.is_file, self._here.rglob("*")):
                    upload(file, self.folder / str(file.relative_to(self._here)))
                self._temporary.cleanup()
            if jax.process_index() == 0:
                announce(f"Trace of steps {self._steps.first} to {self._steps.last}: {self.folder}")
