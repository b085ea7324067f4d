"""What a T5's engine and backend refuse before a batch is made."""

import pytest
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding.requests import Request, Scoring, Unanswerable
from mmqa_jax.decoding.t5_engine import T5Engine, T5EngineConfig
from mmqa_jax.models.t5.config import T5Config
from mmqa_jax.models.t5.network import T5
from mmqa_jax.prompting.backends import Choices, Completion, Decoding
from mmqa_jax.prompting.backends.t5 import T5Backend
from tests.drawn_weights import drawn
from tests.refusals import refuses

SIZES = T5Config(
    vocab_size=9, hidden=8, head_size=4, heads=2, mlp=8, encoder_layers=1, decoder_layers=1,
    buckets=4, farthest=3,
)  # fmt: skip


class Digits:
    """A tokenizer of the digits 2 to 8."""

    end_ids = (0, 1)
    shield = staticmethod(str)

    def encode(self, text):
        return [*self.encode_plain(text), 1]

    def encode_plain(self, text):
        return [int(digit) for digit in text]


def engine(*end_ids: int) -> T5Engine:
    model = drawn(lambda: T5(SIZES, rngs=nnx.Rngs()), 0)
    return T5Engine(model, Digits(), end_ids=end_ids, config=T5EngineConfig(length=4))


@pytest.mark.parametrize(
    ("request_", "kind", "message"),
    [
        (Request("a", []), Unanswerable, "its prompt is empty; give some text"),
        (Scoring("a", [2], [[3], []]), Unanswerable, "a continuation has no token; give some text"),
        (Request("a", [9], 4), UserError, "a token that the model lacks, expected 0 to 8; use the"),
        (Request("a", [2], 5), UserError, "its answer has up to 5 tokens, .* lower max_new_tokens"),
        (Request("a", [2], 4, beams=2), UserError, "one end token, the model has 2; leave beams"),
    ],
)
def test_requests_that_cannot_be_served(request_, kind, message):
    served = engine(0, 1)
    refuses(f"request 'a': .*{message}", served.check, request_, error=kind)


def test_beams_that_were_not_checked_are_refused_too():
    with pytest.raises(UserError, match=r"request 'a': beam .* the model has 0; leave beams out"):
        list(engine().serve([Request("a", [2], 4, beams=2)]))


def test_end_tokens_are_the_models():
    refuses("end token 9: expected 0 to 8; use the model's own", engine, 1, 9)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (Completion("a", "23", Decoding(beams=2)), "one end token, the model has 2; leave beams"),
        (Choices("a", "23", ("4", "")), "continuation '' has no token; give some text"),
        (Completion("a", ""), "its prompt is empty"),
    ],
)
def test_queries_are_refused_before_weights_are_loaded(query, message):
    def no_engine():
        raise AssertionError("the engine was made")

    lazy = T5Backend(no_engine, Digits(), length=64, fingerprint="x")
    refuses(f"request 'a': .*{message}", lazy.check, query, error=(UserError, Unanswerable))
