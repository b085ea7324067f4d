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
from scipy.special import expit

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Modality, Prediction, Question, Ranking
from mmqa_jax.evaluation.webqa import source_f1
from mmqa_jax.retrieval.rankings import best_of

# Grid of the dev sweep; the paper settles on 0.2 (section 6.1).
THRESHOLDS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# How sources are selected -> (fewest, most) of a question's: `best` is section 6.2's, `above` what
# the baseline does in the restricted setting (modeling.py l.1106-1123), perhaps nothing.
SELECTIONS: dict[str, tuple[int, int | None]] = {"best": (1, 2), "above": (0, None)}
# Candidates of each modality that are read in the restricted setting: `webqa` is the baseline's
# (run_webqa.py, --txt_filter_max_choices and --img_filter_max_choices).
CAPS: dict[str, int | None] = {"none": None, "webqa": 16}
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
    """Answers in words from given sources, of one `modality` alone if that is not None."""

    modality: Modality | None
    max_pictures: int

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


def answer_cited(
    questions: Sequence[Question], corpus: Corpus, reader: Reader, cited: Sequence[Ranking]
) -> list[Prediction]:
    """Answers from what the reader takes of the cited sources; they are all cited still."""
    read = read_of_cited(cited, corpus, reader.max_pictures, reader.modality)
    return [
        dataclasses.replace(answer, sources=ranking.sources, source_scores=ranking.scores)
        for answer, ranking in zip(reader.answer(questions, read), cited, strict=True)
    ]


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


def restricted_candidates(
    questions: Sequence[Question], corpus: Corpus, cap: int | None = None
) -> list[Ranking]:
    """Each question's own candidates (gold and hard negatives), without scores.

    They come in an order that says nothing of which is gold: sorted by id.

    Args:
      cap: of each modality at most so many, the gold ones first, then the negatives as the file
        lists them (the baseline shuffles these once). Where gold sources are hidden, the first.
    """
    rankings = []
    for question in questions:
        sources = [corpus.sources[row] for row in corpus.candidates(question)]
        kept = [
            source.id
            for modality in ("text", "image")
            for source in [source for source in sources if source.modality == modality][:cap]
        ]
        rankings.append(Ranking(question.id, tuple(sorted(kept)), (0.0,) * len(kept)))
    return rankings


def select_sources(
    relevance: Sequence[Ranking],
    threshold: float,
    max_sources: int | None = 2,
    min_sources: int = 1,
) -> list[Ranking]:
    """The sources to cite: the best always, others when P(relevant) > threshold.

    WebQA's full-scale selection (section 6.2) keeps two at most; so do the readers. None keeps all.
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
    if weight == 0:
        return relevance_alone(hops)
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
        order = np.argsort(-logits, kind="stable")  # probabilities may be alike where these are not
        names = tuple(read.sources[place] for place in order)
        mixed.append(Ranking(read.question_id, names, tuple(expit(logits[order]).tolist())))
    return mixed


def tune_selection(
    questions: Sequence[Question],
    hops: Sequence[Hop],
    selection: str = "best",
    weights: Sequence[float] = WEIGHTS,
) -> tuple[float, float, dict[tuple[float, float], float]]:
    """Weight of the similarity and threshold with the best source F1 (on dev), and all tried.

    Args:
      selection: a name of SELECTIONS.
      weights: to try; above 0 only where the similarity is known.

    Returns:
      (weight, threshold, {(weight, threshold): mean source F1}); ties go to the smaller weight.
    """
    tuned, sweep = {}, {}
    for weight in weights:
        mixed = combine(hops, weight)
        tuned[weight], tried = tune_threshold(questions, mixed, selection)
        sweep.update({(weight, threshold): f1 for threshold, f1 in tried.items()})
    best = max(weights, key=lambda weight: (sweep[weight, tuned[weight]], -weight))
    return best, tuned[best], sweep


def read_of_cited(
    cited: Sequence[Ranking], corpus: Corpus, pictures: int = 2, modality: Modality | None = None
) -> list[Ranking]:
    """What VLP reads of the cited sources: all snippets, the first `pictures` pictures.

    Further pictures are left out, caption and all (webqa_loader.py, Preprocess4webqaDecoder).
    With `modality` sources of the other one are, too (VLP_I, VLP_T).
    """
    read = []
    for ranking in cited:
        kinds = [corpus.sources[corpus.row[name]].modality for name in ranking.sources]
        shown = [i for i, kind in enumerate(kinds) if kind == "image"][:pictures]
        kept = [
            i
            for i, kind in enumerate(kinds)
            if (kind == "text" or i in shown) and modality in (None, kind)
        ]
        names, scores = (
            tuple(values[i] for i in kept) for values in (ranking.sources, ranking.scores)
        )
        read.append(Ranking(ranking.question_id, names, scores))
    return read


def tune_threshold(
    questions: Sequence[Question], relevance: Sequence[Ranking], selection: str = "best"
) -> tuple[float, dict[float, float]]:
    """The threshold with the best mean source F1 (on dev), and the whole sweep.

    Args:
      selection: a name of SELECTIONS.
    """
    least, most = SELECTIONS[selection]
    sweep = {
        threshold: mean_source_f1(questions, select_sources(relevance, threshold, most, least))
        for threshold in THRESHOLDS
    }
    return best_threshold(sweep), sweep


def best_threshold(sweep: Mapping[float, float]) -> float:
    """The threshold with the best source F1; ties go to the one nearest the paper's 0.2."""
    return max(sweep, key=lambda threshold: (sweep[threshold], -abs(threshold - 0.2)))


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
