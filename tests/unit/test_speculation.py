"""Speculation: answers are those of steps of one token, whatever is proposed."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from test_engine import END, Letters, make_engine
from tiny_llm import MODEL, SIZES, by_id, tiny_llama

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding.requests import Request, Scoring
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.decoding.speculation import look_up

pytestmark = pytest.mark.slow

SPECULATING = dataclasses.replace(SIZES, speculate=4)


def followed(text, count):
    """What `look_up` says, written out with lists; None where nothing is in common."""
    last = len(text) - 1
    common = []
    for place in range(last):
        length = 0
        while length < min(3, place + 1) and text[place - length] == text[last - length]:
            length += 1
        common.append(length)
    if not common or not max(common):
        return None
    place = max(range(last), key=lambda n: (common[n], n))
    return [text[place + 1 + n % (last - place)] for n in range(count)]


def test_the_longest_last_place_is_continued():
    rng = np.random.default_rng(0)
    texts = rng.integers(0, 4, (64, 20)).astype(np.int32)
    positions = rng.integers(0, 20, 64).astype(np.int32)
    got = jax.jit(look_up, static_argnums=2)(texts, positions, 3)
    told = 0
    for text, position, row in zip(texts.tolist(), positions, got.tolist(), strict=True):
        want = followed(text[: position + 1], 3)
        told += want is not None
        assert want is None or row == want
    assert told > 40


def requests():
    """Prompts of all lengths, of which some repeat themselves; greedy and drawn, with stops."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(8, 50, rng.integers(1, 70)).tolist() for _ in range(6)]
    prompts += [[*prompt[:12], *prompt[:12], *prompt[:5]] for prompt in prompts[:3]]
    kinds = [
        {"max_new_tokens": 24},
        {"max_new_tokens": 24, "temperature": 0.7, "seed": 3, "n": 2},
        {"max_new_tokens": 1},
        {"max_new_tokens": 30, "temperature": 1.5, "top_k": 9, "top_p": 0.8},
        {"max_new_tokens": 40, "stop": ["e", "th"]},
    ]
    return [
        Request((n, kind), prompt, logprobs=True, **options)
        for n, prompt in enumerate(prompts)
        for kind, options in enumerate(kinds)
    ]


def answers(engine):
    return {
        key: [
            (drawn.tokens, drawn.text, drawn.finish, drawn.logprobs) for drawn in result.candidates
        ]
        for key, result in by_id(engine.generate(requests())).items()
    }


def equal(got, want):
    assert got.keys() == want.keys()
    for key, candidates in want.items():
        for one, other in zip(got[key], candidates, strict=True):
            assert one[:3] == other[:3]
            np.testing.assert_allclose(one[3], other[3], rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def one_by_one():
    return answers(make_engine())


@pytest.mark.parametrize("speculate", [2, 4, 8])
def test_answers_are_those_of_single_tokens(one_by_one, speculate):
    engine = make_engine(sizes=dataclasses.replace(SIZES, speculate=speculate))
    equal(answers(engine), one_by_one)
    counts = engine.throughput
    assert counts.decode_tokens == sum(
        len(one[0]) - 1 for candidates in one_by_one.values() for one in candidates
    )


def test_a_draft_proposes_what_the_model_takes(one_by_one):
    """An equal model is always right, also where tokens are drawn; another one changes nothing."""
    steps = {}
    for name, seed in (("equal", 6), ("another", 1)):
        engine = make_engine(sizes=SPECULATING, draft=tiny_llama(MODEL, seed))
        equal(answers(engine), one_by_one)
        steps[name] = engine.throughput.decode_tokens / engine.throughput.steps
    assert steps["equal"] > 1.5 * steps["another"]


REFUSED = [
    ({"sizes": {"speculate": 9}}, "engine.speculate is 9: expected 1"),
    ({"sizes": {"speculate": 0}}, "engine.speculate is 0: expected 1"),
    ({"sizes": {"speculate": 2, "scan_layers": True}}, "pages of 128 columns.*set it to 1"),
    ({"draft": {}}, "engine.draft: engine.speculate is 1.*set that to 4"),
    ({"sizes": {"speculate": 2}, "draft": {"positions": 100}}, "reads 100 tokens.*leave engine"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_cannot_be_speculated_is_refused(changes, message):
    draft = changes.get("draft")
    with pytest.raises(UserError, match=message):
        options = {} if draft is None else {"draft": tiny_llama(dataclasses.replace(MODEL, **draft))}
        make_engine(sizes=dataclasses.replace(SIZES, **changes.get("sizes", {})), **options)
