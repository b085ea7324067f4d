"""The door to all routes: who may ask, how much is sent and waits, until when, and who has left.

A request passes it in this order: the name that it was sent to, the page that sent it, its key, the
type and the size of its body, a place in the queue, the body itself, the answer. A refused request
costs nothing of what comes behind. The work for a request ends with the reply, at the deadline, and
when the client leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import parse_json
from mmqa_jax.decoding.online import Closed, QueueFull
from mmqa_jax.decoding.requests import TooLong
from mmqa_jax.prompting.backends.json_fields import Fields, WrongField
from mmqa_jax.serve import LOOPBACK, ServeOptions

_CLIENT_LEFT = 499  # nginx's status; nobody reads it but the metrics
_LEAST_RATE = 2**16  # bytes of a body that buy it another second
_SMALL = 2**16  # bytes of a body that needs no room: the queue bounds how many there are
_BODIES = 8  # of the largest size, for which there is room at once
_PATIENCE = 1.0  # seconds in which an upload is not closed to make room for another request
_LINGER = 1.0  # seconds in which a refused client may end its upload and read why
_LINGERED = 2**20  # bytes that are thrown away meanwhile
_LAST_WORDS = 1.0  # seconds in which a stream says that its time is over
_OWN_PAGE = ("", "same-origin", "none")  # Sec-Fetch-Site of programs, the page, and typed addresses
_HEADERS = {
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Entrance(Route):
    """A route of the application, with the facts that the door needs.

    Args:
      is_queued: it is a POST with a JSON body and takes a place in the queue; others are answered
        at once, from memory or a file.
      is_open: it needs no key.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        *,
        is_queued: bool = False,
        is_open: bool = False,
    ):
        super().__init__(path, endpoint, methods=["POST" if is_queued else "GET"])
        self.is_queued, self.is_open = is_queued, is_open


class _Left(Exception):
    """The client has left."""


class Visit:
    """One request inside the door.

    Args:
      send: ASGI's.
      seconds: that its answer may take.

    Attributes:
      body: what was sent; `is_sent`: the whole of it, or there is none.
      has_begun, has_ended: whether the reply has.
      is_over: its work is to end, since nobody waits for it.
      is_refused: the door answers in the application's place.
    """

    def __init__(self, send: Any, seconds: float, door: Door, *, is_sent: bool):
        self._send, self._seconds, self._door = send, seconds, door
        self.began = asyncio.get_running_loop().time()
        self.deadline = self.began + seconds
        self.body, self.is_sent, self.status = b"", is_sent, 500
        self.places = self.bytes = 0  # that it has taken of the door's
        self.has_begun = self.has_ended = self.is_over = self.is_refused = False
        self.upload: asyncio.Timeout | None = None
        self._works: list[Any] = []

    async def reply(self, message: Any) -> None:
        """Sends a part of the application's reply; drops it once the door has refused."""
        if not self.is_refused:
            await self.send(message)

    async def send(self, message: Any) -> None:
        """Sends a part of a reply."""
        if message["type"] == "http.response.start":
            self.has_begun, self.status = True, message["status"]
            MutableHeaders(scope=message).update(_HEADERS)
        elif not message.get("more_body"):
            self.has_ended = True
            self.end()  # before the client hears of it, and asks again
        await self._send(message)

    async def fields(self) -> Fields:
        """The JSON object that was sent; an ApiError or UserError if it is none."""
        text, self.body = self.body, b""
        body = await asyncio.to_thread(parse_json, text, "the body", remedy="send JSON")
        if not isinstance(body, dict):
            raise ApiError(400, "the body is no JSON object; send {...}.")
        return Fields(body)

    def take(self, places: int) -> None:
        """Takes as many places in the queue as the request has pieces of work, or an ApiError."""
        self._door.take(self, places)

    def works(self, work: Any) -> Any:
        """Lets `work.cancel` be called when the request ends; returns the work, from any thread."""
        self._works.append(work)
        if self.is_over:
            work.cancel()
        return work

    def end(self) -> None:
        """Ends all work, and frees the door's places."""
        self.is_over = True
        for work in self._works:
            work.cancel()  # what is finished is not touched
        self._door.release(self)

    def late(self) -> ApiError:
        """The refusal of what takes too long."""
        return ApiError(504, f"no answer within {self._seconds:g} s (--timeout); ask for less.")


def visit_of(request: Request) -> Visit:
    """The request as the door sees it."""
    return request.scope["visit"]


class Door:
    """An ASGI application in front of another, which finds bodies in the `Visit`. The entrances are
    its routes; other paths are its to refuse.

    Args:
      beside: applications by their paths, which read bodies and bound them themselves; the door
        checks who asks.
    """

    def __init__(
        self,
        app: Any,
        entrances: Sequence[Entrance],
        options: ServeOptions,
        metrics: Metrics,
        beside: Mapping[str, Any] | None = None,
    ):
        self._app, self._entrances, self._options = app, entrances, options
        self._beside = dict(beside or {})
        self._metrics = metrics
        self._hosts = LOOPBACK if options.host in LOOPBACK else ()
        self._most_bytes = int(options.body * 2**20)
        self._places, self._bytes = 0, 0  # that are taken
        self._uploads: dict[Visit, None] = {}  # unfinished ones, the oldest first

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers a request, or refuses it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (other := self._beside.get(scope["path"])) is not None:
            try:
                self._check(Headers(scope=scope), scope["path"], False)
            except ApiError as error:
                other = error.response()
            await other(scope, receive, send)
            return
        is_sent = scope["method"] != "POST"
        visit = scope["visit"] = Visit(send, self._options.timeout, self, is_sent=is_sent)
        matched = (door for door in self._entrances if door.matches(scope)[0] is Match.FULL)
        entrance = next(matched, None)
        try:
            headers, is_open = Headers(scope=scope), entrance is not None and entrance.is_open
            self._check(headers, scope["path"], is_open)
            if entrance is not None and entrance.is_queued:
                length = self._length(headers)
                self.take(visit, 1, length if length > _SMALL else 0)
                visit.body = await self._read(receive, visit, length)
            await self._answer(scope, receive, visit)
        except _Left:
            visit.status = _CLIENT_LEFT
        except ApiError as error:
            await _refuse(error, receive, visit)
        finally:
            visit.end()
            route = "other" if entrance is None else entrance.path.partition("/{")[0]
            seconds = asyncio.get_running_loop().time() - visit.began
            self._metrics.answered(route, visit.status, seconds)

    def take(self, visit: Visit, places: int, size: int = 0) -> None:
        """Takes places in the queue, and room for a body, which lies there until it is answered."""
        queue, room, more = self._options.queue, _BODIES * self._most_bytes, places - visit.places
        if places > queue:
            raise ApiError(
                400,
                f"the request is {places} pieces of work (a prompt that is scored or continued is "
                f"one), and this server's queue holds {queue} (--queue); send fewer prompts.",
            )
        while self._places + more > queue or self._bytes + size > room:
            # The oldest upload makes room; a client has a while to send its body before.
            oldest = next(iter(self._uploads), visit)
            if asyncio.get_running_loop().time() - oldest.began < _PATIENCE or oldest is visit:
                raise busy(f"{queue} requests, or large ones, are being served or wait")
            del self._uploads[oldest]
            self.release(oldest)
            if oldest.upload is not None and not oldest.upload.expired():
                oldest.upload.reschedule(0.0)
        visit.places, visit.bytes = places, visit.bytes + size
        self._places, self._bytes = self._places + more, self._bytes + size

    def release(self, visit: Visit) -> None:
        """Gives back what a request has taken."""
        self._places -= visit.places
        self._bytes -= visit.bytes
        visit.places = visit.bytes = 0

    def _check(self, headers: Headers, path: str, is_open: bool) -> None:
        host = headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        # A page of another site whose name leads here (DNS rebinding) sends that name.
        if self._hosts and name.strip("[]").casefold().removesuffix(".") not in self._hosts:
            raise ApiError(
                421, f"this server does not answer to the name {name!r:.80}; give --host."
            )
        # Links of other sites may lead to the page, which then asks for the rest itself.
        may_ask = {headers.get("origin", ""), "*"} & set(self._options.origins)
        if path != "/" and not may_ask and headers.get("sec-fetch-site", "") not in _OWN_PAGE:
            raise ApiError(403, "pages of other sites may not ask this server; ask on its page.")
        sent = headers.get("authorization", "").removeprefix("Bearer ").encode()
        needs_key = self._options.key and not is_open
        if needs_key and not hmac.compare_digest(sent, self._options.key.encode()):
            raise ApiError(
                401,
                "the key is missing or wrong; send it as Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _length(self, headers: Headers) -> int:
        """Bytes of a JSON body that is to come, at most."""
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # what a foreign page may send without asking first
            raise ApiError(415, "the Content-Type is not application/json; send the body as JSON.")
        length = headers.get("content-length", "")
        if len(length) > 18 or (length.isdecimal() and int(length) > self._most_bytes):
            raise self._too_large()
        return int(length) if length.isdecimal() else self._most_bytes

    async def _read(self, receive: Any, visit: Visit, length: int) -> bytes:
        """The body, which has a deadline and an end."""
        body, seconds = bytearray(), self._options.upload
        self._uploads[visit] = None
        try:
            async with asyncio.timeout_at(visit.began + seconds) as visit.upload:
                while not visit.is_sent:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Left
                    body += message.get("body", b"")
                    visit.is_sent = not message.get("more_body")
                    if len(body) > length:
                        raise self._too_large()
                    last = visit.began + seconds + len(body) / _LEAST_RATE
                    visit.upload.reschedule(min(last, visit.deadline))
        except TimeoutError:
            raise ApiError(
                408, "the body did not arrive in time, or others needed its place; send it faster."
            ) from None
        finally:
            self._uploads.pop(visit, None)
        return bytes(body)

    def _too_large(self) -> ApiError:
        most = self._options.body
        return ApiError(413, f"the request is longer than {most:g} MiB (--body); send less.")

    async def _answer(self, scope: Any, receive: Any, visit: Visit) -> None:
        """Lets the application answer until the deadline, or until the client leaves."""
        answering = asyncio.create_task(self._app(scope, _never, visit.reply))
        leaving = asyncio.create_task(_until_left(receive))
        both, first = (answering, leaving), asyncio.FIRST_COMPLETED
        seconds = visit.deadline - asyncio.get_running_loop().time()
        try:
            await asyncio.wait(both, timeout=seconds, return_when=first)
            if visit.has_ended:  # what is left to do is short
                await asyncio.wait((answering,), timeout=_LAST_WORDS)
            elif visit.has_begun and not leaving.done():
                await asyncio.wait(both, timeout=_LAST_WORDS, return_when=first)
            if answering.done():
                answering.result()
            elif leaving.done():
                raise _Left
            elif not visit.has_begun:
                visit.is_refused = True  # a task that is cancelled may still begin its reply
                raise visit.late()
        finally:
            visit.end()
            for task in both:
                task.cancel()
            await asyncio.wait(both)
            if not answering.cancelled():
                answering.exception()  # of one that was ended nobody asks


async def _until_left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _never() -> Any:
    """The application receives nothing: the door has read the body, and watches the client."""
    await asyncio.Future()


async def _refuse(error: ApiError, receive: Any, visit: Visit) -> None:
    """Sends a refusal, and reads on for a while: closed at once, clients would not see it."""
    response, thrown = error.response(), 0
    if not visit.is_sent:
        response.headers["Connection"] = "close"
    start = {"status": error.status, "headers": response.raw_headers}
    await visit.send({"type": "http.response.start", **start})
    await visit.send({"type": "http.response.body", "body": response.body, "more_body": True})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER):
            while not visit.is_sent and thrown < _LINGERED:
                message = await receive()
                thrown += len(message.get("body", b""))
                visit.is_sent = not message.get("more_body")  # or has left
    await visit.send({"type": "http.response.body", "body": b"", "more_body": False})


class Pieces:
    """The pieces of an answer, sent in order by other threads to the loop that made this."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, piece: Any) -> None:
        """Adds a piece, from any thread."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, piece)

    async def of(self, work: Any, visit: Visit) -> AsyncIterator[Any]:
        """The pieces until `work` is done; ApiError at the request's deadline."""
        work.future.add_done_callback(lambda _: self.put(_END))
        while True:
            try:
                async with asyncio.timeout_at(visit.deadline):
                    piece = await self._queue.get()
            except TimeoutError as error:
                raise visit.late() from error
            if piece is _END:
                return
            yield piece


_END: Any = object()


# What a request is refused with, in OpenAI's form.


_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclasses.dataclass(eq=False)
class ApiError(Exception):
    """A request that is refused.

    Attributes:
      status: of HTTP.
      message: one sentence that says what was expected.
      param: the key of the body that it is about.
      code: OpenAI's short name, for clients that look for it.
      headers: of the reply.
    """

    status: int
    message: str
    _: dataclasses.KW_ONLY
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] | None = None

    def to_json(self) -> dict[str, object]:
        """`{"error": {message, type, param, code}}`."""
        kind = _TYPES.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """The reply."""
        return JSONResponse(self.to_json(), self.status, self.headers)


def busy(message: str) -> ApiError:
    """The refusal of what exceeds the queue; clients try again."""
    sentence = f"{message}; try again in a moment."
    return ApiError(429, sentence, code="queue_full", headers={"Retry-After": "1"})


def refusal(error: Exception) -> ApiError:
    """Returns the reply for an exception; raises an exception that is no refusal."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return busy(str(error))
    if isinstance(error, TooLong):
        return too_long(_without_id(error))
    if isinstance(error, UserError):
        param = error.param if isinstance(error, WrongField) else None
        return ApiError(400, _without_id(error), param=param)
    if isinstance(error, Closed):
        return ApiError(503, str(error))
    raise error


def too_long(message: str) -> ApiError:
    """The refusal of a prompt that exceeds the model's context."""
    return ApiError(400, message, code="context_length_exceeded")


def _without_id(error: UserError) -> str:
    """The sentence without the id that requests have here, which no client gave."""
    return str(error).removeprefix("request 0: ")


# What Prometheus reads: requests, seconds, tokens, and the queue.


_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counts for one server; `unfinished` tells how many requests to the language model wait or are
    being served."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, unfinished: Callable[[], int]):
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "mmqa_requests", "Requests by route and status", ("route", "status"),
            registry=self._registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "mmqa_request_seconds", "Seconds until the last byte", ("route",),
            buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip
        self._tokens = Counter(
            "mmqa_tokens", "Tokens of prompts and of answers", ("kind",), registry=self._registry
        )
        queue = Gauge(
            "mmqa_unfinished_requests", "Requests to the language model that wait or are served",
            registry=self._registry,
        )  # fmt: skip
        queue.set_function(unfinished)

    def tokens(self, prompt: int, completion: int) -> None:
        """Counts the tokens of an answered request."""
        self._tokens.labels("prompt").inc(prompt)
        self._tokens.labels("completion").inc(completion)

    def text(self) -> bytes:
        """Formats all metrics for Prometheus."""
        return generate_latest(self._registry)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Counts a request under its route; there are few routes."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)
