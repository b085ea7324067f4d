"""One run's connection to a server of OpenAI's API: what is sent again, what is given up, and why.

What a server sends is checked before it becomes an answer: a reply that is late, too large, no
JSON, or not what was asked for is a failed request, which is sent again and finally counted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import sys
from collections.abc import Callable
from typing import Any

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.prompting import openai_format
from mmqa_jax.prompting.backends import Usage
from mmqa_jax.prompting.http_client import KEY, URL, HttpClient, NoReply, Reply, clean

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
    """A request finally failed; the message says why.

    Attributes:
      remedy: what to do where all requests fail so.
    """

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

    remedy = f"set {URL} to the address of the server that answers"


class Refused(Failed):
    """The server refuses this request."""


class RefusedAsTooLong(Refused):
    """The server refuses this request because it exceeds the context."""

    remedy = (
        "show fewer examples (of a row: options.shots), lower max_new_tokens, or serve the model "
        "with a longer context"
    )


class Server:
    """The connection of one run, created in its event loop; `named` is the model in messages."""

    def __init__(
        self, model: str, named: str, config: ServerConfig, usage: Usage, fingerprints: set[str]
    ):
        self._model, self._named, self._config = model, named, config
        self._usage, self._fingerprints = usage, fingerprints
        self._slots = asyncio.Semaphore(config.concurrency)
        self._client = HttpClient(config.timeout)
        self._others: set[str] = set()  # names of other models that answered

    async def close(self) -> None:
        """Closes all connections."""
        await self._client.close()

    async def models(self) -> Any:
        """The server's description of the model, without volatile fields; None if there is none.

        Raises:
          UserError, RunError: see OpenAIBackend.
        """
        retries = min(self._config.retries, _FIRST_RETRIES)  # report a wrong address soon
        try:
            answer = await self._send("/models", None, lambda answer: answer, _LIST_BYTES, retries)
        except Redirected as error:
            raise UserError(f"environment: the server of {URL}: {error}; {error.remedy}.") from None
        except Failed as error:
            raise RunError(f"the server of {URL}: {error}; start it, or correct {URL}.") from None
        known = answer.get("data") if isinstance(answer, dict) else None
        for entry in known if isinstance(known, list) else ():
            if isinstance(entry, dict) and entry.get("id") == self._model:
                names = ("id", "root", "parent", "owned_by", "max_model_len", "meta")
                return {name: entry.get(name) for name in names}
        return None  # some servers list no models, or accept any name

    async def post(
        self, path: str, body: dict[str, Any], read: Callable[[dict[str, Any]], Any], most: int
    ) -> tuple[Any, openai_format.Tokens]:
        """Posts, with retries; returns `read` of the answer, and its token counts.

        Raises:
          Failed: there is no answer, and why.
          NoEcho: from `read`, or the server rejects `echo`.
        """

        def read_all(answer):
            return read(answer), openai_format.read_usage(answer)

        body = {"model": self._model, **body}
        async with self._slots:
            answer = await self._send(path, body, read_all, most, self._config.retries)
        self._usage.prompt_tokens += answer[1].prompt
        self._usage.completion_tokens += answer[1].completion
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
                reply = await self._client.send(path, body, most)
                if body is None and reply.status == 404:  # not all servers list their models
                    return {}
                reason = self._refusal(reply, echo="echo" in (body or ()))
                if reason is None:
                    return read(reply.value)
                retry_after = openai_format.retry_after(reply.headers)
            except NoReply as error:
                reason = str(error)
            except openai_format.Malformed as error:
                reason = f"its answer is malformed ({error})"
                if isinstance(error, openai_format.NoLogprobs):
                    kind = WithoutLogprobs
                elif isinstance(error, openai_format.WrongCount):
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

    def _refusal(self, reply: Reply, echo: bool) -> str | None:
        """Why a reply is no answer, None if it is one; raises if a retry cannot help.

        Proxies in front of several models answer 200 with an error, whose code is the status.
        """
        status = reply.status
        if 300 <= status < 400:
            raise Redirected(f"it redirects to another address ({status}), which is not asked")
        error = openai_format.read_error(reply.value, reply.text)
        if status < 300:
            if error is None:
                return None
            if isinstance(error.code, int) and 400 <= error.code < 600:
                status = error.code
        said = "no reason given" if error is None else clean(error.message)
        self._give_up(status, error.code if error else None, error.message if error else "", echo)
        return (
            f"it says {status} ({said})" if status >= 300 else f"it answers with an error ({said})"
        )

    def _give_up(self, status: int, code: str | int | None, message: str, echo: bool) -> None:
        """Raises if a retry cannot help."""
        said = clean(message)
        if status == 401 or (status == 403 and not self._usage.requests):
            raise UserError(f"environment: the server refuses {KEY} ({status}); correct it.")
        if status == 404:
            raise UserError(
                f"{self._named}: the server of {URL} does not know it, or has no such "
                f"service (404: {said}); correct the name or the address (usually ending in /v1)."
            )
        if code == "insufficient_quota":
            raise RunError(f"the server's quota is exhausted ({said}); raise it and restart.")
        if echo and status < 500 and "echo" in message.lower():
            raise openai_format.NoEcho(f"it says {status}: {said}")
        too_long = code == _TOO_LONG_CODE or any(words in message for words in _TOO_LONG_WORDS)
        if status < 500 and too_long:
            raise RefusedAsTooLong(f"it exceeds the server's context ({status}: {said})")
        if 400 <= status < 500 and status not in _TRANSIENT:
            raise Refused(f"the server refuses it ({status}: {said})")

    def _warn_of_another(self, name: str | None) -> None:
        """Warns once where another model answers; dated and prefixed names are the same model's."""
        if name is None or name in self._others or len(self._others) == _NAMES:
            return
        short, asked = (one.casefold().rpartition("/")[2] for one in (name, self._model))
        if short.startswith(asked) or asked.startswith(short):
            return
        self._others.add(name)
        print(
            f"mmqa: {self._named}: the server answers as model {clean(name)}; check that it serves "
            "the one that you mean.",
            file=sys.stderr,
        )


def most_bytes(body: dict[str, Any], tokens: int) -> int:
    """Bytes that the reply to a request may have.

    Args:
      body: of the request.
      tokens: that the reply may be about.
    """
    each = _LOGPROB_BYTES if body.get("logprobs") else _TOKEN_BYTES
    return _REPLY_BYTES + 2 * len(json.dumps(body)) + tokens * each
