"""What the training loop needs of a task: an objective and, if it evaluates, a validation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
from flax import nnx

# Metrics: what a part of an update counts by, and those that are summed up over its parts.
WEIGHT = "weight"
COUNTS = frozenset({"targets", "truncated"})


class Objective(Protocol):
    """What is trained: a model and its loss; each of tasks/ has one.

    One that trains a part of its model has `trained`, a regular expression over the names of the
    parameters that are (None: all). The others get no gradient and stand in no checkpoint: they are
    loaded, or drawn, at each start of the run.
    """

    def init(self, key: jax.Array) -> nnx.Module:
        """Makes the model with its initial weights (traced)."""

    def loss(
        self, model: nnx.Module, batch: Any, dropout_key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Scalar loss and scalar metrics of one batch; pure and traced.

        A loss that is not a mean over the rows has a metric WEIGHT, what it is divided by: by that
        the parts of an update count (`train.accumulate`). It is not logged.
        """


@runtime_checkable
class Outlined(Protocol):
    """An objective whose model is quicker to trace where only its structure is wanted."""

    def outline(self) -> nnx.Module:
        """Makes the model as `init` does, of the same structure and shapes, with any values."""


@runtime_checkable
class ModelBatches(Protocol):
    """Batches that are made with the model itself, such as what it writes when it is asked."""

    def use(self, model: nnx.Module) -> None:
        """Called before each batch with the current model, whose arrays the next step donates: what
        is needed for longer is copied."""


@dataclasses.dataclass(frozen=True)
class Validation:
    """A judgement of the current parameters.

    Attributes:
      evaluate: model -> values by name. It must not keep the model's arrays for longer than the
        call: the next step donates them.
      metric: the value that the best step has the highest of; None: no best step is kept.
    """

    evaluate: Callable[[nnx.Module], Mapping[str, float]]
    metric: str | None = None
