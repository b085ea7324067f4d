"""WebQA (Chang et al., CVPR 2022): find the sources for a question, then answer from them.

The settings of tables 6, 7 and 8, each a function of the same three parts:

  retriever.search(questions, top_k)     -> one Ranking per question, from the whole collection
  reranker.score(questions, candidates)  -> the same sources by P(relevant), best first
  reader.answer(questions, cited)        -> one Prediction per question

`mmqa run`, `answer`, `rerank`, `search` and `ask` all execute these functions.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.evaluation.webqa import (
    CAPS,
    SELECTIONS,
    Cap,
    Select,
    constant_predictions,
    fit_constant_answers,
    select_sources,
)
from mmqa_jax.papers.setting import Setting
from mmqa_jax.retrieval.rankings import (
    Retriever,
    find_candidates,
    gold_ranking,
    restricted_candidates,
    without_own_source,
)


class Reranker(Protocol):
    """Scores candidate sources, as the VLP source head does."""

    def score(self, questions: Sequence[Question], candidates: Sequence[Ranking]) -> list[Ranking]:
        """Ranks the same sources by P(relevant) in [0, 1], best first."""


class Reader(Protocol):
    """Answers questions in words from cited sources."""

    def answer(self, questions: Sequence[Question], cited: Sequence[Ranking]) -> list[Prediction]:
        """One Prediction per question, citing its sources."""


def answer_question_only(questions: Sequence[Question], reader: Reader) -> list[Prediction]:
    """Table 6, `VLP (Q-only)`: the reader sees no source."""
    return reader.answer(questions, [Ranking(question.id, (), ()) for question in questions])


def answer_constant(questions: Sequence[Question], corpus: Corpus) -> list[Prediction]:
    """Ours: nothing is read; each category's best single answer to the other splits' questions."""
    asked = {question.split for question in questions}
    known = [question for question in corpus.questions() if question.split not in asked]
    return constant_predictions(questions, fit_constant_answers(known))


def answer_oracle(questions: Sequence[Question], reader: Reader) -> list[Prediction]:
    """Table 6, oracle sources: the reader sees the gold sources; see `check_gold`."""
    return reader.answer(questions, [gold_ranking(question) for question in questions])


def answer_restricted(
    questions: Sequence[Question],
    corpus: Corpus,
    reranker: Reranker,
    reader: Reader,
    *,
    threshold: float = 0.2,
    cap: Cap = "webqa",
    select: Select = "above",
) -> list[Prediction]:
    """Table 6, restricted setting: VLP selects among each question's own ~40 candidates."""
    cited = select_restricted(
        questions, corpus, reranker, threshold=threshold, cap=cap, select=select
    )
    return reader.answer(questions, cited)


def answer_full_scale(
    questions: Sequence[Question],
    retriever: Retriever,
    reranker: Reranker,
    reader: Reader,
    *,
    top_k: int = 20,
    threshold: float = 0.2,
    select: Select = "best",
) -> list[Prediction]:
    """Section 6.2, CLIP(top_k) + VLP: coarse dense retrieval, VLP source selection, VLP answers."""
    cited = select_full_scale(
        questions, retriever, reranker, top_k=top_k, threshold=threshold, select=select
    )
    return reader.answer(questions, cited)


def answer_retrieved(
    questions: Sequence[Question], retriever: Retriever, reader: Reader, *, top_k: int = 2
) -> list[Prediction]:
    """Table 6, CLIP(2) + VLP: the reader sees the retriever's top sources."""
    return reader.answer(questions, find_candidates(questions, retriever, top_k))


def answer_selected(
    questions: Sequence[Question],
    relevance: Sequence[Ranking],
    reader: Reader,
    *,
    threshold: float = 0.2,
    select: Select = "best",
) -> list[Prediction]:
    """The second half of the restricted and full-scale settings: answers from scored sources."""
    return reader.answer(questions, select_sources(relevance, threshold, SELECTIONS[select]))


def select_restricted(
    questions: Sequence[Question],
    corpus: Corpus,
    reranker: Reranker,
    *,
    threshold: float = 0.2,
    cap: Cap = "webqa",
    select: Select = "above",
) -> list[Ranking]:
    """Table 7, VLP in the restricted setting: the sources above the threshold, possibly none."""
    relevance = reranker.score(questions, restricted_candidates(questions, corpus, CAPS[cap]))
    return select_sources(relevance, threshold, SELECTIONS[select])


def select_full_scale(
    questions: Sequence[Question],
    retriever: Retriever,
    reranker: Reranker,
    *,
    top_k: int = 20,
    threshold: float = 0.2,
    select: Select = "best",
) -> list[Ranking]:
    """Table 7, CLIP(20) + VLP: always the best source, and the second from the threshold on."""
    candidates = find_candidates(questions, retriever, top_k)  # top_k sources by similarity
    relevance = reranker.score(questions, candidates)  # the same, by P(relevant) in [0, 1]
    return select_sources(relevance, threshold, SELECTIONS[select])


def retrieve_restricted(
    questions: Sequence[Question], corpus: Corpus, retriever: Retriever, *, cited: int = 2
) -> list[Ranking]:
    """Table 7, BM25 in the restricted setting: the best two of each question's candidates."""
    ranked = retriever.search_within(questions, restricted_candidates(questions, corpus))
    return without_own_source(questions, ranked, cited)


def retrieve_full_scale(
    questions: Sequence[Question], retriever: Retriever, *, cited: int = 2, top_k: int = 100
) -> list[Ranking]:
    """Table 7, BM25 and CLIP(2): the best two sources of the whole collection, of which `top_k` are
    ranked for recall@k."""
    ranked = find_candidates(questions, retriever, top_k)
    return [top(ranking, cited) for ranking in ranked]


def cap_note(questions: Sequence[Question], cap: Cap) -> str | None:
    """Notes questions with hidden gold sources, which no cap was applied to; None: none."""
    hidden = sum(not question.positives for question in questions)
    if CAPS[cap] is None or not hidden:
        return None
    return (
        f"cap={cap}: {hidden:,} of {len(questions):,} questions hide their gold sources, so all of "
        f"their candidates are scored; the cap of {CAPS[cap]} + {CAPS[cap]} keeps the gold ones"
    )


def top(ranking: Ranking, top_k: int) -> Ranking:
    """The first `top_k` sources of a ranking."""
    return Ranking(ranking.question_id, ranking.sources[:top_k], ranking.scores[:top_k])


def _cap_notes(questions: Sequence[Question], options: Mapping[str, Any]) -> list[str]:
    note = cap_note(questions, options["cap"])
    return [note] if note else []


# The settings that `mmqa run` executes, by the name in a row's config.
SETTINGS = {
    "question_only": Setting(answer_question_only),
    "constant": Setting(answer_constant),
    "oracle": Setting(answer_oracle, of_gold=True),
    "restricted": Setting(answer_restricted, write_notes=_cap_notes),
    "full_scale": Setting(answer_full_scale),
    "retrieved": Setting(answer_retrieved),
    "select_restricted": Setting(select_restricted, write_notes=_cap_notes),
    "select_full_scale": Setting(select_full_scale),
    "retrieve_restricted": Setting(retrieve_restricted),
    "retrieve_full_scale": Setting(retrieve_full_scale),
}
