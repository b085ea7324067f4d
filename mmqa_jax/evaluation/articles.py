"""Retrieval of entities: whether the right article is among the first k.

A ranking of passages or pictures counts by the articles that they are of, each at the rank of its
first source, as EchoSight counts them (Go2Heart/EchoSight, test/test_reranker.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from mmqa_jax.data.articles import Articles, answering_articles
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.evaluation.retrieval import score_rankings
from mmqa_jax.evaluation.scores import Scores

KS = (1, 5, 10, 20, 50)
# Key of Prediction.trace: the articles that a system found -> the best source of each, best first.
ARTICLES = "articles"
PREFIX = "article_"  # before the names of score_rankings: article_recall@1, article_mrr


def know_articles(questions: Sequence[Question]) -> bool:
    """Whether the articles that answer any of the questions are known."""
    return any(map(answering_articles, questions))


def score_articles(
    articles: Articles, questions: Sequence[Question], rankings: Sequence[Ranking]
) -> Scores:
    """article_recall@k and article_mrr; of a question with two articles recall is the part found.

    Args:
      rankings: of sources, one for each question; k goes up to the longest.
    """
    deepest = max([1, *(len(ranking.sources) for ranking in rankings)])
    gold = [set(answering_articles(question)) for question in questions]
    scored = score_rankings(
        gold,
        [
            articles.ranked(ranking, wanted).sources
            for ranking, wanted in zip(rankings, gold, strict=True)
        ],
        [k for k in KS if k <= deepest],
    )
    kept = [questions[row] for row in scored.rows]
    return Scores(
        tuple(question.id for question in kept),
        tuple(question.category for question in kept),
        {
            PREFIX + name: values
            for name, values in scored.per_question.items()
            if name.startswith(("recall", "mrr"))
        },
        unscored=scored.excluded,
    )
