"""An answer's bits do not depend on what else is served, nor on the engine's sizes."""

from __future__ import annotations

import pytest

from mmqa_jax.decoding.requests import Scoring
from tests.equal_bits import answers, engine, requests, scorings

pytestmark = pytest.mark.slow


def assert_same(expected, found):
    different = [key for key in found if found[key] != expected[key]]
    assert found
    assert not different, different


@pytest.mark.parametrize(("dtype", "tied"), [("float32", False), ("bfloat16", True)])
def test_bits(dtype, tied):
    """1, 2, 9 and 40 prompts; 4, 16 and 32 slots; other lengths, batches and orders; prefixes that
    another prompt left, and none."""
    asked = [*requests(40), *scorings(3)]
    first = engine(dtype, tied=tied, slots=16)
    expected = answers(first, *asked)
    for count in (1, 2, 9):
        first.forget()
        assert_same(expected, answers(first, *requests(count)))
        assert_same(expected, answers(first, *requests(count)))  # all prefixes are there
    assert_same(expected, answers(first, *reversed(asked)))
    for sizes in (
        {"slots": 4, "prefill_tokens": 128},
        {"slots": 32, "length": 512, "prefill_tokens": 512},
    ):
        assert_same(expected, answers(engine(dtype, tied=tied, **sizes), *asked))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_drawn_token_has_its_score(dtype):
    """What was decoded token by token is scored in chunks with the same bits."""
    served = engine(dtype, slots=4)
    asked = requests(9)
    drawn = answers(served, *asked)
    scored = answers(
        served, *(Scoring(("scored", one.id), one.prompt, [drawn[one.id][0]]) for one in asked)
    )
    assert_same({("scored", n): [logprobs] for n, (_, logprobs) in drawn.items()}, scored)
