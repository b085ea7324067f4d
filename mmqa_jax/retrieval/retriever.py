"""The interface of every retriever: dense, BM25, fused, routed by modality, with a second hop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mmqa_jax.data.schema import Question, Ranking


class Retriever(Protocol):
    """Ranks sources for questions; a question's picture is `Question.image`."""

    def search(self, questions: Sequence[Question], top_k: int) -> list[Ranking]:
        """The `top_k` sources of the whole collection for every question, best first."""

    def search_within(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> list[Ranking]:
        """Each question's own candidates, best first (the restricted setting)."""
