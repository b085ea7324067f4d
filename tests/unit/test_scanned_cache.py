"""The engine over scanned layers gives what it gives over a list of layers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from flax import nnx
from tiny_llm import by_id, fast_compilation, llama_config

from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.requests import Request, Scoring
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.llama import Llama

MODEL = llama_config(61)
SIZES = EngineConfig(slots=5, length=160, buckets=(8, 32), prefill_tokens=64, block=32)


def run(**changes):
    """Generated candidates and scores by id; prompts share beginnings, several per slot."""
    rng = np.random.default_rng(0)
    head = rng.integers(0, 61, 100)
    requests = [
        Request(n, (*head[: n % 4 * 33], *rng.integers(0, 61, 1 + 3 * n)), 9, logprobs=True)
        for n in range(12)
    ]
    scorings = [
        Scoring(n, head[:size], [rng.integers(0, 61, m) for m in (1, 3, 12, 20)])
        for n, size in enumerate((2, 31, 70, 120))
    ]
    with fast_compilation():
        engine = Engine(
            Llama(MODEL, rngs=nnx.Rngs(3)), config=dataclasses.replace(SIZES, **changes)
        )
    results = by_id(engine.generate(requests))
    assert sum(result.reused_tokens for result in results.values()) > 100
    return {n: r.candidates[0] for n, r in results.items()}, by_id(engine.score(scorings))


@pytest.mark.parametrize(
    ("changes", "most"),
    [({}, 1e-4), ({"cache_dtype": "int8"}, 0.2), ({"weights": "int8"}, 1e-4)],
    ids=str,
)
def test_scanned_layers_change_no_answer(changes, most):
    """Up to an int8 cache, from which the scanned engine reads a chunk's own keys unrounded."""
    (want, want_scores), (got, got_scores) = (
        run(scan_layers=scan, **changes) for scan in (False, True)
    )
    for n in want:
        if most < 0.01:
            assert got[n].tokens == want[n].tokens
        same = np.equal(got[n].tokens, want[n].tokens).cumprod().astype(bool)
        deviation = np.subtract(got[n].logprobs, want[n].logprobs)[same]
        np.testing.assert_allclose(deviation, 0, atol=most)
    for n in want_scores:
        for one, other in zip(got_scores[n].scores, want_scores[n].scores, strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=most)
