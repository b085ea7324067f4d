"""Servers that speak OpenAI's HTTP API as a backend: OpenAI, Gemini, vLLM, llama.cpp, ...

Address and key come from the environment (http_client); openai_server sends requests again, and
gives them up.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import json
import math
import time
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.decoding.requests import Result, Scores, Unanswerable
from mmqa_jax.prompting import openai_format
from mmqa_jax.prompting.backends import Chat, Choices, Completion, Failure, Query, Usage
from mmqa_jax.prompting.event_loop import EventLoop
from mmqa_jax.prompting.http_client import address, check_environment
from mmqa_jax.prompting.openai_server import (
    ENGINE,
    Failed,
    Refused,
    Server,
    ServerConfig,
    most_bytes,
)
from mmqa_jax.prompting.prompt_lengths import PromptLengths, openai_message, shown_id


class OpenAIBackend:
    """Queries a server; see backends.Backend. Candidates have no token ids.

    Args:
      model: the server's name for it.
      config: see ServerConfig.
      flag: that named the model, for messages.

    Raises:
      RunError: the server does not answer.
    """

    def __init__(self, model: str, config: ServerConfig | None = None, flag: str = "--model"):
        self.model, self.config, self._flag = model, config or ServerConfig(), flag
        check_environment()
        self.usage = Usage()
        self.failures: list[Failure] = []
        self.system_fingerprints: set[str] = set()  # reported with the answers
        self._seconds = 0.0
        self._in_a_row = 0  # failures since the last answer
        known = self._fetch_description()
        parts = [address(), model, known]
        self._fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        length = (known or {}).get("max_model_len")
        self._lengths = PromptLengths(model, length, self.config.timeout)

    @property
    def takes_pictures(self) -> None:
        """The server does not say."""

    @property
    def takes_messages(self) -> bool:
        """As far as is known: /v1/chat/completions is what such servers are asked by."""
        return True

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

    def sizes(self) -> None:
        """A server does not say."""

    def check(self, request: Query) -> None:
        """Rejects what the API cannot express, and what a server that counts tokens would refuse.

        Raises:
          TooLong: see PromptLengths; other servers check lengths when they are asked to answer.
          Unanswerable: an empty prompt or a broken picture.
        """
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
        with EventLoop() as loop:
            server = loop.run(self._open())
            try:
                while True:
                    while len(running) < self.config.concurrency:
                        query = next(waiting, None)
                        if query is None:
                            break
                        running[loop.submit(self._send(server, query))] = query
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
                loop.run(server.close())

    async def _send(self, server: Server, query: Query) -> Result | Scores:
        self._check_form(query)
        if isinstance(query, Choices):
            return await self._score(server, query)
        return await self._generate(server, query)

    async def _generate(self, server: Server, request: Completion | Chat) -> Result:
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
            lambda answer: openai_format.read_candidates(
                answer, decoding.logprobs, decoding.n, decoding.stop
            ),
            most_bytes(body, decoding.n * decoding.max_new_tokens),
        )
        found = sorted(found, key=lambda c: -c.total if not math.isnan(c.total) else 0.0)
        return Result(request.id, tuple(found), usage.prompt, 0)

    async def _score(self, server: Server, request: Choices) -> Scores:
        """As lm-evaluation-harness: split at the prompt's number of tokens.

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
            return await server.post("/completions", body, openai_format.read_echo, most)

        try:
            (_, usage), *echoes = await asyncio.gather(
                server.post("/completions", counted, lambda answer: None, most_bytes(counted, 1)),
                *map(scored, request.continuations),
            )
            scores = [
                openai_format.cut_echo(echo, usage.prompt, own.prompt) for echo, own in echoes
            ]
        except openai_format.NoEcho as error:
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

    def _fetch_description(self) -> dict[str, Any] | None:
        async def fetch():
            server = await self._open()
            try:
                return await server.models()
            finally:
                await server.close()

        with EventLoop() as loop:
            return loop.run(fetch())

    async def _open(self) -> Server:
        named = f"{self._flag}={self.model}"
        return Server(self.model, named, self.config, self.usage, self.system_fingerprints)
