"""The engine over scanned layers, or with a GPU's attention, gives what it gives on a CPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_llm import by_id, llama_config, tiny_llama

from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.decoding import kv_cache, ragged_attention, ragged_triton, scanned_cache, slot_runner
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.requests import Request, Scoring
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.common.rope import RopeScaling
from mmqa_jax.models.llama.layer_kinds import DeltaConfig, FullLayers

pytestmark = pytest.mark.slow

MODEL = llama_config(61)
SIZES = EngineConfig(slots=5, length=96, buckets=(32,), prefill_tokens=64)  # one program decodes


@functools.cache
def run(*, attention=None, ragged="", model=MODEL, **changes):
    """Generated candidates and scores by id; prompts share beginnings, several per slot.

    attention: of prompts, in place of what the device chooses.
    ragged: decodes by a "tpu"'s or "gpu"'s kernel, interpreted; by "products" as on a TPU where the
      kernel does not serve.
    """
    rng = np.random.default_rng(0)
    head = rng.integers(0, 61, 64)
    requests = [
        Request(n, (*head[: n % 3 * 32], *rng.integers(0, 61, 1 + n)), 9, logprobs=True)
        for n in range(9)
    ]
    scorings = [
        Scoring(n, head[:size], [rng.integers(0, 61, m) for m in (1, 3, 20)])
        for n, size in enumerate((2, 31, 64))
    ]
    if not model.recurrent:  # whose states hide nothing
        answer, places = rng.integers(0, 61, 9), [(0, 0), (3, 20), (20, 40)]
        scorings.append(Scoring(3, head[:40], [answer] * 3, hidden=places, unscored=2))
    mesh = None
    with pytest.MonkeyPatch.context() as patch:
        if attention is not None:  # a mesh: without one, every layer is a program of a CPU's own
            mesh = make_mesh({"data": 1}, devices=jax.devices()[:1])
            patch.setattr(slot_runner, "implementation_for", lambda device: attention)
        if ragged == "gpu":
            for name in ("attend_to_own", "attend_in_place"):
                interpreted = functools.partial(getattr(ragged_triton, name), interpret=True)
                patch.setattr(ragged_triton, name, interpreted)
            patch.setattr(kv_cache, "ragged_fits", lambda *_: True)
        if model.kinds and ragged:  # a mesh: an engine without one would share its programs
            mesh = make_mesh({"data": 1}, devices=jax.devices()[:1])
            patch.setattr(scanned_cache, "serves", lambda _: True)
        if ragged == "tpu":
            interpreted = functools.partial(ragged_attention.attend_on, interpret=True)
            patch.setattr(ragged_attention, "attend_on", interpreted)
            patch.setattr(scanned_cache, "ragged_fits", lambda *_: True)
        engine = Engine(tiny_llama(model), config=dataclasses.replace(SIZES, **changes), mesh=mesh)
        results = by_id(engine.generate(requests))
    assert model.recurrent or sum(result.reused_tokens for result in results.values()) >= 64
    return {n: r.candidates[0] for n, r in results.items()}, by_id(engine.score(scorings))


def assert_equal(one, other, atol=1e-4):
    """Answers and their log-probabilities, and scores."""
    (want, want_scores), (got, got_scores) = one, other
    for n in want:
        assert got[n].tokens == want[n].tokens
        np.testing.assert_allclose(got[n].logprobs, want[n].logprobs, rtol=0, atol=atol)
    for n in want_scores:
        for one, other in zip(got_scores[n].scores, want_scores[n].scores, strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=atol)


def test_scanned_layers_change_no_answer():
    """With rounded weights, and two programs that decode, to 64 and to 96 columns."""
    scanned = run(scan_layers=True, weights="int8")
    assert_equal(run(scan_layers=False, weights="int8"), scanned)


def test_a_tpus_kernel_changes_no_answer():
    """One program decodes, however far the longest sequence reaches. It rotates some layers, by
    YaRN, whose factor is the rotation's, and sees a window in others."""
    yarn = RopeScaling("yarn", 2.0, original_positions=64, attention_factor=1.3)
    rotated = (True, False) * MODEL.layers
    model = dataclasses.replace(
        MODEL, rotated=rotated[: MODEL.layers], rope_scaling=yarn, windows=(0, 40)[: MODEL.layers]
    )
    sizes = {"length": 128, "model": model}
    scanned = run(scan_layers=True, ragged="tpu", **sizes)
    assert_equal(run(scan_layers=False, **sizes), scanned)


OF_KINDS = {
    "recurrent": {
        "layers": 4,
        "kinds": ("linear", "full") * 2,
        "delta": DeltaConfig(key_heads=2, value_heads=4, key_size=6, value_size=8, taps=3),
        "family": "qwen3_5_text",
        "gated": True,
    },
    "windows": {  # the last two layers borrow; layers that see all have heads of their own
        "layers": 6,
        "kinds": ("near", "near", "full") * 2,
        "local": (True, True, False) * 2,
        "windows": (40, 40, 0) * 2,
        "full_layers": FullLayers(16, 1, keys_are_values=True),
        "borrowers": 2,
        "borrower_mlp": 24,
        "value_norm": True,
        "side": 8,
        "qk_norm": "head",
        "family": "gemma4_text",
    },
}


@pytest.mark.parametrize("kinds", OF_KINDS)
def test_layers_of_several_kinds_have_caches_of_their_own_on_a_tpu(kinds):
    """Steps by the kernel, and by plain products; prompts that begin alike, scored continuations."""
    sizes = {"length": 128, "model": dataclasses.replace(MODEL, **OF_KINDS[kinds])}
    want = run(**sizes)
    for way in ("tpu", "products"):
        assert_equal(want, run(**sizes, ragged=way))


def test_a_gpus_way_to_windows():
    """Rows taken out of the cache, and kernels, with branches of scored continuations; a layer of
    each window beside one without."""
    model = dataclasses.replace(MODEL, layers=3, windows=(3, 40, 0), attention_cap=20.0)
    sizes = {"scan_layers": False, "model": model}
    plain = run(**sizes)
    for ragged in ("", "gpu"):
        assert_equal(plain, run(**sizes, attention="cudnn", ragged=ragged))


def test_a_gpus_way_to_the_cache_changes_no_answer():
    """Rows taken out of the rounded cache, and one attention over them: here by blocks, not by
    cuDNN; and steps that read each sequence's own columns of one segment by a kernel."""
    changes = {"scan_layers": False}
    assert_equal(run(**changes), run(**changes, attention="cudnn", ragged="gpu"), atol=1e-5)
    # An entry that lies between two of int8's steps may be rounded to either.
    changes["cache_dtype"] = "int8"
    assert_equal(run(**changes), run(**changes, attention="cudnn", ragged="gpu"), atol=5e-4)


def test_an_int8_cache_stays_near():
    """Given texts' log-probabilities, written and read in chunks by scanned layers, against an
    unrounded cache of the same weights."""
    _, want = run(scan_layers=False, weights="int8")
    _, got = run(scan_layers=True, weights="int8", cache_dtype="int8")
    deviations = [
        np.subtract(one.logprobs, other.logprobs)
        for n in want
        for one, other in zip(got[n].scores, want[n].scores, strict=True)
    ]
    assert 1e-5 < np.sqrt(np.mean(np.concatenate(deviations) ** 2)) < 0.1


@pytest.mark.parametrize("window", [1, 3, 40])
def test_a_token_sees_its_window_and_itself(window):
    """Against attention written out, at positions before, at and behind the window's length."""
    rng = np.random.default_rng(1)
    positions, (heads, kv_heads, columns, size) = np.array([0, 2, 3, 7]), (4, 2, 8, 16)
    q = rng.normal(size=(4, 1, heads, size)).astype(np.float32)
    k, v = rng.normal(size=(2, 4, 1, kv_heads, size)).astype(np.float32)
    keys, values = rng.normal(size=(2, 4, kv_heads, columns, size)).astype(np.float32)
    held = scanned_cache.ScannedCache(*map(jnp.asarray, (keys, values)), None, None)
    got = scanned_cache._one_token(q, k, v, held, jnp.asarray(positions), window)
    for row, position in enumerate(positions):
        seen = slice(max(0, position - window + 1), position)
        for head in range(heads):
            of = head * kv_heads // heads
            all_keys = np.concatenate([keys[row, of, seen], k[row, :, of]])
            all_values = np.concatenate([values[row, of, seen], v[row, :, of]])
            scores = np.exp(all_keys @ q[row, 0, head] / size**0.5)
            want = scores @ all_values / scores.sum()
            np.testing.assert_allclose(got[row, 0, head], want, rtol=1e-4, atol=1e-5)
