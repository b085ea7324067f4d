"""Servers that are slow, endless, wrong or hostile: a failed request, never an answer or a crash.

The servers listen on 127.0.0.1 and end after seconds; deadlines are below one.
"""

import gzip
import itertools
import json
import os
import re
import socket
import struct
import threading
import time
import tracemalloc
import urllib.parse

import pytest
from openai_stub import Stub, answer, drip, error, said
from tiny_llm import by_id

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.prompting.backends import Choices, Completion, Decoding
from mmqa_jax.prompting.backends.http import OpenAIBackend, ServerConfig
from tests.forks import server
from tests.refusals import refuses

pytestmark = pytest.mark.slow

QUICK = ServerConfig(timeout=0.4, retries=1, first_wait=0.01, longest_wait=0.05, max_failures=5)
CANARY = "sk-canary-7f3a91c2d45e6b80"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
JSON = {"Content-Type": "application/json"}
DRAWN = Decoding(temperature=1.0, n=2)
LOGPROBS = Decoding(logprobs=True)


def body(text: bytes, **headers):
    return 200, {**JSON, **headers}, text


def choices(*found, **more):
    return answer({"choices": list(found), **more})


def text(words="x", **more):
    return {"text": words, **more}


def logprobs(*values):
    numbers = ", ".join(values)
    return body(b'{"choices": [{"text": "x", "logprobs": {"token_logprobs": [%s]}}]}' % (
        numbers.encode(),
    ))  # fmt: skip


def reset(stream):
    """Ends the connection as the network does when a host is gone."""
    stream.write(HEAD + b"Content-Length: 99\r\n\r\n ")
    connection = stream._sock
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    os.close(connection.detach())


IN_TIME = "it gave no answer within 0.4 s"
HOSTILE = {
    "a byte at a time": (drip(HEAD + b"Content-Length: 99\r\n\r\n", b" "), IN_TIME),
    "a header at a time": (drip(b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n"), IN_TIME),
    "a head without end": (drip(HEAD + b"X-Long: ", b"a"), IN_TIME),
    "chunks without end": (drip(CHUNKED, b"1\r\n \r\n"), IN_TIME),
    "preliminary answers": (drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), IN_TIME),
    "silence": (drip(b"", b""), IN_TIME),
    "a flood": (drip(CHUNKED, b"100000\r\n" + b" " * 2**20 + b"\r\n", 0.0), "is larger than the"),
    "gzip bomb": (
        body(gzip.compress(bytes(2**24)), **{"Content-Encoding": "gzip"}),
        "is larger than the 1,",
    ),
    "bomb in a bomb": (
        body(gzip.compress(gzip.compress(bytes(2**24))), **{"Content-Encoding": "gzip, gzip"}),
        "is larger than the 1,",
    ),
    "damaged gzip": (body(b"\x1f\x8b\x08damaged", **{"Content-Encoding": "gzip"}), "malformed"),
    "cut gzip": (
        body(gzip.compress(said("x")[2])[:-20], **{"Content-Encoding": "gzip"}),
        "malformed",
    ),
    "no HTTP": (lambda stream: stream.write(b"\x16\x03\x01 no HTTP at all\r\n\r\n"), "speak HTTP"),
    "a reset": (reset, "the connection to it broke"),
    "a stream of events": (
        drip(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", b"data: {}\n\n"),
        r"\(of the type text/event-stream, expected application/json\)",
    ),
    "a text": ((200, {"Content-Type": "text/plain"}, said("x")[2]), "of the type text/plain"),
    "no type": ((200, {}, said("x")[2]), "without a content type"),
    "half a character": (body(b'{"choices": [{"text": "\\ud83d"}]}'), "half of a character"),
    "half a character of a message": (
        body(b'{"choices": [{"message": {"content": "a\\ude00b"}}]}'),
        "half of a character",
    ),
    "not UTF-8": (body(b'{"choices": [{"text": "\xff"}]}'), "not UTF-8"),
    "deep lists": (body(b"[" * 100_000 + b"]" * 100_000), "nested more than 100 deep"),
    "deep objects beside": (
        body(b'{"choices": [{"text": "x"}], "a": ' + b'{"a":' * 500 + b"1" + b"}" * 501),
        "nested more than 100 deep",
    ),
    "a huge integer": (
        body(b'{"choices": [{"text": "x"}], "created": ' + b"1" * 5000 + b"}"),
        "more than 4,300 digits",
    ),
    "an error in a success": (answer({"error": {"message": "overloaded"}}), r"error \(overloaded"),
    "an error beside an answer": (choices(text(), error="cut"), r"answers with an error \(cut"),
    "an error's code": (answer({"error": {"message": "busy", "code": 503}}), r"says 503 \(busy"),
    "a list": (answer([1, 2]), "it has no choices"),
    "null": (answer(None), "it has no choices"),
    "choices that are none": (answer({"choices": ["x"]}), "a choice is no object"),
    "a text that is none": (choices(text(["x"])), "a choice has no text"),
    "the key": (
        choices(text(f"It is {CANARY}.")),
        "its answer repeats OPENAI_API_KEY, which is written to no file",
    ),
    "more choices": (choices(text(), text()), "it has 2 of the 1 choices"),
}
HOSTILE_NUMBERS = {
    "NaN": (logprobs("NaN"), "no logarithm of a probability"),
    "Infinity": (logprobs("-Infinity"), "no logarithm of a probability"),
    "a huge float": (logprobs("-1e400"), "no logarithm of a probability"),
    "a huge integer": (logprobs("-" + "9" * 400), "no logarithm of a probability"),
    "a probability of 3": (logprobs("1.1"), "no logarithm of a probability"),
    "a word": (logprobs('"-1"'), "no logarithm of a probability"),
    "true": (logprobs("true"), "no logarithm of a probability"),
    "none for a text": (logprobs(), "lacks the requested log-probabilities"),
}
HOSTILE_CHOICES = {
    "fewer": (choices(text()), "it has 1 of the 2 choices that were requested"),
    "one twice": (choices(text(index=0), text(index=0)), "not numbered from 0 on, each once"),
    "other numbers": (choices(text(index=1), text(index=2)), "not numbered from 0 on, each once"),
    "odd numbers": (choices(text(index="0"), text(index=[1])), "not numbered from 0 on"),
}
CASES = [
    *((name, *case, Decoding()) for name, case in HOSTILE.items()),
    *((f"log-probability {name}", *case, LOGPROBS) for name, case in HOSTILE_NUMBERS.items()),
    *((f"choices: {name}", *case, DRAWN) for name, case in HOSTILE_CHOICES.items()),
]


@pytest.mark.parametrize(
    ("reply", "reason", "decoding"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_a_hostile_reply_is_a_failed_request(reply, reason, decoding):
    """Sent again, then counted and named, within the deadline of each try; the others go on."""
    good = [text("good", logprobs={"token_logprobs": [-1.0]}) for _ in range(decoding.n)]

    def answers(asked):
        return choices(*good) if asked["prompt"] == "good" else reply

    with Stub(answers).serving(CANARY) as stub:
        backend = OpenAIBackend("tiny", QUICK)
        began = time.monotonic()
        found = by_id(backend.answer(Completion(p, p, decoding) for p in ("bad", "good")))
        assert time.monotonic() - began < 4
    assert {n: result.text for n, result in found.items()} == {"good": "good"}
    (failure,) = backend.failures
    assert failure.id == "bad"
    assert re.search(reason, failure.reason), failure.reason
    assert failure.reason.endswith("after 2 tries")
    assert len(stub.asked) == 3
    assert (backend.usage.retries, backend.usage.failures, backend.usage.requests) == (1, 1, 1)


def test_a_bomb_takes_no_more_memory_than_its_limit():
    """30 KiB that become 30 MiB; the limit of 64 tokens is 1.1 MiB."""
    packed = gzip.compress(bytes(30 * 2**20), 9)
    with Stub(lambda asked: body(packed, **{"Content-Encoding": "gzip"})).serving():
        backend = OpenAIBackend("tiny", QUICK)
        tracemalloc.start()
        try:
            list(backend.answer([Completion("a", "b")]))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    (failure,) = backend.failures
    assert "larger than the 1,1" in failure.reason
    assert peak < 12 * 2**20


def test_a_reply_may_be_as_large_as_what_was_asked_for():
    """Log-probabilities of many tokens of several answers, and nothing of it is cut."""
    one = {"token": "x" * 300, "logprob": -0.5, "bytes": list(range(200)), "top_logprobs": []}
    found = text("long", logprobs={"content": [one] * 1000})
    decoding = Decoding(max_new_tokens=1000, temperature=1.0, n=2, logprobs=True)
    with Stub(lambda asked: choices(found, found)).serving():
        backend = OpenAIBackend("tiny", ServerConfig(timeout=30, retries=0))
        (result,) = backend.answer([Completion("a", "b", decoding)])
    assert [len(one.logprobs) for one in result.candidates] == [1000, 1000]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(status):
    """Neither with a prompt nor with the key: another server would get both, and answer."""
    with Stub(lambda asked: said("of another")).serving(CANARY) as other:
        away = answer({}, status, Location=f"{other.url}/completions")
        with Stub(lambda asked: away).serving(CANARY):
            backend = OpenAIBackend("tiny", QUICK)
            assert list(backend.answer([Completion("a", "b")])) == []
        (failure,) = backend.failures
        assert failure.reason == f"it redirects to another address ({status}), which is not asked"
        with (
            Stub(said, models=away).serving(CANARY) as stub,
            pytest.raises(UserError, match=r"environment: the server of OPENAI_BASE_URL: it redi"),
        ):
            OpenAIBackend("tiny", QUICK)
        assert stub.asked == other.asked == []
    assert other.authorization == set()


def test_choices_in_another_order_come_in_that_of_their_numbers():
    """Without log-probabilities nothing else orders them: the same draws on every run."""
    decoding = Decoding(temperature=1.0, n=3)
    found = [text(str(n), index=n) for n in (2, 0, 1)]
    with Stub(lambda asked: choices(*found)).serving():
        (result,) = OpenAIBackend("tiny", QUICK).answer([Completion("a", "b", decoding)])
    assert [one.text for one in result.candidates] == ["0", "1", "2"]


def test_a_server_that_gives_one_answer_is_named_with_the_remedy():
    with Stub(lambda asked: said("x")).serving():
        backend = OpenAIBackend("tiny", ServerConfig(retries=0, max_failures=0))
        with pytest.raises(RunError, match=r"of the 2 choices .*; use a server that gives as many"):
            list(backend.answer([Completion("a", "b", DRAWN)]))


@pytest.mark.parametrize(
    ("name", "warned"),
    [
        ("tiny", False),
        ("tiny-2025-08-06", False),
        ("org/Tiny", False),
        (None, False),
        ("huge", True),
        ("org/tin-foil", True),
        ("\x1b[31mred", False),
        (["x"], False),
    ],
)
def test_another_models_answers_are_warned_of_once(name, warned, capsys):
    with Stub(lambda asked: choices(text(), model=name)).serving():
        assert len(list(OpenAIBackend("tiny", QUICK).answer(Completion(n, "a") for n in "ab"))) == 2
    found = capsys.readouterr().err
    assert found.count("the server answers as model") == warned
    assert not warned or f"--model=tiny: the server answers as model {name}; check" in found


@pytest.mark.parametrize("late", ["\xb2", "9" * 400, "-1", "nan", "1e9", "Mon, 1 Jan 0001 x", "\t"])
def test_odd_waits_are_no_waits(late):
    """Retry-After of any kind; none is waited for longer than the longest wait."""
    count = itertools.count()
    busy = error(503, "busy", **{"Retry-After": late})
    with Stub(lambda asked: said("good") if next(count) else busy).serving():
        (result,) = OpenAIBackend("tiny", QUICK).answer([Completion("a", "b")])
    assert result.text == "good"


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": -5, "completion_tokens": True},
        {"prompt_tokens": 10**30, "completion_tokens": 1.5},
        {"prompt_tokens": "7", "completion_tokens": [7]},
        [7],
        "many",
    ],
)
def test_odd_counts_of_tokens_are_none(usage):
    odd = {"usage": usage, "system_fingerprint": ["x"]}
    with Stub(lambda asked: choices(text(finish_reason={"a": 1}), **odd)).serving():
        backend = OpenAIBackend("tiny", QUICK)
        (result,) = backend.answer([Completion("a", "b")])
    assert (result.prompt_tokens, result.candidates[0].finish) == (0, "stop")
    assert (backend.usage.prompt_tokens, backend.usage.completion_tokens) == (0, 0)
    assert backend.system_fingerprints == set()


@pytest.mark.parametrize(
    "top", [[["x"], ["x"]], [{"a": "b"}, {"a": None}], [1, 2], [{"a": [1]}, {"a": -1}]]
)
def test_odd_echoes_are_failed_requests_or_refused(top):
    found = {"token_logprobs": [None, -1.0, -1.0], "top_logprobs": [None, *top]}
    usage = {"prompt_tokens": 2}

    def reply(asked):
        if not asked.get("echo"):
            return choices(text(), usage=usage)
        return choices(text(logprobs=found), usage={"prompt_tokens": 3})

    with Stub(reply).serving():
        backend = OpenAIBackend("tiny", QUICK)
        list(backend.answer([Choices("a", "b", ("c",))]))
    assert [failure.id for failure in backend.failures] in ([], ["a"])


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (body(b"[" * 100_000), "nested more than 100 deep|not valid JSON"),
        (body(b'{"data": [{"id": "\\ud83d"}]}'), "half of a character"),
        (drip(HEAD + b"Content-Length: 99\r\n\r\n", b" "), IN_TIME),
        (drip(CHUNKED, b"100000\r\n" + b" " * 2**20 + b"\r\n", 0.0), "larger than the 16,777,216"),
    ],
    ids=["deep", "half", "slow", "flood"],
)
def test_a_hostile_list_of_models_ends_the_run_in_a_sentence(models, message):
    config = ServerConfig(timeout=0.4 if message == IN_TIME else 5.0, retries=0)
    with Stub(said, models=models).serving(), pytest.raises(RunError, match=message):
        OpenAIBackend("tiny", config)


@pytest.mark.parametrize("length", ["600", -600, 1e400, [600], True, 10**30, {"a": 1}])
def test_an_odd_context_length_is_unknown(length):
    with Stub(lambda asked: said("x"), max_model_len=length).serving():
        backend = OpenAIBackend("tiny", QUICK)
        backend.check(Completion("a", "ab" * 900))


@pytest.mark.parametrize(
    "count",
    [
        drip(HEAD + b"Content-Length: 99\r\n\r\n", b" "),
        answer({"count": "many"}),
        answer({"count": 1e400}),
        answer({"count": -7}),
        answer([7]),
        body(b"[" * 100_000),
        answer({}, 307, Location="/elsewhere"),
    ],
)
def test_an_odd_count_of_tokens_is_none(count):
    """The server is not asked for it again, and may refuse the request itself."""
    with Stub(said, max_model_len=600, count=lambda asked: count).serving():
        backend = OpenAIBackend("tiny", QUICK)
        began = time.monotonic()
        backend.check(Completion("a", "ab" * 900))
        backend.check(Completion("b", "ab" * 900))
        assert time.monotonic() - began < 3


class Recorder:
    """A proxy that keeps what it is sent, and refuses it."""

    def __enter__(self):
        self.received = b""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(0.1)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._ends = time.monotonic() + 30
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def _serve(self):
        while time.monotonic() < self._ends:
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            with connection:
                connection.settimeout(0.5)
                self.received += connection.recv(65536)
                connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")

    def __exit__(self, *_):
        self._ends = 0.0
        self._thread.join()
        self._socket.close()


def test_a_proxy_sees_neither_key_nor_prompts(monkeypatch):
    """It is asked for https:// addresses alone, where it gets the host's name."""
    with Recorder() as proxy, Stub(lambda asked: said("good")).serving(CANARY) as stub:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
            monkeypatch.setenv(name.lower(), proxy.url)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        (result,) = OpenAIBackend("tiny", QUICK).answer([Completion("a", "b")])
        assert (result.text, proxy.received) == ("good", b"")
        secure = stub.url.replace("http:", "https:")
        monkeypatch.setenv("OPENAI_BASE_URL", secure)
        refuses("no connection to it", OpenAIBackend, "tiny", QUICK, error=RunError)
        assert proxy.received.startswith(b"CONNECT 127.0.0.1:")
        assert CANARY.encode() not in proxy.received
        assert b"tiny" not in proxy.received
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        proxy.received = b""
        with pytest.raises(RunError, match="no connection to it"):  # the stub speaks no TLS
            OpenAIBackend("tiny", QUICK)
        assert proxy.received == b""
        for wrong in ("socks5://127.0.0.1:1", "127.0.0.1", "http://user:secret@127.0.0.1:x"):
            monkeypatch.delenv("NO_PROXY")
            monkeypatch.setenv("https_proxy", wrong)
            with pytest.raises(UserError, match=r"^environment: HTTPS_PROXY is no address") as bad:
                OpenAIBackend("tiny", QUICK)
            assert wrong not in str(bad.value)
            monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("OPENAI_API_KEY", CANARY + "\r", "OPENAI_API_KEY holds a character that no header"),
        ("OPENAI_API_KEY", CANARY + "\nX-More: 1", "OPENAI_API_KEY holds a character"),
        ("OPENAI_API_KEY", f"\u201c{CANARY}\u201d", "OPENAI_API_KEY holds a character"),
        ("OPENAI_ORG_ID", "org\n", "OPENAI_ORG_ID holds a character"),
        ("OPENAI_BASE_URL", "localhost:8000/v1", "OPENAI_BASE_URL is no address of a server"),
        ("OPENAI_BASE_URL", "file:///etc/passwd", "OPENAI_BASE_URL is no address of a server"),
        ("OPENAI_BASE_URL", "http://127.0.0.1:port/v1", "OPENAI_BASE_URL is no address of a serv"),
        ("OPENAI_BASE_URL", "http:///v1", "OPENAI_BASE_URL is no address of a server"),
        ("OPENAI_BASE_URL", "http://[v1.x]:1/v1", "OPENAI_BASE_URL is no address of a server"),
        ("OPENAI_BASE_URL", "http://a:1/v1?key=x", "OPENAI_BASE_URL is no address of a server"),
        ("OPENAI_BASE_URL", "http://a:1/v1#part", "OPENAI_BASE_URL is no address of a server"),
    ],
)
def test_what_no_request_can_carry_is_refused_by_name(name, value, message, monkeypatch):
    with Stub(said).serving(CANARY):
        monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=f"^environment: {message}") as refused:
            OpenAIBackend("tiny", QUICK)
    assert CANARY not in str(refused.value)
    assert value not in str(refused.value)


def test_a_password_in_the_address_is_in_no_message(monkeypatch):
    password = "p%40ss-word-0123"
    said = f"no user with {password} or {urllib.parse.unquote(password)}"
    with Stub(lambda asked: error(400, said)).serving() as stub:
        monkeypatch.setenv("OPENAI_BASE_URL", stub.url.replace("//", f"//me:{password}@"))
        backend = OpenAIBackend("tiny", QUICK)
        assert not list(backend.answer([Completion("a", "a", Decoding())]))
    (failure,) = backend.failures
    assert "(400: no user with *** or ***)" in failure.reason


def test_cookies_are_not_kept():
    """A hostile server's would make every request longer."""

    def reply(asked):
        status, headers, data = said("yes")
        return status, {**headers, "Set-Cookie": f"a{asked['prompt']}={'b' * 3000}; Path=/"}, data

    with Stub(reply).serving() as stub:
        backend = OpenAIBackend("tiny", QUICK)
        found = by_id(backend.answer(Completion(n, str(n), Decoding()) for n in range(5)))
    assert len(found) == 5
    assert stub.cookies == {None}


def test_the_key_is_in_no_file_and_in_no_output(tmp_path):
    """`mmqa prompt`, with a server that repeats the key wherever it can, and logs at their most."""
    words = f"key {CANARY} of {{url}}"

    def reply(asked):
        repeated = words.format(url=stub.url)
        if asked["prompt"] == "good":
            return said("good")
        if asked["prompt"] == "repeat":
            return said(repeated)
        return error(400 if asked["prompt"] == "refuse" else 500, repeated, Location=repeated)

    prompts = ("good", "repeat", "refuse", "fail")
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"id": p, "prompt": p}) + "\n" for p in prompts)
    )
    verbose = (
        "import logging, sys; logging.basicConfig(level=1, force=True); "
        "from mmqa_jax.cli import main; sys.exit(main())"
    )
    flags = [
        *("prompt", "--raw", "--backend=openai", "--model=tiny", "--traceback", "--json"),
        *(f"--prompts={tmp_path / 'prompts.jsonl'}", f"--out={tmp_path / 'out.jsonl'}"),
        *(f"--cache={tmp_path / 'cache'}", "--config.server.retries=1"),
        "--config.server.first_wait=0.01",
    ]
    with Stub(reply).serving(CANARY) as stub:
        process = server().start(["-c", verbose, *flags], os.environ)
        printed, _ = process.communicate(120)
    assert process.returncode == 0, printed
    assert "DEBUG:" in printed
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert rows[0]["text"] == "good"
    reasons = [row["error"] for row in rows[1:]]
    assert "its answer repeats OPENAI_API_KEY, which is written to no file" in reasons[0]
    assert "key *** of ***" in reasons[1]
    assert "key *** of ***" in reasons[2]
    files = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert len(files) >= 3
    for name, held in {**files, "printed": printed.encode()}.items():
        assert CANARY.encode() not in held, name
