"""OpenAI's API of `mmqa serve` through OpenAI's own client: a tiny engine's answers, and refusals."""

import base64
import concurrent.futures
import time

import httpx
import numpy as np
import pytest
from document_files import huge_png
from served_app import openai_client, serving
from tiny_llm import flag, text_tokenizer, tiny_backend, tiny_llava

from mmqa_jax import __version__
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.decoding.online import TextStream
from mmqa_jax.prompting.backends import Chat, Completion, Decoding, Message
from mmqa_jax.prompting.backends.openai_requests import data_url, read_picture
from mmqa_jax.prompting.backends.served import ServedModel
from mmqa_jax.runs.ask_corpus import AskedCorpus
from mmqa_jax.serve import ServeOptions
from mmqa_jax.serve.app import make_app
from mmqa_jax.serve.systems import Parts, Threads

pytestmark = pytest.mark.slow
ASKED = [{"role": "user", "content": "What is it"}]
# As httpx.post and the like, which read the machine's certificates for every request.
WEB = httpx.Client(verify=False, limits=httpx.Limits(max_keepalive_connections=0))
WORDS = ["one", "two", "what is", "a b c", "go on", "Some text."]


class Vectors:
    """Unit vectors of two numbers, of texts; a word is a token."""

    class tokenizer:
        vocab_size = 9

        @staticmethod
        def encode_batch(texts):
            return [text.split() for text in texts]

        @staticmethod
        def decode(ids):
            return "".join(map(str, ids))

    def embed_texts(self, texts):
        angles = np.array([len(text) for text in texts], np.float32)
        return np.stack([np.cos(angles), np.sin(angles)], axis=1)

    embed_questions = embed_passages = embed_texts


class Open(Parts):
    """Parts that stay open when one of several servers of them ends."""

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def parts(engine, wanted):
    """A tiny language model, served. It answered what is wanted before."""
    model = ServedModel(tiny_backend(engine), 64)
    yield Open(
        "tiny", model, "tiny", Vectors(), "vectors", {},
        AskedCorpus(Corpus([])), Threads(4),
    )  # fmt: skip
    model.close()


def served(parts, **options):
    """The address of a server of them, in a `with` block."""
    given = ServeOptions(**{"body": 1.0, "timeout": 60.0, **options})
    return serving(make_app(parts, given), given)


@pytest.fixture(scope="module")
def server(parts):
    with served(parts) as address:
        yield address


@pytest.fixture(scope="module")
def client(server):
    return openai_client(server, 60)


def alone(engine, *queries):
    """What the backend answers to queries by itself."""
    return list(tiny_backend(engine).answer(queries))


@pytest.fixture(scope="module")
def wanted(engine):
    """Answers of the backend by itself, computed before the engine is served."""
    decoding = Decoding(max_new_tokens=12, logprobs=True)
    chat = Chat("chat", (Message("user", ("What is it",)),), decoding)
    drawn = Completion("drawn", "go", Decoding(9, 0.8, top_p=0.9, stop=("ab",), n=3, seed=5))
    greedy = [Completion(word, word, decoding) for word in WORDS]
    ids = text_tokenizer().encode("what is it")
    scores = engine.loglikelihood(ids[:1], [ids[1:]])[0]
    return {answer.id: answer for answer in alone(engine, chat, drawn, *greedy)} | {
        "scores": (ids, scores)
    }


def test_chat(client, wanted):
    found = client.chat.completions.create(
        model="tiny", messages=ASKED, temperature=0, max_tokens=12, logprobs=True, top_logprobs=1
    )
    (choice,) = found.choices
    (candidate,) = wanted["chat"].candidates
    assert choice.message.content == candidate.text
    assert [one.logprob for one in choice.logprobs.content] == pytest.approx(
        candidate.logprobs, abs=1e-5
    )
    assert choice.finish_reason == {"end": "stop"}.get(candidate.finish, candidate.finish)
    assert found.usage.prompt_tokens == wanted["chat"].prompt_tokens
    assert found.usage.completion_tokens == len(candidate.tokens)


def test_a_stream_is_the_whole_answer(client, wanted):
    stream = client.chat.completions.create(
        model="tiny", messages=ASKED, temperature=0, max_tokens=12, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    pieces = list(stream)
    texts = [piece.choices[0].delta.content or "" for piece in pieces if piece.choices]
    assert "".join(texts) == wanted["chat"].text
    assert sum(bool(text) for text in texts) > 1
    assert pieces[-1].usage.completion_tokens == len(wanted["chat"].candidates[0].tokens)
    stream = client.completions.create(
        model="tiny", prompt="two", temperature=0, max_tokens=12, stream=True
    )
    assert "".join(piece.choices[0].text for piece in stream) == wanted["two"].text


def test_completions(client, wanted):
    found = client.completions.create(
        model="tiny", prompt="go", max_tokens=9, temperature=0.8, top_p=0.9, n=3, seed=5, stop="ab"
    )
    assert [one.text for one in found.choices] == [one.text for one in wanted["drawn"].candidates]
    found = client.completions.create(model="tiny", prompt=WORDS, max_tokens=12, temperature=0)
    assert [one.text for one in found.choices] == [wanted[word].text for word in WORDS]
    assert [one.index for one in found.choices] == list(range(len(WORDS)))


@pytest.mark.parametrize("as_tokens", [False, True])
def test_an_echoed_prompt_is_scored(client, wanted, as_tokens):
    ids, scores = wanted["scores"]
    found = client.completions.create(
        model="tiny", prompt=ids if as_tokens else "what is it", echo=True, max_tokens=0, logprobs=1
    )
    (choice,) = found.choices
    assert choice.text == "what is it"
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(scores.logprobs, abs=1e-5)
    best = [max(row.values()) for row in choice.logprobs.top_logprobs[1:]]
    assert best == pytest.approx([one.logprob for one in scores.likeliest], abs=1e-5)
    assert choice.logprobs.text_offset == list(range(len("what is it")))
    more = client.completions.create(
        model="tiny", prompt="what is it", echo=True, max_tokens=1, logprobs=1, temperature=0
    )
    assert len(more.choices[0].logprobs.tokens) == len(ids) + 1


def test_embeddings(client):
    texts = ["a cat", "some dogs"]
    plain = client.embeddings.create(model="vectors", input=texts, encoding_format="float")
    packed = client.embeddings.create(model="vectors", input=texts)  # base64, which it unpacks
    vectors = [one.embedding for one in plain.data]
    np.testing.assert_array_equal(vectors, [one.embedding for one in packed.data])
    np.testing.assert_allclose(vectors, Vectors().embed_texts(texts), rtol=1e-6)
    assert plain.usage.prompt_tokens == 4
    as_tokens = client.embeddings.create(model="vectors", input=[[1, 2, 3], [4]])
    np.testing.assert_array_equal(
        [row.embedding for row in as_tokens.data], Vectors().embed_texts(["123", "4"])
    )
    short = client.embeddings.create(model="vectors", input=["a"], dimensions=1)
    assert short.data[0].embedding == [1.0]  # of length 1 again
    assert len(client.embeddings.create(model="vectors", input=["a"] * 2048).data) == 2048


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny", "vectors"]
    assert client.models.retrieve("tiny").max_model_len == 160


def test_documents_are_ranked_by_the_encoder(server):
    documents = ["abcd", {"text": "a"}, "ab"]
    body = {"model": "vectors", "query": "b", "documents": documents}
    best = {**body, "top_n": 2, "return_documents": True}
    rows = WEB.post(f"{server}/v1/rerank", json=best).json()["results"]
    assert [(row["index"], row["document"]["text"]) for row in rows] == [(1, "a"), (2, "ab")]
    assert [row["relevance_score"] for row in rows] == pytest.approx([1, np.cos(1)])
    for wrong, words in [({"documents": []}, "documents is []"), ({"top_n": 0}, "top_n is 0")]:
        reply = WEB.post(f"{server}/v1/rerank", json={**body, **wrong})
        assert (reply.status_code, words in reply.text) == (400, True)


def test_tokens_of_prompts_and_chats(server):
    def post(path, **body):
        return WEB.post(f"{server}/{path}", json={"model": "tiny", **body}).json()

    tokenizer = text_tokenizer()
    cut = post("tokenize", prompt="what is it")
    assert (cut["tokens"], cut["max_model_len"]) == (tokenizer.encode("what is it"), 160)
    assert post("detokenize", tokens=cut["tokens"])["prompt"] == tokenizer.decode(cut["tokens"])
    assert cut["count"] == len(cut["tokens"])
    assert "ids from 0 to" in post("detokenize", tokens=[-1])["error"]["message"]
    assert "give one of them" in post("tokenize")["error"]["message"]
    assert WEB.get(f"{server}/version").json() == {"version": __version__}
    assert WEB.get(f"{server}/health").status_code == 200


def test_pages_of_named_sites_may_ask(parts):
    sent = {"Origin": "https://chat.example", "Sec-Fetch-Site": "cross-site"}
    with served(parts, origins=("https://chat.example",)) as address:
        reply = WEB.get(f"{address}/v1/models", headers=sent)
        assert reply.headers["access-control-allow-origin"] == "https://chat.example"
        asks = {**sent, "Access-Control-Request-Method": "POST"}
        assert WEB.options(f"{address}/v1/models", headers=asks).status_code == 200
        other = WEB.get(f"{address}/v1/models", headers={**sent, "Origin": "https://other.example"})
        assert other.status_code == 403


def picture(url):
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]}


RED = f"data:image/png;base64,{base64.b64encode(flag().data).decode()}"
HUGE = f"data:image/png;base64,{base64.b64encode(huge_png(30_000)).decode()}"
CHAT, COMPLETION = "chat/completions", "completions"


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (CHAT, {"model": "gpt-4"}, 404, "no model 'gpt-4' answers this; these do: tiny"),
        (CHAT, {"max_tokens": 10_000}, 400, "more than engine.length = 160"),
        (CHAT, {"max_tokens": 0}, 400, "max_tokens is 0, expected 1 to"),
        (CHAT, {"messages": []}, 400, "messages is .., expected at least one"),
        (CHAT, {"messages": [{"role": "wizard", "content": "a"}]}, 400, "role is 'wizard'"),
        (CHAT, {"messages": [{"role": "user"}]}, 400, "content is missing"),
        (CHAT, {"messages": ["hello"]}, 400, 'messages[0] is "hello", expected an object'),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
            400,
            'messages[0].content[0] is {"type": "audio"}, expected {"type": "text" or "image_url"',
        ),
        (CHAT, {"messages": "hello"}, 400, 'messages is "hello", expected list'),
        (CHAT, {"tools": [{"type": "function"}]}, 400, "expected letters, digits"),
        (CHAT, {"temperature": 3}, 400, "temperature is 3, expected 0 to 2"),
        (CHAT, {"temperature": True}, 400, "temperature is true, expected int or float"),
        (CHAT, {"min_p": 1.1}, 400, "min_p is 1.1, expected 0 to 1"),
        (CHAT, {"min_q": 0.1}, 400, "min_q is no key"),
        (CHAT, {"n": 2, "temperature": 0}, 400, "n is above 1"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, 400, "expected 0 to 20"),
        (
            COMPLETION,
            {"prompt": "ab", "echo": True, "logprobs": 2},
            400,
            "only the likeliest token",
        ),
        (CHAT, {"stop": [""]}, 400, "stop is"),
        (CHAT, picture({"url": RED}), 400, "text-only LLaMA"),
        (CHAT, picture({"url": "http://127.0.0.1/a.png"}), 400, "no picture is fetched"),
        (CHAT, picture({"url": "file:///etc/passwd"}), 400, "no picture is fetched"),
        (CHAT, picture({"url": RED[:40] + "!"}), 400, "broken base64"),
        (CHAT, picture({"url": RED[: 22 + 40]}), 400, "picture"),
        (CHAT, picture({"url": HUGE}), 400, "pixels"),
        (COMPLETION, {"prompt": ""}, 400, "prompt is"),
        (COMPLETION, {"prompt": [[1], "a"]}, 400, "prompt is"),
        (COMPLETION, {"prompt": ["a"] * 257}, 400, "prompt has 257 prompts, up to 256 at once"),
        (COMPLETION, {"prompt": [10**6]}, 400, "token 1000000, expected 0 to"),
        (COMPLETION, {"prompt": "a" * 200}, 400, "more than engine.length"),
        # Its longest token has twelve characters: this one is not cut into tokens.
        (
            COMPLETION,
            {"prompt": "a" * (160 * 12 + 1)},
            400,
            "1,921 characters, more than the model",
        ),
        (
            COMPLETION,
            {"prompt": ["b", "a" * 1921], "echo": True},
            400,
            "of 160 tokens can hold (1,9",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a" * 1921}]},
            400,
            "has 1,921 characters",
        ),
        (COMPLETION, {"prompt": "a" * 1920}, 400, "its prompt of 1920 tokens"),
        (COMPLETION, {"prompt": "a", "max_tokens": 0}, 400, "without echo at least 1"),
        (COMPLETION, {"prompt": "a", "echo": True}, 400, "one token, which nothing precedes"),
        (COMPLETION, {"prompt": "ab", "echo": True, "stream": True}, 400, "without echo"),
        ("embeddings", {"input": []}, 400, "input is"),
        (
            "embeddings",
            {"input": ["a", "b" * 100_001], "model": "vectors"},
            400,
            "input[1] has 100,001 characters, up to 100,000 are embedded",
        ),
        ("embeddings", {"input": ["a"] * 2049}, 400, "input has 2,049 inputs, up to 2,048 at"),
        ("embeddings", {"input": [9], "model": "vectors"}, 400, "input[0] has the token 9"),
        (
            "embeddings",
            {"input": "a", "encoding_format": "int8"},
            400,
            'encoding_format is "int8", expected float or base64',
        ),
        ("embeddings", {"input": "a", "model": "tiny"}, 404, "these do: vectors"),
        ("embeddings", {"input": "a", "model": "vectors", "dimensions": 5}, 400, "vectors have 2"),
    ],
)
def test_refused_requests(server, path, body, status, words):
    whole = {"model": "tiny", **({"messages": ASKED} if path == CHAT else {}), **body}
    reply = WEB.post(f"{server}/v1/{path}", json=whole)
    error = reply.json()["error"]
    assert reply.status_code == status, error
    assert words.replace("..", "[]") in error["message"]
    assert "request 0" not in error["message"]


def test_pictures_as_urls():
    url = data_url(flag().data)
    assert url == RED
    assert read_picture(url, "image").data == flag().data
    assert data_url(b"BM") is None


def test_what_is_no_request(server):
    url = f"{server}/v1/completions"
    for body, words in [(b"{", "not valid JSON"), (b"[1]", "no JSON object"), (b"\xff", "UTF-8"),
                        (b"[" * 5000, "nested")]:  # fmt: skip
        reply = WEB.post(url, content=body, headers={"Content-Type": "application/json"})
        assert (reply.status_code, words in reply.json()["error"]["message"]) == (400, True)
    assert WEB.post(url, content=b"{}").status_code == 415  # as a foreign page may send
    assert WEB.get(url).status_code == 405
    assert WEB.get(f"{server}/etc/passwd").status_code == 404
    assert WEB.get(f"{server}/page/..%2f..%2fsecret").status_code == 404
    assert WEB.get(server, headers={"Host": "evil.example"}).status_code == 421


def test_uploads_have_an_end(server):
    sent = {"Content-Type": "application/json"}
    url = f"{server}/v1/completions"
    assert WEB.post(url, content=b"a" * (2**20 + 1), headers=sent).status_code == 413

    def pieces():
        for _ in range(40):
            yield b" " * 2**15  # without a Content-Length

    assert WEB.post(url, content=pieces(), headers=sent).status_code == 413


def test_a_key(parts):
    with served(parts, key="secret") as address:
        assert WEB.get(f"{address}/healthz").status_code == 200
        assert WEB.get(f"{address}/").status_code == 200
        assert WEB.get(f"{address}/no/such/path").status_code == 401
        for path in ("/v1/models", "/metrics", "/api/about"):
            for key, status in [("none", 401), ("secre", 401), ("secret", 200)]:
                sent = {"Authorization": f"Bearer {key}"}
                assert WEB.get(f"{address}{path}", headers=sent).status_code == status


def ask(client, word, **options):
    reply = client.completions.create(
        model="tiny", prompt=word, temperature=0, max_tokens=12, **options
    )
    return reply.choices[0].text


def test_twenty_at_once(client, wanted):
    words = WORDS * 4
    with concurrent.futures.ThreadPoolExecutor(20) as users:
        found = list(users.map(lambda word: ask(client, word), words))
    assert found == [wanted[word].text for word in words]


def test_beyond_the_queue_requests_are_refused_and_none_is_lost(parts, wanted):
    body = {"model": "tiny", "prompt": "two", "temperature": 0, "max_tokens": 12}
    with (
        served(parts, queue=6) as server,
        httpx.Client(timeout=60, limits=httpx.Limits(max_connections=None)) as http,
        concurrent.futures.ThreadPoolExecutor(25) as users,
    ):
        asked = users.map(lambda _: http.post(f"{server}/v1/completions", json=body), range(50))
        replies = list(asked)
        counted = WEB.get(f"{server}/metrics").text
    statuses = [reply.status_code for reply in replies]
    assert set(statuses) == {200, 429}
    for reply in replies:
        if reply.status_code == 200:
            assert reply.json()["choices"][0]["text"] == wanted["two"].text
        else:
            assert reply.headers["Retry-After"] == "1"
            assert (
                "6 requests, or large ones, are being served or wait"
                in reply.json()["error"]["message"]
            )
    assert f'status="429"}} {float(statuses.count(429))}' in counted
    assert parts.unfinished == 0


def test_an_idle_server_answers_all_prompts_that_its_queue_holds(parts, wanted):
    """More are refused for good, and not until a moment that never comes."""
    body = {"model": "tiny", "temperature": 0, "max_tokens": 12}
    with served(parts, queue=12) as server:
        url = f"{server}/v1/completions"
        reply = WEB.post(url, json={**body, "prompt": WORDS * 2}, timeout=60).json()
        texts = [one["text"] for one in reply["choices"]]
        assert texts == [wanted[word].text for word in WORDS] * 2
        for more in ({"prompt": ["two"] * 13}, {"prompt": ["two"] * 7, "echo": True}):
            refused = WEB.post(url, json={**body, **more})
            assert refused.status_code == 400
            assert "holds 12 (--queue); send fewer" in refused.json()["error"]["message"]
            assert "Retry-After" not in refused.headers
    assert parts.unfinished == 0


def test_an_answer_takes_so_long_at_most(parts):
    with served(parts, timeout=0.01) as address:
        body = {"model": "tiny", "prompt": "two", "max_tokens": 150, "n": 8}
        reply = WEB.post(f"{address}/v1/completions", json=body, timeout=60)
        assert reply.status_code == 504
        assert "--timeout" in reply.json()["error"]["message"]
        streamed = WEB.post(f"{address}/v1/completions", json={**body, "stream": True})
        assert "no answer within 0.01 s" in streamed.text
    assert waited(lambda: parts.unfinished == 0)


def test_a_client_that_leaves_ends_the_work(parts, server, monkeypatch):
    push = TextStream.push

    def slow(stream, token, finish=""):  # the work is not done when the client has its first line
        time.sleep(0.002)
        return push(stream, token, finish)

    monkeypatch.setattr(TextStream, "push", slow)
    body = {"model": "tiny", "prompt": "two", "max_tokens": 150, "n": 64, "seed": 1}
    streamed = {"json": {**body, "stream": True}, "timeout": 60}
    with WEB.stream("POST", f"{server}/v1/completions", **streamed) as reply:
        assert '"choices"' in next(reply.iter_lines())
        assert parts.unfinished == 1
    assert waited(lambda: parts.unfinished == 0)
    with pytest.raises(httpx.TimeoutException):
        WEB.post(f"{server}/v1/completions", json=body, timeout=0.05)
    assert waited(lambda: parts.unfinished == 0)


def test_for_a_user_who_has_left_the_model_is_not_asked(parts):
    """Though he left before his question came to the model, while passages were looked for."""
    session = parts.llm.session()
    session.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        list(session.answer([Completion(0, "two", Decoding(150))]))
    assert waited(lambda: parts.unfinished == 0)


def waited(holds) -> bool:
    """Whether something holds soon."""
    deadline = time.monotonic() + 20
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


def test_pictures_for_a_model_that_sees():
    """The answer to a data: URL is the backend's to the picture; a cancelled one leaves nothing."""
    red, blue = flag(), flag((20, 30, 240), (3, 9))
    backend = tiny_llava()
    decoding = Decoding(max_new_tokens=6)
    wanted = {}
    for name, seen in (("red", red), ("blue", blue)):
        chat = Chat(0, (Message("user", (seen, "What is it")),), decoding)
        wanted[name] = next(iter(backend.answer([chat]))).text
    assert wanted["red"] != wanted["blue"]
    model = ServedModel(backend, 64)
    parts = Open(
        "tiny", model, "llava", Vectors(), "vectors", {},
        AskedCorpus(Corpus([])), Threads(4),
    )  # fmt: skip
    with served(parts) as address:
        cancelled = [
            model.submit(Chat(0, (Message("user", (blue, f"go {n}")),), Decoding(120)))
            for n in range(9)
        ]
        for one in cancelled:
            one.cancel()
        for name, seen in (("red", red), ("blue", blue)):
            url = f"data:image/png;base64,{base64.b64encode(seen.data).decode()}"
            content = [{"type": "image_url", "image_url": {"url": url}},
                       {"type": "text", "text": "What is it"}]  # fmt: skip
            body = {"model": "llava", "temperature": 0, "max_tokens": 6,
                    "messages": [{"role": "user", "content": content}]}  # fmt: skip
            reply = WEB.post(f"{address}/v1/chat/completions", json=body, timeout=120).json()
            assert reply["choices"][0]["message"]["content"] == wanted[name]
    model.close()
    assert parts.unfinished == 0
