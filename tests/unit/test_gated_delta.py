"""Layers of the gated delta rule: chunks beside a plain recurrence, and an engine with their states."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.requests import Request
from mmqa_jax.decoding.sizes import choose_sizes
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.gated_delta import GatedDelta, in_chunks, one_token, solved_by_products
from mmqa_jax.models.llama.layer_kinds import DeltaConfig
from mmqa_jax.models.llama.network import Llama
from tests.drawn_weights import drawn
from tests.refusals import refuses

MODEL = LlamaConfig(
    family="qwen3_5_text",
    vocab_size=60,
    hidden=32,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp=48,
    positions=256,
    init_stddev=0.4,
    qk_norm="head",
    gated=True,
    kinds=("linear", "full") * 2,
    delta=DeltaConfig(key_heads=2, value_heads=4, key_size=6, value_size=10, taps=3),
    unroll=1,
)
SIZES = EngineConfig(slots=4, length=160, buckets=(32, 128), prefill_tokens=128)


def inputs(length: int, rows: int = 2) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = {"q": (2, 6), "k": (2, 6), "v": (4, 10)}
    made = {name: rng.normal(size=(rows, length, *size)) for name, size in shape.items()}
    made["decay"] = -rng.exponential(0.3, (rows, length, 4))
    made["share"] = rng.uniform(size=(rows, length, 4))
    made["memory"] = rng.normal(size=(rows, 4, 6, 10))
    return {name: x.astype(np.float32) for name, x in made.items()}


def recurrence(q, k, v, decay, share, memory, begins=None) -> tuple[np.ndarray, np.ndarray]:
    """Token by token, as equation 10 of Gated Delta Networks, in float64."""
    memory, outputs = memory.astype(np.float64), []
    q, k = (np.repeat(x.astype(np.float64), 2, axis=2) for x in (q, k))
    q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    for t in range(v.shape[1]):
        if begins is not None:
            memory = np.where(begins[:, t, None, None, None], 0, memory)
        memory = memory * np.exp(decay[:, t])[..., None, None]
        wrong = v[:, t] - np.einsum("bhkv,bhk->bhv", memory, k[:, t])
        memory = memory + np.einsum("bhk,bhv,bh->bhkv", k[:, t], wrong, share[:, t])
        outputs.append(np.einsum("bhkv,bhk->bhv", memory, q[:, t]) / np.sqrt(q.shape[-1]))
    return np.stack(outputs, axis=1), memory


@pytest.mark.parametrize("texts", ["one", "several"])
def test_chunks_are_the_recurrence(texts):
    """Of more than two chunks, with texts that begin within and at the edge of one."""
    given, begins = inputs(150), None
    if texts == "several":
        begins = np.isin(np.arange(150), [3, 64, 70, 149])[None] & np.array([[True], [False]])
    both = (function(**given, begins=begins) for function in (in_chunks, recurrence))
    for got, want in zip(*both, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_one_token_is_the_recurrence():
    given = inputs(1)
    for got, want in zip(one_token(**given), recurrence(**given), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_a_text_in_pieces_is_the_text():
    """With padding behind the first piece, which changes neither memory nor convolutions."""
    delta = GatedDelta(MODEL.of_layer(0), rngs=nnx.Rngs(0))
    x = np.random.default_rng(1).normal(size=(2, 40, 32)).astype(np.float32)
    whole, last = delta(x)
    ends = np.array([17, 30])
    first, state = delta(x[:, :32], ends=ends)
    for row, end in enumerate(ends):
        of_row = jax.tree.map(lambda held, row=row: held[row : row + 1], state)
        rest, of_row = delta(x[row : row + 1, end:], of_row)
        together = np.concatenate([first[row : row + 1, :end], rest], axis=1)
        np.testing.assert_allclose(together[0], whole[row], rtol=0, atol=1e-4)
        for got, want in zip(jax.tree.leaves(of_row), jax.tree.leaves(last), strict=True):
            np.testing.assert_allclose(got[0], want[row], rtol=0, atol=1e-4)


def test_what_is_masked_on_the_left_is_not_there():
    model = drawn(lambda: Llama(MODEL, rngs=nnx.Rngs(0)))
    ids = np.random.default_rng(2).integers(0, 60, (1, 30))
    mask = np.arange(30)[None] >= 7
    got = model(ids, mask, np.maximum(np.arange(30) - 7, 0)[None])
    np.testing.assert_allclose(got[:, 7:], model(ids[:, 7:]), rtol=0, atol=1e-4)


def answers(numbers, **sizes: Any) -> Mapping[int, Any]:
    engine = Engine(
        drawn(lambda: Llama(MODEL, rngs=nnx.Rngs(0))), config=dataclasses.replace(SIZES, **sizes)
    )
    lengths = (5, 40, 33, 100, 64, 70)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 60, length).tolist() for length in lengths]
    requests = [Request(n, prompts[n], 6, logprobs=True) for n in numbers]
    return {result.id: result.candidates[0] for result in engine.generate(requests)}


def test_bits_do_not_depend_on_what_else_is_served():
    """Slots change hands: what a state held before is gone."""
    together = answers(range(6), slots=2, pages=4)
    assert answers([3])[3] == together[3]
    others = answers([5, 4, 3, 2, 1, 0], prefill_tokens=256)
    assert others == together


REFUSED = [
    ({"speculate": 4}, "engine.speculate is 4: layers of the gated delta rule cannot take back"),
    ({"scan_layers": True}, "engine.scan_layers is true: layers of several kinds are compiled one"),
]


@pytest.mark.parametrize(("sizes", "message"), REFUSED)
def test_what_an_engine_cannot_do_is_refused(sizes, message):
    refuses(message, choose_sizes, MODEL, sizes, {}, jax.devices()[:1])
    with pytest.raises(UserError, match=message):
        Engine(Llama(MODEL, rngs=nnx.Rngs(0)), config=dataclasses.replace(SIZES, **sizes))


def test_beams_are_refused():
    model = Llama(MODEL, rngs=nnx.Rngs(0))
    engine = Engine(model, end_ids=[1], config=SIZES)
    with pytest.raises(UserError, match="request 'a': beams is 2: states of the gated delta rule"):
        list(engine.generate([Request("a", [3, 4], 4, beams=2)]))


def test_kinds_and_sizes_are_checked():
    for changes, message in [
        ({"kinds": ("linear",)}, "model.kinds has 1 values: expected one for each of"),
        ({"kinds": ("mamba",) * 4}, "model.kinds"),
        ({"delta": None}, 'model.kinds has "linear", whose sizes model.delta says; give them'),
        ({"shared_expert": 8}, "model.shared_expert needs model.experts"),
    ]:
        refuses(message, dataclasses.replace, MODEL, **changes)
    refuses(r"delta\.key_heads is 3", DeltaConfig, key_heads=3)
    refuses(r"delta\.taps is 1: expected at least 2", DeltaConfig, taps=1)


@pytest.mark.parametrize(
    ("kinds", "period"), [(("linear", "full") * 2, 2), (("linear", "linear", "full", "full"), 4)]
)
def test_layers_repeat_with_their_period(kinds, period):
    config = dataclasses.replace(MODEL, kinds=kinds)
    assert config.period == period
    model = Llama(config, rngs=nnx.Rngs(0))
    assert [layer.config.kinds[0] for layer in model.each_layer()] == list(kinds)


@pytest.mark.parametrize("kind", ["drawn", "alike"])
def test_systems_solved_by_products(kind):
    """As NumPy solves them in float64, and with gradients of the rows' solution, also where all keys
    of a chunk are alike, whose powers grow beyond float32."""
    rng, size = np.random.default_rng(0), 64
    below = np.tril(
        rng.normal(size=(3, size, size)) / 4 if kind == "drawn" else np.ones((3, size, size)), -1
    )
    wanted = rng.normal(size=(3, size, 5))
    want = np.linalg.solve(below + np.eye(size), wanted)
    system = (below + 7 * np.eye(size)).astype(np.float32)  # whose diagonal counts as ones
    arguments = (system, wanted.astype(np.float32))
    np.testing.assert_allclose(solved_by_products(*arguments), want, rtol=2e-5, atol=2e-5)

    def row_by_row(system: jax.Array, wanted: jax.Array) -> jax.Array:
        return jax.scipy.linalg.solve_triangular(system, wanted, lower=True, unit_diagonal=True)

    factors = rng.normal(size=want.shape).astype(np.float32)
    gradients, wants = (
        jax.grad(lambda *x, f=f: (f(*x) * factors).sum(), (0, 1))(*arguments)
        for f in (solved_by_products, row_by_row)
    )
    for gradient, want in zip(gradients, wants, strict=True):
        np.testing.assert_allclose(gradient, want, rtol=1e-4, atol=1e-3)
