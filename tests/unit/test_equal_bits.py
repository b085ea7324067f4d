"""An answer's bits do not depend on what else is served, nor on the engine's sizes."""

import pytest

from mmqa_jax.decoding.requests import Scoring
from tests.equal_bits import KINDS, answers, assert_same, engine, requests, scorings

# Compiled as for users: other programs have other bits.
pytestmark = [pytest.mark.slow, pytest.mark.optimized]


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
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_all_kinds(kind, dtype):
    """2 and 9 prompts, 2 and 4 slots, another order, with and without prefixes that are there; what
    was decoded token by token is scored in chunks with the same bits."""
    asked = [*requests(9, kind), *scorings(2)]
    first = engine(dtype, kind, slots=4)
    expected = answers(first, *asked)
    for count in (2, 9):
        first.forget()
        for there in (False, True):
            assert_same(expected, answers(first, *requests(count, kind)), (count, there))
    assert_same(expected, answers(first, *reversed(asked)), "reversed")
    fewer = engine(dtype, kind, slots=2, prefill_tokens=128)
    assert_same(expected, answers(fewer, *asked), "2 slots")

    drawn = requests(9, kind)
    again = [
        Scoring(
            ("drawn", one.id),
            one.prompt,
            [expected[one.id][0]],
            adapter=one.adapter,
            images=one.images,
        )
        for one in drawn
    ]
    wanted = {("drawn", one.id): [expected[one.id][1]] for one in drawn}
    assert_same(wanted, answers(first, *again), "scored")
