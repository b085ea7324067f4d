"""Linears and experts in codes whose stack a kernel reads, on four devices, beside XLA's product
on one."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.models.common.layers import Linear
from mmqa_jax.models.llama import codes_kernel, experts, mxfp4_kernel, quantize
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.network import Llama
from mmqa_jax.models.llama.quantize import (
    QuantizedGroupedLinear,
    QuantizedLinear,
    Rounded,
    apart,
    put_back,
)
from tests.drawn_weights import drawn

LAYERS, GROUP = 3, 128


class Layers(nnx.Module):
    """Two linears of a stack, as `LlamaLayer` has them."""

    def __init__(self, first: QuantizedLinear, second: QuantizedLinear):
        self.first, self.second = first, second

    def each_linear(self):
        yield from ((self, name) for name in ("first", "second"))


def rounded(inputs, outputs, names, *, zero):
    rng = np.random.default_rng(inputs)
    linear = Linear(inputs, outputs, names, rngs=nnx.Rngs())
    linear.kernel = nnx.Param(
        jnp.zeros((LAYERS, inputs, outputs)), out_sharding=("layers", *names), eager_sharding=False
    )
    linear.bias = nnx.Param(
        jnp.asarray(rng.standard_normal((LAYERS, outputs)), jnp.bfloat16),
        out_sharding=("layers", names[1]),
        eager_sharding=False,
    )
    codes = rng.integers(-8, 8, (LAYERS, inputs, outputs))
    shared = (LAYERS, inputs // GROUP, outputs)
    scale = jnp.asarray(rng.uniform(0.01, 0.02, shared), jnp.float32)
    zeros = jnp.asarray(rng.integers(-8, 8, shared), jnp.int8) if zero else None
    return QuantizedLinear(linear, Rounded(jnp.asarray(codes, jnp.int4), scale, zeros))


def scan(layers, x):
    layers, in_codes = apart(layers, x)
    graphdef, params = nnx.split(layers)

    def body(x, of_layer):
        params, number = of_layer
        layer = nnx.merge(graphdef, params)
        put_back(layer, in_codes, number)
        return jnp.tanh(layer.second(jnp.tanh(layer.first(x)))), number

    return jax.lax.scan(body, x, (params, jnp.arange(LAYERS)))[0]


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("shape", [{"tensor": 4}, {"data": 2, "tensor": 2}, {"data": 4}])
def test_a_split_stack_gives_what_one_device_gives(shape, zero, monkeypatch):
    layers = Layers(
        rounded(256, 512, ("embed", "mlp"), zero=zero),
        rounded(512, 256, ("mlp", "embed"), zero=zero),
    )
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 2, 256)), jnp.bfloat16)
    whole = np.asarray(scan(layers, x), np.float32)

    calls = []

    def multiply(*arguments):
        calls.append(arguments[1].shape)
        return codes_kernel_multiply(*arguments)

    codes_kernel_multiply = functools.partial(codes_kernel.multiply, interpret=True)
    monkeypatch.setattr(codes_kernel, "multiply", multiply)
    monkeypatch.setattr(quantize, "platform", lambda: "tpu")
    with jax.set_mesh(make_mesh(shape, devices=jax.devices()[:4])):
        split = np.asarray(jax.jit(scan)(layers, x), np.float32)

    parts = shape.get("tensor", 1)
    assert calls == [(LAYERS, 256, 512 // parts), (LAYERS, 512 // parts, 256)]
    assert np.abs(split - whole).max() < 0.05 < np.abs(whole).max()


def test_many_rows_are_multiplied_by_the_dequantized_matrix(monkeypatch):
    layers = Layers(*[rounded(256, 256, ("embed", "mlp"), zero=False)] * 2)
    monkeypatch.setattr(quantize, "platform", lambda: "tpu")
    for rows, stays in ((256, False), (257, True)):
        _, in_codes = apart(layers, jnp.zeros((rows, 1, 256), jnp.bfloat16))
        assert [linear is None for linear in in_codes] == [stays] * 2


def layers_of_experts():
    """Layers whose experts have biases and are in MXFP4, with scales of their own."""
    config = LlamaConfig(
        vocab_size=8, hidden=128, layers=LAYERS, heads=2, kv_heads=2, mlp=192, family="gpt_oss",
        experts=8, active_experts=2, mlp_bias=True, gate_limit=7.0, init_stddev=0.4, unroll=1,
        dtype="bfloat16",
    )  # fmt: skip
    layers = drawn(lambda: Llama(config, rngs=nnx.Rngs(0))).layers
    rng = np.random.default_rng(0)
    for name in ("gate", "up", "down"):
        linear = getattr(layers.experts, name)
        *stack, inputs, outputs = linear.kernels[...].shape
        codes = jnp.asarray(rng.choice([0, 0.5, 1, 3, -1, -6], (*stack, inputs, outputs)))
        scale = jnp.asarray(2.0 ** rng.integers(-7, -2, (*stack, inputs // 32, outputs)))
        rounded = Rounded(codes.astype(jnp.float4_e2m1fn), scale.astype(jnp.bfloat16))
        setattr(layers.experts, name, QuantizedGroupedLinear(linear, rounded))
    return layers


@pytest.mark.parametrize("shape", [{"tensor": 4}, {"data": 2, "tensor": 2}])
def test_split_experts_give_what_one_device_gives(shape, monkeypatch):
    layers = layers_of_experts()
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 2, 128)), jnp.bfloat16)
    graphdef, params = nnx.split(layers.experts)
    of_layers = [jax.tree.map(lambda array, n=n: array[n], params) for n in range(LAYERS)]
    whole = np.stack([nnx.merge(graphdef, of_layer)(x) for of_layer in of_layers])

    interpreted = functools.partial(mxfp4_kernel.multiply, interpret=True)
    monkeypatch.setattr(mxfp4_kernel, "multiply", interpreted)
    monkeypatch.setattr(experts, "platform", lambda: "tpu")
    with jax.set_mesh(make_mesh(shape, devices=jax.devices()[:4])):

        @jax.jit
        def run(layers, x):
            left, stacked = experts.apart(layers, x)
            assert left.experts is None
            return jnp.stack([stacked(x, jnp.int32(n)) for n in range(LAYERS)])

        split = np.asarray(run(layers, x))
    difference = np.abs(split.astype(np.float32) - whole.astype(np.float32))
    assert difference.max() < 0.02 * np.abs(whole.astype(np.float32)).max()
