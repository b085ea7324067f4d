"""Servers that speak OpenAI's HTTP API as a backend: OpenAI, Gemini, vLLM, llama.cpp, ...

Address and key come from the environment (http_client); openai_server sends requests again, and
gives them up.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import dataclasses
import hashlib
import json
import math
import random
import sys
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.decoding.requests import Result, Scores, TooLong, Unanswerable
from mmqa_jax.prompting.backends import (
    Chat,
    Choices,
    Completion,
    Decoding,
    Failure,
    Message,
    Picture,
    Query,
    Usage,
    http_client,
    openai_replies,
)
from mmqa_jax.prompting.backends.openai_replies import is_count


class OpenAIBackend:
    """Queries a server; see backends.Backend. Candidates have no token ids.

    Attributes:
      takes_pictures: None: the server does not say.
      takes_messages: the server is asked by /v1/chat/completions, as far as is known.

    Args:
      model: the server's name for it.
      config: see ServerConfig.
      flag: that named the model, for messages.
      thinking: whether the server's chat template is told to think or not (`chat_template_kwargs`
        of vLLM, SGLang and llama.cpp; a server that refuses the key is asked without it); None:
        it is not told.
      effort: `reasoning_effort` of chats; "": it is not named.

    Raises:
      RunError: the server does not answer.
    """

    takes_pictures = None
    takes_messages = True
    hides = False
    parameters = None

    def __init__(
        self,
        model: str,
        config: ServerConfig | None = None,
        flag: str = "--model",
        thinking: bool | None = None,
        effort: str = "",
    ):
        self.model, self.config = model, config or ServerConfig()
        self._thinking, self._effort, self._is_told = thinking, effort, True
        http_client.check_environment()
        self.usage = Usage()
        self.failures: list[Failure] = []
        self.system_fingerprints: set[str] = set()  # reported with the answers
        self._seconds = 0.0
        self._in_a_row = 0  # failures since the last answer
        named = f"{flag}={model}"
        self._loop = http_client.EventLoop()
        self._server = Server(model, named, self.config, self.usage, self.system_fingerprints)
        weakref.finalize(self, _close, self._loop, self._server)
        known = self._loop.run(self._server.models())
        parts = [http_client.address(), model, known]
        parts += [] if thinking is None else [{"thinking": thinking}]
        parts += [{"effort": effort}] if effort else []
        # Of the address, the model and the server's description of it.
        self.fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        length = (known or {}).get("max_model_len")
        self._lengths = PromptLengths(model, length, self._loop, self._server.client)

    def rates(self) -> dict[str, float]:
        """Tokens per second over all requests: prompts (`prefill`) and answers (`decode`)."""
        seconds = max(self._seconds, 1e-9)
        return {
            "prefill": self.usage.prompt_tokens / seconds,
            "decode": self.usage.completion_tokens / seconds,
        }

    def sizes(self) -> None:
        """A server does not say."""

    def check(self, request: Query) -> None:
        """Rejects what the API cannot express, and as TooLong what a server that counts tokens
        would refuse (other servers check lengths when they are asked to answer); Unanswerable for
        an empty prompt or a broken picture."""
        self._check_form(request)
        self._lengths.check(request)

    def _check_form(self, request: Query) -> None:
        where = f"request {shown_id(request.id)}"
        if isinstance(request, Choices):
            if not isinstance(request.prompt, str) or request.images:
                raise UserError(
                    f"{where}: a server only scores continuations of a text; give a `prompt` "
                    f"without images, or use {ENGINE}."
                )
            if not request.prompt.strip():
                raise Unanswerable(f"{where}: its prompt is empty; give some text.")
            return
        request.decoding.request(request.id)
        if request.decoding.grammar or request.decoding.top_logprobs:
            raise UserError(
                f"{where}: a form of answers and top_logprobs are not passed on to a server; leave "
                f"them out, or use {ENGINE}."
            )
        if request.decoding.beams:
            raise UserError(
                f"{where}: beams is {request.decoding.beams}, a server has no beam search; use 0, "
                f"or {ENGINE}."
            )
        if isinstance(request, Completion) and request.images:
            raise UserError(
                f"{where}: a server only takes pictures in `messages`; give them there."
            )
        for message in request.messages if isinstance(request, Chat) else ():
            for picture in message.pictures:
                picture.media_type  # noqa: B018 - raises for another format

    def answer(self, queries: Iterable[Query]) -> Iterator[Result | Scores]:
        """Keeps `concurrency` queries in flight; abandons those still in flight when closed.

        Completions and Choices go to /completions (Choices with `echo` and `logprobs`), Chats to
        /chat/completions, with pictures as data URLs; see Backend.
        """
        waiting, running = iter(queries), {}
        began, before = time.monotonic(), self._seconds
        try:
            while True:
                while len(running) < self.config.concurrency:
                    query = next(waiting, None)
                    if query is None:
                        break
                    running[self._loop.submit(self._send(query))] = query
                if not running:
                    return
                done, _ = concurrent.futures.wait(
                    running, return_when=concurrent.futures.FIRST_COMPLETED
                )
                self._seconds = before + time.monotonic() - began
                for future in done:
                    query = running.pop(future)
                    try:
                        result = future.result()
                    except Failed as error:
                        self._fail(query.id, error)
                        continue
                    self.usage.requests += 1
                    self._in_a_row = 0
                    yield result
        finally:
            for future in running:
                future.cancel()

    async def _send(self, query: Query) -> Result | Scores:
        self._check_form(query)
        return await (self._score(query) if isinstance(query, Choices) else self._generate(query))

    async def _generate(self, request: Completion | Chat) -> Result:
        decoding = request.decoding
        body: dict[str, Any]
        if isinstance(request, Chat):
            path, limit = "/chat/completions", self.config.max_tokens_key
            messages = request.messages
            if request.begun:  # vLLM's and SGLang's keys
                messages = (*messages, Message("assistant", (request.begun,)))
            body = {"messages": [openai_message(message) for message in messages]}
            if request.begun:
                body |= {"continue_final_message": True, "add_generation_prompt": False}
        else:
            path, limit = "/completions", "max_tokens"
            body = {"prompt": request.prompt}
        body |= {limit: decoding.max_new_tokens, "temperature": decoding.temperature}
        is_on, effort = self._thinking, self._effort
        if isinstance(request, Chat) and request.thinking is not None:
            is_on, effort = request.thinking.on, request.thinking.effort
        if isinstance(request, Chat) and effort:
            body["reasoning_effort"] = effort
        if decoding.logprobs:
            body["logprobs"] = True if isinstance(request, Chat) else 1
        if decoding.temperature:
            body |= {"seed": decoding.seed, "top_p": decoding.top_p}
            body |= {"top_k": decoding.top_k} if decoding.top_k else {}
        if decoding.stop:
            body["stop"] = list(decoding.stop)
        if decoding.n > 1:
            body["n"] = decoding.n
        plain = Decoding()
        for name in ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            if (value := getattr(decoding, name)) != getattr(plain, name):
                body[name] = value
        if decoding.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in decoding.logit_bias}

        def read(answer):
            return openai_replies.read_candidates(
                answer, decoding.logprobs, decoding.n, decoding.stop
            )

        most = most_bytes(body, decoding.n * decoding.max_new_tokens)
        switches = {}
        if is_on is not None and self._is_told and isinstance(request, Chat):
            switches = {_TOLD: {"enable_thinking": is_on}}
        try:
            candidates, usage = await self._server.post(path, body | switches, read, most)
        except Refused as error:
            if not switches or _TOLD not in str(error):
                raise
            self._is_told = False  # the server does not know the key: it is not told again
            candidates, usage = await self._server.post(path, body, read, most)
        candidates = sorted(candidates, key=lambda c: -c.total if not math.isnan(c.total) else 0.0)
        if len(candidates) == 1:  # a server counts all of several together
            candidates = [dataclasses.replace(candidates[0], thinking_tokens=usage.thinking)]
        return Result(request.id, tuple(candidates), usage.prompt, 0)

    async def _score(self, request: Choices) -> Scores:
        """Scores as lm-evaluation-harness: the text is split at the prompt's number of tokens.

        Trailing spaces of the prompt belong to the continuations, as in the engine. The API
        requires one new token, which is dropped.
        """
        text = request.prompt.rstrip()
        spaces = request.prompt[len(text) :]
        plain = {"max_tokens": 1, "temperature": 0.0}
        echoing = {**plain, "echo": True, "logprobs": 1}
        counted = {**plain, "prompt": text}

        async def scored(continuation: str):
            body = {**echoing, "prompt": text + spaces + continuation}
            tokens = len(body["prompt"].encode()) + 2  # at most: its bytes, and special tokens
            most = most_bytes(body, tokens)
            return await self._server.post("/completions", body, openai_replies.read_echo, most)

        try:
            (_, usage), *echoes = await asyncio.gather(
                self._server.post(
                    "/completions", counted, lambda answer: None, most_bytes(counted, 1)
                ),
                *map(scored, request.continuations),
            )
            scores = [
                openai_replies.cut_echo(echo, usage.prompt, whole.prompt) for echo, whole in echoes
            ]
        except openai_replies.NoEcho as error:
            raise UserError(
                f"request {shown_id(request.id)}: the server gives no log-probabilities of a "
                f"prompt ({error}); use one that does, such as vLLM's /completions with `echo`, "
                f"or {ENGINE}."
            ) from None
        for score, continuation in zip(scores, request.continuations, strict=True):
            if score is None:
                raise Refused(
                    f"continuation {continuation!r} adds no token to its prompt; expected some text"
                )
        return Scores(request.id, tuple(scores), usage.prompt)

    def _fail(self, request_id: Hashable, error: Failed) -> None:
        self.failures.append(Failure(request_id, str(error)))
        self.usage.failures += 1
        others = self.usage.requests + self.usage.cached
        if isinstance(error, Refused) and others and self.config.max_failures:
            return
        self._in_a_row += 1
        if self._in_a_row > self.config.max_failures:
            raise RunError(
                f"{self._in_a_row} requests failed in a row, more than server.max_failures = "
                f"{self.config.max_failures}, the last, {shown_id(request_id)}, because {error}; "
                f"{error.remedy}."
            )


_TOLD = "chat_template_kwargs"


def _close(loop: http_client.EventLoop, server: Server) -> None:
    loop.run(server.client.close())
    loop.close()


# How long a request is on a server that counts tokens: vLLM's /tokenize.


# A chat template's own tokens, at most; a text's are at most its bytes.
_TEMPLATE_TOKENS = 512
# A count comes with the tokens themselves (ids, in some servers texts): at most as many as bytes.
_COUNT_BYTES, _COUNT_BYTES_PER_BYTE = 2**20, 64
_LONGEST_CONTEXT = 2**31  # tokens; what a server says beyond it is not believed


class TooLongForServer(TooLong):
    """A request that exceeds the server's context, with its new tokens, by `excess` tokens."""

    def __init__(self, request_id: Hashable, tokens: int, new: int, length: int):
        self.excess = tokens + new - length
        Unanswerable.__init__(
            self,
            f"request {shown_id(request_id)}: its prompt of {tokens} tokens plus {new} new ones is "
            f"{self.excess} more than the server's context of {length}; shorten it (fewer "
            "examples), lower max_new_tokens, or serve the model with a longer context.",
        )


class PromptLengths:
    """Refuses what a server would refuse as too long, before it is sent.

    A request is counted only where its bytes leave room for doubt. Pictures are not counted, so
    that the server may still refuse what has some.

    Args:
      model: the server's name for it.
      length: of its context (vLLM's max_model_len), as the server says; where that is no sensible
        number it is unknown, and nothing is refused.
      loop, client: by which it is asked.
    """

    def __init__(
        self, model: str, length: Any, loop: http_client.EventLoop, client: http_client.HttpClient
    ):
        self._model, self._loop, self._client = model, loop, client
        self._length = length if is_count(length) and 0 < length < _LONGEST_CONTEXT else None

    def check(self, request: Query) -> None:
        """Raises TooLong."""
        if self._length is None:
            return
        new = 1 if isinstance(request, Choices) else request.decoding.max_new_tokens
        if isinstance(request, Chat):
            texts = [Message(message.role, message.text) for message in request.messages]
            body: dict[str, Any] = {"messages": [openai_message(message) for message in texts]}
            size = sum(len(message.text.encode()) for message in texts) + _TEMPLATE_TOKENS
            size += len(request.begun.encode())
        else:
            longest = max(request.continuations, key=len) if isinstance(request, Choices) else ""
            body = {"prompt": f"{request.prompt}{longest}"}
            size = len(body["prompt"].encode()) + 2  # special tokens
        if size + new <= self._length:
            return
        tokens = self._count(body)
        if tokens is not None and tokens + new > self._length:
            raise TooLongForServer(request.id, tokens, new, self._length)

    def _count(self, body: dict[str, Any]) -> int | None:
        """A request's tokens; None where the server does not say, which is not asked again."""
        asked = {"model": self._model, **body}
        most = _COUNT_BYTES + _COUNT_BYTES_PER_BYTE * len(json.dumps(asked))
        try:
            reply = self._loop.run(self._client.send("/tokenize", asked, most, beside=True))
        except http_client.NoReply:
            reply = None
        count = reply.value.get("count") if reply and isinstance(reply.value, dict) else None
        if reply is None or reply.status != 200 or not is_count(count):
            self._length = None
            return None
        return count


def shown_id(request_id: Hashable) -> str:
    """A request's id as messages show it; one of several parts is `a/b`."""
    return "/".join(map(str, request_id)) if isinstance(request_id, tuple) else repr(request_id)


def openai_message(message: Message) -> dict[str, Any]:
    """A message as the API takes it, pictures as data URLs."""
    if not message.pictures:
        return {"role": message.role, "content": message.text}
    parts = []
    for part in message.content:
        if isinstance(part, Picture):
            data = base64.b64encode(part.data).decode()
            url = f"data:{part.media_type};base64,{data}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            parts.append({"type": "text", "text": part})
    return {"role": message.role, "content": parts}


# One run's connection to a server of OpenAI's API: what is sent again, what is given up, and why.
#
# What a server sends is checked before it becomes an answer: a reply that is late, too large, no
# JSON, or not what was asked for is a failed request, which is sent again and finally counted.


_TRANSIENT = (408, 409, 429)  # and all from 500 on
_FIRST_RETRIES = 2  # of the first request, which shows whether there is a server at all
# A reply may have 1 MiB, twice its request (servers may repeat the prompt, with characters beyond
# ASCII as escapes), and so much per token: its text alone, or with its log-probability as well.
_REPLY_BYTES, _TOKEN_BYTES, _LOGPROB_BYTES = 2**20, 2**10, 2**12
_LIST_BYTES = 2**24  # of the list of models, which has thousands at some services
_NAMES = 3  # of other models, at most, are warned of
ENGINE = "--backend=engine (of a row: parts.llm.backend)"  # what can do more than a server
# How servers word that a request exceeds the context: OpenAI, vLLM, llama.cpp, Gemini.
_TOO_LONG_CODE = "context_length_exceeded"
_TOO_LONG_WORDS = (
    *("maximum context length", "maximum model length", "exceed_context_size"),
    *("exceeds the available context", "input token count"),
)


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """How requests are sent to a server.

    Up to `concurrency` requests are in flight at once. A reply that is not there as a whole
    `timeout` seconds after it was asked for, a lost connection, the statuses 408, 409, 429 and 5xx
    and a malformed or too large answer are retried up to `retries` times with exponential backoff
    from `first_wait` to `longest_wait` seconds, less a random part of up to a half; if the server
    says how long to wait (Retry-After), that long, up to `longest_wait`. A request that finally
    fails is counted; the run ends when more than `max_failures` in a row do. A request that the
    server refuses is not one of them once others were answered: its own text or picture is the
    reason then. With 0 the first failure ends it.
    `max_tokens_key` is the server's name for the limit of new tokens in chats (older servers:
    max_tokens).
    """

    concurrency: int = 8
    timeout: float = 120.0
    retries: int = 6
    first_wait: float = 0.5
    longest_wait: float = 60.0
    max_failures: int = 10
    max_tokens_key: str = "max_completion_tokens"

    def __post_init__(self):
        for name, least in (("concurrency", 1), ("retries", 0), ("max_failures", 0)):
            if getattr(self, name) < least:
                raise UserError(
                    f"config key server.{name}={getattr(self, name)}: expected at least {least}."
                )
        for name in ("timeout", "first_wait", "longest_wait"):
            if not getattr(self, name) > 0:
                raise UserError(
                    f"config key server.{name}={getattr(self, name)}: expected a positive number."
                )


class Failed(Exception):
    """A request finally failed, as the message says; `remedy` is what to do where all requests fail
    so."""

    remedy = "restart when the server works again"


class WithoutLogprobs(Failed):
    """The answers lack log-probabilities."""

    remedy = f"use a server that gives log-probabilities of its answers, such as vLLM, or {ENGINE}"


class WithoutChoices(Failed):
    """The answers lack choices, or have too many."""

    remedy = (
        "use a server that gives as many answers to a prompt as are requested (n), such as vLLM, "
        f"or {ENGINE}"
    )


class Redirected(Failed):
    """The server names another address."""

    remedy = f"set {http_client.URL} to the address of the server that answers"


class Refused(Failed):
    """The server refuses this request."""


class RefusedAsTooLong(Refused):
    """The server refuses this request because it exceeds the context."""

    remedy = (
        "show fewer examples (of a row: options.shots), lower max_new_tokens, or serve the model "
        "with a longer context"
    )


class Server:
    """The requests to the server of one model, which is `named` so in messages."""

    def __init__(
        self, model: str, named: str, config: ServerConfig, usage: Usage, fingerprints: set[str]
    ):
        self._model, self._named, self._config = model, named, config
        self._usage, self._fingerprints = usage, fingerprints
        self._slots = asyncio.Semaphore(config.concurrency)
        self.client = http_client.HttpClient(config.timeout)
        self._others: set[str] = set()  # names of other models that answered

    async def models(self) -> Any:
        """Returns the server's description of the model, without volatile fields; None if there is
        none. It raises what OpenAIBackend does."""
        retries = min(self._config.retries, _FIRST_RETRIES)  # report a wrong address soon
        try:
            answer = await self._send("/models", None, lambda answer: answer, _LIST_BYTES, retries)
        except Redirected as error:
            raise UserError(
                f"environment: the server of {http_client.URL}: {error}; {error.remedy}."
            ) from None
        except Failed as error:
            raise RunError(
                f"the server of {http_client.URL}: {error}; start it, or correct {http_client.URL}."
            ) from None
        known = answer.get("data") if isinstance(answer, dict) else None
        for entry in known if isinstance(known, list) else ():
            if isinstance(entry, dict) and entry.get("id") == self._model:
                names = ("id", "root", "parent", "owned_by", "max_model_len", "meta")
                return {name: entry.get(name) for name in names}
        return None  # some servers list no models, or accept any name

    async def post(
        self, path: str, body: dict[str, Any], read: Callable[[dict[str, Any]], Any], most: int
    ) -> tuple[Any, openai_replies.Tokens]:
        """Posts, with retries; returns `read` of the answer, and its token counts. It raises Failed
        where there is no answer, and NoEcho as `read`, or where the server rejects `echo`."""

        def read_all(answer):
            return read(answer), openai_replies.read_usage(answer)

        body = {"model": self._model, **body}
        async with self._slots:
            answer = await self._send(path, body, read_all, most, self._config.retries)
        self._usage.prompt_tokens += answer[1].prompt
        self._usage.completion_tokens += answer[1].completion
        self._usage.thinking_tokens += answer[1].thinking or 0
        if answer[1].system:
            self._fingerprints.add(answer[1].system)
        self._warn_of_another(answer[1].model)
        return answer

    async def _send(
        self,
        path: str,
        body: dict[str, Any] | None,
        read: Callable[[Any], Any],
        most: int,
        retries: int,
    ) -> Any:
        for attempt in range(retries + 1):
            retry_after = None  # seconds
            kind = Failed
            try:
                reply = await self.client.send(path, body, most)
                if body is None and reply.status == 404:  # not all servers list their models
                    return {}
                reason = self._refusal(reply, echo="echo" in (body or ()))
                if reason is None:
                    return read(reply.value)
                retry_after = openai_replies.retry_after(reply.headers)
            except http_client.NoReply as error:
                reason = str(error)
            except openai_replies.Malformed as error:
                reason = f"its answer is malformed ({error})"
                if isinstance(error, openai_replies.NoLogprobs):
                    kind = WithoutLogprobs
                elif isinstance(error, openai_replies.WrongCount):
                    kind = WithoutChoices
            if attempt < retries:
                self._usage.retries += 1
                await asyncio.sleep(self._wait(attempt, retry_after))
        tries = f"{retries + 1} tries" if retries else "one try"
        raise kind(f"{reason}, after {tries}")

    def _wait(self, attempt: int, retry_after: float | None) -> float:
        if retry_after is not None:
            return min(retry_after, self._config.longest_wait)
        longest = min(self._config.first_wait * 2**attempt, self._config.longest_wait)
        return longest * random.uniform(0.5, 1.0)

    def _refusal(self, reply: http_client.Reply, echo: bool) -> str | None:
        """Why a reply is no answer, None if it is one; raises if a retry cannot help.

        Proxies in front of several models answer 200 with an error, whose code is the status.
        """
        status = reply.status
        if 300 <= status < 400:
            raise Redirected(f"it redirects to another address ({status}), which is not asked")
        error = openai_replies.read_error(reply.value, reply.text)
        if status < 300:
            if error is None:
                return None
            if isinstance(error.code, int) and 400 <= error.code < 600:
                status = error.code
        words = "no reason given" if error is None else http_client.clean(error.message)
        self._give_up(status, error.code if error else None, error.message if error else "", echo)
        return (
            f"it says {status} ({words})"
            if status >= 300
            else f"it answers with an error ({words})"
        )

    def _give_up(self, status: int, code: str | int | None, message: str, echo: bool) -> None:
        """Raises if a retry cannot help."""
        reply = http_client.clean(message)
        if status == 401 or (status == 403 and not self._usage.requests):
            raise UserError(
                f"environment: the server refuses {http_client.KEY} ({status}); correct it."
            )
        if status == 404:
            raise UserError(
                f"{self._named}: the server of {http_client.URL} does not know it, or has no such "
                f"service (404: {reply}); correct the name or the address (usually ending in /v1)."
            )
        if code == "insufficient_quota":
            raise RunError(f"the server's quota is exhausted ({reply}); raise it and restart.")
        if echo and status < 500 and "echo" in message.lower():
            raise openai_replies.NoEcho(f"it says {status}: {reply}")
        too_long = code == _TOO_LONG_CODE or any(words in message for words in _TOO_LONG_WORDS)
        if status < 500 and too_long:
            raise RefusedAsTooLong(f"it exceeds the server's context ({status}: {reply})")
        if 400 <= status < 500 and status not in _TRANSIENT:
            raise Refused(f"the server refuses it ({status}: {reply})")

    def _warn_of_another(self, name: str | None) -> None:
        """Warns once where another model answers; dated and prefixed names are the same model's."""
        if name is None or name in self._others or len(self._others) == _NAMES:
            return
        short, asked = (full.casefold().rpartition("/")[2] for full in (name, self._model))
        if short.startswith(asked) or asked.startswith(short):
            return
        self._others.add(name)
        print(
            f"mmqa: {self._named}: the server answers as model {http_client.clean(name)}; check "
            "that it serves the one that you mean.",
            file=sys.stderr,
        )


def most_bytes(body: dict[str, Any], tokens: int) -> int:
    """Returns the bytes that the reply to a request, about so many tokens, may have."""
    each = _LOGPROB_BYTES if body.get("logprobs") else _TOKEN_BYTES
    return _REPLY_BYTES + 2 * len(json.dumps(body)) + tokens * each
