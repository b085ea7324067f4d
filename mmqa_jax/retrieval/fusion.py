"""Reciprocal-rank fusion of several retrievers' rankings."""

from __future__ import annotations

from collections.abc import Sequence

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.schema import Ranking


def reciprocal_rank_fusion(
    runs: Sequence[Sequence[Ranking]],
    k: float = 60.0,
    weights: Sequence[float] | None = None,
    top_k: int | None = None,
) -> list[Ranking]:
    """Fuses runs by sum over runs of weight / (k + rank), rank from 1 (Cormack et al., 2009).

    Args:
      runs: one list of Rankings per retriever, over the same questions.
      k: damping; 60 is the paper's value. Larger values let lower ranks count more.
      weights: one per run; all 1 if None.
      top_k: how many sources to keep per question; all if None.

    Returns:
      One Ranking per question, in the first run's order. Equal sums: the source with the better
      best rank first, then the smaller id, so that the result never depends on dict order.

    Raises:
      UserError: no runs, runs of different questions, k < 0, weights that do not fit.
    """
    if not runs:
        raise UserError("fusion: no rankings were given, at least one retriever's was expected.")
    weights = [1.0] * len(runs) if weights is None else list(weights)
    if len(weights) != len(runs) or not all(0.0 <= weight < float("inf") for weight in weights):
        raise UserError(
            f"fusion: weights={weights} must hold one number >= 0 for each of {len(runs)} rankings."
        )
    if k < 0:
        raise UserError(f"fusion: k={k} must be >= 0; 60 is usual.")
    if top_k is not None and top_k < 1:
        raise UserError(f"fusion: top_k={top_k} must be at least 1.")
    tables = [{ranking.question_id: ranking for ranking in run} for run in runs]
    for number, table in enumerate(tables[1:], start=2):
        differing = sorted(table.keys() ^ tables[0].keys())
        if differing:
            raise UserError(
                f"fusion: ranking 1 and ranking {number} are of different questions (for example "
                f"{differing[0]!r} is in one only); search the same questions with both."
            )
    return [
        _fuse([table[first.question_id] for table in tables], k, weights, top_k)
        for first in runs[0]
    ]


def _fuse(
    rankings: Sequence[Ranking], k: float, weights: Sequence[float], top_k: int | None
) -> Ranking:
    total: dict[str, float] = {}
    best_rank: dict[str, int] = {}
    for ranking, weight in zip(rankings, weights, strict=True):
        for rank, source in enumerate(ranking.sources, start=1):
            total[source] = total.get(source, 0.0) + weight / (k + rank)
            best_rank[source] = min(rank, best_rank.get(source, rank))
    order = sorted(total, key=lambda source: (-total[source], best_rank[source], source))[:top_k]
    return Ranking(rankings[0].question_id, tuple(order), tuple(total[source] for source in order))
