"""A mixture of experts: both ways to compute it, that tokens do not depend on others, its costs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.flops import traced_flops
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.requests import Request
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.encoders.text_encoders import FAMILIES
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.expert_tensors import experts_apart, experts_together
from mmqa_jax.models.llama.experts import Experts, reached
from mmqa_jax.models.llama.lora import LoraConfig, add_lora, merge_lora
from mmqa_jax.models.llama.network import Llama, unstack_layers
from mmqa_jax.models.llama.quantize import QuantizedGroupedLinear, quantize_weights, round_matrix
from mmqa_jax.weights.formats.safetensors import ArraySource
from tests.drawn_weights import drawn

pytestmark = pytest.mark.slow

CONFIG = LlamaConfig(
    vocab_size=60, hidden=32, layers=2, heads=4, kv_heads=2, mlp=24, positions=128, init_stddev=0.3,
    family="qwen3_moe", qk_norm="head", experts=8, active_experts=3, normed_experts=True, unroll=1,
)  # fmt: skip


def llama(config=CONFIG):
    return drawn(lambda: Llama(config, rngs=nnx.Rngs()), 3, config.init_stddev)


def mixture(**changes):
    config = dataclasses.replace(CONFIG, **changes)
    return drawn(lambda: Experts(config, rngs=nnx.Rngs()), 0, config.init_stddev)


@functools.partial(jax.jit, static_argnums=0)
def _forward(graphdef, state, ids):
    return nnx.merge(graphdef, state)(ids)


def forward(model, ids):
    """Models of one structure share a program."""
    return _forward(*nnx.split(model), ids)


def same_to_rounding(got, want):
    """Compares arrays whose sums may be of cancelling numbers as large as their largest."""
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * max(1, np.abs(want).max()))


@pytest.mark.parametrize(
    "changes", [{}, {"mlp_bias": True, "gate_limit": 0.3}, {"weighted_input": True}]
)
def test_sorted_by_expert_and_all_by_all_are_the_same(changes):
    """What a TPU computes and what others do; of a part of the experts too, with gradients; with
    biases and limits (gpt-oss), with weights of what experts get (Llama 4)."""
    experts = mixture(**changes)
    graphdef, state = nnx.split(experts)
    rows = np.random.default_rng(1).normal(size=(37, 32)).astype("f")

    def computed(by: str, shift: int):
        def run(state, rows):
            own = nnx.merge(graphdef, state)
            chosen, weights = own.choose(rows)
            y = getattr(own, by)(rows, chosen - shift, weights)
            return (y * jnp.arange(1.0, 33)).sum(), y

        return jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))(state, rows)

    for shift in (0, 5):  # of the second, experts 0 to 4 are another device's, and 8 to 12 are none
        got, want = computed("by_groups", shift), computed("by_all", shift)
        jax.tree.map(same_to_rounding, got, want)
    assert np.abs(want[0][1]).max() > 0.1


STACKED = dataclasses.replace(CONFIG, hidden=256, mlp=128)  # sizes that the TPU's kernel takes


def stack(bits8: bool = False):
    """Experts of two layers as `apart` gives them, and each layer's."""
    model = llama(STACKED)
    if bits8:
        quantize_weights(model)
    graphdef, state = nnx.split(model.layers.experts)
    of_layer = [nnx.merge(graphdef, jax.tree.map(lambda x, n=n: x[n], state)) for n in range(2)]
    return model.layers.experts, of_layer


@pytest.mark.parametrize("bits8", [False, True])
def test_the_kernel_reads_a_layer_of_the_stack(bits8):
    """Experts of more rows than a block, of some, of none; a part of the experts; int8."""
    experts, of_layer = stack(bits8)
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(272, 256)).astype("f")
    chosen = np.stack([np.full(272, 1), rng.choice([0, 3, 7], 272), rng.choice([5, 6], 272)], 1)
    weights = rng.uniform(0.1, 1, chosen.shape).astype("f")
    weights[:9] = 0  # as of a token whose probabilities underflow
    for layer, shift in ((0, 0), (1, 0), (1, 4)):
        took = experts.by_kernel(
            rows, jnp.array(chosen - shift), weights, jnp.int32(layer), interpret=True
        )
        want = of_layer[layer].by_all(rows, jnp.array(chosen - shift), weights)
        np.testing.assert_allclose(took, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())
        assert np.abs(want).max() > 0.1


def test_in_the_kernel_a_token_does_not_depend_on_the_others():
    experts, _ = stack()
    rng, token = np.random.default_rng(0), np.random.default_rng(1).normal(size=256)
    took = []
    for _ in range(3):
        rows = rng.normal(size=(48, 256)) * rng.uniform(0.1, 3, (48, 1))
        rows[20] = token
        rows = rows.astype(jnp.bfloat16)
        layer = jnp.int32(1)
        y = experts.by_kernel(rows, *experts.choose(rows, layer), layer, interpret=True)
        took.append(np.asarray(y, np.float32)[20])
    np.testing.assert_array_equal(took[0], took[1])
    np.testing.assert_array_equal(took[0], took[2])


def test_a_token_does_not_depend_on_the_others():
    rng = np.random.default_rng(0)
    for dtype in ("float32", "bfloat16"):
        experts = mixture()
        graphdef, state = nnx.split(experts)
        token = rng.normal(size=32)
        for by in ("by_groups", "by_all"):

            @jax.jit
            def run(state, rows, by=by, graphdef=graphdef):
                own = nnx.merge(graphdef, state)
                return getattr(own, by)(rows, *own.choose(rows))

            found = []
            for _ in range(6):
                rows = rng.normal(size=(17, 32)) * rng.uniform(0.1, 3, (17, 1))
                rows[4] = token
                found.append(np.asarray(run(state, rows.astype(jnp.dtype(dtype))))[4])
            for other in found[1:]:
                np.testing.assert_array_equal(other, found[0])


def test_answers_do_not_depend_on_what_else_is_served():
    """The engine's contract, with int8 weights: unrounded, by the test above."""
    rng = np.random.default_rng(2)
    prompts = [tuple(map(int, rng.integers(0, 60, 5 + 9 * n))) for n in range(5)]
    sizes = EngineConfig(
        slots=3, length=96, buckets=(32,), prefill_tokens=64,
        weights="int8",
    )  # fmt: skip
    engine = Engine(llama(), config=sizes)
    together = {}
    requests = [Request(n, prompt, 8, logprobs=True) for n, prompt in enumerate(prompts)]
    for result in engine.generate(requests):
        together[result.id] = result.candidates[0]
    for request in requests:
        engine.forget()
        (alone,) = engine.generate([request])
        assert alone.candidates[0] == together[request.id]


def test_int8_experts_are_close_and_their_router_is_not_rounded():
    model = llama()
    ids = np.random.default_rng(0).integers(0, 60, (2, 20))
    want = forward(model, ids)
    unstack_layers(model)
    router = np.asarray(model.layers[1].experts.router[...])
    stacked = llama()
    quantize_weights(stacked)
    assert isinstance(stacked.layers.experts.up, QuantizedGroupedLinear)
    assert stacked.layers.experts.up.kernels.dtype == jnp.int8
    np.testing.assert_array_equal(stacked.layers.experts.router[1], router)
    got = forward(stacked, ids)
    spread = np.asarray(want).std()
    assert np.abs(got - want).mean() < 0.1 * spread
    kernels = np.random.default_rng(0).normal(size=(8, 32, 24)).astype("f")
    linear = mixture().gate
    linear.kernels[...] = kernels
    rounded = QuantizedGroupedLinear(linear, round_matrix(linear.kernels[...], -2, 8))
    x = np.random.default_rng(1).normal(size=(8, 5, 32)).astype("f")
    sizes, group = np.array([5] * 8, np.int32), np.repeat(np.arange(8, dtype=np.int32), 5)

    @nnx.jit
    def both(rounded):
        return rounded.of_all(x), rounded.of_groups(x.reshape(40, 32), sizes, group)

    of_all, of_groups = map(np.asarray, both(rounded))
    plain = x @ (np.asarray(rounded.kernels) * np.asarray(rounded.scale)[:, None])
    np.testing.assert_allclose(of_all, plain, atol=1e-4)
    np.testing.assert_allclose(of_groups.reshape(8, 5, 24), of_all, atol=1e-4)


def test_flops_are_those_of_active_experts():
    graphdef, state = nnx.split(mixture())
    rows = np.ones((12, 32), np.float32)

    def run(by):
        def loss(state, rows):
            own = nnx.merge(graphdef, state)
            return getattr(own, by)(rows, *own.choose(rows)).sum()

        return loss

    want = 2 * 12 * 32 * (3 * 3 * 24 + 8)  # three matrices of three experts, and the router
    for by in ("by_groups", "by_all"):
        assert traced_flops(run(by), state, rows) == pytest.approx(want)
        gradient = jax.grad(run(by), argnums=(0, 1))
        assert traced_flops(gradient, state, rows) == pytest.approx(3 * want)
    experts, _ = stack()
    many = jax.ShapeDtypeStruct((272, 256), np.float32)

    def by_kernel(rows):  # one of two devices
        chosen, weights = experts.choose(rows, 0)
        return experts.by_kernel(rows, chosen, weights, jnp.int32(0), parts=2)

    want = 2 * 272 * 256 * (3 * 3 * 128 / 2 + 8)
    assert traced_flops(by_kernel, many) == pytest.approx(want)
    assert reached(CONFIG, 1) == pytest.approx(3 / 8)
    assert reached(CONFIG, 4) == pytest.approx(1 - (5 / 8) ** 4)


def test_lora_changes_the_attention_of_a_mixture():
    model = llama()
    ids = np.random.default_rng(0).integers(0, 60, (2, 20))
    want = forward(model, ids)
    add_lora(model, LoraConfig(rank=2), rngs=nnx.Rngs(1))
    added = [name for name in flatten_named(nnx.state(model, nnx.Param)) if "lora_a" in name]
    assert added == [f"layers/{name}/lora_a" for name in ("k", "out", "q", "v")]
    np.testing.assert_allclose(forward(merge_lora(model), ids), want, atol=1e-5)
    with pytest.raises(UserError, match=r"gate, down are inside this model's experts.*'q', 'k'"):
        add_lora(model, LoraConfig(targets=("q", "gate", "down")), rngs=nnx.Rngs(1))
    dense = llama(dataclasses.replace(CONFIG, experts=None))
    add_lora(dense, LoraConfig(rank=2), rngs=nnx.Rngs(1))
    added = [name for name in flatten_named(nnx.state(dense, nnx.Param)) if "lora_a" in name]
    assert len(added) == 7


def test_a_mixture_is_no_encoder_of_texts():
    published = CONFIG.to_hf()
    with pytest.raises(UserError, match=r"x: num_experts is 8: .* use an encoder without experts"):
        FAMILIES["qwen3_moe"].config(published, "x")


def test_published_experts_are_one_tensor_of_a_layer_and_back():
    rng = np.random.default_rng(0)
    names = [("gate_proj", (5, 4)), ("up_proj", (5, 4)), ("down_proj", (4, 5))]
    arrays = {
        f"model.layers.{layer}.mlp.experts.{n}.{name}.weight": rng.normal(size=shape)
        for layer in range(2)
        for n in range(11)  # of two digits too
        for name, shape in names
    }
    arrays["model.norm.weight"] = rng.normal(size=4)
    together = experts_together(ArraySource(arrays), 11)
    assert together.specs()["model.layers.1.mlp.experts.up_proj.weight"].shape == (11, 5, 4)
    back = experts_apart(together)
    assert back.specs().keys() == arrays.keys()
    for key, array in arrays.items():
        np.testing.assert_array_equal(back.read(key), array)
    del arrays["model.layers.1.mlp.experts.3.up_proj.weight"]
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.experts\.up_proj is of 10 .*\[3\]"):
        experts_together(ArraySource(arrays), 11)
