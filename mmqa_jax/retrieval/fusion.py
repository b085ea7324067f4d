"""Reciprocal-rank fusion of several retrievers' rankings."""

from __future__ import annotations

from collections.abc import Sequence

from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.retrieval.retriever import Retriever

_DAMPING = 60.0  # as in Cormack et al.


class FusedRetriever:
    """A Retriever: the reciprocal-rank fusion of several.

    Args:
      depth: how many sources each of them retrieves, at least.
    """

    def __init__(self, retrievers: Sequence[Retriever], depth: int = 100):
        self.retrievers, self.depth = retrievers, depth

    def search(self, questions: Sequence[Question], top_k: int) -> list[Ranking]:
        """The `top_k` sources of the whole collection for every question, best first."""
        depth = max(top_k, self.depth)
        runs = [retriever.search(questions, depth) for retriever in self.retrievers]
        return reciprocal_rank_fusion(runs, top_k)

    def search_within(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> list[Ranking]:
        """Each question's own candidates, best first (the restricted setting)."""
        runs = [retriever.search_within(questions, candidates) for retriever in self.retrievers]
        return reciprocal_rank_fusion(runs)


def reciprocal_rank_fusion(
    runs: Sequence[Sequence[Ranking]], top_k: int | None = None
) -> list[Ranking]:
    """Fuses runs by the sum over runs of 1 / (60 + rank), rank from 1 (Cormack et al., 2009).

    Args:
      runs: for each retriever one Ranking per question, all in the same order of questions.
      top_k: how many sources to keep per question; all if None.

    Returns:
      One Ranking per question. Ties go to the source with the better best rank, then to the
      smaller id.
    """
    return [_fuse(rankings, top_k) for rankings in zip(*runs, strict=True)]


def _fuse(rankings: Sequence[Ranking], top_k: int | None) -> Ranking:
    (question_id,) = {ranking.question_id for ranking in rankings}
    total: dict[str, float] = {}
    best_rank: dict[str, int] = {}
    for ranking in rankings:
        for rank, source in enumerate(ranking.sources, start=1):
            total[source] = total.get(source, 0.0) + 1.0 / (_DAMPING + rank)
            best_rank[source] = min(rank, best_rank.get(source, rank))
    order = sorted(total, key=lambda source: (-total[source], best_rank[source], source))[:top_k]
    return Ranking(question_id, tuple(order), tuple(total[source] for source in order))
