"""Dense retrieval and BM25 combined: by their scores (convex combination) or ranks (RRF).

Ranks alone weigh both retrievers equally, which costs recall where one is much better. A convex
combination has one weight, chosen on val; its ends are the two retrievers themselves, so that on
val it is never worse than the better one (Bruch, Gai and Ingber, "An Analysis of Fusion Functions
for Hybrid Retrieval", TOIS 2023).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.retrieval.rankings import Retriever, check_scores, without_own_source

DEPTH = 100  # sources that each retriever finds, at least
DEFAULT_WEIGHT = 0.8  # where no questions with gold sources are there to choose it on
WEIGHTS = tuple(i / 20 for i in range(21))  # tried on val, both ends included
_DAMPING = 60.0  # as in Cormack et al.
_LEAST_COSINE, _LEAST_BM25 = -1.0, 0.0


class DenseScores(Retriever, Protocol):
    """A dense retriever that can also score given sources, embedding the questions once."""

    def search_and_score(
        self, questions: Sequence[Question], top_k: int, others: Sequence[Ranking]
    ) -> tuple[list[Ranking], list[Ranking]]:
        """`search`, and each question's `others` by their exact cosines, best first."""


class BM25Scores(Retriever, Protocol):
    """BM25 that can also score given sources, with the statistics of the whole collection."""

    def score(self, questions: Sequence[Question], candidates: Sequence[Ranking]) -> list[Ranking]:
        """Ranks the same sources by the scores that `search` gives them, best first."""


class Pool(NamedTuple):
    """What dense retrieval and BM25 each found for one question, best first, and the scores of all
    these sources by both, whichever found them."""

    dense: Ranking
    bm25: Ranking
    cosines: Mapping[str, float]
    bm25_scores: Mapping[str, float]


class HybridSearch:
    """Dense retrieval and BM25 side by side: one Pool per question, to be combined.

    A source that only one of them found is scored by the other too: a dot product with its stored
    embedding, or BM25 of that source. The source that a question was made from (key `from_source`)
    is left out: both would score it far above all others, and so scale them down.

    `remember`: keep what was found, for another search of the same questions with other weights.
    """

    def __init__(self, dense: DenseScores, bm25: BM25Scores, *, remember: bool = False):
        self.dense, self.bm25 = dense, bm25
        self._found: dict[tuple, Pool] | None = {} if remember else None

    def search(self, questions: Sequence[Question], depth: int) -> list[Pool]:
        """The Pool of every question: the best `depth` sources of each retriever."""
        if self._found is None:
            return self._search(questions, depth)
        keys = [(q.id, q.question, q.image, depth) for q in questions]
        missing = [i for i, key in enumerate(keys) if key not in self._found]
        if missing:
            pools = self._search([questions[i] for i in missing], depth)
            self._found.update(zip([keys[i] for i in missing], pools, strict=True))
        return [self._found[key] for key in keys]

    def search_within(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> list[Pool]:
        """The Pool of every question's own candidates, as both rank them."""
        dense = self.dense.search_within(questions, candidates)
        bm25 = self.bm25.search_within(questions, candidates)
        # BM25 leaves out the candidates without a word of the question, which score 0.
        return [
            Pool(d, b, _scores(d), dict.fromkeys(d.sources, 0.0) | _scores(b))
            for d, b in zip(dense, bm25, strict=True)
        ]

    def _search(self, questions: Sequence[Question], depth: int) -> list[Pool]:
        count = depth + any("from_source" in question.extra for question in questions)
        bm25 = without_own_source(questions, self.bm25.search(questions, count), depth)
        dense, also = self.dense.search_and_score(questions, count, bm25)
        dense = without_own_source(questions, dense, depth)
        bm25_also = self.bm25.score(questions, dense)
        # A retriever's own score wins, so that its end of the weight has its order to the last bit.
        return [
            Pool(d, b, _scores(cosines) | _scores(d), _scores(scores) | _scores(b))
            for d, b, cosines, scores in zip(dense, bm25, also, bm25_also, strict=True)
        ]


class ScoreFusion:
    """A Retriever: the convex combination of cosines, with a weight in [0, 1], and BM25 scores
    (`convex_combination`), of at least `depth` sources of each."""

    def __init__(self, hybrid: HybridSearch, weight: float, depth: int = DEPTH):
        check_weight(weight, "fusion_weight")
        self.hybrid, self.weight, self.depth = hybrid, weight, depth

    def search(self, questions: Sequence[Question], top_k: int) -> list[Ranking]:
        """The `top_k` sources of the whole collection for every question, best first."""
        pools = self.hybrid.search(questions, max(top_k, self.depth))
        return [convex_combination(pool, self.weight, top_k) for pool in pools]

    def search_within(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> list[Ranking]:
        """Each question's own candidates, best first (the restricted setting)."""
        pools = self.hybrid.search_within(questions, candidates)
        return [convex_combination(pool, self.weight) for pool in pools]


class RankFusion:
    """A Retriever: the reciprocal-rank fusion of several, each of which retrieves at least `depth`
    sources."""

    def __init__(self, retrievers: Sequence[Retriever], depth: int = DEPTH):
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


def check_weight(weight: float, name: str) -> None:
    """UserError unless the weight, which the user knows as `name`, is in [0, 1]."""
    if not 0 <= weight <= 1:
        raise UserError(
            f"{name}={weight}: a weight from 0 (BM25 alone) to 1 (dense alone) was expected; give "
            f"one, such as {DEFAULT_WEIGHT}."
        )


def convex_combination(pool: Pool, weight: float, top_k: int | None = None) -> Ranking:
    """weight * dense + (1 - weight) * BM25, both normalized per question to at most 1.

    The normalization is Bruch et al.'s theoretical min-max (their TM2C2): (s - min) / (max - min)
    with the smallest possible score, -1 for a cosine and 0 for BM25, and the largest of the pool.
    The best source of each thus has 1, also where all its scores are alike.

    Args:
      weight: 0 and 1 give the ranking of BM25 and of dense retrieval, without what only the other
        found.
      top_k: how many sources to keep; all if None.

    Returns:
      Ties go to the source with the better best rank, then to the smaller id.
    """
    for scores in (pool.cosines, pool.bm25_scores):
        check_scores(pool.dense.question_id, scores)
    parts = (
        (weight, pool.dense, _normalized(pool.cosines, _LEAST_COSINE)),
        (1.0 - weight, pool.bm25, _normalized(pool.bm25_scores, _LEAST_BM25)),
    )
    counted = [part for part in parts if part[0] > 0]
    total = {
        name: sum(share * scores[name] for share, _, scores in counted)
        for name in dict.fromkeys(name for _, ranking, _ in counted for name in ranking.sources)
    }
    return _ranked(pool.dense.question_id, total, [ranking for _, ranking, _ in counted], top_k)


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
    fused = []
    for rankings in zip(*runs, strict=True):
        (question_id,) = {ranking.question_id for ranking in rankings}
        total: dict[str, float] = {}
        for ranking in rankings:
            for rank, name in enumerate(ranking.sources, start=1):
                total[name] = total.get(name, 0.0) + 1.0 / (_DAMPING + rank)
        fused.append(_ranked(question_id, total, rankings, top_k))
    return fused


def _ranked(
    question_id: str, total: Mapping[str, float], runs: Sequence[Ranking], top_k: int | None
) -> Ranking:
    """Sources by their totals; ties go to the better best rank in `runs`, then the smaller id."""
    best_rank: dict[str, int] = {}
    for run in runs:
        for rank, name in enumerate(run.sources):
            best_rank[name] = min(rank, best_rank.get(name, rank))
    order = sorted(total, key=lambda name: (-total[name], best_rank[name], name))[:top_k]
    return Ranking(question_id, tuple(order), tuple(total[name] for name in order))


def _normalized(scores: Mapping[str, float], least: float) -> dict[str, float]:
    """(s - least) / (max - least); all 0 where no score is above the least possible one."""
    span = max(scores.values(), default=least) - least
    return {name: (score - least) / span if span > 0 else 0.0 for name, score in scores.items()}


def _scores(ranking: Ranking) -> dict[str, float]:
    return dict(zip(ranking.sources, ranking.scores, strict=True))
