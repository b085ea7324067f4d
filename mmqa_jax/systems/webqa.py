"""WebQA (Chang et al., CVPR 2022): find the sources of a question, then answer from them.

The paper's settings, each a few lines over the same three parts:

  retriever.search(questions, top_k)        -> one Ranking per question, the whole collection
  reranker.score(questions, rankings)       -> the same sources, ranked by P(relevant)
  reader.answer(questions, cited rankings)  -> one Prediction per question
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.evaluation.webqa import source_f1
from mmqa_jax.retrieval.rankings import best_of, by_score

# Grid of the dev sweep; the paper settles on 0.2 (section 6.1).
THRESHOLDS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# Weights of the retriever's cosine beside VLP's log-odds; 0 is the paper's VLP alone.
WEIGHTS = (0.0, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0)


class Retriever(Protocol):
    """Finds sources in the whole collection."""

    def search(self, questions: Sequence[Question], top_k: int) -> list[Ranking]: ...


class Reranker(Protocol):
    """Scores given sources with the relevance probability of the VLP source head."""

    def score(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> list[Ranking]: ...


class Reader(Protocol):
    """Answers in words from given sources."""

    def answer(
        self, questions: Sequence[Question], cited: Sequence[Ranking]
    ) -> list[Prediction]: ...


def answer_question_only(questions: Sequence[Question], reader: Reader) -> list[Prediction]:
    """Table 6, `VLP Q-only`: the reader sees no source."""
    return reader.answer(questions, [cited_nothing(question) for question in questions])


def answer_oracle(questions: Sequence[Question], reader: Reader) -> list[Prediction]:
    """Table 6, oracle sources: the reader sees the gold sources."""
    return reader.answer(questions, [gold_ranking(q) for q in questions])


def answer_restricted(
    questions: Sequence[Question], corpus: Corpus, reranker: Reranker, reader: Reader, threshold
) -> list[Prediction]:
    """Table 6, restricted setting: VLP selects among each question's ~40 candidates."""
    relevance = reranker.score(questions, restricted_candidates(questions, corpus))
    return reader.answer(questions, select_sources(relevance, threshold))


def answer_full_scale(
    questions: Sequence[Question],
    retriever: Retriever,
    reranker: Reranker,
    reader: Reader,
    *,
    top_k: int = 20,
    threshold: float = 0.2,
) -> list[Prediction]:
    """Section 6.2, CLIP(top_k) + VLP: coarse dense retrieval, VLP source selection, VLP answers."""
    candidates = retriever.search(questions, top_k)  # [question, top_k] sources by similarity
    relevance = reranker.score(questions, candidates)  # the same, by P(relevant) in [0, 1]
    return reader.answer(questions, select_sources(relevance, threshold))


def answer_settings(
    questions: Sequence[Question], reader: Reader, cited: Mapping[str, Sequence[Ranking]]
) -> dict[str, list[Prediction]]:
    """Answers in several settings; the same question with the same sources is read only once.

    Args:
      cited: setting -> the sources of every question.
    """
    place: dict[tuple[str, tuple[str, ...]], int] = {}
    asked, shown = [], []
    for rankings in cited.values():
        for question, ranking in zip(questions, rankings, strict=True):
            if place.setdefault((question.id, ranking.sources), len(asked)) == len(asked):
                asked.append(question)
                shown.append(ranking)
    answers = reader.answer(asked, shown)
    return {
        setting: [
            dataclasses.replace(
                answers[place[ranking.question_id, ranking.sources]], source_scores=ranking.scores
            )
            for ranking in rankings
        ]
        for setting, rankings in cited.items()
    }


def gold_ranking(question: Question) -> Ranking:
    """The question's gold sources, all with score 1."""
    return Ranking(question.id, question.positives, (1.0,) * len(question.positives))


def cited_nothing(question: Question) -> Ranking:
    """No source at all."""
    return Ranking(question.id, (), ())


def top(ranking: Ranking, top_k: int) -> Ranking:
    """The first `top_k` sources of a ranking."""
    return Ranking(ranking.question_id, ranking.sources[:top_k], ranking.scores[:top_k])


def restricted_candidates(questions: Sequence[Question], corpus: Corpus) -> list[Ranking]:
    """Each question's own candidates (gold and hard negatives), without scores.

    They come in an order that says nothing of which is gold: sorted by id.
    """
    rankings = []
    for question in questions:
        ids = tuple(sorted(corpus.sources[row].id for row in corpus.candidates(question)))
        rankings.append(Ranking(question.id, ids, (0.0,) * len(ids)))
    return rankings


def select_sources(
    relevance: Sequence[Ranking], threshold: float, max_sources: int = 2, min_sources: int = 1
) -> list[Ranking]:
    """The sources to cite: the best always, others when P(relevant) > threshold.

    WebQA's full-scale selection (section 6.2) keeps two at most; so do the readers.
    `min_sources=0` lets a question go without, as one that brings its own picture may.
    """
    selected = []
    for ranking in relevance:
        kept = [
            position
            for position, score in enumerate(ranking.scores[:max_sources])
            if position < min_sources or score > threshold
        ]
        selected.append(
            Ranking(
                ranking.question_id,
                tuple(ranking.sources[position] for position in kept),
                tuple(ranking.scores[position] for position in kept),
            )
        )
    return selected


class Hop(NamedTuple):
    """What one hop says of its sources; a question without that hop has empty rankings."""

    relevance: Sequence[Ranking]  # by VLP's P(relevant)
    similarity: Sequence[Ranking]  # by the retriever's cosine


def combine(hops: Sequence[Hop], weight: float) -> list[Ranking]:
    """Every source with the higher of its interpolated probabilities over the hops (ours)."""
    return functools.reduce(best_of, (interpolate(*hop, weight) for hop in hops))


def relevance_alone(hops: Sequence[Hop]) -> list[Ranking]:
    """The higher of VLP's probabilities over the hops, without the similarity."""
    return functools.reduce(best_of, (hop.relevance for hop in hops))


def interpolate(
    relevance: Sequence[Ranking], similarity: Sequence[Ranking], weight: float
) -> list[Ranking]:
    """VLP's relevance P and the retriever's similarity s as one probability (ours).

    sigmoid(logit(P) + weight * (s - s of the question's most similar source)): a source that
    the retriever likes as much as its best keeps P, the others lose. Weight 0 is P alone.
    """
    mixed = []
    for read, found in zip(relevance, similarity, strict=True):
        cosine = dict(zip(found.sources, found.scores, strict=True))
        best = max(found.scores, default=0.0)
        p = np.clip(np.array(read.scores, np.float64), 1e-6, 1 - 1e-6)
        behind = np.array([cosine[name] - best for name in read.sources], np.float64)
        logits = np.log(p) - np.log1p(-p) + weight * behind
        named = dict(zip(read.sources, 1 / (1 + np.exp(-logits)), strict=True))
        mixed.append(by_score(read.question_id, named))
    return mixed


def tune_selection(
    questions: Sequence[Question], hops: Sequence[Hop]
) -> tuple[float, float, dict[tuple[float, float], float]]:
    """Weight of the similarity and threshold with the best source F1 (on dev), and all tried.

    Returns:
      (weight, threshold, {(weight, threshold): mean source F1}); ties go to the smaller weight.
    """
    tuned, sweep = {}, {}
    for weight in WEIGHTS:
        mixed = combine(hops, weight)
        tuned[weight], tried = tune_threshold(questions, mixed)
        sweep.update({(weight, threshold): f1 for threshold, f1 in tried.items()})
    best = max(WEIGHTS, key=lambda weight: (sweep[weight, tuned[weight]], -weight))
    return best, tuned[best], sweep


def tune_threshold(
    questions: Sequence[Question], relevance: Sequence[Ranking]
) -> tuple[float, dict[float, float]]:
    """The threshold with the best mean source F1 (on dev), and the whole sweep.

    Ties go to the threshold nearest the paper's 0.2.
    """
    sweep = {
        threshold: mean_source_f1(questions, select_sources(relevance, threshold))
        for threshold in THRESHOLDS
    }
    best = max(sweep, key=lambda threshold: (sweep[threshold], -abs(threshold - 0.2)))
    return best, sweep


def mean_source_f1(questions: Sequence[Question], cited: Sequence[Ranking]) -> float:
    """Mean source F1 of cited sources; 0 where no question has gold sources."""
    values = source_f1s(questions, cited)
    return float(values.mean()) if values.size else 0.0


def source_f1s(questions: Sequence[Question], cited: Sequence[Ranking]) -> np.ndarray:
    """Source F1 of every question that has gold sources, float64."""
    return np.array(
        [
            source_f1(ranking.sources, question.positives, variant="official")
            for question, ranking in zip(questions, cited, strict=True)
            if question.positives
        ]
    )
