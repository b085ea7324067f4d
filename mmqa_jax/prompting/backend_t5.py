"""A T5 in this process as a backend: texts in, answers of the encoder-decoder out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import MESH_AXES
from mmqa_jax.decoding.requests import Request, Result, Scores, Scoring, TooLong, Unanswerable
from mmqa_jax.decoding.t5_engine import T5Engine
from mmqa_jax.prompting.backends import Chat, Choices, Failure, Query, Usage
from mmqa_jax.prompting.text_tokenizer import TextTokenizer


class T5Backend:
    """Serves from a T5, Flan-T5 or mT5; see backends.Backend.

    A prompt is the encoder's text, and the answer all that the decoder says; continuations are
    scored as its answer.

    Args:
      make_engine: called for the first queries, so that a run whose answers are all cached loads no
        weights. The engine must have the same tokenizer.
      tokenizer: of the model.
      length: the most tokens of a prompt, and of an answer.
      fingerprint: of weights and numerics (see local_t5).
    """

    takes_pictures = False
    takes_messages = False

    def __init__(
        self,
        make_engine: Callable[[], T5Engine],
        tokenizer: TextTokenizer,
        *,
        length: int,
        fingerprint: str,
    ):
        self._make_engine, self._tokenizer = make_engine, tokenizer
        self._length, self.fingerprint = length, fingerprint
        self._engine: T5Engine | None = None
        self.usage = Usage()
        self.failures: list[Failure] = []  # none: what cannot be served is refused by `check`

    @property
    def engine(self) -> T5Engine:
        """The engine, made on first use."""
        if self._engine is None:
            self._engine = self._make_engine()
        return self._engine

    def check(self, query: Query) -> None:
        """Rejects what cannot be served; loads no weights.

        Raises:
          TooLong: the prompt exceeds `length` tokens.
          Unanswerable: an empty prompt, a continuation without tokens.
          UserError: messages, pictures, more new tokens than `length`.
        """
        text = self._text(query)
        if not self._tokenizer.encode_plain(text):
            raise Unanswerable(f"request {query.id!r}: its prompt is empty; give some text.")
        tokens = len(self._tokenizer.encode(text))
        if tokens > self._length:
            raise TooLong(query.id, tokens, 0, self._length)
        request = self._request(query)
        if isinstance(request, Scoring):
            longest = max(map(len, request.continuations))
        else:
            longest = request.max_new_tokens
        if longest > self._length:
            raise UserError(
                f"request {query.id!r}: its answer has up to {longest} tokens, expected at most "
                f"engine.length = {self._length}; lower max_new_tokens or raise engine.length."
            )

    def answer(self, queries: Iterable[Query]) -> Iterator[Result | Scores]:
        """See Backend."""
        requests = [self._request(query) for query in queries]
        if not requests:
            return
        for result in self.engine.serve(requests):
            self.usage.requests += 1
            self.usage.prompt_tokens += result.prompt_tokens
            if isinstance(result, Result):
                self.usage.completion_tokens += sum(len(c.tokens) for c in result.candidates)
            yield result

    def rates(self) -> dict[str, float]:
        """New tokens per second of whole batches, the encoder's and compilation's time included."""
        return {} if self._engine is None else {"decode": self._engine.throughput.decode_rate}

    def sizes(self) -> dict[str, Any] | None:
        """Devices, mesh and sizes of the engine; None: it was not needed."""
        if self._engine is None:
            return None
        mesh, config = self._engine.mesh, self._engine.config
        shape = dict.fromkeys(MESH_AXES, 1) if mesh is None else dict(mesh.shape)
        return {
            "devices": 1 if mesh is None else mesh.size,
            "mesh": shape,
            **{name: getattr(config, name) for name in ("slots", "length", "tokens")},
            "buckets": list(config.buckets),
        }

    def _text(self, query: Query) -> str:
        """The prompt; UserError for what a T5 does not read."""
        if isinstance(query, Chat) or not isinstance(query.prompt, str):
            raise UserError(
                f"request {query.id!r}: it has messages, but a T5 has no chat template; give a "
                "`prompt`, or use a chat model."
            )
        if query.images:
            raise UserError(
                f"request {query.id!r}: it has pictures, but a T5 reads text alone; use a LLaVA "
                "or --backend=openai."
            )
        return query.prompt

    def _request(self, query: Query) -> Request | Scoring:
        tokens = self._tokenizer.encode(self._text(query))
        if not isinstance(query, Choices):
            assert not isinstance(query, Chat)
            return query.decoding.request(query.id, tokens)
        continuations = [self._tokenizer.encode_plain(text) for text in query.continuations]
        for text, ids in zip(query.continuations, continuations, strict=True):
            if not ids:
                raise Unanswerable(
                    f"request {query.id!r}: continuation {text!r} has no token; give some text."
                )
        return Scoring(query.id, tokens, continuations)
