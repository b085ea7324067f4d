"""The application of one server: the page, OpenAI's API, health and metrics, behind one door.

OpenAI's API has completions, chats, embeddings and the list of models. A language model answers
under its own name; a system that answers from sources under its own as well, with the last message
as the question.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.schema import Source
from mmqa_jax.decoding.online import Closed, Pending, QueueFull, TextStream
from mmqa_jax.decoding.requests import Candidate, Result, Scores, Scoring, Tokenizer
from mmqa_jax.decoding.requests import Request as EngineRequest
from mmqa_jax.decoding.scheduler import GeneratedSequence
from mmqa_jax.prompting.backends import Chat, Completion, Decoding, Picture, Query, openai_requests
from mmqa_jax.prompting.backends.openai_requests import read_picture
from mmqa_jax.prompting.backends.served import ServedModel
from mmqa_jax.prompting.backends.thinking import ThoughtStream, with_thinking_tokens
from mmqa_jax.runs.prepare import folder_notes
from mmqa_jax.serve import ServeOptions, door
from mmqa_jax.serve.systems import Asking, Parts


class OpenAIApi:
    """Answers the routes under /v1 with the parts."""

    def __init__(self, parts: Parts, metrics: door.Metrics):
        self._parts, self._metrics = parts, metrics
        self._started = int(time.time())

    async def models(self, request: Request) -> Response:
        """The names that requests may give as `model`."""
        rows = [self._described(name) for name in self._parts.model_names]
        return JSONResponse({"object": "list", "data": rows})

    async def model(self, request: Request) -> Response:
        """One of them."""
        name = request.path_params["name"]
        self._check_name(name, self._parts.model_names)
        return JSONResponse(self._described(name))

    async def completions(self, request: Request) -> Response:
        """Continues texts, or scores them (echo)."""
        visit = door.visit_of(request)
        asked = openai_requests.read_completion(await visit.fields())
        model = self._llm(asked.model)
        _check_form(model, asked.form)
        _check_length(model, (text for text in asked.prompts if isinstance(text, str)))
        if asked.form.stream:
            query = _continuation(asked.prompts[0], asked.decoding)
            return await self._streamed(
                query, model, asked.decoding, asked.form, asked.model, visit
            )
        visit.take(len(asked.prompts) * (asked.form.echo + (not asked.is_only_scored)))
        pending = await asyncio.to_thread(_submit_all, model, asked, visit)
        results = [await asyncio.wrap_future(work.future) for work in pending]
        tokenizer = model.backend.tokenizer
        choices, prompt_tokens, new_tokens = [], 0, 0
        for number, prompt in enumerate(asked.prompts):
            scores = results.pop(0) if asked.form.echo else None
            echoed = _echoed(model, prompt, scores) if asked.form.echo else []
            result = None if asked.is_only_scored else results.pop(0)
            prompt_tokens += result.prompt_tokens if result is not None else len(echoed)
            text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
            begin = text if asked.form.echo else ""
            candidates = [_NOTHING] if result is None else result.candidates
            for draw, candidate in enumerate(candidates):
                new_tokens += len(candidate.tokens)
                logprobs = None
                if asked.form.logprobs:
                    tokens = [*echoed, *tokens_of(candidate, top=asked.form.top)]
                    logprobs = completion_logprobs(tokens, tokenizer, top=asked.form.top)
                index, answer = number * len(candidates) + draw, begin + (candidate.text or "")
                finish = finish_of(candidate.finish)
                choices.append(_text_choice(index, answer, finish, logprobs=logprobs))
        self._metrics.tokens(prompt_tokens, new_tokens)
        envelope = Envelope("text_completion", asked.model)
        return JSONResponse(envelope.whole(choices, usage_of(prompt_tokens, new_tokens)))

    async def chat(self, request: Request) -> Response:
        """The next message of a conversation, by a language model or a system."""
        visit = door.visit_of(request)
        fields = await visit.fields()
        named = fields.names()
        asked = openai_requests.read_chat(fields)
        if asked.model in self._parts.systems:
            for key in sorted(named & _DECODING):
                raise door.ApiError(
                    400, f"{asked.model} decodes as it is set up; leave {key} out.", param=key
                )
            return await self._chat_with_system(visit, asked)
        model = self._llm(asked.model)
        _check_form(model, asked.form)
        _check_length(model, ["".join(message.text for message in asked.messages)])
        query = await asyncio.to_thread(_sized, model, asked)
        if asked.form.stream:
            return await self._streamed(
                query, model, query.decoding, asked.form, asked.model, visit
            )
        pending = await asyncio.to_thread(lambda: visit.works(model.submit(query)))
        result = await asyncio.wrap_future(pending.future)
        result = with_thinking_tokens(result, model.backend.tokenizer.decode)
        choices = []
        for draw, candidate in enumerate(result.candidates):
            logprobs = None
            if asked.form.logprobs:
                tokens = tokens_of(candidate, top=asked.form.top)
                logprobs = chat_logprobs(tokens, model.backend.tokenizer)
            split = _thought_stream(model).push(candidate.text or "", is_last=True)
            choices.append(_chat_choice(draw, *split, candidate.finish, logprobs))
        new_tokens = sum(len(candidate.tokens) for candidate in result.candidates)
        self._metrics.tokens(result.prompt_tokens, new_tokens)
        usage = usage_of(result.prompt_tokens, new_tokens, _thinking_tokens(result))
        return JSONResponse(Envelope("chat.completion", asked.model).whole(choices, usage))

    async def embeddings(self, request: Request) -> Response:
        """The vectors of texts."""
        visit = door.visit_of(request)
        asked = openai_requests.read_embedding(await visit.fields())
        self._check_name(asked.model, [self._parts.embedder_name])
        for number, text in enumerate(asked.texts):
            if len(text) > _LONGEST_TEXT:
                raise door.ApiError(
                    400,
                    f"input[{number}] has {len(text):,} characters, up to {_LONGEST_TEXT:,} are "
                    "embedded; cut it into passages.",
                    param="input",
                )
        embedded = visit.works(self._parts.embed(asked.texts))
        vectors, tokens = await asyncio.wrap_future(embedded.future)
        self._metrics.tokens(tokens, 0)
        rows = [
            embedding(vector, number, as_base64=asked.as_base64)
            for number, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": rows, "model": asked.model, "usage": usage})

    async def _chat_with_system(
        self, visit: door.Visit, asked: openai_requests.ChatRequest
    ) -> Response:
        """The last message is the question; earlier ones are no part of it."""
        system = self._parts.systems[asked.model]
        last = asked.messages[-1]
        if last.role != "user":
            raise door.ApiError(
                400, "the last message is not the user's; ask in it.", param="messages"
            )
        pictures = last.pictures
        if len(pictures) > 1:
            raise door.ApiError(
                400, "a question has at most one picture here; send one.", param="messages"
            )
        if pictures and not system.takes_pictures:
            raise door.ApiError(
                400, f"{system.label} takes no pictures; remove it.", param="messages"
            )
        picture = pictures[0].data if pictures else None
        pieces = door.Pieces()
        asking = system.ask(last.text, picture, lambda kind, value: pieces.put((kind, value)))
        visit.works(asking)
        envelope = Envelope("chat.completion", asked.model)
        if asked.form.stream:
            parts = _system_pieces(asking, pieces, envelope, visit)
            return StreamingResponse(parts, media_type="text/event-stream")
        row = await asyncio.wrap_future(asking.future)
        choice = _chat_choice(0, "", row["answer"], "end", None)
        return JSONResponse(envelope.whole([choice], None, sources=row["sources"]))

    async def _streamed(
        self,
        query: Query | EngineRequest,
        model: ServedModel,
        decoding: Decoding,
        form: openai_requests.Form,
        name: str,
        visit: door.Visit,
    ) -> StreamingResponse:
        """An answer in pieces."""
        pieces = door.Pieces()
        listener = _listener(model, decoding, pieces)
        pending = await asyncio.to_thread(lambda: visit.works(model.submit(query, listener)))
        is_chat = isinstance(query, Chat)
        envelope = Envelope("chat.completion" if is_chat else "text_completion", name)
        choice = _delta if is_chat else _text_choice
        tokenizer = model.backend.tokenizer

        async def events() -> AsyncIterator[str]:
            begun: dict[int, ThoughtStream] = {}
            try:
                async for draw, text, token, finish in pieces.of(pending, visit):
                    logprobs = None
                    if form.logprobs and is_chat:
                        logprobs = chat_logprobs([token], tokenizer)
                    elif form.logprobs:
                        logprobs = completion_logprobs([token], tokenizer, top=form.top)
                    if is_chat and draw not in begun:
                        begun[draw] = _thought_stream(model)
                        yield _event(envelope.piece([_delta(draw, "", role="assistant")]))
                    thoughts = {}
                    if is_chat:
                        thought, text = begun[draw].push(text, is_last=bool(finish))
                        thoughts = {"thoughts": thought} if thought else {}
                    if text or thoughts or logprobs:
                        piece = choice(draw, text, logprobs=logprobs, **thoughts)
                        yield _event(envelope.piece([piece]))
                    if finish:
                        last = choice(draw, None if is_chat else "", finish_of(finish))
                        yield _event(envelope.piece([last]))
                result = await asyncio.wrap_future(pending.future)
                new_tokens = sum(len(candidate.tokens) for candidate in result.candidates)
                self._metrics.tokens(result.prompt_tokens, new_tokens)
                if form.usage:
                    result = with_thinking_tokens(result, tokenizer.decode) if is_chat else result
                    counts = result.prompt_tokens, new_tokens, _thinking_tokens(result)
                    yield _event(envelope.piece([], usage_of(*counts)))
                yield _DONE
            except Exception as error:
                yield _event(door.refusal(error).to_json())

        return StreamingResponse(events(), media_type="text/event-stream")

    def _llm(self, name: str) -> ServedModel:
        self._check_name(name, self._parts.llm_names)
        llm = self._parts.llm
        assert llm is not None
        return llm if name == self._parts.llm_name else llm.with_adapter(name)

    def _check_name(self, name: str, known: Sequence[str]) -> None:
        if name not in known:
            names = ", ".join(known) or "none"
            raise door.ApiError(
                404,
                f"no model {name!r:.80} answers this; these do: {names}.",
                param="model",
                code="model_not_found",
            )

    def _described(self, name: str) -> dict[str, Any]:
        row = {"id": name, "object": "model", "created": self._started, "owned_by": "mmqa_jax"}
        if name in self._parts.adapters:  # as vLLM's list says it
            row["parent"] = self._parts.llm_name
        return row


_NOTHING = Candidate("", (), 0.0, (), "length")  # what is generated where a prompt is only scored
_LONGEST_TEXT = 100_000  # characters of a text that is embedded
_DONE = "data: [DONE]\n\n"
# Keys of a chat that say how a language model decodes.
_DECODING = {
    *("temperature", "top_p", "top_k", "n", "stop", "seed"),
    *("max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "stream_options"),
}


async def _system_pieces(
    asking: Asking, pieces: door.Pieces, envelope: Envelope, visit: door.Visit
) -> AsyncIterator[str]:
    sent = False
    try:
        async for kind, value in pieces.of(asking, visit):
            if kind == "text" and value:
                sent = True
                yield _event(envelope.piece([_delta(0, value)]))
        row = await asyncio.wrap_future(asking.future)
        if not sent:  # nothing was decoded: the question was refused
            yield _event(envelope.piece([_delta(0, row["answer"])]))
        end = envelope.piece([_delta(0, None, "stop")], sources=row["sources"])
        yield _event(end) + _DONE
    except Exception as error:
        yield _event(door.refusal(error).to_json())


def _event(value: Any) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _check_form(model: ServedModel, form: openai_requests.Form) -> None:
    """ApiError for a form that the model cannot answer in."""
    for key, reason in model.backend.cannot.items():
        if getattr(form, key):
            raise door.ApiError(400, f"{key}: {reason}.", param=key)


def _check_length(model: ServedModel, texts: Iterable[str]) -> None:
    """ApiError for a text that has too many tokens however it is cut, before it is."""
    backend = model.backend
    most = backend.length * backend.tokenizer.longest_token
    for text in texts:
        if len(text) > most:
            raise door.too_long(
                f"the prompt has {len(text):,} characters, more than the model's context of "
                f"{backend.length:,} tokens can hold ({most:,}); shorten it."
            )


def _continuation(prompt: openai_requests.Prompt, decoding: Decoding) -> Query | EngineRequest:
    if isinstance(prompt, str):
        return Completion(0, prompt, decoding)
    return decoding.request(0, prompt)


def _sized(model: ServedModel, asked: openai_requests.ChatRequest) -> Chat:
    """The query, with all new tokens that the context holds where none are named."""
    query = Chat(0, asked.messages, asked.decoding)
    most = asked.most
    if most is None:
        most = model.backend.new_tokens(query)
    decoding = dataclasses.replace(asked.decoding, max_new_tokens=most)
    return dataclasses.replace(query, decoding=decoding)


def _submit_all(
    model: ServedModel, asked: openai_requests.CompletionRequest, visit: door.Visit
) -> list[Pending]:
    """Submits each prompt's scores, if it is echoed, and its continuations."""
    pending: list[Pending] = []
    for prompt in asked.prompts:
        if visit.is_over:
            break  # nobody reads the answers
        if asked.form.echo:
            pending.append(visit.works(model.submit(_prompt_scoring(model, prompt))))
        if not asked.is_only_scored:
            query = _continuation(prompt, asked.decoding)
            pending.append(visit.works(model.submit(query)))
    return pending


def _prompt_tokens(model: ServedModel, prompt: openai_requests.Prompt) -> list[int]:
    tokenizer = model.backend.tokenizer
    return tokenizer.encode(tokenizer.shield(prompt)) if isinstance(prompt, str) else list(prompt)


def _prompt_scoring(model: ServedModel, prompt: openai_requests.Prompt) -> Scoring:
    """Scores all tokens of a prompt behind the first."""
    tokens = _prompt_tokens(model, prompt)
    if len(tokens) < 2:
        raise door.ApiError(400, "echo: the prompt has one token, which nothing precedes.")
    return Scoring(0, tokens[:1], [tokens[1:]])


def _echoed(model: ServedModel, prompt: openai_requests.Prompt, scores: Scores) -> list[Token]:
    """The tokens of a prompt with their log-probabilities."""
    first, *rest = _prompt_tokens(model, prompt)
    (score,) = scores.scores
    rows = zip(rest, score.logprobs, score.likeliest, strict=True)
    return [Token(first, None, None), *(Token(*row) for row in rows)]


def _listener(
    model: ServedModel, decoding: Decoding, pieces: door.Pieces
) -> Callable[[GeneratedSequence], None]:
    """Puts (draw, text, token, finish) for each token."""
    streams: dict[int, TextStream] = {}

    def on_token(sequence: GeneratedSequence) -> None:
        draw = sequence.draw
        if draw not in streams:
            streams[draw] = TextStream(model.backend.tokenizer, decoding.stop)
        token, logprob = sequence.tokens[-1], sequence.logprobs[-1]
        text = streams[draw].push(token, sequence.finish)
        pieces.put((draw, text, Token(token, logprob, (token, logprob)), sequence.finish))

    return on_token


def _thought_stream(model: ServedModel) -> ThoughtStream:
    template = model.backend.tokenizer.template
    return ThoughtStream(**({} if template is None else template.thought_marks))


def _thinking_tokens(result: Result) -> int:
    return sum(candidate.thinking_tokens or 0 for candidate in result.candidates)


def _chat_choice(
    index: int, thoughts: str, text: str, finish: str, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    """A message as vLLM's reasoning parsers write it: thoughts apart, no content without answer."""
    content = {"content": text or None, "reasoning_content": thoughts}
    content = content if thoughts else {"content": text}
    return {
        "index": index,
        "message": {"role": "assistant", **content, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": finish_of(finish),
    }


def _delta(
    index: int,
    text: str | None,
    finish: str | None = None,
    *,
    role: str | None = None,
    logprobs: dict[str, Any] | None = None,
    thoughts: str = "",
) -> dict[str, Any]:
    delta: dict[str, Any] = {} if role is None else {"role": role}
    if thoughts:
        delta["reasoning_content"] = thoughts
    if text is not None and (text or not thoughts):
        delta["content"] = text
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _text_choice(
    index: int, text: str, finish: str | None = None, *, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


# Answers in the form of OpenAI's API.


_FINISH = {"end": "stop", "stop": "stop", "length": "length"}


class Token(NamedTuple):
    """A token in an answer's log-probabilities, None for the first of an echoed prompt, and the
    likeliest (id, log-probability) in its place."""

    id: int
    logprob: float | None
    likeliest: tuple[int, float] | None


class Envelope:
    """The fields of all replies to a request: their kind, and the model as the client named it."""

    def __init__(self, kind: str, model: str):
        prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._kind, self._model, self._created = kind, model, int(time.time())

    def whole(
        self, choices: Sequence[Any], usage: dict[str, int] | None, **more: Any
    ) -> dict[str, Any]:
        """The reply with all choices; `usage` None: tokens are not counted."""
        return {**self._head(self._kind), "choices": list(choices), "usage": usage, **more}

    def piece(
        self, choices: Sequence[Any], usage: dict[str, int] | None = None, **more: Any
    ) -> dict[str, Any]:
        """A piece of a stream."""
        kind = self._kind if self._kind == "text_completion" else f"{self._kind}.chunk"
        piece = {**self._head(kind), "choices": list(choices), **more}
        return piece if usage is None else {**piece, "usage": usage}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}


def usage_of(prompt: int, completion: int, thinking: int = 0) -> dict[str, Any]:
    """Numbers of tokens; of the completion's those of thoughts, where there are some."""
    total = prompt + completion
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
    of_thoughts = {"completion_tokens_details": {"reasoning_tokens": thinking}}
    return counts | (of_thoughts if thinking else {})


def finish_of(finish: str) -> str:
    """OpenAI's word for how an answer ended."""
    return _FINISH[finish]


def tokens_of(candidate: Candidate, *, top: bool) -> list[Token]:
    """An answer's tokens; at temperature 0 each is the likeliest in its place."""
    pairs = zip(candidate.tokens, candidate.logprobs or (), strict=True)
    return [Token(token, p, (token, p) if top else None) for token, p in pairs]


def completion_logprobs(
    tokens: Sequence[Token], tokenizer: Tokenizer, *, top: bool, start: int = 0
) -> dict[str, Any]:
    """Returns the `logprobs` of a completion's choice, with `start` characters in front of the
    first token."""
    texts = [tokenizer.decode([token.id]) for token in tokens]
    offsets = list(itertools.accumulate(map(len, texts), initial=start))[:-1]
    best: list[dict[str, float] | None] = []
    for token, text in zip(tokens, texts, strict=True):
        if token.logprob is None or token.likeliest is None:
            best.append(None)
        else:
            likeliest, logprob = token.likeliest
            best.append({text: token.logprob} | {tokenizer.decode([likeliest]): logprob})
    return {
        "tokens": texts,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": best if top else None,
        "text_offset": offsets,
    }


def chat_logprobs(tokens: Sequence[Token], tokenizer: Tokenizer) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        text = tokenizer.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        {
            **entry(token.id, token.logprob),
            "top_logprobs": [] if token.likeliest is None else [entry(*token.likeliest)],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def embedding(vector: np.ndarray, index: int, *, as_base64: bool) -> dict[str, Any]:
    """One vector of a list."""
    plain = np.asarray(vector, "<f4")
    value = base64.b64encode(plain.tobytes()).decode() if as_base64 else plain.tolist()
    return {"object": "embedding", "index": index, "embedding": value}


# The table of routes, behind the door.


_THREADS = 64  # that read requests, hand them to the model, and read pictures


def make_app(parts: Parts, options: ServeOptions) -> door.Door:
    """Makes the ASGI application. The parts that it answers with are closed when the server ends,
    after its last answer."""
    metrics = door.Metrics(lambda: parts.unfinished)

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
        door.Entrance("/", page.page, is_open=True),
        door.Entrance("/page/{name}", page.file, is_open=True),
        door.Entrance("/healthz", health, is_open=True),
        door.Entrance("/metrics", measured),
        door.Entrance("/api/about", page.about),
        door.Entrance("/api/source/{name:path}", page.source),
        door.Entrance("/api/picture/{name:path}", page.picture),
        door.Entrance("/api/ask", page.ask, is_queued=True),
        door.Entrance("/v1/models", api.models),
        door.Entrance("/v1/models/{name:path}", api.model),
        door.Entrance("/v1/completions", api.completions, is_queued=True),
        door.Entrance("/v1/chat/completions", api.chat, is_queued=True),
        door.Entrance("/v1/embeddings", api.embeddings, is_queued=True),
    ]
    refused = (door.ApiError, UserError, QueueFull, Closed)
    app = Starlette(
        routes=entrances,
        exception_handlers={**dict.fromkeys(refused, _refused), HTTPException: _http_error},
        lifespan=lifespan,
    )
    return door.Door(app, entrances, options, metrics)


async def _refused(request: Request, error: Exception) -> Response:
    return door.refusal(error).response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence = {404: "no such path", 405: "not with this method"}.get(error.status_code)
    return door.ApiError(error.status_code, f"{sentence or error.detail}.").response()


# What the page asks for: the systems, an answer as it comes, a source with its surroundings.


_FILES = {"page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}
_AROUND = 3  # passages of the same document that are shown before and after one
# The page's own files alone: no script of a document or an answer is ever run.
_POLICY = "default-src 'self'; img-src 'self' blob: data:; frame-ancestors 'none'; base-uri 'none'"
_HEADERS = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"}


class PageApi:
    """Answers the routes of the page with the parts."""

    def __init__(self, parts: Parts):
        self._parts = parts
        folder = resources.files("mmqa_jax.serve") / "page"
        self._files = {name: (folder / name).read_bytes() for name in ("index.html", *_FILES)}

    async def page(self, request: Request) -> Response:
        """The page itself."""
        return Response(self._files["index.html"], media_type="text/html", headers=_HEADERS)

    async def file(self, request: Request) -> Response:
        """A file of the page: one of few, by name."""
        name = request.path_params["name"]
        if name not in _FILES:
            raise door.ApiError(404, "no such file.")
        return Response(self._files[name], media_type=_FILES[name], headers=_HEADERS)

    async def about(self, request: Request) -> Response:
        """What can be asked here."""
        parts = self._parts
        systems = [
            {
                "name": system.name,
                "label": system.label,
                "about": system.about,
                "pictures": system.takes_pictures,
                "examples": list(system.examples),
            }
            for system in parts.systems.values()
        ]
        corpus = parts.corpus
        return JSONResponse(
            {
                "title": parts.title,
                "systems": systems,
                "sources": 0 if corpus is None else len(corpus),
                "credits": [] if corpus is None else list(map(str, corpus.materials)),
                "unread": [] if corpus is None else folder_notes(corpus.manifest.get("origin", {})),
            }
        )

    async def ask(self, request: Request) -> Response:
        """An answer as server-sent events: those of `systems.py`, then `answer` or `error`."""
        pieces, visit = door.Pieces(), door.visit_of(request)
        fields = await visit.fields()
        question, name = fields.take("question", str), fields.take("system", str)
        url = fields.take("image", str, "")
        fields.end()
        if name not in self._parts.systems:
            known = ", ".join(self._parts.systems)
            raise door.ApiError(404, f"no system {name!r:.80}; there are: {known}.", param="system")
        system = self._parts.systems[name]
        picture = (await asyncio.to_thread(read_picture, url, "image")).data if url else None
        if picture is not None and not system.takes_pictures:
            raise door.ApiError(400, f"{system.label} takes no pictures; remove it.", param="image")
        asking = system.ask(question, picture, lambda kind, value: pieces.put((kind, value)))
        visit.works(asking)

        async def events() -> AsyncIterator[str]:
            try:
                async for kind, value in pieces.of(asking, visit):
                    yield _sent_event(kind, value)
                yield _sent_event("answer", await asyncio.wrap_future(asking.future))
            except Exception as error:
                yield _sent_event("error", door.refusal(error).to_json()["error"])

        return StreamingResponse(events(), media_type="text/event-stream", headers=_HEADERS)

    async def source(self, request: Request) -> Response:
        """A source, with what stands before and after it in the same document."""
        row = self._row(request.path_params["name"])
        assert self._parts.corpus is not None
        sources = self._parts.corpus.sources
        source = sources[row]
        first = row
        while first > max(row - _AROUND, 0) and _follows(sources[first - 1], source):
            first -= 1
        last = row
        while last < min(row + _AROUND, len(sources) - 1) and _follows(sources[last + 1], source):
            last += 1
        return JSONResponse(
            {
                **_described(source),
                "before": [_described(before) for before in sources[first:row]],
                "after": [_described(after) for after in sources[row + 1 : last + 1]],
            }
        )

    async def picture(self, request: Request) -> Response:
        """A source's picture, as it is encoded."""
        row = self._row(request.path_params["name"])
        assert self._parts.corpus is not None
        data = await asyncio.to_thread(self._parts.corpus.picture, row)
        if data is None:
            raise door.ApiError(404, "this source has no picture.")
        try:
            media_type = Picture(data).media_type
        except Exception as error:
            raise door.ApiError(
                415, "the picture is of a kind that browsers do not show."
            ) from error
        headers = {**_HEADERS, "Content-Security-Policy": "default-src 'none'"}
        return Response(data, media_type=media_type, headers=headers)

    def _row(self, name: str) -> int:
        """A source is looked up by its id in the corpus: no path reaches the file system."""
        corpus = self._parts.corpus
        if corpus is None or name not in corpus.row:
            raise door.ApiError(404, "no such source.")
        return corpus.row[name]


def _follows(neighbor: Source, source: Source) -> bool:
    file = source.extra.get("file")
    return file is not None and neighbor.modality == "text" and neighbor.extra.get("file") == file


def _described(source: Source) -> dict[str, Any]:
    return {
        "id": source.id,
        "title": source.title,
        "text": source.text,
        "file": source.extra.get("file"),
        "page": source.extra.get("page"),
        "image": source.image is not None,
    }


def _sent_event(kind: str, value: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps(value)}\n\n"
