"""The door of `mmqa serve`: every route beside every fault of a client, on real sockets.

Each cell asserts what the client is told, that work for nobody is not done, and that the next request is
answered. What computes is a fake that waits at a gate, so that no cell hangs on how fast a machine is.
"""

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
import types

import numpy as np
import pytest
from served_app import serving

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Source
from mmqa_jax.decoding.requests import Candidate, Result
from mmqa_jax.runs.ask_corpus import AskedCorpus
from mmqa_jax.serve import ServeOptions, run
from mmqa_jax.serve.app import make_app
from mmqa_jax.serve.door import Door, Metrics
from mmqa_jax.serve.systems import Parts, Threads, answer_row

pytestmark = pytest.mark.slow
SOON = 20.0  # seconds in which a test machine answers
OPTIONS = ServeOptions(queue=2, timeout=60.0, body=0.25, header=0.2, upload=0.2)
AT_ONCE = {
    "/": "/",
    "/page/{name}": "/page/page.js",
    "/healthz": "/healthz",
    "/health": "/health",
    "/version": "/version",
    "/metrics": "/metrics",
    "/api/about": "/api/about",
    "/api/source/{name:path}": "/api/source/a",
    "/api/picture/{name:path}": "/api/picture/a",
    "/v1/models": "/v1/models",
    "/v1/models/{name:path}": "/v1/models/tiny",
}


def chat(model, steps, **more):
    return {"model": model, "messages": [{"role": "user", "content": str(steps)}], **more}


def completion(steps, **more):
    return {"model": "tiny", "prompt": str(steps), "max_tokens": 1, **more}


# Name -> (path, the body of a request of so many steps).
QUEUED = {
    "completion": ("/v1/completions", completion),
    "completion in pieces": ("/v1/completions", lambda n: completion(n, stream=True)),
    "chat": ("/v1/chat/completions", lambda n: chat("tiny", n)),
    "chat in pieces": ("/v1/chat/completions", lambda n: chat("tiny", n, stream=True)),
    "system": ("/v1/chat/completions", lambda n: chat("search", n)),
    "system in pieces": ("/v1/chat/completions", lambda n: chat("search", n, stream=True)),
    "page": ("/api/ask", lambda n: {"question": str(n), "system": "search"}),
    "response": ("/v1/responses", lambda n: {"model": "tiny", "input": str(n)}),
    "embeddings": ("/v1/embeddings", lambda n: {"model": "vectors", "input": ["a"] * 8 * n}),
    "rerank": (
        "/v1/rerank",
        lambda n: {"model": "vectors", "query": "a", "documents": ["a"] * 8 * n},
    ),
}
# Queued, since a body has to be read; of uploads this server takes none.
SHORT = ("/tokenize", "/detokenize", "/api/upload")


class Slow:
    """All that computes: a language model, a system and an encoder, step by step, at a gate."""

    name, label, about, examples = "search", "Find passages", "", ()
    takes_pictures = takes_directions = False

    def __init__(self):
        self.threads, self.gate = Threads(OPTIONS.queue), threading.Event()
        self.begun = self.done = 0
        tokenizer = types.SimpleNamespace(
            longest_token=4,
            encode=list,
            decode=str,
            encode_batch=lambda texts: texts,
            template=None,
        )
        self.backend = types.SimpleNamespace(
            cannot={}, length=10**6, tokenizer=tokenizer, new_tokens=lambda query: 1
        )
        self.tokenizer = tokenizer
        self.online = types.SimpleNamespace(unfinished=0, is_serving=True)

    def step(self):
        self.begun += 1
        assert self.gate.wait(SOON)
        self.done += 1

    def start(self, text, result):
        def answer(turn):
            for _ in range(int(text)):
                with turn():
                    self.step()
            return result

        return self.threads.start(answer)

    def submit(self, query, listener=None):
        text = query.messages[0].text if hasattr(query, "messages") else query.prompt
        return self.start(text, Result(0, (Candidate("x", (), 0.0, (), "end"),), 1, 0))

    def ask(self, question, picture, tell, directions=None):
        return self.start(question, answer_row(question, "x", True, [], 0.0))

    def embed_texts(self, texts):
        self.step()
        return np.ones((len(texts), 2), np.float32)

    embed_passages = embed_texts

    def embed_questions(self, texts):
        return np.ones((len(texts), 2), np.float32)

    def close(self):
        pass


def app_of(slow, options):
    pictures = {"a.png": PNG, "large.png": PNG.ljust(2**25)}
    sources = [Source(name[:-4], "image", "", image=name) for name in pictures]
    corpus = Corpus(sources, read_picture=pictures.__getitem__)
    return make_app(
        Parts("x", slow, "tiny", slow, "vectors", {"search": slow}, AskedCorpus(corpus), slow.threads),
        options,
    )  # fmt: skip


PNG = b"\x89PNG\r\n\x1a\n"


class Client:
    """Of one server, with what computes behind it."""

    def __init__(self, slow, app, address):
        self.slow, self.app = slow, app
        self._place = address.removeprefix("http://").split(":")

    def send(self, path, body=None, *, length=None, **headers):
        """An open connection on which a request was sent: all of it, or less than `length`."""
        sent = b"" if body is None else body if type(body) is bytes else json.dumps(body).encode()
        fields = {"Host": "127.0.0.1", "Connection": "close"}
        if body is not None:
            fields |= {"Content-Type": "application/json", "Content-Length": length or len(sent)}
        fields |= {key.replace("_", "-"): value for key, value in headers.items()}
        lines = "".join(f"{key}: {value}\r\n" for key, value in fields.items())
        method = "GET" if body is None else "POST"
        return self.raw(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + sent)

    def raw(self, data):
        connection = socket.create_connection(self._place, SOON)
        connection.sendall(data)
        return connection

    def ask(self, *request, **more):
        return reply_of(self.send(*request, **more))

    def counted(self, status):
        """How many requests were counted under a status."""
        with contextlib.closing(self.send("/metrics", Host="localhost")) as connection:
            text = reply_of(connection)[1]
        counts = re.findall(rf'mmqa_requests_total.*status="{status}"}} (\S+)', text)
        return sum(map(float, counts))

    def left(self, connection):
        """Closes a connection, and returns once the server has noticed."""
        before = self.counted(499)
        connection.close()
        assert soon(lambda: self.counted(499) == before + 1)


def reply_of(connection):
    """(status, body) until the server closes."""
    with connection:
        data = b""
        while part := connection.recv(2**16):
            data += part
    return int(data.split()[1]), data.partition(b"\r\n\r\n")[2].decode(errors="replace")


def soon(holds):
    deadline = time.monotonic() + SOON
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


@contextlib.contextmanager
def client_of(options):
    slow = Slow()
    app = app_of(slow, options)
    with serving(app, options) as address:
        yield Client(slow, app, address)
        slow.gate.set()


@pytest.fixture(scope="module")
def open_client():
    with pytest.MonkeyPatch.context() as patch, client_of(OPTIONS) as client:
        patch.setattr("mmqa_jax.serve.door._LINGER", 0.05)  # `reply_of` waits for the end
        yield client


@pytest.fixture
def client(open_client):
    """With a gate that is open, and nothing done yet."""
    open_client.slow.gate.set()
    open_client.slow.begun = open_client.slow.done = 0
    return open_client


@pytest.fixture(params=QUEUED)
def queued(request, client):
    """(path, body of so many steps); afterwards the next request is answered."""
    path, body_of = QUEUED[request.param]
    yield path, body_of
    client.slow.gate.set()
    before = client.slow.done
    status, text = client.ask(path, body_of(1))
    assert (status, '"error":{' in text.replace(" ", "")) == (200, False), text
    assert client.slow.done == before + 1


def test_the_table_has_every_route(client):
    is_queued = {one.path: one.is_queued for one in client.app._entrances}
    queued = dict.fromkeys((*(path for path, _ in QUEUED.values()), *SHORT), True)
    of_files = ("/api/page/{name:path}", "/api/original/{name:path}")  # a corpus in memory has none
    assert is_queued == dict.fromkeys((*AT_ONCE, *of_files), False) | queued


# What is refused by its header, on any route.
FOREIGN = [
    ({"Host": "evil.example"}, 421),
    ({"Host": "localhost.evil.example"}, 421),
    ({"Sec_Fetch_Site": "cross-site"}, 403),
    ({"Sec_Fetch_Site": "same-site"}, 403),
]


@pytest.mark.parametrize(("headers", "status"), FOREIGN)
@pytest.mark.parametrize("path", AT_ONCE.values())
def test_foreign_requests_that_cost_nothing(client, path, headers, status):
    if path == "/" and "Sec_Fetch_Site" in headers:
        status = 200  # a link of another site
    assert client.ask(path, **headers)[0] == status
    for own in ({}, {"Sec_Fetch_Site": "same-origin"}, {"Sec_Fetch_Site": "none"}):
        for host in (
            "127.0.0.1",
            "LOCALHOST",
            "localhost.",
            "LocalHost.:8321",
            "[::1]:80",
            "[::1]",
        ):
            assert client.ask(path, Host=host, **own)[0] == 200


@pytest.mark.parametrize(("headers", "status"), FOREIGN)
def test_foreign_requests_that_cost_work(client, queued, headers, status):
    path, body_of = queued
    assert client.ask(path, body_of(1), **headers)[0] == status
    assert client.slow.begun == 0


def test_a_foreign_page_learns_nothing_of_pictures(client):
    names = ("/api/picture/a", "/api/picture/none", "/api/source/a", "/api/source/none")
    told = {client.ask(path, Sec_Fetch_Site="cross-site") for path in names}
    assert len(told) == 1
    with client.send(names[0]) as connection:
        head = connection.recv(2**16).lower()
    assert b"cross-origin-resource-policy: same-origin" in head
    assert b"x-content-type-options: nosniff" in head


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "an integer of more than 4,300 digits"),
        (b"[" * 200 + b"]" * 200, "nested more than 100 deep"),
        (b"[1]", "no JSON object"),
        (b"\xff", "UTF-8"),
    ],
)
def test_bodies_that_are_no_request(client, queued, body, words):
    status, text = client.ask(queued[0], body)
    assert (status, words in text, client.slow.begun) == (400, True, 0)


def test_bodies_that_are_too_large(client, queued):
    path, _ = queued
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    assert client.ask(path, b"{", length=2**18 + 1)[0] == 413  # before it is sent
    chunk = b"8000\r\n" + b" " * 2**15 + b"\r\n"
    pieces = client.raw(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk * 9)
    assert reply_of(pieces)[0] == 413
    assert client.slow.begun == 0


def test_a_slow_body(client, queued):
    status, text = client.ask(queued[0], b"{", length=100)
    assert (status, "did not arrive in time" in text, client.slow.begun) == (408, True, 0)


def test_a_body_that_is_not_sent_to_its_end(client, queued, capfd):
    client.left(client.send(queued[0], b"{", length=100))
    assert capfd.readouterr().err == ""
    assert client.slow.begun == 0


@pytest.mark.parametrize("path", [*AT_ONCE.values(), "/v1/completions"])
def test_a_slow_header(client, path):
    """It is closed without an answer; others are answered meanwhile."""
    started = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nX-A: "
    slow = client.raw(started.encode())
    assert client.ask("/healthz")[0] == 200
    with slow:
        assert slow.recv(100) == b""
    kept = client.raw(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" + started.encode())
    with kept:  # the second request of a connection
        data = b""
        while part := kept.recv(2**16):
            data += part
    assert data.count(b"HTTP/1.1 ") == 1


def test_a_reply_that_is_read_slowly_is_sent_to_its_end(client):
    """Longer than a header may take."""
    with client.send("/api/picture/large") as connection:
        time.sleep(3 * OPTIONS.header)
        length = 0
        while part := connection.recv(2**20):
            length += len(part)
    assert length > 2**25


def test_a_client_that_leaves_while_its_request_waits(client, queued):
    path, body_of = queued
    client.slow.gate.clear()
    first = client.send(path, body_of(1))
    assert soon(lambda: client.slow.begun == 1)
    client.left(client.send(path, body_of(3)))
    client.slow.gate.set()
    assert reply_of(first)[0] == 200
    assert client.slow.begun == 1


def test_a_client_that_leaves_while_its_request_is_computed(client, queued):
    path, body_of = queued
    client.slow.gate.clear()
    leaving = client.send(path, body_of(5))
    assert soon(lambda: client.slow.begun == 1)
    client.left(leaving)
    client.slow.gate.set()
    assert client.ask(path, body_of(1))[0] == 200
    assert client.slow.begun == 2


def test_a_full_queue(client, queued):
    """It is asked before a body is read; what costs nothing is answered."""
    path, body_of = queued
    client.slow.gate.clear()
    taken = [client.send(path, body_of(1)) for _ in range(OPTIONS.queue)]
    assert soon(lambda: client.app._places == OPTIONS.queue)
    assert soon(lambda: not client.app._uploads)
    status, text = client.ask(path, b"", length=100)
    assert (status, "2 requests, or large ones, are being" in text) == (429, True)
    assert client.ask("/healthz")[0] == 200
    client.slow.gate.set()
    assert [reply_of(one)[0] for one in taken] == [200] * OPTIONS.queue
    assert client.slow.begun == OPTIONS.queue


@pytest.mark.parametrize("name", QUEUED)
def test_a_deadline(name):
    path, body_of = QUEUED[name]
    options = ServeOptions(queue=2, timeout=0.3)
    with client_of(options) as client:
        status, text = client.ask(path, body_of(5))
        is_stream = name == "page" or "pieces" in name
        assert status == (200 if is_stream else 504)
        assert "no answer within 0.3 s (--timeout)" in text
        assert soon(lambda: client.app._places == 0)
        client.slow.gate.set()
    client.slow.threads.close()
    assert client.slow.begun <= 1  # of five; on a busy machine none


def test_a_reply_that_begins_after_its_deadline_is_dropped():
    sent, left = [], asyncio.Event()

    async def app(scope, receive, send):
        try:
            await asyncio.Future()
        finally:  # when the door cancels it
            await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive():
        await left.wait()

    async def send(message):
        sent.append(message)

    door = Door(app, (), ServeOptions(timeout=0.01), Metrics(lambda: {}))
    scope = {"type": "http", "method": "GET", "path": "/x", "headers": [(b"host", b"127.0.0.1")]}
    asyncio.run(door(scope, receive, send))
    assert [message.get("status") for message in sent if "status" in message] == [504]
    assert b"--timeout" in b"".join(message.get("body", b"") for message in sent)


def test_uploads_that_are_not_finished_make_room(monkeypatch):
    """In a queue that is full of them the oldest is closed for a request that is sent."""
    monkeypatch.setattr("mmqa_jax.serve.door._PATIENCE", 0.0)
    path, body_of = QUEUED["completion"]
    with client_of(ServeOptions(queue=2, upload=60.0)) as client:
        client.slow.gate.set()
        uploads = [client.send(path, b"{", length=100) for _ in range(2)]
        assert soon(lambda: len(client.app._uploads) == 2)
        assert client.ask(path, body_of(1))[0] == 200
        assert reply_of(uploads[0])[0] == 408
        uploads[1].sendall(json.dumps(body_of(1)).encode().ljust(100)[1:])
        assert reply_of(uploads[1])[0] == 200


def test_large_bodies_that_wait_have_an_end(monkeypatch):
    """Room for one of two large ones; small ones pass."""
    monkeypatch.setattr("mmqa_jax.serve.door._BODIES", 1)
    path, body_of = QUEUED["completion"]
    large = json.dumps(body_of(1)).encode().ljust(200_000)
    with client_of(ServeOptions(queue=4, body=0.25)) as client:
        first = client.send(path, large)
        assert soon(lambda: client.slow.begun == 1)
        status, text = client.ask(path, large)
        assert (status, "or large ones, are being served" in text) == (429, True)
        small = client.send(path, body_of(1))
        client.slow.gate.set()
        assert [reply_of(one)[0] for one in (first, small)] == [200, 200]
        assert client.ask(path, large)[0] == 200


def test_half_sent_headers_do_not_shut_others_out(monkeypatch):
    """The oldest connections are closed for new ones."""
    monkeypatch.setattr(run, "_MOST", 20)
    with client_of(ServeOptions(header=60.0)) as client:
        half = [client.raw(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: ") for _ in range(60)]
        for _ in range(3):
            assert client.ask("/healthz")[0] == 200
        for connection in half[:40]:
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(10) == b""
        half[-1].sendall(b"b\r\n\r\n")
        assert half[-1].recv(100).startswith(b"HTTP/1.1 200")
        for connection in half:
            connection.close()


@pytest.mark.parametrize(
    ("limits", "files"),
    [((1024, 4096), 4096), ((1024, 1024), 1024), ((1024, -1), 2**16), ((-1, -1), 2**16)],
)
def test_files_are_as_many_as_allowed(monkeypatch, limits, files):
    asked = []
    monkeypatch.setattr("resource.getrlimit", lambda kind: limits)
    monkeypatch.setattr("resource.setrlimit", lambda kind, given: asked.append(given))
    assert run._open_files() == files
    assert asked == ([(files, limits[1])] if limits[0] not in (-1, files) else [])
