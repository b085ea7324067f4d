"""What is refused before a request is read: too much of it, no key, another site's page."""

from __future__ import annotations

import dataclasses
import hmac
from collections.abc import Collection
from typing import Any

from starlette.requests import Request

from mmqa_jax.serve.errors import ApiError

_OPEN = ("/", "/healthz")  # paths that need no key, besides the page's own files
_PAGE = "/page/"


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a server takes.

    Attributes:
      body_bytes: of a request.
      key: that requests must carry as `Authorization: Bearer KEY`; "" needs none.
      hosts: names that the server answers to (the Host header); empty: to any. On the loopback
        interface these are its own, so that a page of another site whose name leads here
        (DNS rebinding) is refused.
    """

    body_bytes: int
    key: str = ""
    hosts: Collection[str] = ()


class Limited:
    """An ASGI application behind limits."""

    def __init__(self, app: Any, limits: Limits):
        self._app, self._limits = app, limits

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Refuses, or lets the application answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        left = self._limits.body_bytes

        async def bounded() -> Any:
            """A body without a Content-Length may still be too long."""
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise self._too_long()
            return message

        try:
            self._check(Request(scope))
            await self._app(scope, bounded, send)
        except ApiError as error:
            await error.response()(scope, receive, send)

    def _check(self, request: Request) -> None:
        host = request.headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if self._limits.hosts and name.strip("[]") not in self._limits.hosts:
            raise ApiError(
                421, f"this server does not answer to the name {name!r:.80}; give --host."
            )
        length = request.headers.get("content-length", "0")
        if not length.isdigit() or int(length) > self._limits.body_bytes:
            raise self._too_long()
        path = request.url.path
        if not self._limits.key or path in _OPEN or path.startswith(_PAGE):
            return
        sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(sent.encode(), self._limits.key.encode()):
            raise ApiError(
                401,
                "the key is missing or wrong; send it as Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _too_long(self) -> ApiError:
        most = self._limits.body_bytes / 2**20
        return ApiError(413, f"the request is longer than {most:g} MiB; send less.")
