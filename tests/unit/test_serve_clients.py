"""Requests as clients send them: bodies recorded from Open WebUI, LibreChat, LangChain and lm_eval,
and LangChain itself where it is installed."""

import json

import httpx
import pytest
from printable_llm import printable_backend
from served_app import serving

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.prompting.backends.served import ServedModel
from mmqa_jax.prompting.llm_reader import LLMReaderOptions
from mmqa_jax.runs.ask_corpus import AskedCorpus
from mmqa_jax.serve import ServeOptions
from mmqa_jax.serve.app import make_app
from mmqa_jax.serve.systems import FromMemory, Parts, Threads

pytestmark = pytest.mark.slow
OPTIONS = ServeOptions(body=1.0, timeout=60.0)
PNG = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="  # fmt: skip
HI = {"role": "user", "content": "hi"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather", "description": "Weather of a city.",
        "parameters": {"properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"], "type": "object"},
    },
}  # fmt: skip
USED = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "id": "c1", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]}  # fmt: skip
A = {"properties": {"a": {"title": "A", "type": "integer", "maximum": 99, "minimum": 0}}, "required": ["a"], "title": "A", "type": "object", "additionalProperties": False}  # fmt: skip
CHATS = {
    # backend/open_webui/routers/openai.py and utils/payload.py: metadata is taken out, parameters of
    # the model go to the body, user is an object for pipelines.
    "Open WebUI, chat": {
        "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.8, "top_p": 0.9,
        "frequency_penalty": 0.1, "seed": 42, "stop": ["</s>"], "max_tokens": 20,
        "messages": [{"role": "system", "content": "Be brief."}, HI, {"role": "assistant", "content": "Hello"}, HI],
        "user": {"name": "Ada", "id": "1", "email": "a@example.org", "role": "user"},
    },
    "Open WebUI, cached parts": {
        "stream": False, "max_tokens": 20,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}],
    },
    "Open WebUI, title": {"messages": [{"role": "user", "content": "### Task: a title as JSON"}], "stream": False, "max_completion_tokens": 30},
    "Open WebUI, tools": {"stream": True, "messages": [HI], "tools": [WEATHER], "max_tokens": 20, "logit_bias": {"3": 5}},
    # packages/api/src/endpoints/openai/llm.ts, sent by LangChain's JavaScript client.
    "LibreChat, chat": {
        "temperature": 1, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0.5, "stream": True, "user": "66f0",
        "n": 1, "stream_options": {"include_usage": True}, "messages": [{"role": "system", "content": "Be brief."}, HI],
        "max_tokens": 20,
    },
    "LibreChat, agent": {
        "temperature": 1, "stream": True, "user": "66f0", "parallel_tool_calls": True, "tools": [WEATHER], "tool_choice": "auto",
        "messages": [HI, USED, {"role": "tool", "content": "sun", "tool_call_id": "c1", "name": "weather"}], "max_tokens": 20,
    },
    # langchain-openai 1.7.4, recorded.
    "LangChain, invoke": {"stream": False, "messages": [HI], "max_completion_tokens": 20, "presence_penalty": 0.5, "seed": 1, "temperature": 0.2},
    "LangChain, after a tool": {"stream": False, "messages": [HI, USED, {"content": "sun", "role": "tool", "tool_call_id": "c1"}], "max_completion_tokens": 20, "tools": [WEATHER]},
    "LangChain, schema": {"stream": False, "messages": [HI], "response_format": {"type": "json_schema", "json_schema": {"schema": A, "name": "A", "strict": True}}, "max_completion_tokens": 60},
    "LangChain, stream": {"stream": True, "messages": [HI], "max_completion_tokens": 20, "seed": 1, "temperature": 0.2},
    # lm_eval/models/openai_completions.py, local-chat-completions.
    "lm_eval, local-chat": {"messages": [HI], "max_tokens": 20, "temperature": 0, "stop": ["\n\n"], "seed": 1234},
}  # fmt: skip


@pytest.fixture(scope="module")
def address():
    model = ServedModel(printable_backend(), 64)
    corpus, threads = AskedCorpus(Corpus([])), Threads(4)
    memory = FromMemory(corpus, model.session, LLMReaderOptions(), threads)
    parts = Parts("tiny", model, "tiny", None, "none", {"memory": memory}, corpus, threads)
    with serving(make_app(parts, OPTIONS), OPTIONS) as at:
        yield at


@pytest.mark.parametrize("model", ["tiny", "memory"])
@pytest.mark.parametrize("client", CHATS)
def test_a_chat(address, client, model):
    """Of a language model and of a system; a stream has one head, one end, and its usage."""
    body = {**CHATS[client], "model": model}
    reply = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    if not body.get("stream"):
        (choice,) = reply.json()["choices"]
        assert choice["finish_reason"] in ("stop", "length", "tool_calls")
        if "response_format" in body:
            assert json.loads(choice["message"]["content"]).keys() == {"a"}
        return
    *events, last = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert last == "[DONE]"
    pieces = [json.loads(event) for event in events]
    assert next(p["choices"][0]["delta"].get("role") for p in pieces if p["choices"]) == "assistant"
    ends = [p["choices"][0]["finish_reason"] for p in pieces if p["choices"]]
    assert ends[-1] in ("stop", "length", "tool_calls")
    assert set(ends[:-1]) <= {None}
    if "stream_options" in body:
        assert (pieces[-1]["choices"], pieces[-1]["usage"]["completion_tokens"] > 0) == ([], True)


def test_completions_of_lm_eval(address):
    """local-completions: scores of a prompt's tokens, and texts."""
    scored = {"model": "tiny", "prompt": [[3, 4, 5, 6]], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}  # fmt: skip
    (choice,) = httpx.post(f"{address}/v1/completions", json=scored).json()["choices"]
    logprobs = choice["logprobs"]
    assert [len(logprobs[key]) for key in ("token_logprobs", "top_logprobs")] == [5, 5]
    assert all(max(row.values()) >= p for p, row in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True))  # fmt: skip
    written = {"model": "tiny", "prompt": ["ab"], "max_tokens": 8, "temperature": 0, "stop": ["\n"], "seed": 1234}  # fmt: skip
    assert httpx.post(f"{address}/v1/completions", json=written).status_code == 200


def test_langchain_itself(address):
    langchain_openai = pytest.importorskip("langchain_openai")
    options = {"model": "tiny", "base_url": f"{address}/v1", "api_key": "none", "seed": 1}
    chat = langchain_openai.ChatOpenAI(**options, max_tokens=80)
    (call,) = chat.bind_tools([WEATHER], tool_choice="weather", parallel_tool_calls=False).invoke("hi").tool_calls  # fmt: skip
    assert (call["name"], list(call["args"])) == ("weather", ["city"])
    assert chat.with_structured_output(A, method="json_schema").invoke("hi").keys() == {"a"}
    pieces = list(chat.stream("hi"))
    assert len(pieces) > 1
