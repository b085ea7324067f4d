"""A T5's engine for requests that arrive one by one (see online.py): what waits is one batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from mmqa_jax.decoding.requests import Request, Result, Scores, Scoring
from mmqa_jax.decoding.t5_engine import T5Engine


@dataclasses.dataclass
class ArrivedRequest:
    """A request that has been checked."""

    original: Request | Scoring


class T5Arrivals:
    """Serves what has arrived while the batches before it ran.

    Nobody hears of tokens as they are decoded, and what was begun is not cancelled: a batch is one
    program, which runs to its end.
    """

    def __init__(self, engine: T5Engine):
        self._engine = engine

    def tokenized(self, request: Request | Scoring) -> ArrivedRequest:
        """The request, checked; see `T5Engine.check`."""
        self._engine.check(request)
        return ArrivedRequest(request)

    def serve(
        self, arrivals: Iterable[ArrivedRequest | None], on_token: Any = None
    ) -> Iterator[Result | Scores]:
        """Answers requests; None among them says that no other waits."""
        waiting: list[Request | Scoring] = []
        for arrived in arrivals:
            if arrived is not None:
                waiting.append(arrived.original)
            elif waiting:
                batch, waiting = waiting, []
                yield from self._engine.serve(batch)
        yield from self._engine.serve(waiting)
