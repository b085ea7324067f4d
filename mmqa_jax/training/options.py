"""The section `train` of a config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import DEFAULT_RULES, Rules
from mmqa_jax.core.typed import at_least, read_typed
from mmqa_jax.training.nonfinite import OnNan
from mmqa_jax.training.optimizer import OptimizerOptions, rates


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """The section `train` of a config.

    Attributes:
      steps: updates of the whole run. Each takes `batches.batch_size` examples.
      optimizer: see OptimizerOptions.
      rules: logical axis -> mesh axes.
      log_every, checkpoint_every, evaluate_every: in steps, and at the end; with 0 checkpoints
        are only saved at the end, and nothing is evaluated.
      checkpoint_local_every: the same of checkpoints on the hosts' own disks, with 0 none; see
        core.local_checkpoints.
      accumulate: parts of an update, one after another: each has `batches.batch_size` / accumulate
        examples and a shape of its own, and only one is in memory (see make_step).
      keep: how many of the latest checkpoints; the best one is kept besides.
      on_nan: a loss or gradient that is not finite ends the run (`stop`), or that step changes
        nothing (`skip`).
      skip_at_most: so many such steps in a run; one more ends it.
    """

    steps: int = at_least(1)
    optimizer: OptimizerOptions
    rules: Rules = DEFAULT_RULES
    log_every: int = at_least(1, 10)
    checkpoint_every: int = at_least(0, 500)
    checkpoint_local_every: int = at_least(0, 0)
    evaluate_every: int = at_least(0, 0)
    accumulate: int = at_least(1, 1)
    keep: int = at_least(1, 2)
    on_nan: OnNan = "stop"
    skip_at_most: int = at_least(1, 10)


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
    *("evaluate_every", "keep", "on_nan", "skip_at_most"),
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

    Raises:
      UserError: fewer steps than were taken, or another schedule.
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
