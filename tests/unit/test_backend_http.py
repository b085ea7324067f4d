"""A server as a backend: what is sent, what comes of it, and servers that fail as they are told."""

import base64
import contextlib
import itertools
import logging
import math
import threading
import time

import numpy as np
import pytest
from openai_stub import Stub, answer, error, said
from tiny_llm import by_id, flag, text_tokenizer

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.prompting.backends import Chat, Choices, Completion, Decoding, Message, Picture
from mmqa_jax.prompting.backends.cache import Cached, ResponseCache
from mmqa_jax.prompting.backends.http import OpenAIBackend, ServerConfig
from tests.refusals import refuses

pytestmark = pytest.mark.slow

QUICK = ServerConfig(timeout=0.5, retries=3, first_wait=0.01, longest_wait=1.5, max_failures=2)
KEY = "sk-very-secret-0123456789"


@contextlib.contextmanager
def served(reply, config=QUICK):
    """A server that replies so, and a backend that asks it."""
    with Stub(reply).serving() as stub:
        yield OpenAIBackend("tiny", config), stub


def or_good(reply):
    """Replies to the prompt `good` as a server should, to others as `reply` does."""
    return lambda body: said("good") if body["prompt"] == "good" else reply(body)


def test_a_server_answers_in_the_same_form():
    """What is sent, and what comes of it; pictures arrive byte for byte, the key in its header."""

    choices = [
        {
            "text": " Paris",
            "finish_reason": "length",
            "logprobs": {"token_logprobs": [-0.5, -0.25]},
        },
        {"text": " Rome", "finish_reason": "stop", "logprobs": {"content": [{"logprob": -0.125}]}},
    ]
    usage = {"prompt_tokens": 5, "completion_tokens": 3}
    completion = answer({"choices": choices, "usage": usage, "system_fingerprint": "fp_1"})
    decoding = Decoding(
        max_new_tokens=2,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        stop=("\n",),
        n=2,
        seed=7,
        logprobs=True,
    )
    picture = flag()
    question = Message("user", (picture, "What is this?"))
    reply = lambda body: completion if "prompt" in body else said("A red flag.")  # noqa: E731
    with served(reply) as (backend, stub):
        (one,) = backend.answer([Completion("a", "The capital is", decoding)])
        (two,) = backend.answer([Chat("b", (Message("system", ("Be brief.",)), question))])
    assert stub.authorization == {f"Bearer {KEY}"}
    (path, body), (chat_path, chat) = stub.asked
    assert path == "/v1/completions"
    assert body == {
        "model": "tiny", "prompt": "The capital is", "max_tokens": 2, "temperature": 0.5,
        "top_k": 3, "top_p": 0.9, "stop": ["\n"], "n": 2, "seed": 7, "logprobs": 1,
    }  # fmt: skip
    assert [(c.text, c.total, c.logprobs, c.finish) for c in one.candidates] == [
        (" Rome", -0.125, (-0.125,), "stop"),
        (" Paris", -0.75, (-0.5, -0.25), "length"),
    ]
    assert (one.id, one.prompt_tokens) == ("a", 5)
    assert chat_path == "/v1/chat/completions"
    assert chat["max_completion_tokens"] == 64
    assert "seed" not in chat  # nothing is drawn
    assert chat["messages"][0] == {"role": "system", "content": "Be brief."}
    image, text = chat["messages"][1]["content"]
    assert text == {"type": "text", "text": "What is this?"}
    head, _, data = image["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(data) == picture.data
    assert two.text == "A red flag."
    assert math.isnan(two.candidates[0].total)
    usage = backend.usage
    assert (usage.requests, usage.retries, usage.failures) == (2, 0, 0)
    assert (usage.prompt_tokens, usage.completion_tokens) == (8, 5)
    assert backend.system_fingerprints == {"fp_1", "fp"}


def html(status=200):
    return status, {"Content-Type": "text/html"}, b"<html>Bad gateway</html>"


FAULTS = {
    "500": lambda: error(500, "oops"),
    "503 in HTML": lambda: html(503),
    "429": lambda: error(429, "slow down"),
    "not JSON": lambda: (200, {"Content-Type": "application/json"}, b'{"choices": [{"te'),
    "HTML": html,
    "no choices": lambda: answer({"choices": []}),
    "no text": lambda: answer({"choices": [{"message": {"content": None}}]}),
    "cut": lambda: (200, {"Content-Length": "1000"}, b"{}"),
    "slow": lambda: time.sleep(0.8) or said("late"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_that_pass_are_waited_out(fault):
    count = itertools.count()
    reply = lambda body: FAULTS[fault]() if next(count) < 2 else said("good")  # noqa: E731
    with served(reply) as (backend, stub):
        (result,) = backend.answer([Completion("a", "b")])
    assert result.text == "good"
    assert len(stub.asked) == 3
    assert (backend.usage.retries, backend.usage.failures, backend.failures) == (2, 0, [])


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_that_stay_are_counted_and_named(fault):
    with served(or_good(lambda body: FAULTS[fault]())) as (backend, stub):
        results = by_id(backend.answer(Completion(p, p) for p in ("bad", "good", "worse")))
        assert results.keys() == {"good"}
        assert {failure.id for failure in backend.failures} == {"bad", "worse"}
        assert all("after 4 tries" in failure.reason for failure in backend.failures)
        assert (backend.usage.requests, backend.usage.failures, backend.usage.retries) == (1, 2, 6)
        assert len(stub.asked) == 9
        message = "3 requests failed in a row, more than server.max_failures = 2"
        with pytest.raises(RunError, match=message):
            list(backend.answer([Completion("last", "bad")]))


def test_a_server_without_log_probabilities():
    reply = answer({"choices": [{"text": "good", "logprobs": None}]})
    wanted = Decoding(logprobs=True)
    lacks = pytest.raises(RunError, match="lacks the requested log-probabilities")
    with served(lambda body: reply) as (backend, _), lacks as failed:
        list(backend.answer(Completion(p, p, wanted) for p in "abc"))
    assert "use a server that gives log-probabilities of its answers" in str(failed.value)
    assert "works again" not in str(failed.value)


def test_waits_as_long_as_the_server_asks_and_longer_each_time():
    count = itertools.count()

    def reply(body):
        number = next(count)
        if number == 0:
            return error(429, "slow down", **{"Retry-After": "1"})
        return said("good") if number == 4 else error(500, "oops")

    config = ServerConfig(retries=5, first_wait=0.1, longest_wait=1.5)
    with served(reply, config) as (backend, stub):
        list(backend.answer([Completion("a", "b")]))
    waits = np.diff(stub.at)
    assert 1.0 <= waits[0] < 2.0
    for attempt, wait in enumerate(waits[1:], start=1):  # 0.1 s * 2^attempt, half of it random
        assert 0.05 * 2**attempt <= wait


def test_a_day_of_waiting_is_cut_short():
    count = itertools.count()
    busy = error(503, "busy", **{"Retry-After": "86400"})
    config = ServerConfig(retries=1, first_wait=0.01, longest_wait=0.2)
    with served(lambda body: said("good") if next(count) else busy, config) as (backend, stub):
        (result,) = backend.answer([Completion("a", "b")])
    assert result.text == "good"
    assert np.diff(stub.at)[0] < 30


def test_what_cannot_get_better_is_not_tried_again():
    too_long = error(400, "the context is too long")
    with served(or_good(lambda body: too_long)) as (backend, stub):
        results = by_id(backend.answer([Completion("long", "long"), Completion("g", "good")]))
    assert results.keys() == {"g"}
    assert len(stub.asked) == 2
    (failure,) = backend.failures
    assert failure.id == "long"
    assert failure.reason.startswith("the server refuses it (400: ")
    assert "the context is too long" in failure.reason


QUOTA = answer({"error": {"message": "m", "code": "insufficient_quota"}}, 429)


@pytest.mark.parametrize(
    ("reply", "kind", "message"),
    [
        (error(401, f"Incorrect API key provided: {KEY}"), UserError, "refuses OPENAI_A"),
        (error(404, "no such model"), UserError, "--model=tiny: the server of OPENAI_BASE_URL"),
        (QUOTA, RunError, "the server's quota is exhausted"),
    ],
)
def test_what_concerns_all_requests_ends_the_run(reply, kind, message):
    with (
        served(lambda body: reply) as (backend, stub),
        pytest.raises(kind, match=message) as caught,
    ):
        list(backend.answer(Completion(n, "b") for n in range(50)))
    assert KEY not in str(caught.value)
    assert len(stub.asked) <= QUICK.concurrency


def test_ids_and_the_model_are_named_as_the_user_knows_them():
    config = ServerConfig(retries=0, max_failures=0)
    with served(lambda body: error(500, "oops"), config) as (backend, _):
        with pytest.raises(RunError, match=r"the last, 4687845/0, because it says 500"):
            list(backend.answer([Completion(("4687845", 0), "a")]))
        with pytest.raises(UserError, match=r"request q/planner: beams is 2"):
            backend.check(Completion(("q", "planner"), "a", Decoding(beams=2)))
    with Stub(lambda body: error(404, "none")).serving():
        backend = OpenAIBackend("tiny", QUICK, "config key parts.llm.model")
        with pytest.raises(UserError, match=r"^config key parts\.llm\.model=tiny: the server of"):
            list(backend.answer([Completion("a", "b")]))


LONGER = (
    ("This model's maximum context length is 64 tokens. However, you requested 99", None),
    ("Please shorten it", "context_length_exceeded"),
    ("the request exceeds the available context size", None),
)


@pytest.mark.parametrize(("message", "code"), LONGER)
def test_a_refusal_for_its_length_has_a_name_of_its_own(message, code):
    refused = answer({"error": {"message": message, "code": code}}, 400)
    with served(or_good(lambda body: refused)) as (backend, _):
        list(backend.answer([Completion("g", "good"), Completion("l", "long")]))
        (failure,) = backend.failures
        assert failure.reason.startswith("it exceeds the server's context (400: ")
    remedy = pytest.raises(RunError, match=r"show fewer examples \(of a row: options\.shots\)")
    with served(lambda body: refused) as (backend, _), remedy:
        list(backend.answer(Completion(n, "long") for n in range(9)))


def test_a_missing_server_is_named_without_its_address(monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    refuses("environment: OPENAI_BASE_URL is not set; set it to the", OpenAIBackend, "tiny", QUICK)
    with Stub(said).serving() as stub:
        pass
    monkeypatch.setenv("OPENAI_BASE_URL", stub.url)  # nobody listens there any more
    with pytest.raises(RunError, match="no connection to it, after 3 tries; start it") as caught:
        OpenAIBackend("tiny", QUICK)
    assert stub.url not in str(caught.value)


def test_neither_key_nor_address_gets_anywhere(tmp_path, caplog):
    """Not into messages, logs, causes, the cache or the fingerprint."""
    caplog.set_level(logging.DEBUG)

    def reply(body):
        return error(400, f"refused for {KEY} at {stub.url}")

    with served(or_good(reply)) as (backend, stub):
        cached = Cached(backend, ResponseCache(tmp_path / "cache"))
        list(cached.answer([Completion("g", "good"), Completion("x", "x")]))
    (failure,) = backend.failures
    assert "refused for *** at ***" in failure.reason
    kept = b"".join(file.read_bytes() for file in tmp_path.glob("cache/*"))
    assert b"good" in kept
    for place in (kept.decode(errors="replace"), backend.fingerprint, repr(vars(backend))):
        assert KEY not in place
        assert stub.url not in place
    assert KEY not in caplog.text


def test_as_many_at_once_as_allowed():
    gate = threading.Barrier(5)

    def reply(body):
        gate.wait(timeout=20)  # five must come together, or none gets on
        return said(body["prompt"])

    with served(reply, ServerConfig(concurrency=5, timeout=30)) as (backend, stub):
        results = by_id(backend.answer(Completion(n, str(n)) for n in range(20)))
    assert {n: result.text for n, result in results.items()} == {n: str(n) for n in range(20)}
    assert stub.most == 5


def test_leaving_early_gives_up_what_is_under_way():
    release = threading.Event()

    def reply(body):
        if body["prompt"] != "quick":
            release.wait(60)
        return said("good")

    with served(reply, ServerConfig()) as (backend, _):
        results = backend.answer(Completion(n, "slow" if n else "quick") for n in range(4))
        assert next(results).id == 0
        began = time.monotonic()
        results.close()
        assert time.monotonic() - began < 20
        release.set()


def test_scores_of_a_server_equal_the_engines(engine, backend):
    """The stub echoes in the older form of completions, with the tiny engine's numbers."""
    tokenizer = text_tokenizer()

    def reply(body):
        ids = tokenizer.encode(body["prompt"])
        usage = {"prompt_tokens": len(ids), "completion_tokens": 1}
        if not body.get("echo"):
            return answer({"choices": [{"text": "z", "logprobs": None}], "usage": usage})
        with lock:
            (score,) = engine.loglikelihood(ids[:1], [ids[1:]])
            greedy = [
                engine.loglikelihood(ids[:n], [[ids[n]]])[0].greedy for n in range(1, len(ids))
            ]
        top = [
            {"t": value if good else value + 1.0}
            for value, good in zip(score.logprobs, greedy, strict=True)
        ]
        logprobs = {
            "token_logprobs": [None, *score.logprobs, -0.5],
            "top_logprobs": [None, *top, {"t": -0.5}],
        }
        choice = {"text": body["prompt"] + "z", "logprobs": logprobs}
        return answer({"choices": [choice], "usage": usage})

    lock = threading.Lock()
    requests = [
        Choices("a", "The capital is ", ("Paris", "Rome, or not")),
        Choices("b", "a\nb", (" c", "d", "a")),
    ]
    (greedy,) = backend.answer([Completion(0, "abc", Decoding(max_new_tokens=2))])
    requests.append(Choices("c", "abc", (greedy.text, "zz")))
    with served(reply, ServerConfig(timeout=60)) as (remote, _):
        got = by_id(remote.answer(requests))
    want = by_id(backend.answer(requests))
    for request in requests:
        for one, other in zip(got[request.id].scores, want[request.id].scores, strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-4)
            assert one.total == pytest.approx(other.total, abs=1e-3)
            assert one.greedy == other.greedy
    assert got["c"].scores[0].greedy
    assert remote.usage.requests == 3


def echoed(token_logprobs, *, prompt, **top):
    choice = {"text": "x", "logprobs": {"token_logprobs": token_logprobs, **top}}
    return answer({"choices": [choice], "usage": {"prompt_tokens": prompt}})


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (said("x"), "its answer has none"),
        (error(400, "Only no echo is supported"), "it says 400: .*Only no echo"),
        (echoed([-1.0], prompt=3, top_logprobs=[{}]), "1 tokens have some, the prompt has 3"),
        (echoed([-1.0], prompt=3, top_logprobs=None), "its answer has no top_logprobs"),
        (echoed([-1.0], prompt=None, top_logprobs=[{}]), "do not say how many tokens a prompt has"),
        (echoed([None] * 4, prompt=4, top_logprobs=[{}] * 4), "some of its tokens have none, or"),
    ],
)
def test_a_server_that_cannot_score_says_so_in_one_sentence(reply, reason):
    ends = pytest.raises(UserError, match=rf"gives no log-probabilities .*{reason}.*; use one")
    with served(lambda body: reply if "echo" in body else said("x")) as (backend, _), ends:
        list(backend.answer([Choices("a", "b", ("c", "d"))]))


def test_a_continuation_without_a_token_is_a_failed_request():
    reply = echoed([None, -1.0, -1.0], prompt=3, top_logprobs=[None, {}, {}])
    with served(lambda body: reply if "echo" in body else said("x")) as (backend, _):
        assert not list(backend.answer([Choices("a", "b", ("",))]))
    (failure,) = backend.failures
    assert "continuation '' adds no token to its prompt; expected some text" in failure.reason


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        *(
            (key, value, "expected a positive number")
            for key in ("timeout", "first_wait", "longest_wait")
            for value in (0.0, -1.0, math.nan)
        ),
        ("retries", -1, "expected at least 0"),
    ],
)
def test_wrong_settings(key, value, message):
    refuses(rf"config key server\.{key}=.*: {message}", ServerConfig, **{key: value})


IN_MESSAGES = (Message("user", ("b",)),)
ODD = Message("user", (Picture(b"BM bitmap", "old.bmp"),))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Completion("a", "b", Decoding(beams=2)), "a server has no beam search"),
        (Completion("a", "b", images=(flag(),)), "a server only takes pictures in `messages`"),
        (Choices("a", IN_MESSAGES, ("c",)), "a server only scores continuations of a text"),
        (Choices("a", " \n", ("c",)), "its prompt is empty"),
        (Chat("a", (ODD,)), "old.bmp: not a PNG, JPEG, GIF or WebP"),
    ],
)
def test_what_the_api_cannot_say_is_refused(request_, message):
    with served(said) as (backend, _):
        pass
    refuses(message, backend.check, request_)


def test_the_fingerprint_is_of_server_and_model():
    with Stub(said).serving():
        one = OpenAIBackend("tiny", QUICK).fingerprint
        assert OpenAIBackend("tiny", ServerConfig(concurrency=1)).fingerprint == one
        assert OpenAIBackend("other", QUICK).fingerprint != one
    with Stub(said).serving():  # on another port
        assert OpenAIBackend("tiny", QUICK).fingerprint != one
