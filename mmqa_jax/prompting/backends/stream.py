"""All prompts of a stage as one stream to the backend."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from mmqa_jax.core.progress import Progress
from mmqa_jax.decoding.requests import Result, Scores
from mmqa_jax.prompting.backends import Backend, Chat, Message, Query
from mmqa_jax.prompting.backends.cache import Cached


class Answers(NamedTuple):
    """What a backend made of a stage's queries.

    Attributes:
      by_id: Result or Scores of every query that was answered.
      failed: query id -> why it has no answer.
    """

    by_id: dict[Hashable, Any]
    failed: dict[Hashable, str]


def answer_all(
    backend: Backend | Cached, queries: Sequence[Query], title: str = "Answering"
) -> Answers:
    """Answers queries with unique ids; those in the response cache first.

    The others are sent in the order of their texts, so that prompts with a common beginning follow
    each other and the engine computes it once.
    """
    answers: dict[Hashable, Result | Scores] = {}
    if isinstance(backend, Cached):
        for query in queries:
            if (found := backend.find(query)) is not None:
                answers[query.id] = found
    missing = sorted((query for query in queries if query.id not in answers), key=text_of)
    before = len(backend.failures)
    if missing:
        start = len(answers)
        with Progress(title, len(queries), "requests", start=start) as progress:
            failed = 0
            for result in backend.answer(missing):
                answers[result.id] = result
                rates = {kind: f"{rate:.0f} tokens/s" for kind, rate in backend.rates().items()}
                fresh, failed = backend.usage.failures - failed, backend.usage.failures
                progress.advance(1 + fresh, **rates, **({"failed": failed} if failed else {}))
    reasons = {failure.id: failure.reason for failure in backend.failures[before:]}
    return Answers(answers, reasons)


def text_of(query: Query) -> str:
    """A query's whole text, without its pictures."""
    content = query.messages if isinstance(query, Chat) else query.prompt
    if isinstance(content, str):
        return content
    return "\n".join(message.text for message in content if isinstance(message, Message))
