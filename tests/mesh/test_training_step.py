"""A training step on meshes of eight devices against one; layers run as a loop, as on accelerators."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

from mmqa_jax.core.mesh import DEFAULT_RULES, batch_sharding, make_mesh
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.models.llama_config import LlamaConfig
from mmqa_jax.tasks.objectives import LanguageModelObjective
from mmqa_jax.training.optimizer import OptimizerOptions, make_optimizer
from mmqa_jax.training.state import abstract_state, initial_state, make_step, split_model

MESHES = {
    "fsdp": {"fsdp": 8},
    "all": {"data": 2, "fsdp": 2, "tensor": 2},
}
ROWS, LENGTH, TARGETS = 16, 12, 5
CONFIG = LlamaConfig(
    vocab_size=64, hidden=32, layers=3, heads=4, kv_heads=2, mlp=64, positions=LENGTH, unroll=1,
    init_stddev=0.3,
)  # fmt: skip


def make_batch():
    rng = np.random.default_rng(0)
    order = np.broadcast_to(np.arange(LENGTH), (ROWS, LENGTH))
    return {
        "input_ids": rng.integers(0, 64, (ROWS, LENGTH), np.int32),
        "segments": (order < rng.integers(6, LENGTH + 1, (ROWS, 1))).astype(np.int32),
        "positions": order.astype(np.int32),
        "target_positions": rng.integers(0, 6, (ROWS, TARGETS), np.int32),
        "target_ids": rng.integers(0, 64, (ROWS, TARGETS), np.int32),
        # Rows of different numbers of targets.
        "target_segments": (np.arange(TARGETS) < rng.integers(1, 6, (ROWS, 1))).astype(np.int32),
    }


def one_step(shape, devices, accumulate):
    """Metrics, and the optimizer's moments: the gradient, but for a factor."""
    mesh = make_mesh(shape, devices=devices)
    task = LanguageModelObjective(CONFIG)
    optimizer, schedule = make_optimizer(OptimizerOptions(warmup=0.0), steps=10)
    model = split_model(task, 0)
    abstract = abstract_state(model, optimizer, mesh, DEFAULT_RULES)
    step = make_step(
        task, model, optimizer, schedule, seed=0, accumulate=accumulate, abstract=abstract,
        mesh=mesh,
    )  # fmt: skip
    state = initial_state(task, optimizer, 0, abstract)
    batch = jax.device_put(make_batch(), batch_sharding(mesh))
    state, metrics = step(state, batch)
    for name, leaf in flatten_named(state.optimizer).items():
        if leaf.ndim > 2:  # the stacked kernels' moments
            splits = math.prod(shape.get(axis, 1) for axis in ("fsdp", "tensor"))
            assert leaf.addressable_shards[0].data.size == leaf.size // splits, name
    return jax.device_get((metrics, flatten_named(state.optimizer)))


@pytest.fixture(scope="module")
def alone():
    return one_step({}, jax.devices()[:1], 1)


@pytest.mark.parametrize(("name", "accumulate"), [("fsdp", 2), ("all", 1)])
def test_a_step_is_that_of_one_device(alone, name, accumulate):
    expected_metrics, expected = alone
    metrics, moments = one_step(MESHES[name], None, accumulate)
    for key, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[key], value, rtol=1e-5, err_msg=key)
    for key, value in expected.items():
        np.testing.assert_allclose(moments[key], value, rtol=0, atol=1e-6, err_msg=key)
