"""A training step on meshes of eight devices against one; layers run as a loop, as on accelerators."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from steps import MESHES, same_step, take_step

from mmqa_jax.models.llama_config import LlamaConfig
from mmqa_jax.tasks.objectives import LanguageModelObjective

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
    return take_step(TASK, make_batch(), {}, jax.devices()[:1])


@pytest.mark.parametrize(("name", "accumulate"), [("fsdp", 2), ("all", 1)])
def test_a_step_is_that_of_one_device(alone, name, accumulate):
    # On one of the meshes from weights that it draws itself.
    start = alone.start if name == "fsdp" else None
    step = take_step(TASK, make_batch(), MESHES[name], None, accumulate=accumulate, start=start)
    same_step(step, alone)


def test_adafactors_moments_are_those_of_one_device():
    """Means of rows and columns, of matrices that are split."""
    task = LanguageModelObjective(dataclasses.replace(CONFIG, hidden=128, mlp=256, layers=2))
    options = {"name": "adafactor", "weight_decay": 0.0}
    alone = take_step(task, make_batch(), {}, jax.devices()[:1], **options)
    got = take_step(task, make_batch(), MESHES["all"], None, start=alone.start, **options).moments
    assert any(x.shape == (2, 256) for name, x in got.items() if "gate" in name)
    for key, value in alone.moments.items():
        np.testing.assert_allclose(got[key], value, rtol=1e-4, atol=1e-7, err_msg=key)
