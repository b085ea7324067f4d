"""Connections of one server: how many there are, and how long the header of a request may take."""

from __future__ import annotations

import asyncio
import functools
import resource
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mmqa_jax.serve.options import ServeOptions

_GRACE = 10  # seconds beyond an answer's own limit that the end waits for answers
_MOST_FILES = 2**16
_MOST = 4096  # connections
BACKLOG = 2048  # connections that wait to be accepted


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, which has no deadline for a header and no bound on idle connections.

    A connection that has sent no whole header in time is closed. Where there are too many, the one
    that has waited longest for its header is.

    Args:
      waiting: connections without a whole header, the oldest first; one for all.
      most: connections.
    """

    def __init__(
        self,
        waiting: dict[BoundedProtocol, None],
        most: int,
        options: ServeOptions,
        **given: Any,
    ):
        super().__init__(**given)
        self._waiting, self._most, self._options = waiting, most, options
        self._served: Any = None  # the request that was being served at the last look
        self._end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._look()
        if len(self.connections) > self._most:
            next(iter(self._waiting))._abort()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """See H11Protocol."""
        super().on_response_complete()
        self._look()

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        super().connection_lost(error)
        self._forget()

    def _look(self) -> None:
        """Starts the clock of what the connection waits for."""
        is_served = self.cycle is not None and not self.cycle.response_complete
        served = self.cycle if is_served else None
        if served is self._served and self._end is not None:
            return
        self._forget()
        self._served = served
        if is_served:  # the door ends requests, but not replies that nobody reads
            self._end = self.loop.call_later(self._options.timeout + _GRACE, self._abort)
        else:  # a reply may still be on its way: it is sent to its end
            self._waiting[self] = None
            self._end = self.loop.call_later(self._options.header, self.transport.close)

    def _forget(self) -> None:
        self._waiting.pop(self, None)
        if self._end is not None:
            self._end.cancel()

    def _abort(self) -> None:
        self._forget()
        self.connections.discard(self)
        self.transport.abort()


class _Server(uvicorn.Server):
    """More connections may wait than are accepted at once: else clients try again after seconds."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)


def make_server(app: Any, options: ServeOptions) -> uvicorn.Server:
    """A server of an ASGI application, not yet running."""
    files = _open_files()
    most, waiting = min(files // 2, _MOST), dict[BoundedProtocol, None]()
    protocol = functools.partial(BoundedProtocol, waiting, most, options)
    config = uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type]  # what makes one is enough
        ws="none",
        # Of other loops accept does not end before connections are closed.
        loop="asyncio",
        log_level="warning",
        access_log=False,
        use_colors=False,  # would be shown escaped (core/terminal.py)
        # As many are accepted at once, a few times before the first of them can be closed.
        backlog=min(files // 16, BACKLOG),
        timeout_graceful_shutdown=int(options.timeout) + _GRACE,
        server_header=False,
        proxy_headers=False,
    )
    return _Server(config)


def _open_files() -> int:
    """How many files this process may have open, raised as far as that is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # -1: any number
    most = min(hard, _MOST_FILES) if hard >= 0 else _MOST_FILES
    if 0 <= soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(soft, most)
