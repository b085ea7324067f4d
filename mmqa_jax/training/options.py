"""The section `train` of a config."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jax.sharding import Mesh

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.mesh import DEFAULT_RULES, Rules
from mmqa_jax.core.progress import announce
from mmqa_jax.core.typed import at_least, read_typed
from mmqa_jax.training.optimizer import OptimizerOptions, rates


@dataclasses.dataclass(frozen=True)
class Precision:
    """The section `train.precision` of a config.

    What is held in bfloat16 is updated in float32 and rounded at random to one of its two
    neighbours, in expectation to itself; there is no float32 copy, as with MaxText's weight_dtype,
    which rounds to the nearest and so loses updates below 1/512 of a weight. Checkpoints keep it.
    """

    # Those that are trained; also the trained weights that the run leaves.
    parameters: Literal["float32", "bfloat16"] = "float32"
    moments: Literal["float32", "bfloat16"] = "float32"  # the optimizer's
    # In which they are computed, exchanged and summed over `accumulate`; bfloat16 also rounds the
    # parameters that the model computes with.
    gradients: Literal["float32", "bfloat16"] = "float32"
    # Int8 or fp8 (E4M3, gradients E5M2) rounds both operands of the products with the matrices of
    # stacked layers, forward and backward; empty: they run in the model's dtype.
    products: Literal["", "int8", "fp8"] = ""


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """The section `train` of a config."""

    steps: int = at_least(1)  # updates of the whole run. Each takes `batches.batch_size` examples.
    optimizer: OptimizerOptions  # see OptimizerOptions
    rules: Rules = DEFAULT_RULES  # logical axis -> mesh axes
    # log_every, checkpoint_every, evaluate_every: in steps, and at the end; with 0 checkpoints are
    # only saved at the end, and nothing is evaluated.
    log_every: int = at_least(1, 10)
    checkpoint_every: int = at_least(0, 500)
    # The same of checkpoints on the hosts' own disks, with 0 none; see
    # core.checkpoints.local_checkpoints.
    checkpoint_local_every: int = at_least(0, 0)
    evaluate_every: int = at_least(0, 0)
    # Parts of an update, one after another: each has `batches.batch_size` / accumulate examples and
    # a shape of its own, and only one is in memory (see make_step).
    accumulate: int = at_least(1, 1)
    precision: Precision = Precision()  # see Precision
    # `optimizer` keeps the optimizer's moments and `ema`'s average in the host's memory; while
    # parameters are updated all of them are on the devices. `parameters` keeps those of stacked
    # layers there, too, trained or frozen, and their gradients: each layer comes to the devices
    # when it is computed.
    offload: Literal["", "optimizer", "parameters"] = ""
    # Decay of the exponential moving average of the parameters, which begins as these; the average
    # is what is validated and saved as weights. 0: there is none.
    ema: float = at_least(0, 0.0)
    keep: int = at_least(1, 2)  # how many of the latest checkpoints; the best one is kept besides
    # A loss or gradient that is not finite ends the run (`stop`), or that step changes nothing
    # (`skip`).
    on_nan: OnNan = "stop"
    skip_at_most: int = at_least(1, 10)  # so many such steps in a run; one more ends it

    def __post_init__(self):
        if self.ema >= 1:
            raise UserError(
                f"config key train.ema={self.ema}: a decay from 0 to less than 1 was expected, "
                "such as 0.9999; change it."
            )
        rounds = self.precision.gradients != "float32" == self.precision.parameters
        if self.offload == "parameters" and rounds:
            raise UserError(
                "config key train.offload=parameters: parameters in float32 are not rounded to "
                "train.precision.gradients=bfloat16 on their way from the host; set "
                "train.precision.parameters to bfloat16, too, or gradients to float32."
            )


def read_section(config: Mapping[str, Any]) -> LoopOptions:
    """Reads the section `train`; UserError for an unknown or missing key or a bad value."""
    if "every" in (config.get("optimizer") or {}):
        raise UserError(
            "config key train.optimizer.every: was replaced by train.accumulate=N, with which "
            "batches.batch_size counts the examples of an update, N times as many, and train.steps "
            "and train.optimizer.warmup count updates; set these instead."
        )
    return read_typed(LoopOptions, config, "train")


def check_batch_size(size: int, mesh: Mesh, accumulate: int) -> None:
    """UserError if a batch over all processes cannot be split."""
    parts = accumulate * mesh.shape["data"] * mesh.shape["fsdp"]
    if size % parts or size < 1:
        raise UserError(
            f"batch of {size}: must be a multiple of {parts} (train.accumulate x mesh axes "
            "data and fsdp); change batches.batch_size or the mesh."
        )


# What of the section `train` may change while a run goes on: what changes no step's numbers.

# Keys of the section `train` that are no part of the experiment. `steps` decides the schedule: see
# `check_steps`.
FREE = (
    *("rules", "log_every", "checkpoint_every", "checkpoint_local_every"),
    *("evaluate_every", "keep", "on_nan", "skip_at_most", "offload"),
)


def experiment(train: Mapping[str, Any]) -> dict[str, Any]:
    """The section `train` without what a run may change."""
    return {key: value for key, value in train.items() if key not in (*FREE, "steps")}


def check_steps(
    optimizer: OptimizerOptions, before: int, now: int, taken: int, *, stretch: bool
) -> None:
    """Refuses another number of steps if a step that was taken would have been another one.

    Args:
      before: `train.steps` of the run so far.
      now: of the config.
      taken: steps that the run has taken.
      stretch: whether the schedule may become another one from here on.
    """
    if now == before or not taken:
        return
    key = f"config key train.steps={now}"
    if now < taken:
        raise UserError(f"{key}: the run has taken {taken} steps; give at least as many.")
    old, new = (rates(optimizer, total, taken) for total in (before, now))
    differing = np.flatnonzero(~np.isclose(old, new, rtol=1e-6, atol=0))
    if differing.size and not stretch:
        first = differing[0]
        raise UserError(
            f"{key}: the run began with {before}, and with {now} the schedule "
            f"{optimizer.schedule} would have given step {first + 1} the learning rate "
            f"{new[first]:.3g} instead of {old[first]:.3g}; set train.steps back, or add "
            f"--stretch_schedule to follow the schedule of {now} steps from step {taken + 1} on."
        )


# Steps whose loss or gradient is not finite: stop, or leave them out up to a limit.

OnNan = Literal["stop", "skip"]
_SHOWN = 16


class NotFinite(RunError):
    """A run ended since a loss or gradient was not finite."""


class FiniteCheck:
    """Looks at the metrics of every step, some steps after it was dispatched.

    Args:
      on_nan: `stop` the run, or `skip`: the step has left the state as it was (see make_step).
      limit: how many steps a run may skip.
      skipped: of this run's earlier attempts.
    """

    def __init__(self, on_nan: OnNan, limit: int, skipped: int = 0):
        self._on_nan, self._limit, self.skipped = on_nan, limit, skipped

    def counts(self, step: int, ids: Sequence[Any], values: Mapping[str, Any], saved: int) -> bool:
        """Whether the values are finite; False: the step was skipped.

        Args:
          ids: names of this process's examples of each part of the step, by kind.
          saved: step of the last good checkpoint.

        Raises:
          NotFinite: they are not, and the run stops; with step and examples.
        """
        bad = [name for name in ("loss", "grad_norm") if not math.isfinite(values[name])]
        if not bad:
            return True
        what = f"step {step}: {bad[0]} is {float(values[bad[0]])}{_named(ids)}"
        remedy = "lower the learning rate, clip the gradient, or look at those examples."
        if self._on_nan == "stop":
            raise NotFinite(f"{what}; the last good checkpoint is step {saved}; {remedy}")
        self.skipped += 1
        if self.skipped > self._limit:
            raise NotFinite(
                f"{what}: {self.skipped} steps were skipped, train.skip_at_most is {self._limit}; "
                f"the last good checkpoint is step {saved}; {remedy}"
            )
        announce(f"{what}: skipped ({self.skipped} of at most {self._limit})")
        return False


def _named(ids: Sequence[Any]) -> str:
    if not all(ids):
        return ""
    names = []
    for name in ids[0]:
        listed = [x for part in ids for x in np.asarray(part[name]).reshape(-1).tolist()]
        more = f", ... ({len(listed)} in all)" if len(listed) > _SHOWN else ""
        names.append(f"{name} {', '.join(map(str, listed[:_SHOWN]))}{more}")
    return f" on the batch with {'; '.join(names)}"
