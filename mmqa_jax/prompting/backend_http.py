"""Servers that speak OpenAI's HTTP API as a backend: OpenAI, Gemini, vLLM, llama.cpp, ...

The server's address and key come only from the environment variables that OpenAI's own client
reads: OPENAI_BASE_URL (such as http://localhost:8000/v1) and OPENAI_API_KEY (optional if the server
requires none). Neither is ever printed, stored or put into a message.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import hashlib
import json
import math
import os
import random
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.decoding.requests import Result, Scores, Unanswerable
from mmqa_jax.prompting import openai_format
from mmqa_jax.prompting.backends import Chat, Choices, Completion, Failure, Query, Usage
from mmqa_jax.prompting.event_loop import EventLoop
from mmqa_jax.prompting.prompt_lengths import PromptLengths, openai_message, shown_id

URL, KEY = "OPENAI_BASE_URL", "OPENAI_API_KEY"
_TRANSIENT = (408, 409, 429)  # and all from 500 on
_FIRST_RETRIES = 2  # of the first request, which shows whether there is a server at all
_SHOWN = 300  # characters of a server's message
_ENGINE = "--backend=engine (of a row: parts.llm.backend)"  # what can do more than a server
# How servers word that a request exceeds the context: OpenAI, vLLM, llama.cpp, Gemini.
_TOO_LONG_CODE = "context_length_exceeded"
_TOO_LONG_WORDS = (
    *("maximum context length", "maximum model length", "exceed_context_size"),
    *("exceeds the available context", "input token count"),
)


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """How requests are sent to a server.

    Up to `concurrency` requests are in flight at once. A timeout (`timeout` seconds), a lost
    connection, the statuses 408, 409, 429 and 5xx and a malformed answer are retried up to
    `retries` times with exponential backoff from `first_wait` to `longest_wait` seconds, less a
    random part of up to a half; if the server says how long to wait (Retry-After), that long, up
    to `longest_wait`. A request that finally fails is counted; the run ends when more than
    `max_failures` in a row do. A request that the server refuses is not one of them once others
    were answered: its own text or picture is the reason then. With 0 the first failure ends it.
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


class _Failed(Exception):
    """A request finally failed; the message says why.

    Attributes:
      remedy: what to do where all requests fail so.
    """

    remedy = "restart when the server works again"


class _WithoutLogprobs(_Failed):
    """The answers lack log-probabilities."""

    remedy = f"use a server that gives log-probabilities of its answers, such as vLLM, or {_ENGINE}"


class _Refused(_Failed):
    """The server refuses this request."""


class _RefusedAsTooLong(_Refused):
    """The server refuses this request because it exceeds the context."""

    remedy = (
        "show fewer examples (of a row: options.shots), lower max_new_tokens, or serve the model "
        "with a longer context"
    )


class OpenAIBackend:
    """Queries a server; see backends.Backend. Candidates have no token ids.

    Args:
      model: the server's name for it.
      config: see ServerConfig.
      flag: that named the model, for messages.

    Raises:
      UserError: no server in the environment or at its address, a rejected key, or a model that it
        does not serve.
      RunError: the server does not answer.
    """

    def __init__(self, model: str, config: ServerConfig | None = None, flag: str = "--model"):
        self.model, self.config, self._flag = model, config or ServerConfig(), flag
        if not os.environ.get(URL) and not os.environ.get(KEY):
            raise UserError(
                f"environment: {URL} is not set; set it to the server's address (such as "
                f"http://localhost:8000/v1), and {KEY} to its key if it asks for one."
            )
        self.usage = Usage()
        self.failures: list[Failure] = []
        self.system_fingerprints: set[str] = set()  # reported with the answers
        self._seconds = 0.0
        self._in_a_row = 0  # failures since the last answer
        known = self._fetch_description()
        parts = [os.environ.get(URL, ""), model, known]
        self._fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        length = (known or {}).get("max_model_len")
        self._lengths = PromptLengths(model, length, self.config.timeout)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of address, model and the server's description of the model."""
        return self._fingerprint

    def rates(self) -> dict[str, float]:
        """Tokens per second over all requests: prompts (`prefill`) and answers (`decode`)."""
        seconds = max(self._seconds, 1e-9)
        return {
            "prefill": self.usage.prompt_tokens / seconds,
            "decode": self.usage.completion_tokens / seconds,
        }

    def check(self, request: Query) -> None:
        """Rejects what the API cannot express, and what a server that counts tokens would refuse.

        Raises:
          TooLong: see PromptLengths; other servers check lengths when they are asked to answer.
          Unanswerable: an empty prompt or a broken picture.
          UserError: anything else that cannot be served.
        """
        self._check_form(request)
        self._lengths.check(request)

    def _check_form(self, request: Query) -> None:
        where = f"request {shown_id(request.id)}"
        if isinstance(request, Choices):
            if not isinstance(request.prompt, str) or request.images:
                raise UserError(
                    f"{where}: a server only scores continuations of a text; give a `prompt` "
                    f"without images, or use {_ENGINE}."
                )
            if not request.prompt.strip():
                raise Unanswerable(f"{where}: its prompt is empty; give some text.")
            return
        request.decoding.request(request.id)
        if request.decoding.beams:
            raise UserError(
                f"{where}: beams is {request.decoding.beams}, a server has no beam search; use 0, "
                f"or {_ENGINE}."
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

        Raises:
          UserError: the server gives no log-probabilities of a prompt.
        """
        waiting, running = iter(queries), {}
        began, before = time.monotonic(), self._seconds
        with EventLoop() as loop:
            server = loop.run(self._open())
            try:
                while True:
                    while len(running) < self.config.concurrency:
                        query = next(waiting, None)
                        if query is None:
                            break
                        running[loop.start(self._send(server, query))] = query
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
                        except _Failed as error:
                            self._fail(query.id, error)
                            continue
                        self.usage.requests += 1
                        self._in_a_row = 0
                        yield result
            finally:
                for future in running:
                    future.cancel()
                loop.run(server.close())

    async def _send(self, server: _Server, query: Query) -> Result | Scores:
        self._check_form(query)
        if isinstance(query, Choices):
            return await self._score(server, query)
        return await self._generate(server, query)

    async def _generate(self, server: _Server, request: Completion | Chat) -> Result:
        decoding = request.decoding
        body: dict[str, Any]
        if isinstance(request, Chat):
            path, limit = "/chat/completions", self.config.max_tokens_key
            body = {"messages": [openai_message(message) for message in request.messages]}
        else:
            path, limit = "/completions", "max_tokens"
            body = {"prompt": request.prompt}
        body |= {limit: decoding.max_new_tokens, "temperature": decoding.temperature}
        if decoding.logprobs:
            body["logprobs"] = True if isinstance(request, Chat) else 1
        if decoding.temperature:
            body |= {"seed": decoding.seed, "top_p": decoding.top_p}
            body |= {"top_k": decoding.top_k} if decoding.top_k else {}
        if decoding.stop:
            body["stop"] = list(decoding.stop)
        if decoding.n > 1:
            body["n"] = decoding.n
        found, usage = await server.post(
            path,
            body,
            lambda answer: openai_format.read_candidates(answer, decoding.logprobs, decoding.stop),
        )
        found = sorted(found, key=lambda c: -c.total if not math.isnan(c.total) else 0.0)
        return Result(request.id, tuple(found), usage.prompt, 0)

    async def _score(self, server: _Server, request: Choices) -> Scores:
        """As lm-evaluation-harness: split at the prompt's number of tokens.

        Trailing spaces of the prompt belong to the continuations, as in the engine. The API
        requires one new token, which is dropped.
        """
        text = request.prompt.rstrip()
        spaces = request.prompt[len(text) :]
        plain = {"max_tokens": 1, "temperature": 0.0}
        echoing = {**plain, "echo": True, "logprobs": 1}

        async def scored(continuation: str):
            body = {**echoing, "prompt": text + spaces + continuation}
            return await server.post("/completions", body, openai_format.read_echo)

        try:
            (_, usage), *echoes = await asyncio.gather(
                server.post("/completions", {**plain, "prompt": text}, lambda answer: None),
                *map(scored, request.continuations),
            )
            scores = [
                openai_format.cut_echo(echo, usage.prompt, own.prompt) for echo, own in echoes
            ]
        except openai_format.NoEcho as error:
            raise UserError(
                f"request {shown_id(request.id)}: the server gives no log-probabilities of a "
                f"prompt ({error}); use one that does, such as vLLM's /completions with `echo`, "
                f"or {_ENGINE}."
            ) from None
        for score, continuation in zip(scores, request.continuations, strict=True):
            if score is None:
                raise _Refused(
                    f"continuation {continuation!r} adds no token to its prompt; expected some text"
                )
        return Scores(request.id, tuple(scores), usage.prompt)

    def _fail(self, request_id: Hashable, error: _Failed) -> None:
        self.failures.append(Failure(request_id, str(error)))
        self.usage.failures += 1
        others = self.usage.requests + self.usage.cached
        if isinstance(error, _Refused) and others and self.config.max_failures:
            return
        self._in_a_row += 1
        if self._in_a_row > self.config.max_failures:
            raise RunError(
                f"{self._in_a_row} requests failed in a row, more than server.max_failures = "
                f"{self.config.max_failures}, the last, {shown_id(request_id)}, because {error}; "
                f"{error.remedy}."
            )

    def _fetch_description(self) -> dict[str, Any] | None:
        async def fetch():
            server = await self._open()
            try:
                return await server.models()
            finally:
                await server.close()

        with EventLoop() as loop:
            return loop.run(fetch())

    async def _open(self) -> _Server:
        named = f"{self._flag}={self.model}"
        return _Server(self.model, named, self.config, self.usage, self.system_fingerprints)


class _Server:
    """The connection of one run, created in its event loop; `named` is the model in messages."""

    def __init__(
        self, model: str, named: str, config: ServerConfig, usage: Usage, fingerprints: set[str]
    ):
        import openai

        self._openai, self._model, self._named, self._config = openai, model, named, config
        self._usage, self._fingerprints = usage, fingerprints
        self._slots = asyncio.Semaphore(config.concurrency)
        # The client requires a key; a server that needs none ignores it.
        self._key = os.environ.get(KEY) or "none"
        self._client = openai.AsyncOpenAI(api_key=self._key, timeout=config.timeout, max_retries=0)

    async def close(self) -> None:
        """Closes all connections."""
        await self._client.close()

    async def models(self) -> Any:
        """The server's description of the model, without volatile fields; None if there is none.

        Raises:
          UserError, RunError: see OpenAIBackend.
        """
        try:
            retries = min(self._config.retries, _FIRST_RETRIES)  # report a wrong address soon
            answer = await self._send(lambda: self._get("/models"), retries=retries)
        except _Failed as error:
            raise RunError(f"the server of {URL}: {error}; start it, or correct {URL}.") from None
        known = answer.get("data") if isinstance(answer, dict) else None
        for entry in known if isinstance(known, list) else ():
            if isinstance(entry, dict) and entry.get("id") == self._model:
                names = ("id", "root", "parent", "owned_by", "max_model_len", "meta")
                return {name: entry.get(name) for name in names}
        return None  # some servers list no models, or accept any name

    async def post(
        self, path: str, body: dict[str, Any], read: Callable[[dict[str, Any]], Any]
    ) -> tuple[Any, openai_format.Tokens]:
        """Posts, with retries; returns `read` of the answer, and its token counts.

        Raises:
          _Failed: there is no answer, and why.
          UserError: no request could be answered: a rejected key, an unknown model.
          NoEcho: from `read`, or the server rejects `echo`.
        """

        def read_all(answer):
            return read(answer), openai_format.read_usage(answer)

        async with self._slots:
            answer = await self._send(
                lambda: self._client.post(
                    path, cast_to=object, body={"model": self._model, **body}
                ),
                read_all,
                echo="echo" in body,
            )
        self._usage.prompt_tokens += answer[1].prompt
        self._usage.completion_tokens += answer[1].completion
        if answer[1].system:
            self._fingerprints.add(answer[1].system)
        return answer

    async def _get(self, path: str) -> Any:
        try:
            return await self._client.get(path, cast_to=object)
        except self._openai.NotFoundError:  # not all servers have this list
            return {}

    async def _send(
        self,
        send: Callable[[], Any],
        read: Callable[[Any], Any] = lambda answer: answer,
        *,
        echo: bool = False,
        retries: int | None = None,
    ) -> Any:
        openai = self._openai
        retries = self._config.retries if retries is None else retries
        for attempt in range(retries + 1):
            retry_after = None  # seconds
            kind = _Failed
            try:
                return read(await send())
            except openai_format.Malformed as error:
                reason = f"its answer is malformed ({error})"
                if isinstance(error, openai_format.NoLogprobs):
                    kind = _WithoutLogprobs
            except (openai.APIResponseValidationError, ValueError) as error:
                reason = f"its answer is malformed ({self._clean(str(error))})"
            except openai.APITimeoutError:
                reason = f"it gave no answer within {self._config.timeout:g} s"
            except openai.APIConnectionError:
                reason = "no connection to it"
            except openai.APIStatusError as error:
                said, status = self._clean(error.message), error.status_code
                self._give_up(status, error.code, said, echo)
                reason = f"it says {status} ({said})"
                retry_after = openai_format.retry_after(error.response.headers)
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

    def _give_up(self, status: int, code: str | None, said: str, echo: bool) -> None:
        """Raises if a retry cannot help."""
        if status == 401 or (status == 403 and not self._usage.requests):
            raise UserError(f"environment: the server refuses {KEY} ({status}); correct it.")
        if status == 404:
            raise UserError(
                f"{self._named}: the server of {URL} does not know it, or has no such "
                f"service (404: {said}); correct the name or the address (usually ending in /v1)."
            )
        if code == "insufficient_quota":
            raise RunError(f"the server's quota is exhausted ({said}); raise it and restart.")
        if echo and status < 500 and "echo" in said.lower():
            raise openai_format.NoEcho(f"it says {status}: {said}")
        if status < 500 and (code == _TOO_LONG_CODE or any(w in said for w in _TOO_LONG_WORDS)):
            raise _RefusedAsTooLong(f"it exceeds the server's context ({status}: {said})")
        if status < 500 and status not in _TRANSIENT:
            raise _Refused(f"the server refuses it ({status}: {said})")

    def _clean(self, said: str) -> str:
        """A server's message in one short line, without key and address."""
        for secret in (os.environ.get(KEY), os.environ.get(URL)):
            said = said.replace(secret, "***") if secret else said
        said = " ".join(said.split()).rstrip(".")
        return said if len(said) <= _SHOWN else said[:_SHOWN] + "..."
