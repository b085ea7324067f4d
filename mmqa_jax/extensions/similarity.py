"""Combines VLP's relevance and the retriever's similarity (ours, beyond the paper)."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.evaluation.webqa import Selection, tune_threshold
from mmqa_jax.papers import webqa
from mmqa_jax.retrieval.rankings import best_of, check_scores, ranking_of, ranking_row

# Weights of the similarity tried on val; 0 is the paper's VLP alone. While the largest is the best
# so far, its double is tried too, up to LARGEST_WEIGHT: there, a cosine lower by 0.01 alone costs a
# source 12.8 in log-odds, so that P hardly counts.
WEIGHTS = (0.0, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0)
LARGEST_WEIGHT = 1280.0


class Evidence(NamedTuple):
    """One hop's scores of its candidates; empty rankings for questions without that hop."""

    relevance: Sequence[Ranking]  # by VLP's P(relevant)
    similarity: Sequence[Ranking]  # by the retriever's cosine; empty if it is unknown


def combine(hops: Sequence[Evidence], weight: float) -> list[Ranking]:
    """Gives every source the higher of its probabilities over the hops; with weight 0 of the
    similarity VLP's relevance alone counts."""
    if weight == 0:
        return functools.reduce(best_of, (hop.relevance for hop in hops))
    return functools.reduce(best_of, (interpolate(*hop, weight) for hop in hops))


def read_restricted(
    questions: Sequence[Question], corpus: Corpus, reranker: webqa.Reranker, cap: str = "none"
) -> list[Evidence]:
    """Evidence for each question's own candidates (the restricted setting)."""
    return _read(
        questions, webqa.restricted_candidates(questions, corpus, webqa.CAPS[cap]), reranker
    )


def read_candidates(
    questions: Sequence[Question],
    candidates: Sequence[Ranking],
    reranker: webqa.Reranker,
    top_k: int,
) -> list[Evidence]:
    """Evidence for the best `top_k` candidates, whose scores are the similarity."""
    best = [webqa.top(ranking, top_k) for ranking in candidates]
    hops = _read(questions, best, reranker)
    if len(hops) == 1:
        hops = [Evidence(hops[0].relevance, best)]
    return hops


def read_all(questions: Sequence[Question], reranker: webqa.Reranker, top_k: int) -> list[Evidence]:
    """Evidence for the whole collection, of which the `top_k` most relevant sources are kept."""
    if not hasattr(reranker, "search"):
        raise UserError(
            "--candidates=all: this model computes every pair of question and source from scratch; "
            "train one with model.joint_layers (configs/atlas/rerank_cached.py), or give a file of "
            "`mmqa search`."
        )
    relevance = webqa.retrieve_full_scale(questions, reranker, cited=top_k, top_k=top_k)
    return [Evidence(relevance, [Ranking(question.id, (), ()) for question in questions])]


def evidence_rows(hops: Sequence[Evidence]) -> list[dict[str, Any]]:
    """One JSON value per question, of which `evidence_of` makes the evidence again."""
    of_question = zip(*(zip(*hop, strict=True) for hop in hops), strict=True)
    return [
        {"hops": [[ranking_row(ranking) for ranking in pair] for pair in pairs]}
        for pairs in of_question
    ]


def evidence_of(rows: Sequence[Mapping[str, Any]]) -> list[Evidence]:
    """Parses the evidence of `evidence_rows`, possibly of several groups of questions."""
    hops = zip(*(row["hops"] for row in rows), strict=True)
    return [
        Evidence(*(tuple(map(ranking_of, rankings)) for rankings in zip(*pairs, strict=True)))
        for pairs in hops
    ]


def _read(
    questions: Sequence[Question], candidates: Sequence[Ranking], reranker: webqa.Reranker
) -> list[Evidence]:
    """Relevance, and similarity in both hops if the reranker has a retriever."""
    if hasattr(reranker, "read"):
        return reranker.read(questions, candidates)
    unknown = [Ranking(question.id, (), ()) for question in questions]
    return [Evidence(reranker.score(questions, candidates), unknown)]


def interpolate(
    relevance: Sequence[Ranking], similarity: Sequence[Ranking], weight: float
) -> list[Ranking]:
    """sigmoid(logit(P) + weight * (s - s of the question's most similar source)).

    The most similar source keeps its P; the others' are lowered. Weight 0 is P alone. A source that
    `similarity` lacks shares no word with the question: BM25's 0.
    """
    combined = []
    for relevant, similar in zip(relevance, similarity, strict=True):
        cosine = dict(zip(similar.sources, similar.scores, strict=True))
        check_scores(similar.question_id, cosine)
        best = max(similar.scores, default=0.0)
        check_scores(
            relevant.question_id, dict(zip(relevant.sources, relevant.scores, strict=True))
        )
        p = np.clip(np.array(relevant.scores, np.float64), 1e-6, 1 - 1e-6)
        gap = np.array([cosine.get(name, 0.0) - best for name in relevant.sources], np.float64)
        logits = np.log(p) - np.log1p(-p) + weight * gap
        order = np.argsort(-logits, kind="stable")  # probabilities may tie where logits do not
        names = tuple(relevant.sources[i] for i in order)
        scores = np.exp(-np.logaddexp(0, -logits[order]))  # sigmoid
        combined.append(Ranking(relevant.question_id, names, tuple(scores.tolist())))
    return combined


class Tuned(NamedTuple):
    """The weight and threshold with the best source F1, and that of every pair tried."""

    weight: float
    threshold: float
    sweep: dict[tuple[float, float], float]

    @property
    def weights(self) -> list[float]:
        """The weights tried, ascending."""
        return sorted({weight for weight, _ in self.sweep})

    @property
    def at_edge(self) -> bool:
        """Whether the weight is the largest of several tried: a larger one may be better."""
        return len(self.weights) > 1 and self.weight == self.weights[-1]


def tune_selection(
    questions: Sequence[Question],
    hops: Sequence[Evidence],
    selection: Selection,
    weights: Sequence[float] = WEIGHTS,
) -> Tuned:
    """Chooses the weight of the similarity and the threshold by source F1 (on val).

    `weights`: to try; above 0 only if the similarity is known. Ties go to the smallest one. While
    the largest one is the best, its double is tried too, up to LARGEST_WEIGHT.
    """
    thresholds, sweep = {}, {}
    untried = list(weights)
    while untried:
        weight = untried.pop(0)
        thresholds[weight], tried = tune_threshold(questions, combine(hops, weight), selection)
        sweep.update({(weight, threshold): f1 for threshold, f1 in tried.items()})
        best = max(thresholds, key=lambda weight: (sweep[weight, thresholds[weight]], -weight))
        doubled = 2 * max(thresholds)
        if not untried and best == max(thresholds) and 0 < doubled <= LARGEST_WEIGHT:
            untried.append(doubled)
    return Tuned(best, thresholds[best], sweep)
