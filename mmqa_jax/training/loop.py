"""The one training loop: every task, on any mesh, resumable at every checkpoint; traces of steps.

Order within a step, which is what makes a killed and resumed run equal to an uninterrupted one:
batch, update, log, evaluate, save. A checkpoint's step therefore has all its rows in
metrics.jsonl, and rows after it are dropped when the run resumes. A step that is the best so far
is always saved.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.checkpoints.checkpoint import Checkpoints
from mmqa_jax.core.checkpoints.local_checkpoints import local_folder
from mmqa_jax.core.chips import GIB, chip_of_kind
from mmqa_jax.core.config import config_fingerprint
from mmqa_jax.core.errors import RunError, UserError, report_full_disk
from mmqa_jax.core.files import write_json
from mmqa_jax.core.host import matmul_peak
from mmqa_jax.core.hosts.watchdog import Watchdog, hang_limit
from mmqa_jax.core.mesh import batch_blocks, local_blocks, on_device, put_batch
from mmqa_jax.core.metrics import METRICS, MetricsWriter
from mmqa_jax.core.paths import as_path, in_store, upload
from mmqa_jax.core.progress import Progress, announce
from mmqa_jax.training.attempts import Attempts, TimeSplit
from mmqa_jax.training.best_weights import BestWeights
from mmqa_jax.training.optimizer import decay_line, make_optimizer, parameter_table
from mmqa_jax.training.options import (
    FiniteCheck,
    LoopOptions,
    check_batch_size,
    check_steps,
    experiment,
    read_section,
)
from mmqa_jax.training.state import (
    Model,
    ModelBatches,
    Objective,
    Step,
    TrainState,
    Validation,
    abstract_state,
    finished,
    initial_state,
    make_step,
    of_update,
    pretrained_state,
    split_model,
)
from mmqa_jax.weights.folder import save_trained
from mmqa_jax.weights.record import RUN_FILES

# In the workdir: every parameter, and whether it is trained and decayed.
PARAMETERS = "parameters.json"
# Entries of a batch that stay on the host: to name the examples of a bad step, and tokens lost.
_ID_KEYS = ("ids", "index")
_TRUNCATED = "truncated"
_SHOWN_INPUT_SHARE = 0.05  # of the time, from which on the progress shows the wait for input


@dataclasses.dataclass(frozen=True)
class Observed:
    """What is recorded of an attempt besides metrics.jsonl; no part of the experiment."""

    profile: Steps | None = None  # the steps to trace
    wandb: str | None = None  # project in Weights & Biases


@dataclasses.dataclass(frozen=True)
class Resuming:
    """How an attempt goes on from the checkpoints of an earlier one."""

    skip_damaged: bool = False  # sets damaged checkpoints aside and goes on from an earlier one
    stretch_schedule: bool = False  # lets another `train.steps` change the schedule from here on
    # The section `train` that the run had so far; None: as the config's.
    former: Mapping[str, Any] | None = None
    # Called with the step that is resumed from (0: a new run), before the next one.
    on_start: Callable[[int], None] = lambda step: None


def train(
    config: Mapping[str, Any],
    *,
    objective: Objective,
    batches: Any,
    mesh: Mesh,
    workdir: Any,
    seed: int,
    validation: Validation | None = None,
    load_pretrained: Callable[[nnx.Module], None] | None = None,
    finish: Callable[[nnx.Module], nnx.Module] | None = None,
    title: str = "Training",
    limits: Sequence[str] = (),
    metadata: Mapping[str, Any] | None = None,
    only_start: bool = False,
    observed: Observed = Observed(),
    resuming: Resuming = Resuming(),
) -> Any:
    """Trains a task to its last step, resuming from the newest checkpoint in `workdir`.

    Args:
      config: the section `train` of a config; see LoopOptions.
      objective: model and loss.
      batches: Grain iterator (`get_state`, `set_state`) of pytrees of numpy arrays, first axis the
        rows that this process feeds (core.mesh.local_rows), `train.accumulate` of them for each
        update. A step is compiled once per shape.
        One that makes them with the model itself is a `ModelBatches`.
        Entries `ids` or `index` of a dict batch stay on the host and name the examples if the
        loss is not finite; so does `truncated`, the tokens that each example has lost, which a
        metric of that name counts for every step.
      mesh: of core.mesh.make_mesh.
      workdir: folder of this training run: checkpoints/, metrics.jsonl, attempts.jsonl, events,
        parameters.json, weights/, model.json, and best/ if `validation` has a metric.
      seed: of the initial weights and of dropout.
      validation: judges the parameters every `evaluate_every` steps and at the end; the values
        are logged as `eval/NAME`. All processes call it.
      load_pretrained: puts pretrained weights into the model, in place, before the first step of
        a run, and when it resumes if the model has frozen parameters, which no checkpoint holds;
        see training.state.pretrained_state.
      finish: the trained module -> the one whose weights are kept for other verbs; None: itself.
      title: shown in front of the progress.
      limits: the config keys by which tokens are cut, to be named where some are.
      metadata: JSON values for model.json, which describe the model.
      only_start: takes no step: the weights that are saved are the initial ones.
      observed: see Observed.
      resuming: see Resuming.

    Returns:
      The final parameters (nnx.State).

    Raises:
      RunError: a loss or gradient that is not finite (step and example ids named; nothing of it
        is saved), data that ends too early, or a disk that is full.
      SystemExit: SIGTERM, Ctrl-C or SIGHUP, after saving (code 143, 130 or 129).
    """
    options = read_section(config)
    steps = 0 if only_start else options.steps
    optimizer, schedule = make_optimizer(options.optimizer, options.steps)
    model = split_model(objective, seed, options.precision, options.ema, options.offload)
    abstract = abstract_state(model, optimizer, mesh, options.rules)
    step_fn = make_step(
        objective,
        model,
        optimizer,
        schedule,
        seed=seed,
        accumulate=options.accumulate,
        abstract=abstract,
        mesh=mesh,
        trainable=options.optimizer.trainable,
        skip_nonfinite=options.on_nan == "skip",
    )
    folder = as_path(workdir)
    further = {"seed": seed, "model": metadata or {}}
    former = config if resuming.former is None else resuming.former
    attempts = Attempts(folder)
    with (
        report_full_disk(folder),
        Checkpoints(
            folder / "checkpoints",
            fingerprint=config_fingerprint({"train": experiment(config), **further}),
            former=[config_fingerprint({"train": former, **further})],
            keep=options.keep,
            skip_damaged=resuming.skip_damaged,
            local=local_folder(os.environ, options.checkpoint_local_every),
        ) as checkpoints,
    ):
        state, first, meta = _restore_or_start(
            checkpoints, model, optimizer, seed, abstract, batches, load_pretrained
        )
        check_steps(
            options.optimizer,
            meta.get("steps", former["steps"]),
            options.steps,
            first,
            stretch=resuming.stretch_schedule,
        )
        best = None
        if validation is not None and validation.metric is not None:
            described = {**(metadata or {}), "seed": seed}
            best = BestWeights(folder, checkpoints, model, described, validation.metric, finish)
            best.repair(abstract.saved_params, state.frozen)
        with (
            MetricsWriter(folder, restored_step=first, wandb=observed.wandb) as metrics,
            Progress(title, steps, "steps", start=first, quiet=_quiet()) as progress,
            StopSignals() as stop,
            Watchdog(hang_limit(os.environ), resumes=checkpoints.committed_step) as watchdog,
            Profile(observed.profile, folder) as profile,
            StillThere(folder) as there,
        ):
            resuming.on_start(first)
            if not only_start:
                attempts.start(first)
            outputs = _Outputs(checkpoints, metrics, attempts, progress, watchdog, there)
            run = _Run(options, outputs, step_fn, batches, meta["window"], seed, limits)
            if first == 0 and not only_start and jax.process_index() == 0:
                table = parameter_table(options.optimizer, abstract.params)
                write_json(folder / PARAMETERS, table)
                announce(f"{decay_line(table)} ({folder / PARAMETERS}).")
            state = step_fn.begin(state)
            for step in range(first + 1, steps + 1):
                with profile.step(step, run.wait):
                    for _ in range(options.accumulate):
                        if isinstance(batches, ModelBatches):
                            batches.use(model.merge(*on_device((state.params, state.frozen))))
                        batch = run.read(step, state)
                        with jax.transfer_guard("disallow"):  # only the batch is transferred, above
                            state, values = step_fn(state, batch)
                        run.dispatched(step, values)
                progress.advance()
                if step % options.log_every == 0 or step == options.steps:
                    run.log(step)
                score = None
                every = options.evaluate_every
                if validation is not None and every and _due(step, every, options.steps):
                    module = model.merge(*on_device((state.saved_params, state.frozen)))
                    score = run.evaluate(step, module, validation)
                is_best = best is not None and best.beats(score)
                stopped = stop.received(checkpoints, step)
                if stopped or is_best or _due(step, options.checkpoint_every, options.steps):
                    run.save(step, state, score)
                elif options.checkpoint_local_every and not step % options.checkpoint_local_every:
                    run.save_local(step, state)
                if best is not None and is_best:
                    run.save_best(step, best, state)
                if stopped:
                    run.finish("stop", step)
                    stop.leave(title, step, folder)
            run.finish("end", steps)
            checkpoints.remove_local()
        there.check()
        metadata = {**(metadata or {}), "step": steps, "seed": seed}
        save_trained(folder, *finished(model, state.saved_params, state.frozen, finish), metadata)
    return state.saved_params


@dataclasses.dataclass(frozen=True)
class _Outputs:
    """Where a run writes, and who looks at it."""

    checkpoints: Checkpoints
    metrics: MetricsWriter
    attempts: Attempts
    progress: Progress
    watchdog: Watchdog
    there: StillThere


class _Run:
    """The host's side of the loop: batches, steps in flight, the logged window, and saving."""

    def __init__(
        self,
        options: LoopOptions,
        outputs: _Outputs,
        step_fn: Step,
        batches: Any,
        window: dict[str, Any],
        seed: int,
        limits: Sequence[str],
    ):
        self._options, self._outputs = options, outputs
        self._checkpoints, self._metrics = outputs.checkpoints, outputs.metrics
        self._progress, self._watchdog = outputs.progress, outputs.watchdog
        self._batches, self._mesh, self._seed = batches, step_fn.mesh, seed
        skipped = window.get("skipped", 0)
        self._finite = FiniteCheck(options.on_nan, options.skip_at_most, skipped)
        self._flying: collections.deque[tuple[int, Any, dict[str, jax.Array]]] = collections.deque()
        self._sums, self._count = dict(window["sums"]), window["count"]
        self._split, self._throughput = TimeSplit(), Throughput(self._mesh, step_fn)
        self._ids, self._compiles = None, False  # of the batch that was read last
        self._truncated: dict[str, float] = {}  # as the others: its metric, if it counts tokens
        self._limits, self._is_told = limits, False
        # The CPU runs a step on the cores that also make batches: running ahead costs memory only.
        on_cpu = self._mesh.devices.flat[0].platform == "cpu"
        self._most_in_flight = 2 if on_cpu else 8

    def read(self, step: int, state: TrainState) -> Any:
        """The next batch, on the mesh."""
        self._watchdog.beat(step, "reading the batch")
        self._split.lap("compute")
        rows, self._ids = _next_rows(self._batches, step, self._mesh)
        self._truncated = self._count_truncated(rows, step)
        batch = put_batch(self._mesh, rows)
        # While the devices still compute an earlier step, nothing waits for the batch.
        self._split.lap("input" if self._idle() else "compute")
        self._watchdog.beat(step, "computing")
        self._compiles = self._throughput.count(rows, state, batch)
        return batch

    def dispatched(self, step: int, values: dict[str, jax.Array]) -> None:
        """Records a dispatched part of a step, and waits for an older one if too many are in
        flight."""
        self._split.lap("compile" if self._compiles else "compute")
        self._flying.append((step, self._ids, values | self._truncated))
        if len(self._flying) > self._most_in_flight:
            self._flying[-1 - self._most_in_flight][2]["loss"].block_until_ready()

    def _count_truncated(self, rows: Any, step: int) -> dict[str, float]:
        """Takes what a batch tells of lost tokens from it, and says so the first time."""
        if not isinstance(rows, dict) or _TRUNCATED not in rows:
            return {}
        lost = rows.pop(_TRUNCATED)
        if lost.any() and not self._is_told and jax.process_index() == 0:
            self._is_told = True
            announce(
                f"step {step}: {np.count_nonzero(lost)} of {len(lost)} examples lose "
                f"{lost.sum()} tokens that do not fit; raise {' or '.join(self._limits)}, or let "
                f"it be: metrics.jsonl counts them in the column {_TRUNCATED}."
            )
        # This process has seen its own rows alone; of several hosts the whole is estimated.
        return {_TRUNCATED: lost.sum() * batch_blocks(self._mesh) / len(local_blocks(self._mesh))}

    def wait(self) -> None:
        """Returns when all dispatched steps are computed."""
        if self._flying:
            self._flying[-1][2]["loss"].block_until_ready()

    def _idle(self) -> bool:
        return not self._flying or self._flying[-1][2]["loss"].is_ready()

    def check_finite(self) -> None:
        """Fetches the metrics of all steps so far; see FiniteCheck.counts."""
        fetched = jax.device_get([values for _, _, values in self._flying])
        flown = zip(self._flying, fetched, strict=True)
        for step, parts in itertools.groupby(flown, lambda part: part[0][0]):
            of_parts, of_their_values = zip(*parts, strict=True)
            ids, values = [part[1] for part in of_parts], of_update(of_their_values)
            if not self._finite.counts(step, ids, values, self._checkpoints.latest_step() or 0):
                continue
            for name, value in values.items():
                self._sums[name] = self._sums.get(name, 0.0) + float(value)
            self._count += 1
        self._flying.clear()

    def log(self, step: int) -> None:
        """Writes the means of the steps since the last row."""
        self._outputs.there.check(often=True)
        self.check_finite()
        means = {name: total / self._count for name, total in self._sums.items()}
        if self._finite.skipped:
            means["skipped_steps"] = self._finite.skipped
        if (rate := self._progress.rate()) is not None:
            means["steps_per_second"] = rate
        self._split.lap("compute")
        seconds = self._split.take()
        self._metrics.write(step, means | self._throughput.columns(seconds))
        self._outputs.attempts.note("step", step, self._split.total)
        self._show_input_wait(seconds)
        if "loss" in means:
            self._progress.advance(0, loss=means["loss"])
        self._sums, self._count = {}, 0

    def evaluate(self, step: int, model: nnx.Module, validation: Validation) -> float | None:
        """Writes a row of the validation's values; returns that of its metric, if it is finite."""
        self.check_finite()
        self._split.lap("compute")
        self._watchdog.beat(step, "evaluating")
        if jax.process_count() == 1:
            self._watchdog.rest()  # no other host waits, and it may take long
        with self._progress.paused():
            values = _same_on_all(validation.evaluate(model))
        self._metrics.write(step, {f"eval/{name}": value for name, value in values.items()})
        self._split.lap("evaluate")
        if validation.metric is None:
            return None
        score = values[validation.metric]
        self._progress.advance(0, **{validation.metric: score})
        return score if math.isfinite(score) else None

    def save(self, step: int, state: TrainState, score: float | None) -> None:
        """Starts a checkpoint, after checking that all values so far are finite."""
        self._checkpoints.save(step, **self._state_to_save(step, state), score=score)
        self._saved("save", step)

    def save_local(self, step: int, state: TrainState) -> None:
        """The same on the hosts' own disks."""
        self._checkpoints.save_local(step, **self._state_to_save(step, state))
        self._saved("local", step)

    def _state_to_save(self, step: int, state: TrainState) -> dict[str, Any]:
        self._outputs.there.check()
        self.check_finite()
        self._split.lap("compute")
        self._watchdog.beat(step, "saving")
        self._metrics.flush()
        window = {"sums": self._sums, "count": self._count, "skipped": self._finite.skipped}
        return {
            **_items(state),
            "iterator": self._batches,
            # A log window may span a checkpoint: keep its first part.
            "meta": {"seed": self._seed, "window": window, "steps": self._options.steps},
        }

    def _saved(self, event: str, step: int) -> None:
        self._split.lap("checkpoint")
        self._outputs.attempts.note(event, step, self._split.total)

    def save_best(self, step: int, best: BestWeights, state: TrainState) -> None:
        """Writes the weights of a step that is the best so far; its checkpoint is saved first."""
        self._watchdog.beat(step, "saving the best weights")
        best.write(state.saved_params, state.frozen)
        self._split.lap("checkpoint")

    def finish(self, event: str, step: int) -> None:
        """Waits for the last checkpoint, and notes how the attempt ended."""
        self._checkpoints.wait()
        self._outputs.there.check()
        self._split.lap("checkpoint")
        self._outputs.attempts.note(event, step, self._split.total)
        self._show_input_wait(self._split.total)
        if (times := self._outputs.attempts.goodput()) is not None:
            self._progress.advance(0, goodput=f"{100 * times.share:.0f} %")

    def _show_input_wait(self, seconds: Mapping[str, float]) -> None:
        share = seconds["input"] / max(sum(seconds.values()), 1e-9)
        text = f"{100 * share:.0f} %" if share > _SHOWN_INPUT_SHARE else None
        self._progress.advance(0, **{"input wait": text})


def models_at(
    steps: Sequence[int],
    config: Mapping[str, Any],
    *,
    objective: Objective,
    batches: Any,
    mesh: Mesh,
    workdir: Any,
    seed: int,
    load_pretrained: Callable[[nnx.Module], None] | None,
    metadata: Mapping[str, Any],
) -> Iterator[tuple[int, nnx.Module]]:
    """Yields the models with which a run went on from these steps, 0 or of checkpoints, its batches
    set to where they were then; arguments as of `train`."""
    options = read_section(config)
    optimizer, _ = make_optimizer(options.optimizer, options.steps)
    model = split_model(objective, seed, options.precision, options.ema, options.offload)
    abstract = abstract_state(model, optimizer, mesh, options.rules)
    further = {"seed": seed, "model": metadata}
    fingerprint = config_fingerprint({"train": experiment(config), **further})
    former = [config_fingerprint({"train": config, **further})]
    folder = as_path(workdir) / "checkpoints"
    with Checkpoints(
        folder, fingerprint=fingerprint, former=former, keep=options.keep
    ) as checkpoints:
        for step in steps:
            state, _, _ = _restore_or_start(
                checkpoints, model, optimizer, seed, abstract, batches, load_pretrained, step
            )
            yield step, model.merge(*on_device((state.params, state.frozen)))


def _restore_or_start(
    checkpoints: Checkpoints,
    model: Model,
    optimizer: Any,
    seed: int,
    abstract: TrainState,
    batches: Any,
    load_pretrained: Callable[[nnx.Module], None] | None,
    step: int | None = None,
) -> tuple[TrainState, int, dict[str, Any]]:
    """The newest checkpoint, or that of a step, or else the weights that the task starts from (step
    0); step and `meta`."""
    wanted = {**_items(abstract), "iterator": batches}
    if step is None:
        restored = checkpoints.restore_latest(**wanted)
    else:
        restored = checkpoints.restore(step, **wanted) if step else None
    frozen = abstract.frozen
    if restored is None or jax.tree.leaves(frozen):
        state = (
            initial_state(model, optimizer, seed, abstract)
            if load_pretrained is None
            else pretrained_state(model, optimizer, seed, abstract, load_pretrained)
        )
        if restored is None:
            return state, 0, {"window": {"sums": {}, "count": 0}}
        frozen = state.frozen
    step, moments = restored.train["step"], restored.train["optimizer"]
    params, average = restored.params, None
    if abstract.average is not None:
        params, average = restored.train["params"], restored.params
    return TrainState(step, params, moments, frozen, average), restored.step, restored.meta


def _items(state: TrainState) -> dict[str, Any]:
    """What a checkpoint holds of a state: as its `params` what the run keeps as weights."""
    train = {"step": state.step, "optimizer": state.optimizer}
    if state.average is not None:
        train["params"] = state.params
    return {"params": state.saved_params, "train": train}


def _next_rows(batches: Iterator[Any], step: int, mesh: Mesh) -> tuple[Any, Any]:
    """This process's rows of the next batch, and the ids, which stay on the host."""
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
        check_batch_size(0 if rest else size, mesh, 1)
    return batch, ids


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


# SIGTERM, SIGHUP and Ctrl-C, which end a training run after the step that it is in.


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

    `folder`: the workdir; the run's first files are in it when the context is entered.
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

        `often`: called so often that objects in a store are not asked for.

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


# How fast a training run computes: examples, tokens and FLOPs of its steps, memory in use.


# Entries of batches that are True at every token (a VLP's picture regions are tokens too), and
# those that number the packed example of a token, 0 where there is none.
_MASKS = frozenset(
    ("mask", "query_mask", "source_mask", "candidate_mask", "context_mask", "answer_mask")
)
_SEGMENTS = "segments"
# Columns of metrics.jsonl that a clock gives, and that differ between equal runs.
CLOCK_COLUMNS = (
    *("input_seconds", "compile_seconds", "compute_seconds"),
    *("checkpoint_seconds", "evaluate_seconds", "steps_per_second", "examples_per_second"),
    *("tokens_per_second", "tflops_per_second", "mfu", "mfu_measured", "hbm_gib"),
)
_MEASURE_AFTER = 60.0  # seconds of computing, of which measuring the peak is a small part


@dataclasses.dataclass
class Work:
    """What steps have worked on."""

    examples: float = 0.0  # the rows of a batch, or of its entry with the fewest
    tokens: float = 0.0  # without padding; 0 where a batch does not say
    flops: float = 0.0  # of the model's products and their gradients, nothing counted twice


class Throughput:
    """Counts the work of a log window.

    Args:
      mesh: of the run.
      step: the jitted update.
      measure_after: seconds of computing after which the devices' peak is measured.
    """

    def __init__(self, mesh: Mesh, step: Step, *, measure_after: float = _MEASURE_AFTER):
        self._mesh, self._step, self._measure_after = mesh, step, measure_after
        # This process has seen its own rows alone; of several hosts the whole is estimated.
        self._share = len(local_blocks(mesh)) / batch_blocks(mesh)
        self._flops: dict[tuple, float] = {}  # of a step, by the shapes of its batch
        self._device = next(iter(mesh.local_devices))
        self._chip = chip_of_kind(self._device.device_kind)
        self._window, self._computed = Work(), 0.0

    def count(self, host_batch: Any, state: TrainState, batch: Any) -> bool:
        """Counts a step; returns whether its program is new and will be compiled.

        Args:
          host_batch: this process's rows, as numpy arrays.
          state, batch: what the step is going to be called with.
        """
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(batch))
        is_new = shapes not in self._flops
        if is_new:
            self._flops[shapes] = self._step.model_flops(state, batch)
        self._window.examples += min(shape[0] for shape in shapes)
        self._window.tokens += tokens_of(host_batch) / self._share
        self._window.flops += self._flops[shapes]
        return is_new

    def columns(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """The columns of a log row, from the seconds of a window (`TimeSplit.take`), and an empty
        window.

        Rates are over the time in which steps were computed or waited for their batch.
        """
        work, self._window = self._window, Work()
        row = {f"{phase}_seconds": value for phase, value in seconds.items()}
        if not row["compile_seconds"]:
            del row["compile_seconds"]
        self._computed += seconds["compute"]
        passed = seconds["input"] + seconds["compute"]
        if passed > 0 and work.examples:
            row["examples_per_second"] = work.examples / passed
            if work.tokens:
                row["tokens_per_second"] = work.tokens / passed
            row |= self._flop_columns(work.flops / passed)
        if (used := self._most_bytes()) is not None:
            row["hbm_gib"] = used / GIB
        return row

    def _flop_columns(self, rate: float) -> dict[str, float]:
        row = {"tflops_per_second": rate / 1e12}
        devices = self._mesh.size
        if self._chip is not None:
            row["mfu"] = rate / (devices * self._chip.peak)
        if self._computed >= self._measure_after and jax.process_index() == 0:
            row["mfu_measured"] = rate / (devices * matmul_peak(self._device))
        return row

    def _most_bytes(self) -> int | None:
        """Most memory that a device of this process has held; None where it does not say."""
        statistics = [device.memory_stats() or {} for device in self._mesh.local_devices]
        return max((stats.get("peak_bytes_in_use") or 0 for stats in statistics), default=0) or None


def tokens_of(batch: Any) -> int:
    """Tokens of a batch of numpy arrays, padding left out; 0 if it has no masks."""
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        name = str(getattr(path[-1], "key", getattr(path[-1], "name", ""))) if path else ""
        if name in _MASKS or name == _SEGMENTS:
            total += int(np.count_nonzero(leaf))
    return total


# A trace of some steps of a run, `mmqa train --profile=START:END`, for xprof or TensorBoard.


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
