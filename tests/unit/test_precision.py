"""How a training run holds its numbers: in bfloat16, on the host, and as a moving average."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import DEFAULT_RULES, batch_sharding, make_mesh
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.training.optimizer import OptimizerOptions, make_optimizer
from mmqa_jax.training.options import Precision, read_section
from mmqa_jax.training.state import abstract_state, initial_state, make_step, split_model

pytestmark = pytest.mark.slow

BFLOAT16 = Precision(parameters="bfloat16", moments="bfloat16", gradients="bfloat16")


class Net(nnx.Module):
    def __init__(self, key):
        one, two = jax.random.split(key)
        names = {"out_sharding": ("embed", "mlp"), "eager_sharding": False}
        self.first = nnx.Param(jax.random.normal(one, (6, 32)) / 6**0.5, **names)
        self.second = nnx.Param(jax.random.normal(two, (32, 4)) / 32**0.5, **names)


class Regression:
    def init(self, key):
        return Net(key)

    def loss(self, model, batch, dropout_key):
        hidden = jax.nn.relu(batch["x"] @ model.first[...].astype(jnp.float32))
        error = hidden @ model.second[...].astype(jnp.float32) - batch["y"]
        return jnp.mean(error**2), {}


class Sum(Regression):
    """Adam moves each of the ones by the learning rate, whatever the batch."""

    def init(self, key):
        net = Net(key)
        net.first[...], net.second[...] = jnp.ones((6, 32)), jnp.ones((32, 4))
        return net

    def loss(self, model, batch, dropout_key):
        both = (model.first[...], model.second[...])
        return sum(x.astype(jnp.float32).sum() for x in both), {}


def batches(count):
    rng = np.random.default_rng(1)
    for _ in range(count):
        x = rng.normal(size=(8, 6)).astype(np.float32)
        yield {"x": x, "y": np.sin(x[:, :4])}


def trained(count, task=None, *, accumulate=1, rate=0.02, skip_nonfinite=False, rows=None, **held):
    """States and losses after each update; the batch of all parts is one of `batches`."""
    mesh, task = make_mesh(devices=jax.devices()[:1]), task or Regression()
    options = OptimizerOptions(learning_rate=rate, schedule="constant", warmup=0, weight_decay=0)
    optimizer, schedule = make_optimizer(options, count)
    model = split_model(task, 0, **held)
    abstract = abstract_state(model, optimizer, mesh, DEFAULT_RULES)
    step = make_step(
        task, model, optimizer, schedule, seed=3, accumulate=accumulate, abstract=abstract,
        mesh=mesh, skip_nonfinite=skip_nonfinite,
    )  # fmt: skip
    state, states, losses = initial_state(model, optimizer, 0, abstract), [], []
    states.append(jax.device_get(state))
    state = step.begin(state)
    for batch in rows or batches(count):
        parts = []
        for number in range(accumulate):
            part = jax.tree.map(lambda x, n=number: x[n::accumulate], batch)
            state, values = step(state, jax.device_put(part, batch_sharding(mesh)))
            parts.append(float(values["loss"]))
        kinds = {
            leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim
        }
        assert kinds == {"pinned_host" if held.get("offload") else "device"}
        states.append(jax.device_get(state))
        losses.append(np.mean(parts))
    return states, np.array(losses)


def dtypes(tree):
    return {str(leaf.dtype) for leaf in jax.tree.leaves(tree) if leaf.ndim}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_in_bfloat16_learns_as_one_in_float32(accumulate):
    _, wanted = trained(60)
    states, losses = trained(60, precision=BFLOAT16, accumulate=accumulate)
    assert dtypes(states[-1].params) == dtypes(states[-1].optimizer) == {"bfloat16"}
    if accumulate > 1:
        assert dtypes(states[-1].sums.gradient) == {"bfloat16"}
    np.testing.assert_allclose(losses[0], wanted[0], rtol=0.02)
    np.testing.assert_allclose(losses[-10:].mean(), wanted[-10:].mean(), rtol=0.1)
    assert wanted[-10:].mean() < 0.2 * wanted[0]


def test_updates_that_bfloat16_cannot_hold_are_kept_in_the_mean():
    """20 updates of 1e-4 each: rounded to the nearest, ones would stay ones."""
    states, _ = trained(20, Sum(), rate=1e-4, precision=Precision(parameters="bfloat16"))
    after = np.concatenate([x.ravel() for x in jax.tree.leaves(states[-1].params)])
    moved = 1 - after.astype(np.float32)
    # In each step 1e-4 / 2^-8 of the 320 fall by 2^-8: four deviations of the mean.
    assert abs(moved.mean() - 20e-4) < 4 * (20 * 1e-4 * 2**-8 / 320) ** 0.5
    assert len(np.unique(moved)) > 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_average_is_torchs_own(dtype):
    import torch

    states, _ = trained(7, ema=0.9, precision=Precision(parameters=dtype))
    own = [torch.nn.Parameter(torch.tensor(x.astype(np.float32)))
           for x in jax.tree.leaves(states[0].params)]  # fmt: skip
    net = torch.nn.ParameterList(own)
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    averaged = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=average)
    averaged.update_parameters(net)  # the first call copies
    for state in states[1:]:
        for parameter, x in zip(own, jax.tree.leaves(state.params), strict=True):
            parameter.data = torch.tensor(x.astype(np.float32))
        averaged.update_parameters(net)
        for ours, theirs in zip(
            jax.tree.leaves(state.average), averaged.module.parameters(), strict=True
        ):
            np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=0, atol=1e-6)
    assert dtypes(states[-1].average) == {"float32"}
    assert dtypes(states[-1].params) == {dtype}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_where_moments_lie_changes_no_number(accumulate):
    held = {"ema": 0.9, "accumulate": accumulate}
    wanted, _ = trained(3, **held)
    got, _ = trained(3, offload="optimizer", **held)
    for name, value in flatten_named(wanted[-1]).items():
        np.testing.assert_array_equal(flatten_named(got[-1])[name], value, err_msg=name)


def test_a_step_that_is_skipped_changes_nothing_held():
    good, bad = batches(2)
    bad["y"] = np.full_like(bad["y"], np.nan)
    states, _ = trained(
        2, precision=BFLOAT16, ema=0.5, offload="optimizer", skip_nonfinite=True, rows=[good, bad]
    )
    before, after = (flatten_named(state) for state in states[1:])
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert changed == {"step"}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"ema": 1.0}, r"train\.ema=1\.0: a decay from 0 to less than 1 was expected"),
        ({"precision": {"moments": "float16"}}, r"train\.precision\.moments"),
        ({"precision": {"products": "int4"}}, r"train\.precision\.products"),
        ({"offload": "all"}, r"train\.offload"),
    ],
)
def test_what_cannot_be(section, message):
    with pytest.raises(UserError, match=message):
        read_section({"steps": 1, "optimizer": {}} | section)
