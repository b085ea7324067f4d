"""What Prometheus reads: requests, seconds, tokens, and the queue."""

from __future__ import annotations

from collections.abc import Callable

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

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Counts a request under a route, of which there are few."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)
