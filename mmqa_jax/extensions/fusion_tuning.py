"""Chooses the weight of fused retrieval (retrieval/fusion.py) on questions with gold sources."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.schema import Question
from mmqa_jax.evaluation.retrieval import KS, score_rankings
from mmqa_jax.papers import webqa
from mmqa_jax.retrieval.fusion import DEFAULT_WEIGHT, WEIGHTS
from mmqa_jax.retrieval.rankings import Retriever


class TunedFusion(NamedTuple):
    """The weight with the best nDCG, and every weight tried."""

    weight: float
    # Weight -> `ndcg` over all ranked sources, `mrr`, `recall@k`; means over the questions that
    # have gold sources.
    sweep: dict[float, dict[str, float]]


def tune_fusion(
    questions: Sequence[Question], at: Callable[[float], Retriever], top_k: int
) -> TunedFusion:
    """Searches at every weight of WEIGHTS; ties go to the weight nearest the default.

    nDCG counts every rank, so that neither the first few sources nor the last are given up for
    the others (Bruch et al. choose by it too).

    Args:
      questions: of val; at least one must have gold sources.
      at: weight -> retriever, such as `parts.open_fusions` gives.
      top_k: sources to rank per question.
    """
    check_gold(questions, "tune_fusion", "the fusion weight")
    gold = [set(question.positives) for question in questions]
    ks = sorted({*(k for k in KS if k < top_k), top_k})
    sweep = {}
    for weight in WEIGHTS:
        rankings = webqa.find_candidates(questions, at(weight), top_k)
        scores = score_rankings(gold, [ranking.sources for ranking in rankings], ks).scores
        sweep[weight] = {"ndcg": scores[f"ndcg@{top_k}"], "mrr": scores["mrr"]}
        sweep[weight] |= {f"recall@{k}": scores[f"recall@{k}"] for k in ks}
    best = max(WEIGHTS, key=lambda weight: (sweep[weight]["ndcg"], -abs(weight - DEFAULT_WEIGHT)))
    return TunedFusion(best, sweep)


def check_gold(questions: Sequence[Question], name: str, what: str) -> None:
    """UserError, about the flag or function `name`, where no gold sources tell `what` is best."""
    if not any(question.positives for question in questions):
        raise UserError(
            f"{name}: none of the {len(questions)} questions has gold sources to choose {what} by; "
            "take a split whose gold sources are known."
        )
