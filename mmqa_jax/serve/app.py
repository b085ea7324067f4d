"""The application of one server: the page, OpenAI's API, health and metrics."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding.online import Closed, QueueFull
from mmqa_jax.serve.errors import ApiError
from mmqa_jax.serve.limits import Limited, Limits
from mmqa_jax.serve.metrics import Metrics
from mmqa_jax.serve.openai_api import OpenAIApi
from mmqa_jax.serve.page_api import PageApi
from mmqa_jax.serve.parts import Parts
from mmqa_jax.serve.waiting import refusal

_THREADS = 64  # that read requests and wait for what systems compute


def make_app(parts: Parts, limits: Limits, seconds: float) -> Any:
    """The ASGI application.

    Args:
      parts: what it answers with; closed when the server ends, after its last answer.
      seconds: that an answer may take.
    """
    metrics = Metrics(lambda: parts.unfinished)

    async def health(request: Request) -> Response:
        if parts.is_serving:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "the model answers no more"}, 503)

    async def measured(request: Request) -> Response:
        return Response(metrics.text(), media_type=metrics.content_type)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = _THREADS
        yield
        await anyio.to_thread.run_sync(parts.close)

    page, api = PageApi(parts, seconds), OpenAIApi(parts, metrics, seconds)
    app = Starlette(
        routes=[
            *page.routes(),
            *api.routes(),
            Route("/healthz", health),
            Route("/metrics", measured),
        ],
        exception_handlers={
            ApiError: _refused,
            UserError: _refused,
            QueueFull: _refused,
            Closed: _refused,
            HTTPException: _http_error,
        },
        lifespan=lifespan,
    )
    return metrics.around(Limited(app, limits), _route_of)


async def _refused(request: Request, error: Exception) -> Response:
    return refusal(error).response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence = {404: "no such path", 405: "not with this method"}.get(error.status_code)
    return ApiError(error.status_code, f"{sentence or error.detail}.").response()


def _route_of(path: str) -> str:
    """The route that a path is counted under."""
    for prefix in ("/v1/models", "/api/source", "/api/picture", "/page"):
        if path.startswith(f"{prefix}/"):
            return prefix
    known = ("/", "/healthz", "/metrics", "/api/about", "/api/ask", "/v1/models")
    answers = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")
    return path if path in (*known, *answers) else "other"
