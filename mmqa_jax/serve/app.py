"""The application of one server: the page, OpenAI's API, health and metrics, behind one door."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding.online import Closed, QueueFull
from mmqa_jax.serve.door import Door, Entrance
from mmqa_jax.serve.errors import ApiError, refusal
from mmqa_jax.serve.metrics import Metrics
from mmqa_jax.serve.openai_api import OpenAIApi
from mmqa_jax.serve.options import ServeOptions
from mmqa_jax.serve.page_api import PageApi
from mmqa_jax.serve.parts import Parts

_THREADS = 64  # that read requests, hand them to the model, and read pictures


def make_app(parts: Parts, options: ServeOptions) -> Door:
    """The ASGI application.

    Args:
      parts: what it answers with; closed when the server ends, after its last answer.
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
        threads = concurrent.futures.ThreadPoolExecutor(_THREADS, "request")
        asyncio.get_running_loop().set_default_executor(threads)
        yield
        await asyncio.to_thread(parts.close)

    page, api = PageApi(parts), OpenAIApi(parts, metrics)
    entrances = [
        Entrance("/", page.page, is_open=True),
        Entrance("/page/{name}", page.file, is_open=True),
        Entrance("/healthz", health, is_open=True),
        Entrance("/metrics", measured),
        Entrance("/api/about", page.about),
        Entrance("/api/source/{name:path}", page.source),
        Entrance("/api/picture/{name:path}", page.picture),
        Entrance("/api/ask", page.ask, is_queued=True),
        Entrance("/v1/models", api.models),
        Entrance("/v1/models/{name:path}", api.model),
        Entrance("/v1/completions", api.completions, is_queued=True),
        Entrance("/v1/chat/completions", api.chat, is_queued=True),
        Entrance("/v1/embeddings", api.embeddings, is_queued=True),
    ]
    refused = (ApiError, UserError, QueueFull, Closed)
    app = Starlette(
        routes=entrances,
        exception_handlers={**dict.fromkeys(refused, _refused), HTTPException: _http_error},
        lifespan=lifespan,
    )
    return Door(app, entrances, options, metrics)


async def _refused(request: Request, error: Exception) -> Response:
    return refusal(error).response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence = {404: "no such path", 405: "not with this method"}.get(error.status_code)
    return ApiError(error.status_code, f"{sentence or error.detail}.").response()
