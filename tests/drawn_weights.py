"""Random weights without initializers, each of which is several programs to compile when it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.mesh import state_shardings
from mmqa_jax.core.trees import flatten_named, unflatten_named

if TYPE_CHECKING:
    from mmqa_jax.training.state import TrainState

Model = TypeVar("Model", bound=nnx.Module)


def drawn(
    build: Callable[[], Model],
    seed: int = 0,
    stddev: float | None = None,
    mesh: Mesh | None = None,
) -> Model:
    """A model with weights from NumPy: matrices by their inputs, scales near 1, biases near 0.

    Args:
      build: makes the model; it is only traced.
      stddev: of all matrices, in place of what their inputs give.
      mesh: where the weights go; None is the default device.
    """
    graphdef, state = nnx.split(nnx.eval_shape(build))
    where = None if mesh is None else state_shardings(state, mesh)
    # `jnp.asarray` would compile a program for every shape.
    return nnx.merge(graphdef, jax.device_put(_values(state, seed, stddev), where))


def drawn_start(
    model: Any, optimizer: Any, seed: int, abstract: TrainState, stddev: float | None = None
) -> TrainState:
    """In the place of `training.state.initial_state`: weights as `drawn`, moments of zeros."""
    every = flatten_named(_values(nnx.merge_state(abstract.params, abstract.frozen), seed, stddev))
    params, frozen = (
        unflatten_named(part, {name: every[name] for name in flatten_named(part)})
        for part in (abstract.params, abstract.frozen)
    )
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract)
    average = None if abstract.average is None else params
    start = dataclasses.replace(zeros, params=params, frozen=frozen, average=average)
    return jax.device_put(start, jax.tree.map(lambda leaf: leaf.sharding, abstract))


@contextlib.contextmanager
def drawn_starts() -> Iterator[None]:
    """Trainings start from such weights: the initializers, a large program, are not traced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmqa_jax.training.loop.initial_state", drawn_start)
        yield


def _values(state: nnx.State, seed: int, stddev: float | None) -> nnx.State:
    rng = np.random.default_rng(seed)

    def values(path, leaf):
        name, shape = jax.tree_util.keystr(path), leaf.shape
        if "scale" in name or "var" in name:
            array = rng.uniform(0.8, 1.2, shape)
        elif "bias" in name or "mean" in name or len(shape) < 2:
            array = rng.normal(scale=0.02, size=shape)
        else:
            array = rng.normal(scale=stddev or math.prod(shape[:-1]) ** -0.5, size=shape)
        return array.astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(values, state)
