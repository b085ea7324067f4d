"""Penalties, biases, min_p, likeliest tokens and grammars of answers: the sampler beside transformers'
processors, the engine beside a loop over a plain forward pass, and grammars beside jsonschema."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
import torch
from flax import nnx
from printable_llm import VOCABULARY, printable_engine, printable_llama
from tiny_llm import by_id
from transformers.generation import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from mmqa_jax.decoding.requests import MOST_TOP, Request
from mmqa_jax.decoding.sampling import (
    SamplingParameters,
    ShapedAnswer,
    choose,
    draw_key,
    shaped,
    shaping_of,
)
from mmqa_jax.prompting.backends.answer_forms import read_form
from mmqa_jax.prompting.backends.json_fields import Fields
from tests.refusals import refuses

pytestmark = pytest.mark.slow
V = 70  # of random logits, no multiple of 32


@pytest.fixture(scope="module")
def engine():
    return printable_engine()


@pytest.fixture
def logits():
    return np.random.default_rng(0).normal(size=(1, V)).astype(np.float32) * 3


def answered(prompt, written, **options):
    """An answer of which some tokens are written."""
    answer = ShapedAnswer(Request(0, prompt, **options), prompt, V)
    for token in written:
        answer.push(token)
    return shaping_of(1, {0: answer}, V)


def test_penalties_and_biases_are_those_of_transformers_and_vllm(logits):
    prompt, written = [3, 5, 5, 9], [7, 7, 5, 60]
    text = torch.tensor([prompt + written])
    scores = torch.tensor(logits)
    bias = {(7,): 1.5, (2,): -4.0}
    changed = shaped(
        logits, answered(prompt, written, repetition_penalty=1.3, logit_bias=[(7, 1.5), (2, -4.0)])
    )
    of_bias = SequenceBiasLogitsProcessor([[list(key), value] for key, value in bias.items()])
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(text, of_bias(text, scores))
    np.testing.assert_allclose(changed, theirs, rtol=1e-6)
    # vLLM: logits -= frequency * output_bin_counts; logits -= presence * output_mask
    changed = shaped(
        logits, answered(prompt, written, frequency_penalty=0.4, presence_penalty=-0.7)
    )
    counts = np.bincount(written, minlength=V)
    np.testing.assert_allclose(changed, logits - 0.4 * counts + 0.7 * (counts > 0), rtol=1e-5)


@pytest.mark.parametrize(("min_p", "top_p"), [(0.1, 1.0), (0.3, 0.7), (0.9, 1.0)])
def test_min_p_keeps_what_transformers_keeps(logits, min_p, top_p):
    """4,000 draws come from the kept tokens alone, and each likely one of them comes."""
    rows = 4000
    tiled = np.tile(logits, (rows, 1))
    parameters = SamplingParameters(
        np.full(rows, 1.5, np.float32), np.zeros(rows, np.int32), np.full(rows, top_p, np.float32),
        np.stack([draw_key(0, n) for n in range(rows)]),
    )  # fmt: skip
    (shaping,) = [answered([1], [], min_p=min_p)]
    shaping = jax.tree.map(lambda x: np.repeat(x, rows, axis=0), shaping)
    inputs = tiled, parameters, np.zeros(rows, np.int32), np.ones(rows, bool), None, shaping
    tokens, top = jax.jit(choose, static_argnums=4)(*inputs)
    scores = TopPLogitsWarper(top_p)(None, TemperatureLogitsWarper(1.5)(None, torch.tensor(logits)))
    kept = MinPLogitsWarper(min_p)(None, scores)
    probabilities = torch.softmax(kept, -1)[0].numpy()
    assert set(np.asarray(tokens)) <= set(np.flatnonzero(probabilities))
    assert set(np.flatnonzero(probabilities > 0.005)) <= set(np.asarray(tokens))
    want = torch.log_softmax(torch.tensor(logits), -1)[0]
    values, ids = want.topk(MOST_TOP)
    np.testing.assert_array_equal(top.tokens[0], ids)
    np.testing.assert_allclose(top.of_tokens[0], values, atol=1e-5)
    np.testing.assert_allclose(top.chosen, want[np.asarray(tokens)], atol=1e-5)


def test_answers_are_those_of_a_loop(engine):
    """Greedy with all penalties, token by token from a whole forward pass; a plain answer beside it
    is the one that it is alone, to the last bit."""
    prompt = [40, 3, 77, 12, 12]
    options = {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.3,
        "logit_bias": [(12, -2.0), (4, 3.0)],
    }
    plain = Request("plain", [5, 6, 7], 12, logprobs=True)
    shaped_one = Request("shaped", prompt, 12, logprobs=True, top_logprobs=3, **options)
    (alone,) = engine.generate([plain])
    together = by_id(engine.generate([plain, shaped_one]))
    assert together["plain"].candidates == alone.candidates
    (candidate,) = together["shaped"].candidates

    graphdef, state = nnx.split(printable_llama())
    forward = jax.jit(lambda ids: nnx.merge(graphdef, state)(ids))
    written = []
    for place, token in enumerate(candidate.tokens):
        ids = np.zeros((1, 32), np.int32)
        ids[0, : len(prompt) + place] = prompt + written
        row = np.asarray(forward(ids)[0, len(prompt) + place - 1])
        answer = ShapedAnswer(dataclasses.replace(shaped_one, id=0), prompt, VOCABULARY)
        for earlier in written:
            answer.push(earlier)
        changed = shaped(jnp.asarray(row[None]), shaping_of(1, {0: answer}, VOCABULARY))
        assert token == int(np.argmax(changed)), place
        likeliest = candidate.likeliest[place]
        assert [one.token for one in likeliest] == np.argsort(-row, kind="stable")[:3].tolist()
        written.append(token)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ada", "bo"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "$defs": {"tag": {"enum": ["x", "y z"]}},
}  # fmt: skip


def grammar_of(schema):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return read_form(Fields({"response_format": form})).grammar


def test_a_random_model_writes_the_schema(engine):
    """Draws, greedy answers and a plain one in one batch, with speculation and without."""
    grammar = grammar_of(SCHEMA)
    asked = [
        Request("drawn", [1, 2], 90, temperature=1.0, n=3, seed=4, grammar=grammar),
        Request("greedy", [3], 90, grammar=grammar, logit_bias=[(0, -100.0)]),
        Request("plain", [9, 9], 20),
    ]
    results = by_id(engine.generate(asked))
    (alone,) = engine.generate(asked[2:])
    assert results["plain"].candidates == alone.candidates
    for name in ("drawn", "greedy"):
        for candidate in results[name].candidates:
            assert candidate.finish == "end", candidate.text
            jsonschema.validate(json.loads(candidate.text), SCHEMA)
    assert len({candidate.text for candidate in results["drawn"].candidates}) > 1
    several = printable_engine(speculate=3)
    again = by_id(several.generate(asked))
    assert {name: answer.text for name, answer in again.items()} == {
        name: answer.text for name, answer in results.items()
    }


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"grammar": grammar_of({"type": "integer", "minimum": 5, "maximum": 2})}, "no answer can be written"),
        ({"grammar": grammar_of({"not": {}})}, "no answer can be written"),
        ({"grammar": "start: ("}, "no answer can be written"),
        ({"logit_bias": [(VOCABULARY, 1.0)]}, "logit_bias has the token 102"),
        ({"logit_bias": [(1, 101.0)]}, "expected tokens' ids with -100 to 100"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"presence_penalty": float("nan")}, "presence_penalty is nan"),
        ({"top_logprobs": 21}, "top_logprobs is 21"),
        ({"beams": 2, "n": 2, "min_p": 0.1}, "beams is 2"),
    ],
)  # fmt: skip
def test_refusals(engine, options, sentence):
    refuses(sentence, lambda: list(engine.generate([Request(0, [1, 2], 8, **options)])))
