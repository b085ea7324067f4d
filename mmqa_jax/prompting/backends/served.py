"""A language model that many threads ask at once, each for its own user (mmqa serve)."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator

from mmqa_jax.decoding.online import OnlineEngine, OnToken, Pending, TextStream
from mmqa_jax.decoding.requests import Request, Result, Scores, Scoring
from mmqa_jax.decoding.scheduler import GeneratedSequence
from mmqa_jax.prompting.backends import Around, Choices, Failure, Query, Usage
from mmqa_jax.prompting.backends.engine import EngineBackend
from mmqa_jax.prompting.backends.t5 import T5Backend
from mmqa_jax.prompting.backends.thinking import with_thinking_tokens

OnText = Callable[[str], None]  # in the engine's thread, with the next piece of an answer


class ServedModel:
    """An engine that answers as requests arrive, of which `most` may be unfinished at once; from
    now on nobody else asks the backend."""

    def __init__(self, backend: EngineBackend | T5Backend, most: int):
        self.backend = backend
        self.online = OnlineEngine(backend.fixed(), most)
        self._adapter = ""

    def with_adapter(self, name: str) -> ServedModel:
        """Returns the same model, answering with an adapter of its engine."""
        adapted = copy.copy(self)
        adapted._adapter = name
        return adapted

    def submit(self, query: Query | Request | Scoring, on_token: OnToken | None = None) -> Pending:
        """Hands a query, or a request of tokens, to the engine; see `OnlineEngine.submit`."""
        if not isinstance(query, Request | Scoring):
            self.backend.check(query)
            query = self.backend.engine_request(query)
        if self._adapter:
            query = dataclasses.replace(query, adapter=self._adapter)
        return self.online.submit(query, on_token)

    def session(self, on_text: OnText | None = None) -> ServedBackend:
        """The model as one user's backend."""
        return ServedBackend(self, on_text)

    def close(self) -> None:
        """Ends when what was taken is answered."""
        self.online.close()


class ServedBackend(Around):
    """Asks one user's queries of a model that others ask as well (see backends.Backend), and tells
    `on_text` of pieces of the answers as they are decoded."""

    def __init__(self, model: ServedModel, on_text: OnText | None):
        super().__init__(model.backend)
        self._model, self._on_text = model, on_text
        self.usage, self.failures = Usage(), list[Failure]()
        self._pending: list[Pending] = []
        self._is_cancelled = False

    def answer(self, queries: Iterable[Query]) -> Iterator[Result | Scores]:
        """See Backend."""
        asked = list(queries)
        self._pending = []
        try:
            for query in asked:
                self._pending.append(self._model.submit(query, self._listener(query)))
        except BaseException:
            self.cancel()  # those that were taken, of which nobody hears any more
            raise
        if self._is_cancelled:  # while they were submitted, or before
            self.cancel()
        for query, pending in zip(asked, self._pending, strict=True):
            answer = pending.future.result()
            self.usage.requests += 1
            self.usage.prompt_tokens += answer.prompt_tokens
            if isinstance(answer, Result):
                answer = with_thinking_tokens(answer, self.tokenizer.decode)
                self.usage.add(answer)
            yield dataclasses.replace(answer, id=query.id)

    def cancel(self) -> None:
        """Ends the work on all that is unanswered; `answer` raises CancelledError from now on."""
        self._is_cancelled = True
        for pending in self._pending:
            pending.cancel()

    def _listener(self, query: Query) -> OnToken | None:
        if self._on_text is None or isinstance(query, Choices):
            return None
        stream = TextStream(self.tokenizer, query.decoding.stop)

        def on_token(sequence: GeneratedSequence) -> None:
            if piece := stream.push(sequence.tokens[-1], sequence.finish):
                self._on_text(piece)

        return on_token
