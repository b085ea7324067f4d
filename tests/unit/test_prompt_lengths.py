"""Prompts that a server's context does not hold, where the server counts tokens."""

import pytest
from openai_stub import Stub, answer, error, said
from test_backend_http import QUICK
from tiny_llm import flag

from mmqa_jax.decoding.requests import TooLong
from mmqa_jax.prompting.backends import Chat, Choices, Completion, Decoding, Message
from mmqa_jax.prompting.backends.http import OpenAIBackend
from tests.refusals import refuses

USER = (Message("system", ("Be brief.",)), Message("user", (flag(), "ab" * 300)))


@pytest.mark.parametrize(
    ("query", "body", "new"),
    [
        (Completion("a", "ab" * 300, Decoding(max_new_tokens=40)), {"prompt": "ab" * 300}, 40),
        (Choices("a", "ab" * 300, ("c", "cde")), {"prompt": "ab" * 300 + "cde"}, 1),
        (
            Chat("a", USER, Decoding(max_new_tokens=40)),
            {
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "ab" * 300},
                ]
            },
            40,
        ),
    ],
)
def test_a_server_that_counts_tokens_refuses_before_it_is_asked(query, body, new):
    """What its context holds is let through, to the token; nothing is generated."""
    counted = []

    def count(asked):
        counted.append(asked)
        return answer({"count": tokens, "max_model_len": 600})

    with Stub(said, max_model_len=600, count=count).serving() as stub:
        backend = OpenAIBackend("tiny", QUICK)
        tokens = 600 - new
        backend.check(query)
        tokens += 2
        refuses(rf"{tokens} tokens plus {new} new ones is 2", backend.check, query, error=TooLong)
        backend.check(Completion("short", "ab"))  # no token is shorter than a byte
    assert counted == [{"model": "tiny", **body}] * 2
    assert stub.asked == []


def test_a_server_that_counts_no_tokens_is_asked_once_for_them():
    counted = []

    def count(asked):
        counted.append(asked)
        return error(404, "Not Found")

    long = Completion("a", "ab" * 900)
    with Stub(said, max_model_len=600, count=count).serving():
        backend = OpenAIBackend("tiny", QUICK)
        backend.check(long)
        backend.check(long)
        assert len(counted) == 1
    with Stub(said, count=count).serving():  # the length of its context is not known
        OpenAIBackend("tiny", QUICK).check(long)
    assert len(counted) == 1
