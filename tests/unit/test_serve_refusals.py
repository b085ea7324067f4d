"""What `mmqa serve` refuses before, while and after a system answers: status, sentence, parameter."""

import concurrent.futures

import pytest
from starlette.testclient import TestClient
from tiny_llm import flag

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Source
from mmqa_jax.decoding.online import Closed, QueueFull
from mmqa_jax.prompting.backends.openai_requests import data_url
from mmqa_jax.runs.ask_corpus import AskedCorpus
from mmqa_jax.serve import ServeOptions
from mmqa_jax.serve.app import make_app
from mmqa_jax.serve.systems import Asking, Parts, Threads

RED = data_url(flag().data)
BUSY = QueueFull("4 questions are being answered or wait")
FAILED = Closed("the engine failed: no memory")


def failing(error):
    """Raises it when asked."""

    def ask():
        raise error

    return ask


def ended(error):
    """An answer that ends with it."""
    future = concurrent.futures.Future()
    future.set_exception(error)
    return lambda: Asking(future, lambda: None)


class Blind:
    """A system without eyes, whose answers are made by `begin`."""

    name, label, about, examples = "blind", "Find passages", "", ()
    takes_pictures = takes_directions = False

    def __init__(self, begin):
        self._begin = begin

    def ask(self, question, picture, tell, directions=None):
        assert picture is None
        return self._begin()


class Seeing(Blind):
    name, takes_pictures = "seeing", True


NEVER = failing(AssertionError("asked"))


def client(begin=NEVER) -> TestClient:
    """Of a server with both systems, whose answers take a moment at most."""
    corpus = Corpus(
        [Source("bitmap", "image", "", image="a.bmp")], read_picture=lambda name: b"BM0000"
    )
    parts = Parts(
        "x", None, "", None, "",
        {system.name: system for system in (Blind(begin), Seeing(begin))},
        AskedCorpus(corpus), Threads(1),
    )  # fmt: skip
    return TestClient(
        make_app(parts, ServeOptions(body=1.0, timeout=0.05)),
        "http://127.0.0.1",
        raise_server_exceptions=False,
    )


def chat(model, *content, role="user", **more):
    url = "/v1/chat/completions"
    return url, {"model": model, "messages": [{"role": role, "content": list(content)}], **more}


def page(system, **more):
    return "/api/ask", {"question": "a", "system": system, **more}


TEXT = {"type": "text", "text": "a"}
PICTURE = {"type": "image_url", "image_url": {"url": RED}}
NO_PICTURES = (400, "Find passages takes no pictures; remove it.")


@pytest.mark.parametrize(
    ("request_", "status", "message", "param"),
    [
        (chat("blind", TEXT, PICTURE), *NO_PICTURES, "messages"),
        (chat("blind", TEXT, PICTURE, stream=True), *NO_PICTURES, "messages"),
        (page("blind", image=RED), *NO_PICTURES, "image"),
        (
            chat("seeing", TEXT, PICTURE, PICTURE),
            *(400, "a question has at most one picture here; send one.", "messages"),
        ),
        (
            chat("blind", TEXT, role="assistant"),
            *(400, "the last message is not the user's; ask in it.", "messages"),
        ),
        (chat("blind", TEXT, n=2), *(400, "blind gives one answer; leave n out.", "n")),
        (
            chat("blind", TEXT, logprobs=True),
            *(400, "blind gives no log-probabilities; leave logprobs out.", "logprobs"),
        ),
    ],
)
def test_questions_that_no_system_is_asked(request_, status, message, param):
    url, body = request_
    reply = client().post(url, json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["message"], error["param"]) == (status, message, param)


@pytest.mark.parametrize("request_", [chat("blind", TEXT), page("blind")], ids=["chat", "page"])
@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (BUSY, 429, f"{BUSY}; try again in a moment."),
        (FAILED, 503, str(FAILED)),
        (UserError("the question is empty; write one."), 400, "the question is empty; write one."),
    ],
)
def test_what_a_system_refuses(request_, error, status, message):
    """At once, or in its answer."""
    url, body = request_
    reply = client(failing(error)).post(url, json=body)
    assert (reply.status_code, reply.json()["error"]["message"]) == (status, message)
    reply = client(ended(error)).post(url, json=body)
    if url == "/api/ask":  # its events have begun
        assert (reply.status_code, message in reply.text) == (200, True)
    else:
        assert (reply.status_code, reply.json()["error"]["message"]) == (status, message)


def test_an_answer_that_does_not_come():
    url, body = chat("blind", TEXT)
    reply = client(lambda: Asking(concurrent.futures.Future(), lambda: None)).post(url, json=body)
    assert reply.status_code == 504
    assert reply.json()["error"]["message"].startswith("no answer within 0.05 s (--timeout); ask")


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/page/other.js", 404, "no such file."),
        ("/api/source/none", 404, "no such source."),
        ("/api/picture/bitmap", 415, "the picture is of a kind that browsers do not show."),
    ],
)
def test_files_that_are_not_shown(path, status, message):
    reply = client().get(path)
    assert (reply.status_code, reply.json()["error"]["message"]) == (status, message)
