"""One training step on a mesh."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from mmqa_jax.core.mesh import DEFAULT_RULES, batch_sharding, make_mesh
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.training.optimizer import OptimizerOptions, make_optimizer
from mmqa_jax.training.state import (
    TrainState,
    abstract_state,
    initial_state,
    make_step,
    of_update,
    split_model,
)
from tests.drawn_weights import drawn_start

MESHES = {"fsdp": {"fsdp": 8}, "all": {"data": 2, "fsdp": 2, "tensor": 2}}


class Taken(NamedTuple):
    """What a training step leaves.

    Attributes:
      metrics: of the step.
      moments: the optimizer's (the gradient, but for a factor), by name.
      module: after the step.
      start: the TrainState before it, of NumPy arrays.
    """

    metrics: dict[str, np.ndarray]
    moments: dict[str, np.ndarray]
    module: nnx.Module
    start: TrainState


def take_step(
    task: Any,
    batch: Mapping[str, np.ndarray],
    shape: Mapping[str, int],
    devices: Sequence[jax.Device] | None,
    *,
    accumulate: int = 1,
    start: TrainState | None = None,
    initialize: bool = False,
    stddev: float | None = None,
    offload: str = "",
    **options: Any,
) -> Taken:
    """One training step.

    Args:
      task: the objective.
      accumulate: parts that it takes the batch in.
      shape, devices: of the mesh; None: all devices.
      start: another mesh's; None: the mesh has its own.
      initialize: its own is as a run's, a program more to compile; else NumPy draws it.
      stddev: of the matrices that are drawn; None: by their inputs.
      offload: as `train.offload`.
      options: of the optimizer.
    """
    mesh = make_mesh(shape, devices=devices)
    optimizer, schedule = make_optimizer(OptimizerOptions(warmup=0.0, **options), steps=10)
    model = split_model(task, 0, offload=offload)
    abstract = abstract_state(model, optimizer, mesh, DEFAULT_RULES)
    step = make_step(
        task, model, optimizer, schedule, seed=0, accumulate=accumulate, abstract=abstract,
        mesh=mesh, trainable=options.get("trainable"),
    )  # fmt: skip
    if start is None:
        if initialize:
            state = initial_state(model, optimizer, 0, abstract)
        else:
            state = drawn_start(model, optimizer, 0, abstract, stddev)
        start = jax.device_get(state)
    else:
        state = jax.device_put(start, jax.tree.map(lambda leaf: leaf.sharding, abstract))
    state, parts = step.begin(state), []
    for number in range(accumulate):
        part = jax.tree.map(lambda x, n=number: x[n::accumulate], batch)
        state, values = step(state, jax.device_put(part, batch_sharding(mesh)))
        parts.append(jax.device_get(values))
    metrics = of_update(parts)
    for name, leaf in flatten_named(state.optimizer).items():
        # The stacked kernels' moments; `tensor` splits neither a router nor what LoRA adds.
        if leaf.ndim > 2 and "lora_" not in name and "router" not in name:
            splits = math.prod(shape.get(axis, 1) for axis in ("fsdp", "sequence", "tensor"))
            assert leaf.addressable_shards[0].data.size == leaf.size // splits, name
    found = jax.device_get((metrics, flatten_named(state.optimizer)))
    return Taken(*found, model.merge(state.params, state.frozen), start)


def same_step(got: Taken, wanted: Taken) -> None:
    """Compares the metrics and moments that two meshes give."""
    bounds = {"rtol": 1e-5}, {"rtol": 0, "atol": 1e-6}
    for one, other, bound in zip(got[:2], wanted[:2], bounds, strict=True):
        assert one.keys() == other.keys()
        for key, value in other.items():
            np.testing.assert_allclose(one[key], value, **bound, err_msg=key)
