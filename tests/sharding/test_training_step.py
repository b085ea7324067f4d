"""A training step on meshes of eight fake CPU devices against one device.

As test_mesh.py: the check runs in a subprocess, this file called as a script. Layers run as a loop,
as on accelerators.
"""

from __future__ import annotations

import math

import jax
import numpy as np

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


def test_on_eight_devices(run_on_devices):
    assert run_on_devices(8, "test_training_step.py").split() == [*MESHES, "done"]


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


def main():
    want_metrics, want = one_step({}, jax.devices()[:1], 1)
    for name, shape in MESHES.items():
        metrics, moments = one_step(shape, None, 2 if name == "fsdp" else 1)
        for key, value in want_metrics.items():
            np.testing.assert_allclose(metrics[key], value, rtol=1e-5, err_msg=key)
        for key, value in want.items():
            np.testing.assert_allclose(moments[key], value, rtol=0, atol=1e-6, err_msg=key)
        print(name)
    print("done")


if __name__ == "__main__":
    main()
