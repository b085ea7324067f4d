"""Waiting for what other threads compute, and for the pieces that they tell of it."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request

from mmqa_jax.core.json_text import parse_json
from mmqa_jax.prompting.openai_fields import Fields
from mmqa_jax.serve.door import Visit, visit_of
from mmqa_jax.serve.errors import ApiError, refusal

END: Any = object()


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls what computes in a thread; its refusals as ApiErrors."""
    try:
        return await asyncio.to_thread(function, *arguments)
    except Exception as error:
        raise refusal(error) from error


async def read_body(request: Request) -> Fields:
    """The JSON object that was sent; ApiError if it is none."""
    visit = visit_of(request)
    text, visit.body = visit.body, b""
    body = await in_thread(_parsed, text)
    if not isinstance(body, dict):
        raise ApiError(400, "the body is no JSON object; send {...}.")
    return Fields(body)


def _parsed(text: bytes) -> Any:
    return parse_json(text, "the body", remedy="send JSON")


async def finished(work: Any) -> Any:
    """The result of `online.Pending` or `systems.Asking`; ApiError if the model failed."""
    try:
        return await asyncio.wrap_future(work.future)
    except Exception as error:
        raise refusal(error) from error


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

    async def of(self, visit: Visit) -> AsyncIterator[Any]:
        """The pieces; ApiError if the end comes later than the request's deadline."""
        while True:
            try:
                async with asyncio.timeout_at(visit.deadline):
                    piece = await self._queue.get()
            except TimeoutError as error:
                raise visit.late() from error
            if piece is END:
                return
            yield piece
