"""How a training run holds its numbers: in bfloat16, on the host, and as a moving average."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.flops import flops_by_type
from mmqa_jax.core.mesh import DEFAULT_RULES, batch_sharding, make_mesh
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.models.common.layers import Linear, with_rounded_products
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.lora import ADDED, LoraConfig, add_lora
from mmqa_jax.models.llama.network import Llama
from mmqa_jax.plan.program import shard_bytes, tree_bytes
from mmqa_jax.training.optimizer import OptimizerOptions, make_optimizer
from mmqa_jax.training.options import Precision, read_section
from mmqa_jax.training.state import abstract_state, initial_state, make_step, split_model
from tests.refusals import refuses

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
        offload = held.get("offload")
        assert memory_kinds(state.optimizer) == {"pinned_host" if offload else "device"}
        if offload == "parameters":
            named = flatten_named(state.params) | flatten_named(state.frozen)
            stacks = [x for name, x in named.items() if name.startswith("layers/")]
            assert memory_kinds(stacks) == {"pinned_host"}
            rest = [x for name, x in named.items() if not name.startswith("layers/")]
            assert memory_kinds(rest) == {"device"}
        states.append(jax.device_get(state))
        losses.append(np.mean(parts))
    return states, np.array(losses)


def memory_kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


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
@pytest.mark.parametrize("base", [None, "int8"])
@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
def test_where_state_lies_changes_no_number(offload, base, accumulate):
    held = {"ema": 0.9, "accumulate": accumulate, "rows": texts(3)}
    task = NextToken(base, unroll=1)  # as on accelerators
    wanted, _ = trained(3, task, **held)
    got, _ = trained(3, task, offload=offload, **held)
    for name, value in flatten_named(wanted[-1]).items():
        np.testing.assert_array_equal(flatten_named(got[-1])[name], value, err_msg=name)


def test_what_lies_on_the_host_is_planned_apart():
    model = split_model(Regression(), 0, ema=0.9, offload="optimizer")
    optimizer, _ = make_optimizer(OptimizerOptions(), 1)
    abstract = abstract_state(model, optimizer, make_mesh(devices=jax.devices()[:1]), DEFAULT_RULES)
    held = (abstract.optimizer, abstract.average)
    assert shard_bytes(held, on_host=True) == 3 * 4 * (6 * 32 + 32 * 4)
    assert shard_bytes(held) == 2 * 4  # the counts
    assert shard_bytes(abstract.params, on_host=True) == 0


def test_gradients_are_computed_without_the_moments_of_the_host():
    """Their program gets none, and the update gets what that gives."""
    mesh = make_mesh(devices=jax.devices()[:1])
    optimizer, schedule = make_optimizer(OptimizerOptions(), 1)
    (batch,), taken = batches(1), {}
    for offload in ("", "optimizer"):
        model = split_model(Regression(), 0, offload=offload)
        abstract = abstract_state(model, optimizer, mesh, DEFAULT_RULES)
        options = {"seed": 3, "accumulate": 1, "abstract": abstract, "mesh": mesh}
        step = make_step(Regression(), model, optimizer, schedule, **options)
        taken[offload] = tree_bytes(step.abstract_arguments(batch))
    parameters = 4 * (6 * 32 + 32 * 4)
    counts = 2 * 4  # of the optimizer's updates
    assert taken[""] - taken["optimizer"] == 2 * parameters + counts
    state, _, gradients = step.abstract_update()
    assert tree_bytes(gradients) == tree_bytes(state.params) == parameters
    assert shard_bytes(state.optimizer, on_host=True) == 2 * parameters


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
        (
            {"offload": "parameters", "precision": {"gradients": "bfloat16"}},
            r"train\.offload=parameters: .* set train\.precision\.parameters to bfloat16",
        ),
    ],
)
def test_what_cannot_be(section, message):
    refuses(message, read_section, {"steps": 1, "optimizer": {}} | section)


class NextToken:
    """A tiny LLaMA, whose linears are stacks; with a base the additions of LoRA are trained."""

    def __init__(self, base=None, unroll=None):
        self.trained, self.base, self.unroll = base and ADDED, base, unroll

    def init(self, key):
        sizes = {"vocab_size": 32, "hidden": 16, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 24}
        config, rngs = LlamaConfig(**sizes, init_stddev=0.2, unroll=self.unroll), nnx.Rngs(0)
        model = Llama(config, rngs=rngs)
        if self.base:
            add_lora(model, LoraConfig(rank=2, base=self.base), rngs=rngs)
        return model

    def loss(self, model, batch, dropout_key):
        logits = model(batch["ids"])[:, :-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"][:, 1:])
        return losses.mean(), {}


def texts(count):
    rng = np.random.default_rng(2)
    return [{"ids": (np.arange(16) * rng.integers(1, 4, (8, 1)) % 32)} for _ in range(count)]


@pytest.mark.parametrize(("kind", "nearness"), [("int8", 0.03), ("fp8", 0.06)])
def test_a_run_with_products_in_8_bits_learns_as_one_in_float32(kind, nearness):
    _, wanted = trained(40, NextToken(), rows=texts(40))
    states, losses = trained(40, NextToken(), rows=texts(40), precision=Precision(products=kind))
    assert abs(losses - wanted).max() < nearness * wanted[0]
    assert (losses != wanted).any()
    assert wanted[-1] < 0.6 * wanted[0]
    assert "layers/q/kernel" in flatten_named(states[-1].params)  # as without


def test_products_in_8_bits_are_those_of_the_layers_matrices_forward_and_backward():
    task = NextToken()
    module, (batch,) = task.init(None), texts(1)
    graphdef, params = nnx.split(module)

    def loss(params):
        merged = nnx.merge(graphdef, params)
        return with_rounded_products(merged, task.loss, "int8", batch, None)[0]

    # Of each of 2 x 7 linears one product forward and two backward, as parts of all.
    by_type = flops_by_type(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
    tokens, matrices = 8 * 16, 2 * 16 * (16 + 8 + 8 + 16 + 3 * 24)
    assert by_type["s8"] == 3 * 2 * tokens * matrices
    assert by_type["f32"] > 0  # attention and the head


def test_a_product_in_int8_is_the_one_of_rounded_operands():
    rng = np.random.default_rng(4)
    x, w = rng.normal(size=(5, 12)).astype(np.float32), rng.normal(size=(1, 12, 7))
    x[:, 0], w[:, 0] = 4, 4  # the largest, of 127.5 steps, and cut to 127
    stack = Linear(12, 7, ("embed", "mlp"), rngs=nnx.Rngs(), use_bias=False)
    stack.kernel = nnx.Param(w.astype(np.float32))

    def call(module, x):
        graphdef, state = nnx.split(module)
        return nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[0], state))(x)

    of_rows = abs(x).max(1, keepdims=True) / 127.5
    of_columns = abs(w[0]).max(0, keepdims=True) / 127.5
    rounded = [np.clip(np.round(y), -128, 127) for y in (x / of_rows, w[0] / of_columns)]
    want = rounded[0] @ rounded[1] * of_rows * of_columns
    got = jax.jit(lambda: with_rounded_products(stack, call, "int8", x))()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    assert abs(want - x @ w[0]).max() > 1e-3


def test_products_in_8_bits_without_stacked_linears():
    with pytest.raises(UserError, match=r"no linears in stacked layers .* leave products empty"):
        trained(1, precision=Precision(products="int8"))


def test_parameters_without_stacks_of_layers_stay():
    refuses(r"no stacked layers, .* set it to optimizer", trained, 1, offload="parameters")
