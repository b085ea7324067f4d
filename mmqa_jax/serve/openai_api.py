"""OpenAI's API over the parts of a server: completions, chats, embeddings, the list of models.

A language model answers under its own name; a system that answers from sources under its own as
well, with the last message as the question.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from mmqa_jax.decoding.online import Pending, TextStream
from mmqa_jax.decoding.requests import Candidate, Result, Scores, Scoring
from mmqa_jax.decoding.requests import Request as EngineRequest
from mmqa_jax.decoding.scheduler import GeneratedSequence
from mmqa_jax.prompting.backends import (
    Chat,
    Completion,
    Decoding,
    Message,
    Query,
    openai_requests,
)
from mmqa_jax.prompting.backends.json_fields import Fields, token_ids
from mmqa_jax.prompting.backends.served import ServedModel
from mmqa_jax.prompting.backends.thinking import with_thinking_tokens
from mmqa_jax.serve import door, responses
from mmqa_jax.serve.replies import (
    Envelope,
    MessageReader,
    Token,
    chat_choice,
    chat_logprobs,
    choice_piece,
    completion_logprobs,
    embedding,
    finish_of,
    text_choice,
    tokens_of,
    usage_of,
)
from mmqa_jax.serve.systems import Asking, Directions, Parts, System


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
                choices.append(text_choice(index, answer, finish, logprobs=logprobs))
        self._metrics.tokens(prompt_tokens, new_tokens)
        envelope = Envelope("text_completion", asked.model)
        return JSONResponse(envelope.whole(choices, usage_of(prompt_tokens, new_tokens)))

    async def chat(self, request: Request) -> Response:
        """The next message of a conversation, by a language model or a system."""
        visit = door.visit_of(request)
        return await self._chat(visit, await visit.fields())

    async def responses(self, request: Request) -> Response:
        """The same by OpenAI's Responses API."""
        visit = door.visit_of(request)
        body = responses.chat_body(await visit.fields())
        reply = await self._chat(visit, Fields(body))
        if isinstance(reply, StreamingResponse):
            events = responses.response_events(reply.body_iterator)
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse(responses.response_of(json.loads(reply.body)))

    async def _chat(self, visit: door.Visit, fields: Fields) -> Response:
        named = fields.names()
        asked = openai_requests.read_chat(fields)
        if asked.model in self._parts.systems:
            return await self._chat_with_system(visit, asked, named)
        model = self._llm(asked.model)
        _check_form(model, asked.form)
        _check_length(model, ["".join(message.text for message in asked.messages)])
        query = await asyncio.to_thread(_sized, model, asked)
        if asked.form.stream:
            return await self._streamed(
                query, model, query.decoding, asked.form, asked.model, visit, calls=asked.calls
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
            template = model.backend.tokenizer.template
            reader = MessageReader(template, calls=asked.calls, thinking=asked.thinking)
            message = reader.push(candidate.text or "", candidate.finish)
            choices.append(chat_choice(draw, message, logprobs))
        new_tokens = sum(len(candidate.tokens) for candidate in result.candidates)
        self._metrics.tokens(result.prompt_tokens, new_tokens)
        usage = usage_of(result.prompt_tokens, new_tokens, _thinking_tokens(result))
        return JSONResponse(Envelope("chat.completion", asked.model).whole(choices, usage))

    async def embeddings(self, request: Request) -> Response:
        """The vectors of texts."""
        visit = door.visit_of(request)
        asked = openai_requests.read_embedding(await visit.fields())
        self._check_name(asked.model, [self._parts.embedder_name])
        texts = [self._embedded_text(item, number) for number, item in enumerate(asked.inputs)]
        _check_texts(texts, "input")
        embedded = visit.works(self._parts.embed(texts))
        vectors, tokens = await asyncio.wrap_future(embedded.future)
        if asked.dimensions is not None:
            vectors = _shortened(vectors, asked.dimensions)
        self._metrics.tokens(tokens, 0)
        rows = [
            embedding(vector, number, as_base64=asked.as_base64)
            for number, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": rows, "model": asked.model, "usage": usage})

    async def rerank(self, request: Request) -> Response:
        """Documents by their relevance for a query, best first, as Cohere, Jina and vLLM reply."""
        visit = door.visit_of(request)
        asked = openai_requests.read_rerank(await visit.fields())
        self._check_name(asked.model, [self._parts.reranker_name])
        _check_texts([asked.query], "query")
        _check_texts(asked.documents, "documents")
        scored = visit.works(self._parts.relevance(asked.query, asked.documents))
        scores = await asyncio.wrap_future(scored.future)
        best = np.argsort(-scores, kind="stable")[: asked.most].tolist()
        rows = [{"index": row, "relevance_score": float(scores[row])} for row in best]
        if asked.with_texts:
            rows = [{**row, "document": {"text": asked.documents[row["index"]]}} for row in rows]
        name = f"rerank-{uuid.uuid4().hex}"
        return JSONResponse({"id": name, "model": asked.model, "results": rows})

    async def tokenize(self, request: Request) -> Response:
        """Ids of a prompt's or a chat's tokens, as vLLM replies."""
        visit = door.visit_of(request)
        asked = openai_requests.read_tokenize(await visit.fields())
        model = self._llm(asked.model)
        text = asked.text
        if text is None:
            template = model.backend.tokenizer.template
            if template is None:
                raise door.ApiError(
                    400, f"{asked.model} has no chat template; give a prompt.", param="messages"
                )
            text = template.render(0, asked.messages)
        elif not asked.with_marks:
            text = model.backend.tokenizer.shield(text)
        _check_length(model, [text])
        encode = model.backend.tokenizer.encode
        tokens = await asyncio.to_thread(
            encode if asked.adds_special else model.backend.tokenizer.encode_plain, text
        )
        length = model.backend.length
        return JSONResponse({"count": len(tokens), "max_model_len": length, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, as vLLM replies."""
        fields = await door.visit_of(request).fields()
        name, tokens = fields.take("model", str), fields.take("tokens", list)
        fields.end()
        tokenizer = self._llm(name).backend.tokenizer
        if not token_ids(tokens) or not all(0 <= token < tokenizer.vocab_size for token in tokens):
            raise door.ApiError(
                400,
                f"tokens: ids from 0 to {tokenizer.vocab_size - 1:,} were expected.",
                param="tokens",
            )
        return JSONResponse({"prompt": tokenizer.decode(tokens)})

    def _embedded_text(self, item: openai_requests.Prompt, number: int) -> str:
        """The text of an input, which may be ids of the encoder's tokens."""
        if isinstance(item, str):
            return item
        tokenizer = self._parts.embedder.tokenizer
        if max(item) >= tokenizer.vocab_size or min(item) < 0:
            raise door.ApiError(
                400,
                f"input[{number}] has the token {max(item)}, ids from 0 to "
                f"{tokenizer.vocab_size - 1:,} of the encoder's own tokenizer were expected; send "
                "texts (LangChain: check_embedding_ctx_length=False).",
                param="input",
            )
        return tokenizer.decode(item)

    async def _chat_with_system(
        self, visit: door.Visit, asked: openai_requests.ChatRequest, named: set[str]
    ) -> Response:
        """The last message is the question; the reply's `notes` say what had no effect.

        Args:
          named: keys of the body.
        """
        system = self._parts.systems[asked.model]
        directions, notes = self._directions(system, asked, named)
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

        def tell(kind: str, value: Any) -> None:
            pieces.put((kind, value))

        asking = system.ask(last.text, picture, tell, directions)
        visit.works(asking)
        envelope = Envelope("chat.completion", asked.model)
        if asked.form.stream:
            parts = _system_pieces(asking, pieces, envelope, visit, notes, asked)
            return StreamingResponse(parts, media_type="text/event-stream")
        row = await asyncio.wrap_future(asking.future)
        text, refusal = _answer_text(row, has_form=bool(asked.decoding.grammar))
        reader = MessageReader(None, calls=asked.calls, thinks=False)
        message = reader.push(text, "length" if row.get("cut") else "end")
        choice = chat_choice(0, message, None, refusal)
        notes = [*notes, *row["notes"]]
        return JSONResponse(
            envelope.whole([choice], _usage_of_row(row), **_evidence_of(row), notes=notes)
        )

    def _directions(
        self, system: System, asked: openai_requests.ChatRequest, named: set[str]
    ) -> tuple[Directions, list[str]]:
        """What a chat asks of a system's answer, and notes on what it asks in vain."""
        for key in sorted(named & {"logprobs", "top_logprobs"}):
            if asked.form.logprobs:
                raise door.ApiError(
                    400, f"{asked.model} gives no log-probabilities; leave {key} out.", param=key
                )
        if asked.decoding.n > 1:
            raise door.ApiError(400, f"{asked.model} gives one answer; leave n out.", param="n")
        if asked.decoding.grammar and not system.takes_directions:
            raise door.ApiError(
                400,
                f"{asked.model} answers as it is set up; leave response_format and tools out.",
                param="response_format",
            )
        keys = sorted(named & {*_DECODING_FIELDS, "reasoning_effort", "chat_template_kwargs"})
        decoding = {
            _DECODING_FIELDS[key]: getattr(asked.decoding, _DECODING_FIELDS[key])
            for key in keys
            if _DECODING_FIELDS.get(key, "max_new_tokens") != "max_new_tokens"
        }
        if decoding.get("temperature"):
            decoding["seed"] = asked.decoding.seed
        if asked.decoding.grammar:
            decoding["grammar"] = asked.decoding.grammar
        if asked.most is not None:
            # Sources need room in the context: clients send limits that fill it.
            room = asked.most if self._parts.llm is None else self._parts.llm.backend.length // 2
            decoding["max_new_tokens"] = min(asked.most, room)
        system_texts = [message.text for message in asked.messages if message.role == "system"]
        earlier = [message for message in asked.messages[:-1] if message.role != "system"]
        history = tuple(Message(message.role, (message.text,)) for message in earlier)
        directions = Directions("\n\n".join(system_texts), decoding, history, asked.thinking)
        notes = []
        if history and not system.takes_history:
            notes.append("Earlier messages were not read: only the last one is the question.")
        if not system.takes_directions and (system_texts or decoding or asked.thinking):
            keys += ["the system prompt"] if system_texts else []
            notes.append(f"{system.name} answers as it is set up, without {', '.join(keys)}.")
            directions = Directions(history=history)
        if any(message.pictures for message in earlier):
            notes.append("Pictures of earlier messages were not read: only the last one's are.")
        return directions, notes

    async def _streamed(
        self,
        query: Query | EngineRequest,
        model: ServedModel,
        decoding: Decoding,
        form: openai_requests.Form,
        name: str,
        visit: door.Visit,
        *,
        calls: bool = False,
    ) -> StreamingResponse:
        """An answer in pieces."""
        pieces = door.Pieces()
        listener = _listener(model, decoding, form, pieces)
        pending = await asyncio.to_thread(lambda: visit.works(model.submit(query, listener)))
        is_chat = isinstance(query, Chat)
        envelope = Envelope("chat.completion" if is_chat else "text_completion", name)
        tokenizer = model.backend.tokenizer

        async def events() -> AsyncIterator[str]:
            begun: dict[int, MessageReader] = {}
            try:
                async for draw, text, token, finish in pieces.of(pending, visit):
                    logprobs = None
                    if form.logprobs and is_chat:
                        logprobs = chat_logprobs([token], tokenizer)
                    elif form.logprobs:
                        logprobs = completion_logprobs([token], tokenizer, top=form.top)
                    if not is_chat:
                        if text or logprobs:
                            piece = text_choice(draw, text, logprobs=logprobs)
                            yield _event(envelope.piece([piece]))
                        if finish:
                            last = text_choice(draw, "", finish_of(finish))
                            yield _event(envelope.piece([last]))
                        continue
                    if draw not in begun:
                        template = model.backend.tokenizer.template
                        begun[draw] = MessageReader(template, calls=calls, thinking=query.thinking)
                        head = choice_piece(draw, {"role": "assistant", "content": ""})
                        yield _event(envelope.piece([head]))
                    message = begun[draw].push(text, finish)
                    if (delta := message.delta()) or logprobs:
                        piece = choice_piece(draw, delta, logprobs=logprobs)
                        yield _event(envelope.piece([piece]))
                    if finish:
                        last = choice_piece(draw, {}, message.finish)
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
        if name in self._parts.llm_names:
            row["max_model_len"] = self._parts.llm.backend.length  # as vLLM's list says it
        if name in self._parts.adapters:  # as vLLM's list says it
            row["parent"] = self._parts.llm_name
        return row


_NOTHING = Candidate("", (), 0.0, (), "length")  # what is generated where a prompt is only scored
_LONGEST_TEXT = 100_000  # characters of a text that is embedded
_DONE = "data: [DONE]\n\n"
# Keys of a chat that say how a language model decodes, and the fields of Decoding that they set.
_DECODING_FIELDS = {
    **{
        name: name
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "stop",
            "seed",
            "logit_bias",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
    },
    **{"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"},
}


async def _system_pieces(
    asking: Asking,
    pieces: door.Pieces,
    envelope: Envelope,
    visit: door.Visit,
    notes: Sequence[str],
    asked: openai_requests.ChatRequest,
) -> AsyncIterator[str]:
    has_form, is_written = bool(asked.decoding.grammar), False
    reader = MessageReader(None, calls=asked.calls, thinks=False)
    try:
        yield _event(envelope.piece([choice_piece(0, {"role": "assistant", "content": ""})]))
        async for kind, value in pieces.of(asking, visit):
            if kind == "text" and value:
                is_written = True
                if delta := reader.push(value).delta():
                    yield _event(envelope.piece([choice_piece(0, delta)]))
        row = await asyncio.wrap_future(asking.future)
        text, refusal = ("", None) if is_written else _answer_text(row, has_form=has_form)
        message = reader.push(text, "length" if row.get("cut") else "end")
        delta = message.delta() | ({"refusal": refusal} if refusal else {})
        if delta:
            yield _event(envelope.piece([choice_piece(0, delta)]))
        more = {**_evidence_of(row), "notes": [*notes, *row["notes"]]}
        yield _event(envelope.piece([choice_piece(0, {}, message.finish)], **more))
        if asked.form.usage and (usage := _usage_of_row(row)) is not None:
            yield _event(envelope.piece([], usage))
        yield _DONE
    except Exception as error:
        yield _event(door.refusal(error).to_json())


def _evidence_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The sources of an answer, and the quote that stands before words that are not sure."""
    return {key: row[key] for key in ("sources", "quote") if key in row}


def _answer_text(row: Mapping[str, Any], *, has_form: bool) -> tuple[str, str | None]:
    """The text of a system's answer, and its refusal: in a form that a client asks for, the model's
    own words are the answer, and nothing else is."""
    if not has_form:
        return row["answer"], None
    return (row["written"], None) if row.get("written") is not None else ("", row["answer"])


def _usage_of_row(row: Mapping[str, Any]) -> dict[str, Any] | None:
    usage = row.get("usage")
    return usage_of(usage["prompt_tokens"], usage["completion_tokens"]) if usage else None


def _check_texts(texts: Iterable[str], key: str) -> None:
    for number, text in enumerate(texts):
        if len(text) > _LONGEST_TEXT:
            raise door.ApiError(
                400,
                f"{key}[{number}] has {len(text):,} characters, up to {_LONGEST_TEXT:,} are "
                "embedded; cut it into passages.",
                param=key,
            )


def _shortened(vectors: np.ndarray, dimensions: int) -> np.ndarray:
    """The first numbers of vectors [n, D], at length 1 again (Matryoshka, as OpenAI's)."""
    if dimensions > vectors.shape[1]:
        raise door.ApiError(
            400,
            f"dimensions is {dimensions:,}, the encoder's vectors have {vectors.shape[1]:,}.",
            param="dimensions",
        )
    part = vectors[:, :dimensions]
    return part / np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1e-12)


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
    query = Chat(0, asked.messages, asked.decoding, thinking=asked.thinking)
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
    return [Token(first, None, ()), *(Token(*row, [likeliest]) for *row, likeliest in rows)]


def _listener(
    model: ServedModel, decoding: Decoding, form: openai_requests.Form, pieces: door.Pieces
) -> Callable[[GeneratedSequence], None]:
    """Puts (draw, text, token, finish) for each token."""
    streams: dict[int, TextStream] = {}

    def on_token(sequence: GeneratedSequence) -> None:
        draw = sequence.draw
        if draw not in streams:
            streams[draw] = TextStream(model.backend.tokenizer, decoding.stop)
        pair = sequence.tokens[-1], sequence.logprobs[-1]
        text = streams[draw].push(pair[0], sequence.finish)
        likeliest = sequence.likeliest[-1] if sequence.shape else [pair] * form.top
        pieces.put((draw, text, Token(*pair, likeliest), sequence.finish))

    return on_token


def _thinking_tokens(result: Result) -> int:
    return sum(candidate.thinking_tokens or 0 for candidate in result.candidates)
