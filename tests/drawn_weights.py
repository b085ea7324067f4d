"""Random weights without initializers, each of which is several programs to compile when it runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.mesh import state_shardings

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

    where = None if mesh is None else state_shardings(state, mesh)
    # `jnp.asarray` would compile a program for every shape.
    placed = jax.device_put(jax.tree_util.tree_map_with_path(values, state), where)
    return nnx.merge(graphdef, placed)
