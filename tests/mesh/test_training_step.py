"""A training step on meshes of eight devices against one; layers run as a loop, as on accelerators."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from steps import MESHES, same_step, take_step

from mmqa_jax.core.trees import flatten_named
from mmqa_jax.models.common.layers import Linear, stack_layers
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.tasks.language_model import LanguageModelObjective

ROWS, LENGTH, TARGETS = 16, 12, 5
CONFIG = LlamaConfig(
    vocab_size=64, hidden=32, layers=3, heads=4, kv_heads=2, mlp=64, positions=LENGTH, unroll=1,
    init_stddev=0.3,
)  # fmt: skip
TASK = LanguageModelObjective(CONFIG)


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


@pytest.fixture(scope="module")
def alone():
    return take_step(TASK, make_batch(), {}, jax.devices()[:1], initialize=True)


@pytest.mark.parametrize(
    ("name", "accumulate", "offload"),
    [("fsdp", 2, ""), ("all", 4, ""), ("fsdp", 1, "parameters"), ("all", 2, "parameters")],
)
def test_a_step_is_that_of_one_device(alone, name, accumulate, offload):
    # On one of the meshes from weights that it draws itself.
    start = alone.start if name == "fsdp" else None
    options = {"accumulate": accumulate, "start": start, "initialize": True, "offload": offload}
    step = take_step(TASK, make_batch(), MESHES[name], None, **options)
    same_step(step, alone)


class Wide(nnx.Module):
    """Two layers of matrices that are wide enough for Adafactor to keep their means alone."""

    def __init__(self, rngs):
        self.up = stack_layers(lambda r: Linear(128, 256, ("embed", "mlp"), rngs=r), 2, rngs)
        self.down = stack_layers(lambda r: Linear(256, 128, ("mlp", "embed"), rngs=r), 2, rngs)


class WideObjective:
    """The mean square of what the layers give."""

    def init(self, key):
        return Wide(nnx.Rngs(key))

    def loss(self, model, batch, dropout_key):
        x = batch["x"]
        for up, down in zip(model.up.kernel[...], model.down.kernel[...], strict=True):
            x = x + jnp.tanh(x @ up) @ down
        return 100 * jnp.square(x).mean(), {}


def test_adafactors_moments_are_those_of_one_device():
    """Means of rows and columns, of matrices that are split."""
    task, batch = (
        WideObjective(),
        {"x": np.random.default_rng(0).normal(size=(16, 128)).astype("f4")},
    )
    options = {"name": "adafactor", "weight_decay": 0.0}
    alone = take_step(task, batch, {}, jax.devices()[:1], **options)
    got = take_step(task, batch, MESHES["all"], None, start=alone.start, **options).moments
    assert {(2, 128), (2, 256)} <= {x.shape for name, x in got.items() if "kernel" in name}
    for key, value in alone.moments.items():
        np.testing.assert_allclose(got[key], value, rtol=1e-4, atol=1e-7, err_msg=key)
    assert any(x.max() > 1e-5 for name, x in alone.moments.items() if "kernel" in name)


def test_muons_updates_are_those_of_one_device():
    """Whole matrices are orthogonalized, though `fsdp` and `tensor` split them."""
    batch = {"x": np.random.default_rng(0).normal(size=(16, 128)).astype("f4")}
    options = {"name": "muon", "learning_rate": 1.0, "weight_decay": 0.0, "schedule": "constant"}
    options |= {"initialize": True}  # the state holds Muon's coefficients, which are not zeros
    alone = take_step(WideObjective(), batch, {}, jax.devices()[:1], **options)
    got = take_step(WideObjective(), batch, MESHES["all"], None, start=alone.start, **options)
    start = flatten_named(alone.start.params)
    want, found = (flatten_named(nnx.state(step.module)) for step in (alone, got))
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-3, err_msg=name)
        update = np.asarray(value) - start[name]
        if "kernel" in name:
            assert 0.05 < np.square(update).mean() ** 0.5 < 0.4, name
