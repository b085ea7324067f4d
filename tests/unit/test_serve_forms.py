"""JSON and calls of functions through OpenAI's own client, written by a tiny random model."""

import json

import httpx
import jsonschema
import pytest
from printable_llm import printable_backend
from served_app import openai_client, serving
from tiny_llm import TEMPLATE

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.prompting.backends.answer_forms import Call, CallReader
from mmqa_jax.prompting.backends.served import ServedModel
from mmqa_jax.prompting.llm_reader import LLMReaderOptions
from mmqa_jax.prompting.text_tokenizer import ChatTemplate
from mmqa_jax.runs.ask_corpus import AskedCorpus
from mmqa_jax.serve import ServeOptions
from mmqa_jax.serve.app import make_app
from mmqa_jax.serve.systems import FromMemory, Parts, Threads

pytestmark = pytest.mark.slow
ASKED = [{"role": "user", "content": "What is it"}]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 8}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}  # fmt: skip
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"], "additionalProperties": False}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip
JSON = {"type": "json_schema", "json_schema": {"name": "animal", "strict": True, "schema": SCHEMA}}
OPTIONS = ServeOptions(body=1.0, timeout=60.0)


@pytest.fixture(scope="module")
def client():
    model = ServedModel(printable_backend(), 64)
    corpus, threads = AskedCorpus(Corpus([])), Threads(4)
    memory = FromMemory(corpus, model.session, LLMReaderOptions(), threads)
    parts = Parts("tiny", model, "tiny", None, "none", {"memory": memory}, corpus, threads)
    with serving(make_app(parts, OPTIONS), OPTIONS) as address:
        yield openai_client(address, 60)


def chat(client, model="tiny", **more):
    options = {"messages": ASKED, "max_tokens": 200, "seed": 3, **more}
    return client.chat.completions.create(model=model, **options)


def streamed(client, **more):
    """The pieces of a streamed message put together: content, calls by index, how it ended."""
    text, calls, finish = "", {}, None
    for event in chat(client, stream=True, **more):
        for choice in event.choices:
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                assert call.index not in calls  # each is whole
                calls[call.index] = (call.function.name, call.function.arguments)
            finish = choice.finish_reason or finish
    return text, [calls[n] for n in range(len(calls))], finish


@pytest.mark.parametrize("model", ["tiny", "memory"])
def test_json_of_a_schema(client, model):
    (choice,) = chat(client, model, response_format=JSON).choices
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    assert choice.finish_reason == "stop"
    text, _, finish = streamed(client, model=model, response_format=JSON)
    assert (text, finish) == (choice.message.content, "stop")


def test_any_object_and_several_draws(client):
    reply = chat(
        client, response_format={"type": "json_object"}, n=3, temperature=0.3, max_tokens=400
    )
    for choice in reply.choices:
        assert choice.finish_reason == "length" or isinstance(
            json.loads(choice.message.content), dict
        )


@pytest.mark.parametrize("model", ["tiny", "memory"])
def test_functions_are_called(client, model):
    named = {"type": "function", "function": {"name": "now"}}
    for choice, names, most in [("required", {"weather", "now"}, 2), (named, {"now"}, 1)]:
        wanted = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": most > 1}
        (reply,) = chat(client, model, max_tokens=150, **wanted).choices
        calls = reply.message.tool_calls
        assert {call.function.name for call in calls} <= names
        for call in calls:
            schema = CITY if call.function.name == "weather" else {"maxProperties": 0}
            jsonschema.validate(json.loads(call.function.arguments), schema)
        assert reply.message.content is None
        assert len({call.id for call in calls}) == len(calls)
        if most == 1:
            assert reply.finish_reason == "tool_calls"
        _, again, finish = streamed(client, model=model, max_tokens=150, **wanted)
        assert finish == reply.finish_reason
        assert again == [(call.function.name, call.function.arguments) for call in calls]


def test_a_call_that_the_limit_cuts_is_none(client):
    wanted = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 20}
    (reply,) = chat(client, **wanted).choices
    assert (reply.message.tool_calls, reply.finish_reason) == (None, "length")
    assert not reply.message.content
    assert streamed(client, **wanted) == ("", [], "length")


def test_a_conversation_with_results(client):
    """What a model is shown of calls and results, as Qwen's template writes them."""
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call, {**call, "id": "c2"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
        {"role": "tool", "tool_call_id": "c2", "content": "12:01"},
    ]
    written = [
        *ASKED,
        {"role": "assistant", "content": "\n".join(['<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'] * 2)},
        {"role": "user", "content": "<tool_response>\n12:00\n</tool_response>\n<tool_response>\n12:01\n</tool_response>"},
    ]  # fmt: skip
    options = {"temperature": 0, "max_tokens": 8}
    one, other = (chat(client, messages=asked, **options) for asked in (messages, written))
    assert one.choices[0].message.content == other.choices[0].message.content
    assert one.usage.prompt_tokens == other.usage.prompt_tokens
    # None of the functions has to be called: text is an answer, too.
    (reply,) = chat(client, messages=messages, tools=TOOLS, max_tokens=8).choices
    assert (reply.finish_reason, reply.message.tool_calls) == ("length", None)


def test_responses_call_functions(client):
    options = {"model": "tiny", "input": "What is it", "max_output_tokens": 150, "extra_body": {}}
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS[1:]]
    reply = client.responses.create(
        **options, tools=tools, tool_choice={"type": "function", "name": "now"}
    )
    call = reply.output[-1]
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "now", {})
    answered = [
        {"role": "user", "content": "What is it"},
        {"type": "function_call", "call_id": call.call_id, "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"},
    ]
    reply = client.responses.create(
        **{**options, "input": answered, "max_output_tokens": 2, "temperature": 0}
    )
    assert reply.status == "incomplete"
    events = list(client.responses.create(**options, tools=tools, tool_choice={"type": "function", "name": "now"}, stream=True))  # fmt: skip
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == ["{}"]
    form = {"format": {"type": "json_schema", "name": "animal", "schema": SCHEMA}}
    jsonschema.validate(
        json.loads(client.responses.create(**options, text=form).output_text), SCHEMA
    )


# A template as gpt-oss's and Qwen3's in one: an effort in front, thoughts that are closed at once.
THINKS = "{{ reasoning_effort | default('unset') }}" + TEMPLATE.replace(
    "<|im_start|>assistant\n",
    "<|im_start|>assistant\n' }}{{ '<think></think>' if enable_thinking is false else '",
)


@pytest.fixture(scope="module")
def thinker():
    backend = printable_backend(ChatTemplate(THINKS))
    told = []
    encode = backend.tokenizer.encode_plain
    backend.tokenizer.encode_plain = lambda text: told.append(text) or encode(text)
    model = ServedModel(backend, 64)
    corpus, threads = AskedCorpus(Corpus([])), Threads(4)
    memory = FromMemory(corpus, model.session, LLMReaderOptions(), threads)
    parts = Parts("tiny", model, "tiny", None, "none", {"memory": memory}, corpus, threads)
    with serving(make_app(parts, OPTIONS), OPTIONS) as address:
        yield openai_client(address, 60), told


@pytest.mark.parametrize(
    ("options", "begins", "ends"),
    [
        ({}, "unset", "assistant\n"),
        ({"reasoning_effort": "high"}, "high", "assistant\n"),
        ({"reasoning_effort": "minimal"}, "low", "assistant\n"),
        ({"reasoning_effort": "none"}, "low", "<think></think>"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, "low", "<think></think>"),
        ({"extra_body": {"chat_template_kwargs": {"reasoning_effort": "medium"}}}, "medium", "assistant\n"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("model", ["tiny", "memory"])
def test_a_template_is_told_the_effort(thinker, options, begins, ends, model):
    client, told = thinker
    told.clear()
    chat(client, model, **{"max_tokens": 2, **options})
    assert (told[-1].split("<|im_start|>")[0], told[-1].endswith(ends)) == (begins, True), told
    more = dict(options)
    if effort := more.pop("reasoning_effort", ""):
        more["reasoning"] = {"effort": effort, "summary": "auto"}
    told.clear()
    client.responses.create(model=model, input="What is it", max_output_tokens=2, **more)
    assert (told[-1].split("<|im_start|>")[0], told[-1].endswith(ends)) == (begins, True), told


def test_penalties_and_likeliest_tokens(client):
    options = {"max_tokens": 6, "temperature": 1.0, "logprobs": True, "top_logprobs": 20}
    (choice,) = chat(client, **options).choices
    for token in choice.logprobs.content:
        likeliest = [(one.token, one.logprob) for one in token.top_logprobs]
        assert len(likeliest) == 20
        assert likeliest == sorted(likeliest, key=lambda pair: -pair[1])
        assert token.logprob <= likeliest[0][1] + 1e-6
        if token.token in dict(likeliest):
            assert dict(likeliest)[token.token] == pytest.approx(token.logprob, abs=1e-5)
    bias = chat(client, temperature=0, max_tokens=5, logit_bias={"3": 100}).choices[0]
    assert bias.message.content == "#####"
    more = {"min_p": 1.0, "repetition_penalty": 1.5}
    reply = chat(client, max_tokens=5, presence_penalty=2, frequency_penalty=-1, extra_body=more)
    assert reply.usage.completion_tokens <= 5
    scored = client.completions.create(
        model="tiny", prompt="ab", max_tokens=3, logprobs=5, temperature=0
    )
    assert all(len(row) == 5 for row in scored.choices[0].logprobs.top_logprobs)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"response_format": {"type": "xml"}}, "expected text, json_object, or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "expected text, json_object, or json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}}, "no answer can be written"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": []}}}}, "no answer can be written"),
        ({"model": "memory", "response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "no answer can be written"),
        ({"response_format": JSON, "tools": TOOLS}, "either JSON or a call"),
        ({"tools": [{"type": "retrieval"}]}, 'expected {"type": "function"'),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "expected letters, digits"),
        ({"tool_choice": "required"}, "required where there are tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "name of a function"),
        ({"tools": TOOLS[:1] * 129}, "up to 128 at once"),
        ({"functions": [{"name": "a"}]}, "functions are tools by now"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "expected a function with name"),
        ({"logit_bias": {"a": 1}}, "expected ids of tokens"),
        ({"logit_bias": {"3": 101}}, "from -100 to 100"),
        ({"logit_bias": {"102": 1}}, "logit_bias has the token 102"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs is 21, expected 0 to 20"),
        ({"frequency_penalty": 3}, "expected -2 to 2"),
        ({"reasoning_effort": "lots"}, "expected none, minimal, low, medium, high, xhigh"),
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, "enable_thinking is \"no\", expected bool"),
        ({"chat_template_kwargs": {"builtin_tools": []}}, "builtin_tools is no key that is known"),
    ],
)  # fmt: skip
def test_refusals(client, changes, sentence):
    body = {"model": "tiny", "messages": ASKED, "max_tokens": 8, **changes}
    reply = httpx.post(f"{client.base_url}chat/completions", json=body)
    message = reply.json()["error"]["message"]
    assert (reply.status_code, sentence in message) == (400, True), message
    assert message.count(". ") == 0  # one sentence


def test_calls_are_read_in_any_pieces():
    text = 'Let me <b>see</b>. <tool_call>\n{"name": "f", "arguments": {"a": "<tool"}}\n</tool_call>\nSo <tool'
    for size in (1, 2, 7, len(text)):
        reader, plain, calls = CallReader(), "", []
        for begin in range(0, len(text), size):
            piece, more = reader.push(text[begin : begin + size], is_last=begin + size >= len(text))
            plain, calls = plain + piece, calls + more
        assert plain == "Let me <b>see</b>. So <tool"
        assert calls == [Call("f", '{"a": "<tool"}')]
