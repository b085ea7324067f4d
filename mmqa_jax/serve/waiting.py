"""Waiting for what other threads compute: with an end, and not for a client that has left."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import anyio.to_thread
from starlette.requests import Request

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding.online import Closed, Pending, QueueFull
from mmqa_jax.decoding.requests import TooLong
from mmqa_jax.prompting.openai_fields import WrongField
from mmqa_jax.serve.errors import ApiError, busy

_POLL = 0.25  # seconds between looks whether the client is still there
_CLIENT_LEFT = 499  # nginx's status; nobody reads it but the metrics
END: Any = object()


def refusal(error: Exception) -> ApiError:
    """What an exception of the model's means to a client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return busy(f"{error}; try again in a moment.")
    if isinstance(error, TooLong):
        return ApiError(400, _without_id(error), code="context_length_exceeded")
    if isinstance(error, UserError):
        param = error.param if isinstance(error, WrongField) else None
        return ApiError(400, _without_id(error), param=param)
    if isinstance(error, Closed):
        return ApiError(503, str(error))
    raise error


def _without_id(error: UserError) -> str:
    """The sentence without the id that requests have here, which no client gave."""
    return str(error).removeprefix("request 0: ")


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls what computes in a thread; its refusals as ApiErrors."""
    try:
        return await anyio.to_thread.run_sync(function, *arguments)
    except Exception as error:
        raise refusal(error) from error


async def finished(request: Request, pending: Sequence[Pending], seconds: float) -> list[Any]:
    """The results of requests to a model.

    Raises:
      ApiError: they took longer, the client has left, or the model failed.
    """
    futures = [asyncio.wrap_future(one.future) for one in pending]
    deadline = time.monotonic() + seconds
    try:
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise late(seconds)
            _, left = await asyncio.wait(futures, timeout=min(remaining, _POLL))
            if not left:
                return [future.result() for future in futures]
            if await request.is_disconnected():
                raise ApiError(_CLIENT_LEFT, "the client has left.")
    except Closed as error:
        raise refusal(error) from error
    finally:
        for one in pending:
            one.cancel()  # what is finished is not touched


def late(seconds: float) -> ApiError:
    """The refusal of what takes too long."""
    return ApiError(504, f"no answer within {seconds:g} s (--timeout); ask for less.")


class Pieces:
    """What other threads tell of an answer, in order, for the loop that sends it on.

    To be made in the loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, piece: Any) -> None:
        """Adds a piece, from any thread."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, piece)

    def end_with(self, future: concurrent.futures.Future[Any]) -> None:
        """The pieces end when a future does."""
        future.add_done_callback(lambda _: self.put(END))

    async def until(self, seconds: float) -> AsyncIterator[Any]:
        """The pieces; ApiError if the end takes longer to come."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                left = max(deadline - time.monotonic(), 0.0)
                piece = await asyncio.wait_for(self._queue.get(), left)
            except TimeoutError as error:
                raise late(seconds) from error
            if piece is END:
                return
            yield piece
