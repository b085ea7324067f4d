"""What of the section `train` may change while a run goes on: what changes no step's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.training.optimizer import OptimizerOptions, make_schedule

# Keys of the section `train` that are no part of the experiment. `steps` decides the schedule: see
# `check_steps`.
FREE = (
    *("rules", "log_every", "checkpoint_every", "evaluate_every"),
    *("keep", "on_nan", "skip_at_most"),
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
    steps = np.arange(taken)
    old, new = (np.asarray(make_schedule(optimizer, total)(steps)) for total in (before, now))
    differing = np.flatnonzero(~np.isclose(old, new, rtol=1e-6, atol=0))
    if differing.size and not stretch:
        first = differing[0]
        raise UserError(
            f"{key}: the run began with {before}, and with {now} the schedule "
            f"{optimizer.schedule} would have given step {first + 1} the learning rate "
            f"{new[first]:.3g} instead of {old[first]:.3g}; set train.steps back, or add "
            f"--stretch_schedule to follow the schedule of {now} steps from step {taken + 1} on."
        )
