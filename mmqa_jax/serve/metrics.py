"""What Prometheus reads: requests, seconds, tokens, and the queue."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counts of one server.

    Args:
      unfinished: how many requests to the language model wait or are being served.
    """

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
        """All of it in Prometheus's format."""
        return generate_latest(self._registry)

    def around(self, app: Any, route_of: Callable[[str], str]) -> Any:
        """An ASGI application that counts what another one answers.

        Args:
          route_of: path -> the route that it is counted under; there are few.
        """

        async def counted(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            began, status, route = time.perf_counter(), 500, route_of(scope["path"])

            async def noted(message: Any) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            try:
                await app(scope, receive, noted)
            finally:
                self._requests.labels(route, str(status)).inc()
                self._seconds.labels(route).observe(time.perf_counter() - began)

        return counted
