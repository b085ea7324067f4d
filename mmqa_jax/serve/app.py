"""The application of one server: the routes of the page, of OpenAI's API, of health and metrics."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mmqa_jax import __version__
from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding.online import Closed, QueueFull
from mmqa_jax.serve import ServeOptions, door
from mmqa_jax.serve.openai_api import OpenAIApi
from mmqa_jax.serve.page_api import PageApi
from mmqa_jax.serve.systems import Parts

_THREADS = 64  # that read requests, hand them to the model, and read pictures


def make_app(parts: Parts, options: ServeOptions) -> door.Door | CORSMiddleware:
    """Makes the ASGI application. The parts that it answers with are closed when the server ends,
    after its last answer."""
    metrics = door.Metrics(lambda: parts.unfinished)

    async def health(request: Request) -> Response:
        if parts.is_serving:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "the model answers no more"}, 503)

    async def version(request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def measured(request: Request) -> Response:
        return Response(metrics.text(), media_type=metrics.content_type)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        threads = concurrent.futures.ThreadPoolExecutor(_THREADS, "request")
        asyncio.get_running_loop().set_default_executor(threads)
        async with contextlib.AsyncExitStack() as stack:
            if tools is not None:
                await stack.enter_async_context(tools.session_manager.run())
            yield
        await asyncio.to_thread(parts.close)

    tools, beside = None, {}
    if options.mcp:
        from mmqa_jax.serve.mcp_tools import mcp_application, mcp_server

        tools = mcp_server(parts)
        beside["/mcp"] = mcp_application(tools, int(options.body * 2**20))
    page, api = PageApi(parts, options.uploads), OpenAIApi(parts, metrics)
    entrances = [
        door.Entrance("/", page.page, is_open=True),
        door.Entrance("/page/{name}", page.file, is_open=True),
        door.Entrance("/healthz", health, is_open=True),
        door.Entrance("/health", health, is_open=True),
        door.Entrance("/version", version, is_open=True),
        door.Entrance("/metrics", measured),
        door.Entrance("/api/about", page.about),
        door.Entrance("/api/source/{name:path}", page.source),
        door.Entrance("/api/picture/{name:path}", page.picture),
        door.Entrance("/api/page/{name:path}", page.page_picture),
        door.Entrance("/api/original/{name:path}", page.original),
        door.Entrance("/api/ask", page.ask, is_queued=True),
        door.Entrance("/api/upload", page.upload, is_queued=True),
        door.Entrance("/v1/models", api.models),
        door.Entrance("/v1/models/{name:path}", api.model),
        door.Entrance("/v1/completions", api.completions, is_queued=True),
        door.Entrance("/v1/chat/completions", api.chat, is_queued=True),
        door.Entrance("/v1/responses", api.responses, is_queued=True),
        door.Entrance("/v1/embeddings", api.embeddings, is_queued=True),
        door.Entrance("/v1/rerank", api.rerank, is_queued=True),
        door.Entrance("/tokenize", api.tokenize, is_queued=True),
        door.Entrance("/detokenize", api.detokenize, is_queued=True),
    ]
    refused = (door.ApiError, UserError, QueueFull, Closed)
    app = Starlette(
        routes=entrances,
        exception_handlers={**dict.fromkeys(refused, _refused), HTTPException: _http_error},
        lifespan=lifespan,
    )
    guarded = door.Door(app, entrances, options, metrics, beside)
    if not options.origins:
        return guarded
    return CORSMiddleware(
        guarded, allow_origins=options.origins, allow_methods=["GET", "POST"], allow_headers=["*"]
    )


async def _refused(request: Request, error: Exception) -> Response:
    return door.refusal(error).response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence = {404: "no such path", 405: "not with this method"}.get(error.status_code)
    return door.ApiError(error.status_code, f"{sentence or error.detail}.").response()
