"""`--engine=ray`: the chunks of a job, computed by workers of a Ray cluster that come and go.

Ray Data deals out the chunks' numbers to actors. An actor starts the same command up to where its
chunks are computed, keeps the model, and commits one part for every number. What a lost actor had
in hand is dealt out again. This process holds the locks and puts the parts together.
"""

import argparse
import collections
import importlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mmqa_jax.core.chunks import named
from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.progress import Progress

_RETRIES = 3  # of a chunk whose worker was lost
_REFUSED = f"{UserError.__name__}: "


class RayEngine:
    """Computes the chunks of a verb on a Ray cluster: that of RAY_ADDRESS, or one started on this
    machine, with at most `workers` (None: as many as the cluster has GPUs, or 1).
    """

    is_worker = False

    def __init__(self, command: Mapping[str, Any], workers: int | None):
        try:
            import ray
            import ray.data  # noqa: F401
        except ImportError as error:
            raise UserError(
                f"--engine=ray: Ray is not installed ({error}); install the extra `ray` (pip "
                'install "mmqa-jax[ray]"), or leave --engine out.'
            ) from error
        self._command, self._workers = dict(command), workers

    def compute(self, numbers: Sequence[int], open_one: Any) -> None:
        """Has the chunks computed and committed; the workers open what they need themselves.

        Raises:
          RunError: chunks failed, or their workers were lost too often: they are named.
        """
        import ray

        if not numbers:
            return
        if not ray.is_initialized():
            ray.init(log_to_driver=False, include_dashboard=False)
        gpus = int(ray.cluster_resources().get("GPU", 0))
        most = min(self._workers or gpus or 1, len(numbers))
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        tries = ray.remote(num_cpus=0)(Tries).remote()
        items = [{"chunk": number} for number in numbers]
        results = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
            Worker,
            fn_constructor_args=[self._command, tries],
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=most),
            num_gpus=1 if gpus else None,
        )
        waiting, failed = set(numbers), {}
        try:
            with Progress(f"{self._command['verb']} on Ray", len(items), "chunks") as progress:
                for row in results.iter_rows():
                    number = int(row["chunk"])
                    waiting.discard(number)
                    if row["error"]:
                        failed[number] = str(row["error"])
                    progress.advance(workers=most)
        except ray.exceptions.RayError as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            raise RunError(
                f"--engine=ray: the cluster failed ({reason}); chunks {named(sorted(waiting))} are "
                "not done; start the command again."
            ) from error
        if failed:
            first, reason = min(failed.items())
            if reason.startswith(_REFUSED):
                raise UserError(reason.removeprefix(_REFUSED))
            raise RunError(
                f"--engine=ray: chunks {named(sorted(failed))} failed (chunk {first}: {reason}); "
                "start the command again, which computes those that are missing."
            )


class Tries:
    """Counts how often a chunk was begun: Ray itself deals out a lost worker's without end."""

    def __init__(self):
        self._begun: collections.Counter[int] = collections.Counter()

    def begin(self, number: int) -> int:
        """Counts one more try of a chunk; returns how many there were before."""
        self._begun[number] += 1
        return self._begun[number] - 1


class Worker:
    """A Ray actor that computes chunks of a command's job; a Tries actor counts how often."""

    def __init__(self, command: Mapping[str, Any], tries: Any):
        self._tries = tries
        self._asked: queue.SimpleQueue = queue.SimpleQueue()
        self._answers: queue.SimpleQueue = queue.SimpleQueue()
        verb = importlib.import_module(f"mmqa_jax.commands.{command['verb']}")
        engine = _Serving(self._asked, self._answers)
        arguments = argparse.Namespace(**{**command, "shard": "0/1", "engine": engine})
        self._thread = threading.Thread(target=self._run, args=(verb, arguments), daemon=True)
        self._thread.start()

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Computes the chunks of `chunk` int[n]; `error` says why one failed, or ""."""
        errors = [self._compute(number) for number in batch["chunk"].tolist()]
        return {"chunk": batch["chunk"], "error": np.array(errors, dtype=object)}

    def _compute(self, number: int) -> str:
        import ray

        if ray.get(self._tries.begin.remote(number)) > _RETRIES:
            return f"its workers were lost {_RETRIES + 1} times"
        self._asked.put(number)
        return self._answers.get()

    def _run(self, verb: Any, arguments: argparse.Namespace) -> None:
        try:
            verb.run(arguments)
        except BaseException as error:  # of the input or the model: every chunk fails by it
            while True:
                self._asked.get()
                self._answers.put(f"{type(error).__name__}: {error}")


class _Serving:
    """The engine of a verb within a worker: computes the numbers that it is asked for."""

    is_worker = True

    def __init__(self, asked: queue.SimpleQueue, answers: queue.SimpleQueue):
        self._asked, self._answers = asked, answers

    def compute(
        self, numbers: Sequence[int], open_one: Callable[[], Callable[[int], None]]
    ) -> None:
        """Never returns; ends with the worker."""
        compute_chunk = open_one()
        while True:
            number = self._asked.get()
            try:
                compute_chunk(number)
            except Exception as error:
                self._answers.put(f"{type(error).__name__}: {error}")
            else:
                self._answers.put("")
