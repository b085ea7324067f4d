"""The one training loop: every task, on any mesh, resumable at every checkpoint.

Order within a step, which is what makes a killed and resumed run equal to an uninterrupted one:
batch, update, log, evaluate, save. A checkpoint's step therefore has all its rows in
metrics.jsonl, and rows after it are dropped when the run resumes. A step that is the best so far
is always saved.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.checkpoint import Checkpoints
from mmqa_jax.core.config import Key, check_section, config_fingerprint, optional, spec_of
from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.files import report_full_disk
from mmqa_jax.core.mesh import DEFAULT_RULES, Rules, batch_blocks, local_blocks, put_batch
from mmqa_jax.core.metrics import MetricsWriter
from mmqa_jax.core.paths import as_path
from mmqa_jax.core.progress import Progress
from mmqa_jax.core.watchdog import Watchdog, hang_limit
from mmqa_jax.training.nonfinite import FiniteCheck, OnNan
from mmqa_jax.training.optimizer import OptimizerOptions, make_optimizer, read_options
from mmqa_jax.training.state import (
    Task,
    TrainState,
    abstract_state,
    finished,
    initial_state,
    make_step,
    split_model,
    with_pretrained,
)
from mmqa_jax.training.validation import BestWeights, Validation
from mmqa_jax.weights.folder import save_trained

# Entries of a batch that stay on the host, to name the examples of a bad step.
_ID_KEYS = ("ids", "index")


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """The section `train` of a config.

    Attributes:
      steps: of the whole run.
      optimizer: see OptimizerOptions.
      rules: logical axis -> mesh axes.
      log_every, checkpoint_every, evaluate_every: in steps, and at the end; with 0 checkpoints
        are only saved at the end, and nothing is evaluated.
      accumulate: parts of a batch, one after another (see make_step).
      keep: how many of the latest checkpoints; the best one is kept besides.
      on_nan: a loss or gradient that is not finite ends the run (`stop`), or that step changes
        nothing (`skip`).
      skip_at_most: so many such steps in a run; one more ends it.
    """

    steps: int
    optimizer: OptimizerOptions
    rules: Rules = DEFAULT_RULES
    log_every: int = 10
    checkpoint_every: int = 500
    evaluate_every: int = 0
    accumulate: int = 1
    keep: int = 2
    on_nan: OnNan = "stop"
    skip_at_most: int = 10


def train(
    config: Mapping[str, Any],
    *,
    task: Task,
    batches: Any,
    mesh: Mesh,
    workdir: Any,
    seed: int,
    validation: Validation | None = None,
    load_pretrained: Callable[[nnx.Module], None] | None = None,
    finish: Callable[[nnx.Module], nnx.Module] | None = None,
    title: str = "Training",
    metadata: Mapping[str, Any] | None = None,
    only_start: bool = False,
) -> Any:
    """Trains a task to its last step, resuming from the newest checkpoint in `workdir`.

    Args:
      config: the section `train` of a config; see LoopOptions.
      task: model and loss.
      batches: Grain iterator (`get_state`, `set_state`) of pytrees of numpy arrays, first axis the
        rows that this process feeds (core.mesh.local_rows). A step is compiled once per shape.
        Entries `ids` or `index` of a dict batch stay on the host and name the examples if the
        loss is not finite.
      mesh: of core.mesh.make_mesh.
      workdir: folder of this training run: checkpoints/, metrics.jsonl, events, weights/,
        model.json, and best/ if `validation` has a metric.
      seed: of the initial weights and of dropout.
      validation: judges the parameters every `evaluate_every` steps and at the end; the values
        are logged as `eval/NAME`. All processes call it.
      load_pretrained: puts pretrained weights into the freshly initialized model, in place,
        before the first step of a run (not when it resumes).
      finish: the trained module -> the one whose weights are kept for other verbs; None: itself.
      title: shown in front of the progress.
      metadata: JSON values for model.json, which describe the model.
      only_start: takes no step: the weights that are saved are the initial ones.

    Returns:
      The final parameters (nnx.State).

    Raises:
      UserError: bad config values, a checkpoint of another config, a batch that does not divide.
      RunError: a loss or gradient that is not finite (step and example ids named; nothing of it
        is saved), data that ends too early, or a disk that is full.
      SystemExit: SIGTERM or Ctrl-C, after saving (code 143 or 130).
    """
    options = read_section(config)
    steps = 0 if only_start else options.steps
    optimizer, schedule = make_optimizer(options.optimizer, options.steps)
    model = split_model(task, seed)
    abstract = abstract_state(model, optimizer, mesh, options.rules)
    step_fn = make_step(
        task,
        model,
        optimizer,
        schedule,
        seed=seed,
        accumulate=options.accumulate,
        abstract=abstract,
        mesh=mesh,
        skip_nonfinite=options.on_nan == "skip",
    )
    folder = as_path(workdir)
    fingerprint = config_fingerprint({"train": config, "seed": seed, "model": metadata or {}})
    with (
        report_full_disk(folder),
        Checkpoints(
            folder / "checkpoints", fingerprint=fingerprint, keep=options.keep
        ) as checkpoints,
    ):
        state, first, window = _restore_or_start(
            checkpoints, task, optimizer, seed, abstract, batches
        )
        best = None
        if validation is not None and validation.metric is not None:
            described = {**(metadata or {}), "seed": seed}
            best = BestWeights(folder, checkpoints, model, described, validation.metric, finish)
            best.repair(abstract.params)
        if load_pretrained is not None and first == 0:
            state = with_pretrained(state, model, load_pretrained)
        with (
            MetricsWriter(folder, restored_step=first) as metrics,
            Progress(title, steps, "steps", start=first, quiet=_quiet()) as progress,
            _StopSignals() as stop,
            Watchdog(hang_limit(os.environ)) as watchdog,
        ):
            on_cpu = mesh.devices.flat[0].platform == "cpu"
            run = _Run(
                options, checkpoints, metrics, progress, watchdog, batches, window, seed, on_cpu
            )
            for step in range(first + 1, steps + 1):
                watchdog.beat(step, "reading the batch")
                batch, ids = _next_batch(batches, step, mesh, options.accumulate)
                watchdog.beat(step, "computing")
                with jax.transfer_guard("disallow"):  # only the batch is transferred, above
                    state, values = step_fn(state, batch)
                run.dispatched(step, ids, values)
                if step % options.log_every == 0 or step == options.steps:
                    run.log(step)
                score = None
                every = options.evaluate_every
                if validation is not None and every and _due(step, every, options.steps):
                    score = run.evaluate(step, model.merge(state.params), validation)
                is_best = best is not None and best.beats(score)
                stopped = stop.received(checkpoints, step)
                if stopped or is_best or _due(step, options.checkpoint_every, options.steps):
                    run.save(step, state, score)
                if best is not None and is_best:
                    watchdog.beat(step, "saving the best weights")
                    best.write(state.params)
                if stopped:
                    checkpoints.wait()
                    stop.leave(title, step, folder)
            checkpoints.wait()
        metadata = {**(metadata or {}), "step": steps, "seed": seed}
        save_trained(folder, *finished(model, state.params, finish), metadata)
    return state.params


class _Run:
    """The host's side of the loop: steps in flight, the logged window, and saving."""

    def __init__(
        self,
        options: LoopOptions,
        checkpoints: Checkpoints,
        metrics: MetricsWriter,
        progress: Progress,
        watchdog: Watchdog,
        batches: Any,
        window: dict[str, Any],
        seed: int,
        on_cpu: bool,
    ):
        self._options, self._checkpoints, self._metrics = options, checkpoints, metrics
        self._progress, self._watchdog = progress, watchdog
        self._batches, self._seed = batches, seed
        skipped = window.get("skipped", 0)
        self._finite = FiniteCheck(options.on_nan, options.skip_at_most, skipped)
        self._flying: collections.deque[tuple[int, Any, dict[str, jax.Array]]] = collections.deque()
        self._sums, self._count = dict(window["sums"]), window["count"]
        # The CPU runs a step on the cores that also make batches: running ahead costs memory only.
        self._most_in_flight = 2 if on_cpu else 8

    def dispatched(self, step: int, ids: Any, values: dict[str, jax.Array]) -> None:
        """Records a dispatched step, and waits for an older one if too many are in flight."""
        self._flying.append((step, ids, values))
        if len(self._flying) > self._most_in_flight:
            self._flying[-1 - self._most_in_flight][2]["loss"].block_until_ready()
        self._progress.advance()

    def check_finite(self) -> None:
        """Fetches the metrics of all steps so far; see FiniteCheck.counts."""
        fetched = jax.device_get([values for _, _, values in self._flying])
        for (step, ids, _), values in zip(self._flying, fetched, strict=True):
            if not self._finite.counts(step, ids, values, self._checkpoints.latest_step() or 0):
                continue
            for name, value in values.items():
                self._sums[name] = self._sums.get(name, 0.0) + float(value)
            self._count += 1
        self._flying.clear()

    def log(self, step: int) -> None:
        """Writes the means of the steps since the last row."""
        self.check_finite()
        means = {name: total / self._count for name, total in self._sums.items()}
        if self._finite.skipped:
            means["skipped_steps"] = self._finite.skipped
        if (rate := self._progress.rate()) is not None:
            means["steps_per_second"] = rate
        self._metrics.write(step, means)
        if "loss" in means:
            self._progress.advance(0, loss=means["loss"])
        self._sums, self._count = {}, 0

    def evaluate(self, step: int, model: nnx.Module, validation: Validation) -> float | None:
        """Writes a row of the validation's values; returns that of its metric, if it is finite."""
        self.check_finite()
        self._watchdog.beat(step, "evaluating")
        if jax.process_count() == 1:
            self._watchdog.rest()  # no other host waits, and it may take long
        with self._progress.paused():
            found = _same_on_all(validation.evaluate(model))
        self._metrics.write(step, {f"eval/{name}": value for name, value in found.items()})
        if validation.metric is None:
            return None
        score = found[validation.metric]
        self._progress.advance(0, **{validation.metric: score})
        return score if math.isfinite(score) else None

    def save(self, step: int, state: TrainState, score: float | None) -> None:
        """Starts a checkpoint, after checking that all values so far are finite."""
        self.check_finite()
        self._watchdog.beat(step, "saving")
        self._metrics.flush()
        window = {"sums": self._sums, "count": self._count, "skipped": self._finite.skipped}
        self._checkpoints.save(
            step,
            params=state.params,
            train={"step": state.step, "optimizer": state.optimizer},
            iterator=self._batches,
            # A log window may span a checkpoint: keep its first part.
            meta={"seed": self._seed, "window": window},
            score=score,
        )


class _StopSignals:
    """Turns SIGTERM and the first Ctrl-C into a request to stop; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self._signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _StopSignals:
        # On several hosts jax's preemption service takes SIGTERM, so that all agree on a step.
        if threading.current_thread() is threading.main_thread() and jax.process_count() == 1:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: Any) -> None:
        self._signal = number
        signal.signal(signal.SIGINT, signal.default_int_handler)

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


def _restore_or_start(
    checkpoints: Checkpoints,
    task: Task,
    optimizer: Any,
    seed: int,
    abstract: TrainState,
    batches: Any,
) -> tuple[TrainState, int, dict[str, Any]]:
    """The newest checkpoint, or else the task's initial weights; with step and log window."""
    restored = checkpoints.restore_latest(
        params=abstract.params,
        train={"step": abstract.step, "optimizer": abstract.optimizer},
        iterator=batches,
    )
    if restored is None:
        return initial_state(task, optimizer, seed, abstract), 0, {"sums": {}, "count": 0}
    state = TrainState(restored.train["step"], restored.params, restored.train["optimizer"])
    return state, restored.step, restored.meta["window"]


def _next_batch(batches: Iterator[Any], step: int, mesh: Mesh, accumulate: int) -> tuple[Any, Any]:
    """The next batch on the mesh, split over its data axes, and the ids, which stay on the host."""
    try:
        batch = next(batches)
    except StopIteration:
        raise RunError(
            f"step {step}: the data ended before the last step; let the pipeline repeat, or lower "
            "train.steps."
        ) from None
    ids = None
    if isinstance(batch, dict):
        ids = {key: batch[key] for key in _ID_KEYS if key in batch}
        batch = {key: value for key, value in batch.items() if key not in _ID_KEYS}
    share = len(local_blocks(mesh))
    for leaf in jax.tree.leaves(batch):
        rows = np.shape(leaf)[0] if np.ndim(leaf) else 0
        size, rest = divmod(rows * batch_blocks(mesh), share)
        check_batch_size(0 if rest else size, mesh, accumulate)
    return put_batch(mesh, batch), ids


def read_section(config: Mapping[str, Any]) -> LoopOptions:
    """Reads the section `train`; UserError for an unknown or missing key or a bad value."""
    spec = spec_of(LoopOptions, minimum=1)
    zero = optional(int, minimum=0)
    spec |= {"optimizer": Key(dict), "rules": optional(Any)}
    check_section(config, "train", spec | {"checkpoint_every": zero, "evaluate_every": zero})
    options = {key: config[key] for key in spec if key in config}
    options["optimizer"] = read_options(config["optimizer"])
    rules = options.pop("rules", None) or DEFAULT_RULES
    return LoopOptions(**options, rules=tuple((name, axes) for name, axes in rules))


def check_batch_size(size: int, mesh: Mesh, accumulate: int) -> None:
    """UserError if a batch over all processes cannot be split."""
    parts = accumulate * mesh.shape["data"] * mesh.shape["fsdp"]
    if size % parts or size < 1:
        raise UserError(
            f"batch of {size}: must be a multiple of {parts} (train.accumulate x mesh axes "
            "data and fsdp); change batches.batch_size or the mesh."
        )


def _same_on_all(values: Mapping[str, float]) -> dict[str, float]:
    """Process 0's values: what is decided by them must not differ between processes."""
    numbers = np.array([float(value) for value in values.values()], np.float64)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        # As bytes: arrays of float64 would be rounded.
        numbers = multihost_utils.broadcast_one_to_all(numbers.view(np.uint8)).view(np.float64)
    return dict(zip(values, numbers.tolist(), strict=True))


def _quiet() -> bool | None:
    return True if jax.process_index() else None  # only process 0 shows its progress


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)
