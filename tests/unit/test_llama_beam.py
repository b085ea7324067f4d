"""Beam search of a tiny random LLaMA against the published search written out with lists."""

import jax
import numpy as np
import pytest
import test_beam
from flax import nnx
from tiny_llm import llama_config

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding.beam_batches import beam_search
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.requests import Request
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.llama.network import Llama
from tests.drawn_weights import drawn

pytestmark = pytest.mark.slow

MODEL = llama_config(23, positions=64)
PROMPTS = [[3], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17], [20, 4, 4, 1, 9]]


@pytest.fixture
def model():
    """A new one: an engine unstacks the layers of its own."""
    return drawn(lambda: Llama(MODEL, rngs=nnx.Rngs()), 5, MODEL.init_stddev)


@pytest.fixture(scope="module")
def log_probs():
    """Tokens -> log-probabilities [V] of the next, from one forward pass."""
    graphdef, state = nnx.split(drawn(lambda: Llama(MODEL, rngs=nnx.Rngs()), 5, MODEL.init_stddev))
    forward = jax.jit(lambda state, ids: jax.nn.log_softmax(nnx.merge(graphdef, state)(ids)))

    def run(tokens):
        ids = np.zeros((1, 32), np.int32)
        ids[0, : len(tokens)] = tokens
        return np.asarray(forward(state, ids))[0, len(tokens) - 1]

    return run


@pytest.mark.parametrize(("beams", "steps", "penalty"), [(4, 9, 0.0), (4, 9, 1.5), (1, 6, 0.0)])
def test_equals_the_published_search(monkeypatch, model, log_probs, beams, steps, penalty):
    def after_prompt(sequence, question, vocab):
        return log_probs([*PROMPTS[question], *sequence])

    monkeypatch.setattr(test_beam, "toy_log_probs", after_prompt)
    sizes = EngineConfig(slots=8, length=32, buckets=(16,))
    engine = Engine(model, end_ids=[test_beam.END], config=sizes)
    requests = [
        Request(n, prompt, steps, beams=beams, n=beams, length_penalty=penalty)
        for n, prompt in enumerate(PROMPTS)
    ]
    found = {result.id: result.candidates for result in engine.generate(requests)}
    ended = 0
    for n in range(len(PROMPTS)):
        want = test_beam.published_search(n, MODEL.vocab_size, beams, steps, penalty)
        assert [list(c.tokens) for c in found[n]] == [tokens for _, tokens in want]
        np.testing.assert_allclose([c.total for c in found[n]], [s for s, _ in want], atol=1e-4)
        ended += sum(c.finish == "end" for c in found[n])
    assert ended > 0 or beams == 1


def test_early_stop_keeps_the_best(model, log_probs):
    ids, lengths = np.zeros((3, 16), np.int32), np.array([len(p) for p in PROMPTS], np.int32)
    for row, prompt in enumerate(PROMPTS):
        ids[row, : len(prompt)] = prompt
    options = {"end_id": test_beam.END, "num_beams": 4, "max_new_tokens": 12}
    whole = jax.device_get(beam_search(*nnx.split(model), ids, lengths, **options))
    early = beam_search(*nnx.split(model), ids, lengths, only_best=True, **options)
    early = jax.device_get(early)
    np.testing.assert_array_equal(early.tokens[:, 0], whole.tokens[:, 0])
    np.testing.assert_allclose(early.scores[:, 0], whole.scores[:, 0], atol=1e-5)
    for row in range(3):
        tokens = whole.tokens[row, 0, : whole.lengths[row, 0]].tolist()
        total = sum(
            log_probs([*PROMPTS[row], *tokens[:n]])[token] for n, token in enumerate(tokens)
        )
        assert float(whole.scores[row, 0]) == pytest.approx(total, abs=1e-4)


def test_impossible_searches_are_refused(model):
    ids, lengths = np.zeros((1, 60), np.int32), np.array([60])
    with pytest.raises(UserError, match="num_beams is 24: expected 1 to the vocabulary size 23"):
        beam_search(*nnx.split(model), ids, lengths, end_id=2, num_beams=24, max_new_tokens=2)
    with pytest.raises(UserError, match="max_new_tokens is 5: expected 1 to 4"):
        beam_search(*nnx.split(model), ids, lengths, end_id=2, max_new_tokens=5)
    engine = Engine(model, config=EngineConfig(slots=2, length=32, buckets=(16,)))
    with pytest.raises(UserError, match="beam search needs exactly one end token"):
        list(engine.generate([Request(0, [1], 2, beams=2)]))
