"""Requests of OpenAI's API in types: what is asked of the model, and in which form it is answered.

Of `mmqa serve`, and of batch files that `mmqa prompt` takes. What the API knows and the engine
does not is refused by name; nothing is ignored that would change the answer.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.pictures import decode as images
from mmqa_jax.data.pictures.bounds import PictureError
from mmqa_jax.decoding.requests import MOST_TOP
from mmqa_jax.prompting.backends import Decoding, Message, Picture
from mmqa_jax.prompting.backends.answer_forms import (
    calls_text,
    read_form,
    response_text,
)
from mmqa_jax.prompting.backends.json_fields import Fields, WrongField, strings, token_ids, wrong
from mmqa_jax.prompting.backends.thinking import EFFORTS, Thinking

_MOST_TOKENS = 2**20
_MOST_STOPS = 16
_MOST_DRAWS = 64
_MOST_PROMPTS = 256
_MOST_INPUTS = 2048  # that are embedded or reranked in one request, as OpenAI's
_DEFAULT_TOKENS = 16  # of /v1/completions, as OpenAI's
_ROLES = {"developer": "system"}  # OpenAI's newer name
# OpenAI's names of efforts -> those that chat templates know.
_EFFORTS = {"none": "", "minimal": "low", **{name: name for name in EFFORTS}, "xhigh": "high"}

Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True)
class Form:
    """How answers are given back.

    Attributes:
      stream: in pieces, as they are decoded.
      usage: the stream ends with the numbers of tokens.
      logprobs: of the tokens.
      top: also so many of the likeliest tokens in the place of each.
      echo: the prompt comes first.
    """

    stream: bool = False
    usage: bool = False
    logprobs: bool = False
    top: int = 0
    echo: bool = False


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """`POST /v1/completions`.

    Attributes:
      model: its name.
      prompts: texts, or token ids.
      decoding: of each; `max_new_tokens` is at least 1.
      is_only_scored: max_tokens is 0, with echo: nothing is generated.
    """

    model: str
    prompts: tuple[Prompt, ...]
    decoding: Decoding
    form: Form
    is_only_scored: bool


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """`POST /v1/chat/completions`.

    Attributes:
      decoding: `max_new_tokens` stands for `most`.
      most: new tokens; None: as many as the model's context holds.
      calls: whether functions may be called.
      thinking: what the chat template is told; None: what it was opened with.
    """

    model: str
    messages: tuple[Message, ...]
    decoding: Decoding
    form: Form
    most: int | None
    calls: bool
    thinking: Thinking | None = None


@dataclasses.dataclass(frozen=True)
class EmbeddingRequest:
    """`POST /v1/embeddings`.

    Attributes:
      inputs: texts, or ids of the encoder's own tokens.
      dimensions: how many of a vector's first numbers are returned, at length 1; None: all.
    """

    model: str
    inputs: tuple[Prompt, ...]
    dimensions: int | None
    as_base64: bool


@dataclasses.dataclass(frozen=True)
class RerankRequest:
    """`POST /v1/rerank`, as Cohere, Jina and vLLM have it.

    Attributes:
      most: how many of the best documents are returned.
      with_texts: each result has its document.
    """

    model: str
    query: str
    documents: tuple[str, ...]
    most: int
    with_texts: bool


def read_completion(fields: Fields) -> CompletionRequest:
    """Reads a completion; WrongField for what is wrong with it."""
    model, prompts = fields.take("model", str), fields.take("prompt", (str, list))
    prompts = _texts_or_tokens(prompts, "prompt", _MOST_PROMPTS)
    most = fields.whole("max_tokens", _DEFAULT_TOKENS, 0, _MOST_TOKENS)
    top = fields.whole("logprobs", None, 0, MOST_TOP)
    echo = fields.take("echo", bool, False)
    if echo and (top or 0) > 1:
        raise WrongField(
            f"logprobs is {top}; of an echoed prompt only the likeliest token is known: at most 1.",
            param="logprobs",
        )
    if most == 0 and not echo:
        raise WrongField("max_tokens is 0; without echo at least 1.", param="max_tokens")
    decoding, form = _decoding(fields, max(most, 1), None, top)
    form = dataclasses.replace(form, echo=echo)
    if form.stream and (echo or len(prompts) > 1):
        raise WrongField("stream is for one prompt without echo.", param="stream")
    fields.only("best_of", 1)
    fields.only("suffix", "")
    fields.end()
    return CompletionRequest(model, prompts, decoding, form, is_only_scored=most == 0)


def read_chat(fields: Fields, default: Decoding | None = None) -> ChatRequest:
    """Reads a chat; WrongField for what is wrong with it. `default` has temperature, top_p, top_k
    and seed; None: OpenAI's."""
    model = fields.take("model", str)
    messages = _messages(fields.take("messages", list))
    older = fields.whole("max_tokens", None, 1, _MOST_TOKENS)
    most = fields.whole("max_completion_tokens", older, 1, _MOST_TOKENS)
    logprobs = fields.take("logprobs", bool, False)
    top = fields.whole("top_logprobs", 0, 0, MOST_TOP)
    decoding, form = _decoding(fields, 1, default, top if logprobs else None)
    answer = read_form(fields)
    if answer.grammar:
        decoding = dataclasses.replace(decoding, grammar=answer.grammar, top_logprobs=form.top)
    if answer.instructions:
        messages = _instructed(messages, answer.instructions)
    fields.only("functions", [], why="are tools by now: give them as these")
    fields.only("function_call", "none", "auto")
    fields.only("modalities", ["text"])
    thinking = _thinking(fields)
    fields.end()
    return ChatRequest(model, messages, decoding, form, most, answer.calls, thinking)


def _thinking(fields: Fields) -> Thinking | None:
    """`reasoning_effort`, and the switches among `chat_template_kwargs` as vLLM takes them."""
    switches = Fields(fields.take("chat_template_kwargs", dict, {}))
    key = "reasoning_effort"
    effort = fields.take(key, str, switches.take(key, str, ""))
    if effort and effort not in _EFFORTS:
        raise wrong(key, effort, f"expected {', '.join(_EFFORTS)}")
    older = switches.take("thinking", bool, None)
    is_on = switches.take("enable_thinking", bool, older)
    switches.end()
    if is_on is None and not effort:
        return None
    is_on = effort != "none" if is_on is None else is_on
    return Thinking(is_on, effort=_EFFORTS.get(effort, "") if is_on else "")


def _instructed(messages: tuple[Message, ...], instructions: str) -> tuple[Message, ...]:
    """The messages with instructions at the end of their system prompt."""
    if messages[0].role != "system":
        return (Message("system", (instructions,)), *messages)
    first = Message("system", (*messages[0].content, f"\n\n{instructions}"))
    return (first, *messages[1:])


def read_embedding(fields: Fields) -> EmbeddingRequest:
    """Reads texts to be embedded; WrongField for what is wrong with them."""
    model = fields.take("model", str)
    inputs = _texts_or_tokens(fields.take("input", (str, list)), "input", _MOST_INPUTS)
    form = fields.take("encoding_format", str, "float")
    if form not in ("float", "base64"):
        raise wrong("encoding_format", form, "expected float or base64")
    dimensions = fields.whole("dimensions", None, 1, 2**20)
    fields.ignore("user")
    fields.end()
    return EmbeddingRequest(model, inputs, dimensions, form == "base64")


@dataclasses.dataclass(frozen=True)
class TokenizeRequest:
    """`POST /tokenize`, as vLLM has it.

    Attributes:
      text: a prompt; None: the conversation is rendered by the model's template.
      messages: of the conversation.
      with_marks: special tokens that the text spells out are tokens.
      adds_special: the tokens that a prompt begins with are added.
    """

    model: str
    text: str | None
    messages: tuple[Message, ...]
    with_marks: bool
    adds_special: bool


def read_tokenize(fields: Fields) -> TokenizeRequest:
    """Reads what is to be cut into tokens; WrongField for what is wrong with it."""
    model, text = fields.take("model", str), fields.take("prompt", str, None)
    rows = fields.take("messages", list, None)
    if (text is None) == (rows is None):
        raise WrongField("prompt, messages: give one of them.", param="prompt")
    messages = () if rows is None else _messages(rows)
    fields.only("add_generation_prompt", True)
    adds_special = fields.take("add_special_tokens", bool, text is not None)
    fields.end()
    return TokenizeRequest(model, text, messages, text is None, adds_special)


def read_rerank(fields: Fields) -> RerankRequest:
    """Reads documents to be ranked for a query; WrongField for what is wrong with them."""
    model, query = fields.take("model", str), fields.take("query", str)
    rows = fields.take("documents", list)
    texts = [row.get("text") if isinstance(row, dict) else row for row in rows]
    if not strings(texts) or not texts:
        raise wrong("documents", rows, 'expected texts, or objects with "text"')
    if len(texts) > _MOST_INPUTS:
        raise WrongField(f"documents has {len(texts):,} texts, up to {_MOST_INPUTS:,} at once.")
    most = fields.whole("top_n", len(texts), 1, 2**31 - 1)
    with_texts = fields.take("return_documents", bool, False)
    fields.ignore("user")
    fields.end()
    return RerankRequest(model, query, tuple(texts), min(most, len(texts)), with_texts)


def _decoding(
    fields: Fields, most: int, default: Decoding | None, top: int | None
) -> tuple[Decoding, Form]:
    """What completions and chats have in common; `top`: likeliest tokens in each place, None: no
    log-probabilities."""
    if default is None:  # in OpenAI's API each request without a seed draws otherwise
        default = Decoding(temperature=1.0, seed=random.getrandbits(62))
    temperature = fields.number("temperature", default.temperature, 0.0, 2.0)
    n = fields.whole("n", 1, 1, _MOST_DRAWS)
    if n > 1 and not temperature:
        raise WrongField("n is above 1 at temperature 0, where all answers are the same.")
    stop = fields.take("stop", (str, list), [])
    stop = [stop] if isinstance(stop, str) else stop
    if not strings(stop) or "" in stop or len(stop) > _MOST_STOPS:
        raise wrong("stop", stop, f"expected up to {_MOST_STOPS} texts of some length")
    seed = fields.whole("seed", None, -(2**63), 2**63 - 1)
    decoding = Decoding(
        max_new_tokens=most,
        temperature=temperature,
        top_k=fields.whole("top_k", default.top_k, 0, 2**31 - 1),
        top_p=fields.number("top_p", default.top_p, 1e-6, 1.0),
        stop=tuple(stop),
        n=n,
        seed=default.seed if seed is None else seed % 2**63,
        logprobs=top is not None,
        min_p=fields.number("min_p", default.min_p, 0.0, 1.0),
        repetition_penalty=fields.number(
            "repetition_penalty", default.repetition_penalty, 1e-2, 100.0
        ),
        presence_penalty=fields.number("presence_penalty", default.presence_penalty, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", default.frequency_penalty, -2.0, 2.0),
        logit_bias=_bias(fields.take("logit_bias", dict, {})),
    )
    # A greedy answer's tokens are the likeliest themselves.
    if top and not (top == 1 and not temperature and not decoding.request(0).is_shaped):
        decoding = dataclasses.replace(decoding, top_logprobs=top)
    stream = fields.take("stream", bool, False)
    options = Fields(fields.take("stream_options", dict, {}))
    form = Form(stream, options.take("include_usage", bool, False), top is not None, top or 0)
    options.ignore("include_obfuscation", "continuous_usage_stats")
    options.end()
    fields.ignore("user", "metadata", "store", "service_tier", "safety_identifier")
    fields.ignore("prompt_cache_key")
    return decoding, form


def _bias(rows: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    """`logit_bias`, whose keys are ids of tokens in words."""
    for key, value in rows.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (key.isascii() and key.isdigit() and len(key) < 10 and is_number):
            raise wrong("logit_bias", rows, "expected ids of tokens with numbers from -100 to 100")
        if not -100 <= value <= 100:
            raise wrong("logit_bias", rows, "expected numbers from -100 to 100")
    return tuple(sorted((int(key), float(value)) for key, value in rows.items()))


def _texts_or_tokens(value: Any, key: str, most: int) -> tuple[Prompt, ...]:
    """A text, token ids, or a list of at most so many of either."""
    if isinstance(value, str):
        items: Sequence[Prompt] = [value]
    elif token_ids(value) and value:
        items = [tuple(value)]
    elif strings(value) or (value and all(token_ids(item) and item for item in value)):
        items = value
    else:
        items = []
    if not items or "" in items:
        raise wrong(key, value, "expected a text, token ids, or a list of either")
    if len(items) > most:
        raise WrongField(f"{key} has {len(items):,} {key}s, up to {most:,} at once.")
    return tuple(item if isinstance(item, str) else tuple(item) for item in items)


def _messages(rows: list[Any]) -> tuple[Message, ...]:
    if not rows:
        raise wrong("messages", rows, "expected at least one message")
    messages = []
    for number, row in enumerate(rows):
        key = f"messages[{number}]"
        if not isinstance(row, dict):
            raise wrong(key, row, "expected an object")
        fields = Fields(row)
        role, calls = fields.take("role", str), fields.take("tool_calls", list, [])
        no_text: Any = {"default": ""} if calls else {}
        content = _content(fields.take("content", (str, list), **no_text), key)
        fields.ignore("name", "refusal", "annotations", "audio", "reasoning_content", "reasoning")
        fields.ignore("tool_call_id", "function_call")
        fields.end()
        if calls:
            content = (*filter(None, content), calls_text(calls, f"{key}.tool_calls"))
        if role == "tool":
            result = response_text(Message("user", content).text)
            if number and rows[number - 1].get("role") == "tool":  # of calls side by side
                result = f"{messages.pop().text}\n{result}"
            role, content = "user", (result,)
        try:
            messages.append(Message(_ROLES.get(role, role), content))
        except UserError as error:
            raise WrongField(str(error), param=f"{key}.role") from error
    return tuple(messages)


def _content(content: str | list[Any], key: str) -> tuple[str | Picture, ...]:
    if isinstance(content, str):
        return (content,)
    parts: list[str | Picture] = []
    for number, part in enumerate(content):
        name = f"{key}.content[{number}]"
        kind = part.get("type") if isinstance(part, dict) else None
        value = part.get(kind) if isinstance(kind, str) else None
        if kind == "image_url" and isinstance(value, dict):
            value = value.get("url")
        if kind not in ("text", "image_url") or not isinstance(value, str):
            raise wrong(name, part, 'expected {"type": "text" or "image_url", ...}')
        parts.append(value if kind == "text" else read_picture(value, f"{name}.image_url"))
    return tuple(parts)


def data_url(picture: bytes) -> str | None:
    """An encoded picture as a URL; None of a kind that browsers do not show."""
    try:
        media_type = Picture(picture).media_type
    except UserError:
        return None
    return f"data:{media_type};base64,{base64.b64encode(picture).decode()}"


def read_picture(url: str, key: str) -> Picture:
    """Reads the picture of a `data:` URL, checked before it is decoded; WrongField for another URL
    (nothing is fetched), broken base64, or no picture that may be decoded."""
    head, comma, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64") or not comma:
        raise WrongField(
            f"{key} is no data:image/...;base64, URL; no picture is fetched from elsewhere, so "
            "give its bytes.",
            param=key,
        )
    try:
        decoded = base64.b64decode(data, validate=True)
        images.verify(decoded, "the picture")
        picture = Picture(decoded, "the picture")
        _ = picture.media_type
    except binascii.Error as error:
        raise WrongField(f"{key} is broken base64 ({error}).", param=key) from error
    except (PictureError, UserError) as error:
        raise WrongField(str(error), param=key) from error
    return picture
