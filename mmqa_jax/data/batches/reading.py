"""Batches in the order of their plan, made ahead by threads, or by worker processes with theirs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from absl import flags

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.data.batches.sampling import BatchPlan, PlannedBatch
from mmqa_jax.data.images import BrokenPictures

if TYPE_CHECKING:  # and late, since verbs that only use a task's trained model need no Grain
    import grain

_BUFFERED = 4  # batches that wait for the step, at least
_DIED = "Worker process was terminated unexpectedly"  # how Grain's message begins


class Batches(Protocol):
    """Iterates over batches; a Grain iterator is one."""

    def __iter__(self) -> Self: ...

    def __next__(self) -> Any: ...

    def get_state(self) -> dict[str, Any]:
        """JSON values, the same for any number of threads and workers."""

    def set_state(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def batch_iterator(
    plan: BatchPlan,
    make_batch: Callable[[PlannedBatch], Any],
    *,
    threads: int = 2,
    workers: int = 0,
    broken: Sequence[BrokenPictures] = (),
) -> Batches:
    """Iterates over `make_batch(plan[i])`, i = 0, 1, ..., made ahead.

    Its state (`get_state`, `set_state`) is its position alone, and so the batches do not depend on
    threads and workers, and a run resumes with others.

    Args:
      make_batch: a pure function of its argument.
      threads: that make batches, in each process that makes them.
      workers: processes that make them, in turn; 0: this one. Decoding releases Python's lock and
        needs no workers; what is written in Python (packing, augmentation) holds it.
      broken: what `make_batch` counts; the counts of the workers are added to it.

    Raises:
      RunError: a worker died; when its batch is due.
    """
    if workers < 0:
        raise UserError(f"workers={workers} is negative; give 0 or more processes.")
    if workers:
        return _WorkerBatches(plan, make_batch, threads, workers, broken)
    import grain

    return iter(
        grain.MapDataset.source(plan).map(make_batch).to_iter_dataset(_read_options(threads))
    )


def _read_options(threads: int) -> grain.ReadOptions:
    import grain

    # Grain never works on more elements than it buffers.
    buffered = max(_BUFFERED, threads) if threads else 0
    return grain.ReadOptions(num_threads=threads, prefetch_buffer_size=buffered)


class _WorkerBatches:
    """Grain's worker processes, which start with the first batch; see `batch_iterator`.

    Grain's own state depends on the number of workers. Here they start at a position.
    """

    def __init__(
        self,
        plan: BatchPlan,
        make_batch: Callable[[PlannedBatch], Any],
        threads: int,
        workers: int,
        broken: Sequence[BrokenPictures],
    ):
        self._make = _Counted(plan, make_batch, tuple(broken))
        self._threads, self._workers, self._broken = threads, workers, broken
        self._position = 0
        self._running: Any = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._running is None:
            self._running = self._start()
        try:
            batch, found = next(self._running)
        except RuntimeError as error:
            if not str(error).startswith(_DIED):
                raise
            raise RunError(
                f"batch {self._position}: the worker process that makes it has died ("
                f"{_exit_code(error)}); the last complete checkpoint is as it was: start the same "
                "command again, with fewer batches.workers if memory is short."
            ) from error
        self._position += 1
        for count, reasons in zip(self._broken, found, strict=True):
            for name, reason in reasons:
                count.add(name, reason)
        return batch

    def get_state(self) -> dict[str, Any]:
        return {"next_index": self._position}

    def set_state(self, state: dict[str, Any]) -> None:
        self.close()
        self._position = int(state["next_index"])

    def close(self) -> None:
        """Ends the workers."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def _start(self) -> grain.DatasetIterator:
        import grain

        # Grain reads absl's flags here, which are only known to have their defaults once parsed.
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()
        rest = grain.MapDataset.range(self._position, len(self._make.plan))
        batches = rest.map(self._make).to_iter_dataset(_read_options(self._threads))
        options = grain.MultiprocessingOptions(
            num_workers=self._workers, per_worker_buffer_size=-(-_BUFFERED // self._workers)
        )
        return iter(batches.mp_prefetch(options, worker_init_fn=_start_worker))


class _Counted:
    """Position -> its batch, and what has been counted as broken since the last one."""

    def __init__(
        self,
        plan: BatchPlan,
        make_batch: Callable[[PlannedBatch], Any],
        broken: tuple[BrokenPictures, ...],
    ):
        self.plan, self._make_batch, self._broken = plan, make_batch, broken
        self._told = [0] * len(broken)

    def __call__(self, position: int) -> tuple[Any, list[list[tuple[str, str]]]]:
        batch = self._make_batch(self.plan[position])
        found = []
        for number, count in enumerate(self._broken):
            # Of two threads both may tell the same: counting again changes nothing.
            reasons = list(count.reasons.items())
            found.append(reasons[self._told[number] :])
            self._told[number] = len(reasons)
        return batch, found


def _start_worker(number: int, count: int) -> None:
    """The first that a worker process runs."""
    import jax

    # A signal goes to all processes of a job: the run itself answers it, with a last checkpoint
    # that may take further batches.
    for received in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(received, signal.SIG_IGN)
    # Whatever computes in a worker, it leaves the accelerator to the run.
    jax.config.update("jax_platforms", "cpu")
    threading.Thread(target=_end_with_the_run, daemon=True).start()


def _end_with_the_run() -> None:
    """Ends this process when the run was killed, which could not tell it to."""
    run = multiprocessing.parent_process()
    assert run is not None, "a worker has a parent"
    run.join()
    os._exit(1)


def _exit_code(error: BaseException) -> str:
    """`exit code -9, ...` of Grain's message."""
    words = str(error).partition("exit code ")[2].split()
    code = words[0].rstrip(".") if words else "unknown"
    known = {
        "-9": "killed, as the system does when memory is short",
        "-7": "shared memory, /dev/shm, is full",
    }
    return ", ".join(filter(None, [f"exit code {code}", known.get(code)]))
