"""One training step on a mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mmqa_jax.core.mesh import DEFAULT_RULES, batch_sharding, make_mesh
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.training.optimizer import OptimizerOptions, make_optimizer
from mmqa_jax.training.state import abstract_state, initial_state, make_step, split_model

MESHES = {
    "fsdp": {"fsdp": 8},
    "all": {"data": 2, "fsdp": 2, "tensor": 2},
}


def one_step(
    objective: Any,
    batch: Mapping[str, Any],
    shape: Mapping[str, int],
    devices: Sequence[jax.Device] | None,
    accumulate: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metrics, and the optimizer's moments: the gradient, but for a factor."""
    mesh = make_mesh(shape, devices=devices)
    optimizer, schedule = make_optimizer(OptimizerOptions(warmup=0.0), steps=10)
    model = split_model(objective, 0)
    abstract = abstract_state(model, optimizer, mesh, DEFAULT_RULES)
    step = make_step(
        objective, model, optimizer, schedule, seed=0, accumulate=accumulate, abstract=abstract,
        mesh=mesh,
    )  # fmt: skip
    state = initial_state(objective, optimizer, 0, abstract)
    state, metrics = step(state, jax.device_put(dict(batch), batch_sharding(mesh)))
    for name, leaf in flatten_named(state.optimizer).items():
        if leaf.ndim > 2:  # the stacked kernels' moments
            splits = math.prod(shape.get(axis, 1) for axis in ("fsdp", "tensor"))
            assert leaf.addressable_shards[0].data.size == leaf.size // splits, name
    return jax.device_get((metrics, flatten_named(state.optimizer)))


def same_step(
    got: tuple[dict[str, Any], dict[str, Any]], wanted: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """Compares what two meshes give."""
    for one, other, bounds in zip(
        got, wanted, ({"rtol": 1e-5}, {"rtol": 0, "atol": 1e-6}), strict=True
    ):
        assert one.keys() == other.keys()
        for key, value in other.items():
            np.testing.assert_allclose(one[key], value, **bounds, err_msg=key)
