"""The engine as a backend: texts, conversations, pictures, and what the cache changes (nothing)."""

import contextlib
import dataclasses
import io
import tempfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from tiny_llm import END, LETTERS, SIZES, by_id, flag, text_tokenizer, tiny_backend, tiny_llava

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.hosts import distributed
from mmqa_jax.data.pictures.resize import llava_pixels
from mmqa_jax.decoding.requests import Request, Scoring, TooLong
from mmqa_jax.prompting import llava_prompt
from mmqa_jax.prompting.backends import Chat, Choices, Completion, Decoding, Message
from mmqa_jax.prompting.backends.cache import Cached, ResponseCache
from mmqa_jax.prompting.backends.engine import EngineBackend
from mmqa_jax.prompting.run import leads
from tests.refusals import refuses

pytestmark = pytest.mark.slow


def test_texts_and_conversations_are_the_engines_own_tokens(engine, backend):
    """A conversation is the text that ChatML's template makes of it, and no token more."""
    system, user = Message("system", ("Be brief.",)), Message("user", ("What is it",))
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is it<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = text_tokenizer().encode_plain(text)
    assert ids.count(END) == 2
    assert len(ids) == len(text) - 3 * len("<|im_start|>") - 2 * len("<|im_end|>") + 5
    (want,) = engine.generate([Request("c", ids, 8, logprobs=True)])
    decoding = Decoding(max_new_tokens=8, logprobs=True)
    (got,) = backend.answer([Chat("c", (system, user), decoding)])
    assert got.candidates == want.candidates
    # In a text to be continued the template's marks are letters, as in messages.
    spelled = text_tokenizer().encode_plain("".join(c for c in text if c in LETTERS))
    (want_spelled,) = engine.generate([Request("c", spelled, 8, logprobs=True)])
    (got,) = backend.answer([Completion("c", text, decoding)])
    assert got.candidates == want_spelled.candidates

    # Choices of a conversation begin the assistant's message.
    choices = ("A yes", "B no")
    (got,) = backend.answer([Choices("c", (system, user), choices)])
    rows = [text_tokenizer().encode_plain(choice) for choice in choices]
    for score, expected in zip(got.scores, engine.loglikelihood(ids, rows), strict=True):
        np.testing.assert_allclose(score.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    usage = backend.usage
    assert (usage.requests, usage.failures, usage.retries) == (3, 0, 0)
    assert usage.completion_tokens == 2 * len(want.candidates[0].tokens)
    assert set(backend.rates()) == {"prefill", "decode"}


def test_pieces_of_a_prompt_are_hidden_with_all_their_tokens(engine, tmp_path):
    pieces = ("one <|im_end|>.\n", "two.\n")
    message = Message("user", (f"Read:\n{''.join(pieces)}What?",))
    query = Choices("c", (message,), ("A yes.", "A"), hidden=pieces)
    encode, begin = text_tokenizer().encode_plain, "<|im_start|>user\nRead:\n"
    places, trunk = [(0, 0)], encode(begin)
    for piece in ("one imend.\n", "two.\n"):  # a mark in a source is letters
        places.append((len(trunk), len(trunk) + len(piece)))
        trunk += encode(piece)
    tail = encode("What?<|im_end|>\n<|im_start|>assistant\n")
    rows = [[*tail, *encode(text)] for text in query.continuations]
    scoring = Scoring(
        "c", trunk, rows * 3, hidden=[place for place in places for _ in rows], unscored=len(tail)
    )
    (want,) = engine.score([scoring])
    backend = tiny_backend(engine)
    with contextlib.closing(ResponseCache(tmp_path)) as cache:
        (got,) = Cached(backend, cache).answer([query])
        (kept,) = Cached(backend, cache).answer([query])
        unhidden = dataclasses.replace(query, hidden=())
        (whole,) = Cached(backend, cache).answer([unhidden])
    assert got == kept
    assert [score.logprobs for score in got.scores] == [score.logprobs for score in want.scores]
    assert len(whole.scores) == 2
    for one, other in zip(whole.scores, got.scores[:2], strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


words = st.text("abcde ", min_size=1, max_size=60).filter(str.strip)
decodings = st.builds(
    Decoding,
    max_new_tokens=st.integers(1, 8),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 2),
    stop=st.sampled_from([(), ("e",), (" ", "a")]),
    logprobs=st.booleans(),
)
asked = st.one_of(
    st.builds(Completion, id=st.none(), prompt=words, decoding=decodings),
    st.builds(
        Chat,
        id=st.none(),
        messages=words.map(lambda text: (Message("user", (text,)),)),
        decoding=decodings,
    ),
    st.builds(
        Choices,
        id=st.none(),
        prompt=words,
        continuations=st.lists(words.map("x".__add__), min_size=1, max_size=3).map(tuple),
    ),
)


def numbered(requests):
    return [type(request)(**{**vars(request), "id": n}) for n, request in enumerate(requests)]


@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(requests=st.lists(asked, min_size=1, max_size=8), kept=st.integers(0, 8))
def test_with_cache_and_without_the_same_answers(engine, requests, kept):
    requests = numbered(requests)
    plain = by_id(tiny_backend(engine).answer(requests))
    assert plain.keys() == {request.id for request in requests}
    second, third = tiny_backend(engine), tiny_backend(engine)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(ResponseCache(folder)) as cache,
    ):
        list(Cached(tiny_backend(engine), cache).answer(requests[:kept]))
        mixed = by_id(Cached(second, cache).answer(requests))
        again = by_id(Cached(third, cache).answer(requests))
    assert third.usage.requests == 0
    assert third.usage.cached == len(requests)
    for request in requests:
        one, other, last = plain[request.id], mixed[request.id], again[request.id]
        if isinstance(request, Choices):
            assert one == other == last
        else:
            assert one.candidates == other.candidates == last.candidates


def test_what_does_not_fit_is_refused_before_weights_are_loaded():
    def no_engine(demand):
        raise AssertionError("the engine was made")

    lazy = EngineBackend(no_engine, text_tokenizer(), length=SIZES.length, fingerprint="x")
    decoding = Decoding(max_new_tokens=10)
    lazy.check(Completion("a", "a" * (SIZES.length - 10), decoding))
    with pytest.raises(TooLong, match=r"request 'a': its prompt of 151 tokens .* 1 more than"):
        lazy.check(Completion("a", "a" * (SIZES.length - 9), decoding))
    lazy.check(Choices("a", "a" * 150, ("b" * 10, "c")))
    with pytest.raises(TooLong, match="plus 11 new ones is 1 more than"):
        lazy.check(Choices("a", "a" * 150, ("b", "c" * 11)))
    for request, message in [
        (Completion("a", ""), "its prompt is empty"),
        (Completion("a", "b", images=(flag(),)), "the model is a text-only LLaMA"),
        (Chat("a", (Message("user", ("b", flag())),)), "the model is a text-only LLaMA"),
        (Completion("a", "b", Decoding(temperature=-1)), "temperature is -1, expected 0"),
    ]:
        refuses(f"request 'a': .*{message}", lazy.check, request)
    bare = text_tokenizer()
    bare.template = None
    bare = EngineBackend(no_engine, bare, length=160, fingerprint="x")
    with pytest.raises(UserError, match="it has messages, but the model has no chat template"):
        bare.check(Chat("a", (Message("user", ("b",)),)))
    several = text_tokenizer()
    several.end_ids = (1, 2)  # as of many chat models
    several = EngineBackend(no_engine, several, length=160, fingerprint="x")
    with pytest.raises(UserError, match=r"'a': beam search .* one end token, the model has 2; le"):
        several.check(Completion("a", "b", Decoding(beams=2)))
    refuses("message: role is 'bot', expected one of system, user", Message, "bot", ("b",))


@pytest.mark.parametrize("key", ["model", "prompts"])
def test_processes_of_a_launch_that_are_asked_different_things(key, monkeypatch):
    asked = {"model": "tiny", "prompts": ["a"]}
    monkeypatch.setattr(distributed, "gather", lambda name, own: [own, {**own, key: "other"}])
    refuses(r"--prompts, --model: .* different ones, .*; give all the", leads, asked)
    monkeypatch.setattr(distributed, "gather", lambda name, own: [own, own])
    assert leads(asked)


def test_a_llava_sees_the_pictures_of_a_conversation():
    backend = tiny_llava()
    engine = backend.engine
    red, blue = flag(), flag((20, 30, 240), (3, 9))
    first = Message("user", (red, "What is it"))
    turns = (first, Message("assistant", ("A flag.",)), Message("user", (blue, "And this")))
    said = [("<image>\nWhat is it", "A flag."), ("<image>\nAnd this", None)]
    text = llava_prompt.conversation(said)
    encode = text_tokenizer().encode_plain
    ids = llava_prompt.prompt_ids(text, encode, image_token=-200, bos=None)
    assert ids.count(-200) == 2
    pixels = [
        llava_pixels(Image.open(io.BytesIO(picture.data)).convert("RGB"), 12)
        for picture in (red, blue)
    ]
    (want,) = engine.generate([Request("a", ids, 4, logprobs=True, images=pixels)])
    decoding = Decoding(max_new_tokens=4, logprobs=True)
    backend.check(Chat("a", turns, decoding))
    (got,) = backend.answer([Chat("a", turns, decoding)])
    assert got.candidates == want.candidates
    assert got.prompt_tokens == len(ids) - 2 + 2 * 9
    (swapped,) = engine.generate([Request("a", ids, 4, logprobs=True, images=pixels[::-1])])
    assert swapped.candidates != want.candidates

    # The continuation follows the blank that LLaVA was trained with.
    (scores,) = backend.answer([Choices("a", turns, ("A", "no"))])
    rows = [encode(" A"), encode(" no")]
    (expected,) = engine.score([Scoring("a", ids, rows, images=pixels)])
    for score, wanted in zip(scores.scores, expected.scores, strict=True):
        assert score.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
    # A text without placeholder begins with its pictures.
    (plain,) = backend.answer([Completion("a", "Say", decoding, (red,))])
    (spelled,) = backend.answer([Completion("a", "<image>\nSay", decoding, (red,))])
    assert plain.candidates == spelled.candidates
    with pytest.raises(UserError, match="its text has 1 <image> placeholders for 2 pictures"):
        backend.check(Completion("a", "<image>", decoding, (red, blue)))
    with pytest.raises(UserError, match="LLaVA's messages are system, user, expected user and"):
        backend.check(Chat("a", (Message("system", ("x",)), first), decoding))
    with pytest.raises(TooLong, match="its prompt of 311 tokens plus 10 new ones is 1 more"):
        backend.check(Completion("a", "a" * 301, Decoding(max_new_tokens=10), (red,)))
