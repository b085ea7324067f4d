"""The generation engine on four devices against one."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mmqa_jax.core.mesh import RowPlacement, make_mesh
from mmqa_jax.decoding import kv_cache, ragged_triton, scanned_cache
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.ragged_attention import attend_on, turns_of
from mmqa_jax.decoding.requests import Request, Scoring
from mmqa_jax.decoding.scanned_cache import ScannedCache, specs_of
from mmqa_jax.decoding.sizes import repeat_key_heads
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.layer_kinds import DeltaConfig, LatentConfig
from mmqa_jax.models.llama.lora import Additions
from mmqa_jax.models.llama.network import Llama, unstack_layers
from tests.drawn_weights import drawn

MODEL = LlamaConfig(
    vocab_size=60,
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    mlp=48,
    positions=128,
    init_stddev=0.4,
    unroll=1,
)
# Traits by layer, a norm over what `tensor` splits, and experts (`models.llama.families`).
SWITCHED = dataclasses.replace(
    MODEL,
    family="qwen3_moe",
    mlp=24,
    experts=8,
    active_experts=2,
    windows=(6, 0),
    rotated=(True, False),
    local=(True, False),
    local_theta=30.0,
    qk_norm="whole",
    norms="both",
    unit_norms=True,
    attention_cap=3.0,
    logit_cap=8.0,
)
# One key head for all, which a mesh repeats.
LATENT = dataclasses.replace(
    MODEL,
    family="youtu",
    kv_heads=1,
    head_dim=16,
    latent=LatentConfig(rank=12, query_rank=10, resting=6, turning=4, value=8),
    attention_scale=0.4,
)


def mesh_of(**shape):
    """A mesh of the first four devices."""
    return make_mesh(shape, devices=jax.devices()[:4])


def alone():
    return make_mesh({"data": 1}, devices=jax.devices()[:1])


def sharded(mesh, config=MODEL):
    return drawn(lambda: Llama(config, rngs=nnx.Rngs()), 3, config.init_stddev, mesh)


def answers_and_scores(mesh, sizes, config):
    """Request -> its candidate, scoring -> its scores; where the cache lies is checked."""
    rng = np.random.default_rng(0)
    head = rng.integers(0, 60, 40)
    requests = [
        Request(n, (*head[: n % 3 * 20], *rng.integers(0, 60, 5 + 4 * n)), 8, logprobs=True)
        for n in range(9)
    ]
    scorings = [Scoring(n, head, [rng.integers(0, 60, 4) for _ in range(3)]) for n in range(2)]
    engine = Engine(sharded(mesh, config), config=sizes, mesh=mesh)
    results = {result.id: result.candidates[0] for result in engine.generate(requests)}
    scores = {result.id: result.scores for result in engine.score(scorings)}
    if mesh.size > 1:  # rows over `data`, heads over `tensor`
        for array in jax.tree.leaves(engine.cache):
            shard, whole = array.addressable_shards[0].data.shape, array.shape
            if sizes.scan_layers:
                shard, whole = shard[1:], whole[1:]
            assert shard == (whole[0] // mesh.shape["data"], 1, *whole[2:])
    return results, scores


@pytest.mark.parametrize(
    ("cache_dtype", "config"),
    [("float32", MODEL), ("int8", MODEL), ("float32", SWITCHED), ("float32", LATENT)],
)
def test_answers_are_those_of_one_device(cache_dtype, config):
    sizes = EngineConfig(
        slots=4, length=96, buckets=(32,), prefill_tokens=64,
        cache_dtype=cache_dtype, scan_layers=False,
    )  # fmt: skip
    expected, expected_scores = answers_and_scores(alone(), sizes, config)
    # A rounding that falls to the other side moves an int8 cache by a step.
    close = {"rtol": 0, "atol": 1e-4 if cache_dtype == "float32" else 0.02}
    mesh = mesh_of(data=2, tensor=2)
    if (
        cache_dtype == "int8"
    ):  # scanned it reads a chunk's own keys unrounded: test_scanned_cache.py
        ways = [(mesh, sizes)]
    elif config is MODEL:
        ways = [(mesh, dataclasses.replace(sizes, scan_layers=True, buckets=(8, 32)))]
    else:
        repeated = mesh_of(tensor=4)  # more than key heads: each is there twice
        ways = [(mesh, sizes), (repeated, dataclasses.replace(sizes, scan_layers=True))]
    for where, own in ways:
        answers, scores = answers_and_scores(where, own, config)
        for n, want in expected.items():
            assert answers[n].tokens == want.tokens
            np.testing.assert_allclose(answers[n].logprobs, want.logprobs, **close)
        for n, want in expected_scores.items():
            for one, other in zip(scores[n], want, strict=True):
                np.testing.assert_allclose(one.logprobs, other.logprobs, **close)


def test_rows_of_prompts_in_two_parts(monkeypatch):
    """As chunks of many tokens are encoded; some layers see a window, others all."""
    config = dataclasses.replace(MODEL, windows=(6, 0), rotated=(True, False))
    sizes = EngineConfig(slots=4, length=96, buckets=(32,), prefill_tokens=128, scan_layers=False)
    expected, expected_scores = answers_and_scores(alone(), sizes, config)
    counts = []

    def parts(*arguments):
        counts.append(of_rows(*arguments))
        return counts[-1]

    of_rows = scanned_cache._parts
    monkeypatch.setattr(scanned_cache, "_parts", parts)
    monkeypatch.setattr(scanned_cache, "_IN_PARTS", 64)
    sizes = dataclasses.replace(sizes, scan_layers=True)
    found, scores = answers_and_scores(mesh_of(data=2, tensor=2), sizes, config)
    assert set(counts) == {1, 2}  # steps, which take one token of a row, and chunks
    for n, candidate in expected.items():
        assert found[n].tokens == candidate.tokens
        np.testing.assert_allclose(found[n].logprobs, candidate.logprobs, rtol=0, atol=1e-4)
    for n, of_request in expected_scores.items():
        for one, other in zip(scores[n], of_request, strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_recurrent_states_on_a_mesh(kind):
    """Slots over `data`, value heads or channels over `tensor`; of the slots of others nothing is
    exchanged."""
    delta = DeltaConfig(key_heads=2, value_heads=4, key_size=6, value_size=8, taps=3)
    changes = {
        "linear": {"family": "qwen3_5_text", "delta": delta, "gated": True},
        "conv": {"family": "lfm2", "conv_taps": 4},
    }
    config = dataclasses.replace(MODEL, kinds=(kind, "full"), **changes[kind])
    sizes = EngineConfig(slots=4, length=96, buckets=(32,), prefill_tokens=64)
    rng = np.random.default_rng(0)
    requests = [Request(n, rng.integers(0, 60, 5 + 9 * n), 8, logprobs=True) for n in range(8)]
    found = []
    for where in (alone(), mesh_of(data=2, tensor=2), mesh_of(data=4)):
        engine = Engine(sharded(where, config), config=sizes, mesh=where)
        found.append({result.id: result.candidates[0] for result in engine.generate(requests)})
        slots, tensor = 4 // where.shape["data"], where.shape.get("tensor", 1)
        held = jax.tree.leaves(engine.cache[0])[0].addressable_shards[0].data
        of_slot = {"linear": (4 // tensor, 6, 8), "conv": (3, config.hidden // tensor)}
        assert held.shape == (slots, *of_slot[kind])
    for others in found[1:]:
        for n, want in found[0].items():
            assert others[n].tokens == want.tokens
            np.testing.assert_allclose(others[n].logprobs, want.logprobs, rtol=0, atol=1e-4)


def test_adapters_on_a_mesh():
    """Slots over `data`, A and B over `tensor`, and the B of key heads that are repeated; with steps
    of one token and of three."""
    sizes = EngineConfig(slots=4, length=96, buckets=(32,), prefill_tokens=64)
    rng = np.random.default_rng(0)

    def adapter(rank: int, **widths: tuple[int, int]) -> Additions:
        def draw(*shape: int) -> np.ndarray:
            return rng.normal(0, 0.3, (MODEL.layers, *shape)).astype(np.float32)

        return Additions(
            2.0, {k: (draw(n, rank), draw(rank, out)) for k, (n, out) in widths.items()}
        )

    adapters = {
        "a": adapter(3, q=(32, 32), k=(32, 16), v=(32, 16)),
        "b": adapter(2, k=(32, 16), out=(32, 32), up=(32, 48), down=(48, 32)),
    }
    prompt = rng.integers(0, 60, 40)
    requests = [
        Request((name, n), prompt[: 5 + 9 * n], 6, beams=n % 2, adapter=name)
        for name in ("", *adapters)
        for n in range(3)
    ]
    found = []
    for where, changes in (
        (alone(), {"scan_layers": False}),
        (mesh_of(data=2, tensor=2), {"scan_layers": False, "speculate": 3}),
        (mesh_of(tensor=4), {"scan_layers": True}),
    ):
        own = dataclasses.replace(sizes, **changes)
        engine = Engine(sharded(where), end_ids=[1], config=own, mesh=where, adapters=adapters)
        found.append({result.id: result.candidates[0] for result in engine.generate(requests)})
    expected, *others = found
    assert len({expected[name, 2].tokens for name in ("", *adapters)}) == 3
    for answers in others:
        for key, want in expected.items():
            assert answers[key].tokens == want.tokens
            np.testing.assert_allclose(answers[key].total, want.total, rtol=0, atol=1e-4)


def test_beams_of_a_batch_are_split(monkeypatch):
    """Prompts of a batch are split over `data`, of the last batch one is padding."""
    sizes = EngineConfig(slots=4, length=96, buckets=(32,), prefill_tokens=64)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 60, 5 + 9 * n) for n in range(3)]
    requests = [Request(n, prompt, 6, beams=2, n=2) for n, prompt in enumerate(prompts)]
    found, held, copied = [], [], RowPlacement.copied

    def recorded(placement, result):
        held.append(result.tokens.addressable_shards[0].data.shape[0])
        return copied(placement, result)

    monkeypatch.setattr(RowPlacement, "copied", recorded)
    for where in (alone(), mesh_of(data=2, tensor=2)):
        engine = Engine(sharded(where), end_ids=[1], config=sizes, mesh=where)
        found.append({result.id: result.candidates for result in engine.generate(requests)})
    assert held == [2, 2, 1, 1], held
    for n, want in found[0].items():
        for got, one in zip(found[1][n], want, strict=True):
            assert got.tokens == one.tokens
            np.testing.assert_allclose(got.total, one.total, rtol=0, atol=1e-4)


def test_the_tpus_kernel():
    """The TPU's kernel, interpreted, on rows over `data` and heads over `tensor`."""
    mesh = mesh_of(data=2, tensor=2)
    rng = np.random.default_rng(0)
    key, value = rng.normal(size=(2, 3, 6, 2, 256, 64)).astype(np.float32)
    q, k, v = (rng.normal(size=(4, 1, n, 64)).astype(np.float32) for n in (4, 2, 2))
    cache = ScannedCache(key, value, None, None).beside(128)
    positions = np.int32([0, 255, 0, 7])
    turns = turns_of(*(f(np.ones((4, 1, 1, 32), np.float32)) for f in (np.cos, np.sin)))
    pages = np.int32([[1], [2], [3], [5]])  # of which each half of `data` has three

    def on(mesh, specs):
        table = pages if mesh is None else pages % 3

        def attended(*arguments):
            options = {"read": 256, "mesh": mesh, "specs": specs, "interpret": True}
            return attend_on(table, positions, **options)(*arguments, None, None)

        return jax.tree.leaves(jax.jit(attended)(q, k, v, turns, cache, np.int32(1)))

    for got, want in zip(on(mesh, specs_of(cache, mesh)), on(None, None), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_the_gpus_kernels(monkeypatch):
    """The GPU's kernels, interpreted: a chunk of prompts and a step on meshes that split rows and
    heads, or heads alone."""
    for name in ("attend_to_own", "attend_in_place"):
        interpreted = functools.partial(getattr(ragged_triton, name), interpret=True)
        monkeypatch.setattr(ragged_triton, name, interpreted)
    found, config = {}, dataclasses.replace(MODEL, layers=1)
    meshes = (alone(), mesh_of(data=2, tensor=2), mesh_of(tensor=4))
    for mesh, ways in zip(meshes, (("blocks", "ragged"), *[("ragged",)] * 2), strict=True):
        model = sharded(mesh, config)
        repeat_key_heads(model, mesh)
        unstack_layers(model)
        graphdef, state = nnx.split(model)
        cache = kv_cache.empty(model.config, 4, 64, "float32", mesh)
        tokens = np.random.default_rng(0).normal(size=(4, 17, MODEL.hidden)).astype(np.float32)

        @functools.partial(jax.jit, static_argnames="way")
        def forward(state, tokens, cache, way, graphdef=graphdef, mesh=mesh):
            model, starts = nnx.merge(graphdef, state), np.int32([0, 47, 32, 7])
            table = kv_cache.page_each(4, mesh)
            options = {"table": table, "mesh": mesh, "implementation": way}
            own = {"starts": starts, "ends": starts + 16, **options}
            first, cache = kv_cache.forward(model, tokens[:, :16], cache, **own)
            own |= {"starts": starts + 16, "ends": starts + 17}
            second, cache = kv_cache.forward(model, tokens[:, 16:], cache, **own)
            return jnp.concatenate([first, second], axis=1)

        for way in ways:
            with jax.set_mesh(mesh):
                found[mesh, way] = jax.device_get(forward(state, tokens, cache, way))
    first, *others = found.values()
    for other in others:
        np.testing.assert_allclose(other, first, rtol=0, atol=1e-5)
