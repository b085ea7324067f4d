"""A mixture of experts on a 2 x 2 x 2 mesh: logits and gradients as on one device, experts split
over `tensor` and one sum over it a layer, whether sorted by expert or not."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import LAYER
from flax import nnx

from mmqa_jax.core.flops import traced_flops
from mmqa_jax.core.mesh import batch_sharding, make_mesh, state_shardings
from mmqa_jax.models.llama import experts
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.network import Llama
from mmqa_jax.plan.exchange import Placement, least_exchanges
from tests.drawn_weights import drawn

CONFIG = LlamaConfig(
    vocab_size=60, hidden=32, layers=2, heads=4, kv_heads=2, mlp=24, positions=128, init_stddev=0.3,
    family="qwen3_moe", qk_norm="head", experts=6, active_experts=2, unroll=1,
)  # fmt: skip

# gpt-oss's: biases of experts and routers, and sinks, whose heads are split.
BIASED = dataclasses.replace(
    CONFIG, family="gpt_oss", mlp_bias=True, sinks=True, gate_limit=0.5, activation="quick_gelu"
)


def spread_over(mesh, config=CONFIG):
    return drawn(lambda: Llama(config, rngs=nnx.Rngs()), 3, config.init_stddev, mesh)


IDS = np.random.default_rng(0).integers(0, 60, (4, 24))


def make_step(graphdef):
    """(state, ids) -> (loss, logits), gradient."""

    def loss(state, ids):
        logits = nnx.merge(graphdef, state)(ids)
        return (jax.nn.log_softmax(logits)[..., 7] ** 2).mean() / 10, logits

    return jax.value_and_grad(loss, has_aux=True)


@pytest.fixture(scope="module")
def alone():
    """What one device computes, not sorted by expert."""
    mesh = make_mesh({}, devices=jax.devices()[:1])
    graphdef, state = nnx.split(spread_over(mesh, BIASED))
    with jax.default_matmul_precision("highest"):
        return jax.jit(make_step(graphdef))(state, IDS)


@pytest.mark.parametrize("by", ["by_all", "by_groups"])
def test_logits_and_gradients(alone, by, monkeypatch):
    if by == "by_groups":  # as on a TPU
        grouped = experts.Experts.by_groups
        monkeypatch.setattr(experts.Experts, "by_all", grouped)
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    spread = spread_over(mesh, BIASED)
    graphdef, state = nnx.split(spread)
    shape = spread.layers.experts.up.kernels.addressable_shards[0].data.shape
    assert shape == (2, 3, 16, 24)  # of 6 experts, and 32 rows over fsdp
    (_, want), expected = alone
    with jax.set_mesh(mesh):
        where = ((None, None), state_shardings(state, mesh))
        run = jax.jit(make_step(graphdef), out_shardings=where)
        (_, got), gradient = run(state, jax.device_put(IDS, batch_sharding(mesh)))
    np.testing.assert_allclose(got, want, **LAYER)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **LAYER), gradient, expected)


def test_experts_that_do_not_divide_are_on_every_device():
    """6 of them over 4; and rows that do not divide are computed on every device too."""
    mesh = make_mesh({"data": 2, "tensor": 4})
    graphdef, state = nnx.split(spread_over(mesh))
    ids = np.random.default_rng(0).integers(0, 60, (3, 10))

    def forward(state, ids):
        return nnx.merge(graphdef, state)(ids)

    with jax.set_mesh(mesh):
        got = jax.jit(forward)(state, ids)
    np.testing.assert_allclose(got, jax.jit(forward)(jax.device_get(state), ids), **LAYER)


def test_out_of_a_stack_columns_lie_over_tensor(monkeypatch):
    """A chunk of prompts as a TPU computes it; columns that `tensor` does not divide stay whole."""
    by_kernel = experts.Experts.by_kernel
    interpreted = functools.partialmethod(by_kernel, interpret=True)
    monkeypatch.setattr(experts.Experts, "by_kernel", interpreted)
    config = dataclasses.replace(CONFIG, hidden=128, mlp=128)
    mesh = make_mesh({"data": 2, "tensor": 2}, devices=jax.devices()[:4])
    model = drawn(lambda: Llama(config, rngs=nnx.Rngs()), 3, config.init_stddev, mesh)
    graphdef, state = nnx.split(model.layers.experts)
    layer = nnx.merge(graphdef, jax.tree.map(lambda x: jax.device_get(x)[1], state))

    @jax.jit
    def run(state, x):
        return nnx.merge(graphdef, state)(x, layer=jnp.int32(1))

    for columns in (32, 31):
        x = np.random.default_rng(0).normal(0, 0.1, (32, columns, 128)).astype("f")
        with jax.set_mesh(mesh):
            text = run.lower(state, x).as_text()
            got = run(state, x)
        assert ("reduce_scatter" in text) == (columns == 32)
        np.testing.assert_allclose(got, layer(jnp.array(x)), **LAYER)


def test_what_is_planned():
    """FLOPs are those of one device, and a layer's experts are summed up once."""
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    graphdef, state = nnx.split(spread_over(mesh))
    ids = jax.device_put(np.zeros((4, 24), np.int32), batch_sharding(mesh))

    def forward(state, ids):
        return nnx.merge(graphdef, state)(ids)

    alone = traced_flops(forward, state, ids)
    with jax.set_mesh(mesh):
        jaxpr = jax.make_jaxpr(forward)(state, ids).jaxpr
        # Each of two devices chooses experts for the same rows.
        of_routers = 2 * 2 * 4 * 24 * 32 * 6
        assert traced_flops(forward, state, ids) == pytest.approx(alone + of_routers)
    leaves = jax.tree.leaves((state, ids))
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves]
    found = least_exchanges(jaxpr, given, given[:-1], [], dict(mesh.shape), Placement((0,) * 8))
    sent = {(one.kind, one.axis): one.bytes for one in found}
    # Of each of two layers: what attention gives, and what experts do; [1, 24, 32] on a device.
    assert sent["all-reduce", "tensor"] == 4 * 24 * 32 * 4
    kernels = 2 * 6 * 3 * 32 * 24 * 4 / 2
    assert sent["all-gather", "fsdp"] > kernels
