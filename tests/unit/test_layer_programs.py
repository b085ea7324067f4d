"""On one CPU the engine runs a program for each layer: the same for all, and the same answers."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny_llm import by_id, llama_config, tiny_llama

from mmqa_jax.core.mesh import EXACT_ON_CPU, make_mesh
from mmqa_jax.decoding import kv_cache
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.requests import Request, Scoring
from mmqa_jax.decoding.slot_runner import EngineConfig

pytestmark = pytest.mark.slow


def exact_program():
    return kv_cache.layer_program(tuple(sorted(EXACT_ON_CPU.items())))


SIZES = EngineConfig(slots=4, length=96, buckets=(32,), prefill_tokens=64)


def answers(layers: int, mesh=None):
    model = tiny_llama(dataclasses.replace(llama_config(61), layers=layers))
    engine = Engine(model, config=SIZES, mesh=mesh)
    prompts = np.random.default_rng(0).integers(1, 61, (6, 40))
    requests = [Request(n, row[: 20 + 4 * n].tolist(), 5) for n, row in enumerate(prompts)]
    found = by_id(engine.generate(requests))
    (scored,) = engine.score([Scoring("s", prompts[0].tolist(), [[3, 4], [5]])])
    return found, scored


@pytest.fixture(scope="module")
def of_two():
    """Answers of two layers, and how many programs of a layer they took."""
    before = exact_program()._cache_size()
    return *answers(2), exact_program()._cache_size() - before


def test_answers_are_those_of_whole_programs(of_two):
    found, scored, _ = of_two
    whole, scored_whole = answers(2, make_mesh({"data": 1}, devices=jax.devices()[:1]))
    for name, result in whole.items():
        one, other = found[name].candidates[0], result.candidates[0]
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.total, other.total, rtol=1e-5)
    for one, other in zip(scored.scores, scored_whole.scores, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-5, atol=1e-6)


def test_one_program_serves_all_layers(of_two):
    """However many there are: one takes as many programs as two."""
    *_, count = of_two
    before = exact_program()._cache_size()
    answers(1)
    assert exact_program()._cache_size() - before == count > 1
