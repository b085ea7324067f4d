"""The section `train` of a config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import DEFAULT_RULES, Rules
from mmqa_jax.core.typed import at_least, read_typed
from mmqa_jax.training.nonfinite import OnNan
from mmqa_jax.training.optimizer import OptimizerOptions


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

    steps: int = at_least(1)
    optimizer: OptimizerOptions
    rules: Rules = DEFAULT_RULES
    log_every: int = at_least(1, 10)
    checkpoint_every: int = at_least(0, 500)
    evaluate_every: int = at_least(0, 0)
    accumulate: int = at_least(1, 1)
    keep: int = at_least(1, 2)
    on_nan: OnNan = "stop"
    skip_at_most: int = at_least(1, 10)


def read_section(config: Mapping[str, Any]) -> LoopOptions:
    """Reads the section `train`; UserError for an unknown or missing key or a bad value."""
    return read_typed(LoopOptions, config, "train")


def check_batch_size(size: int, mesh: Mesh, accumulate: int) -> None:
    """UserError if a batch over all processes cannot be split."""
    parts = accumulate * mesh.shape["data"] * mesh.shape["fsdp"]
    if size % parts or size < 1:
        raise UserError(
            f"batch of {size}: must be a multiple of {parts} (train.accumulate x mesh axes "
            "data and fsdp); change batches.batch_size or the mesh."
        )
