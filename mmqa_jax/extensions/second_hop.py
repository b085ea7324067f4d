"""A second hop, in retrieval and in source selection (ours, beyond the paper).

A two-hop question ("What is the anthem of the country whose capital is X?") identifies its second
source only through the first. The second hop repeats the question with the title of the best source
appended.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.extensions.similarity import Evidence, combine
from mmqa_jax.papers.webqa import Reranker, top
from mmqa_jax.retrieval.rankings import Retriever, best_of


class SecondHopRetriever:
    """A Retriever that searches a second time with the title of its first result appended."""

    def __init__(self, retriever: Retriever, corpus: Corpus):
        self.retriever, self.corpus = retriever, corpus

    def search(self, questions: Sequence[Question], top_k: int) -> list[Ranking]:
        """The `top_k` sources of every question: the two hops' results, interleaved.

        The first hop's best, the second hop's best, the first hop's second, and so on; a source's
        score is 1 / its rank. No scores are compared, since BM25's grow with the query.
        """
        top_k = min(top_k, len(self.corpus))
        first = self.retriever.search(questions, top_k)
        with_titles = [
            _with_title(question, self._first_title(ranking))
            for question, ranking in zip(questions, first, strict=True)
        ]
        second = self.retriever.search(with_titles, top_k)
        return [_interleaved(*hops, top_k) for hops in zip(first, second, strict=True)]

    def search_within(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> list[Ranking]:
        """Each question's own candidates, by the higher of their scores in both hops."""
        first, second, _ = self.hops(questions, candidates)
        return best_of(first, second)

    def hops(self, questions: Sequence[Question], candidates: Sequence[Ranking]) -> Hops:
        """Ranks each question's candidates for the first hop and, if it takes one, the second.

        A question takes a second hop unless it names the title of the first hop's best source
        (which then has the answer) or comes with a picture (and is about that picture).
        """
        first = self.retriever.search_within(questions, candidates)
        second = [Ranking(question.id, (), ()) for question in questions]
        second_questions: list[Question | None] = [None] * len(questions)
        for i, (question, ranking) in enumerate(zip(questions, first, strict=True)):
            title = self._best_title(ranking)
            if title and question.image is None and not _names(question, title):
                second_questions[i] = _with_title(question, title)
        two_hop = [i for i, question in enumerate(second_questions) if question is not None]
        if not two_hop:
            return Hops(first, second, second_questions)
        rankings = self.retriever.search_within(
            [second_questions[i] for i in two_hop],
            [_without_best(first[i], candidates[i]) for i in two_hop],
        )
        for i, ranking in zip(two_hop, rankings, strict=True):
            second[i] = ranking
        return Hops(first, second, second_questions)

    def _first_title(self, ranking: Ranking) -> str:
        """Title of the best source that has one."""
        titles = (self._title(name) for name in ranking.sources)
        return next(filter(None, titles), "")

    def _best_title(self, ranking: Ranking) -> str:
        return self._title(ranking.sources[0]) if ranking.sources else ""

    def _title(self, name: str) -> str:
        return self.corpus.sources[self.corpus.row[name]].title.strip()


class Hops(NamedTuple):
    """Candidates ranked for both hops, one entry per question."""

    first: list[Ranking]  # all candidates; of BM25 those that share a word with the question
    second: list[Ranking]  # the same without the first hop's best; empty if there is no second hop
    # The question of the second hop; None if there is no second hop.
    questions: list[Question | None]


_SECOND_HOP = 10  # candidates that are scored again


class SecondHopReranker:
    """A Reranker that scores two-hop questions' candidates again with the first hop's title. The
    retriever decides on the second hop, in which the 10 most similar candidates are
    scored; `weight` is that of similarity.combine."""

    def __init__(self, retriever: SecondHopRetriever, reranker: Reranker, weight: float = 0.0):
        self.retriever, self.reranker, self.weight = retriever, reranker, weight

    def score(self, questions: Sequence[Question], candidates: Sequence[Ranking]) -> list[Ranking]:
        """Ranks the same sources by the combined probability of both hops, best first."""
        return combine(self.read(questions, candidates), self.weight)

    def read(self, questions: Sequence[Question], candidates: Sequence[Ranking]) -> list[Evidence]:
        """Relevance and similarity of the candidates in the first and in the second hop."""
        hops = self.retriever.hops(questions, candidates)
        relevance = self.reranker.score(questions, candidates)
        two_hop = [i for i, question in enumerate(hops.questions) if question is not None]
        second = [top(ranking, _SECOND_HOP) for ranking in hops.second]
        second_relevance = list(second)  # empty where there is no second hop
        if two_hop:
            rescored = self.reranker.score(
                [hops.questions[i] for i in two_hop], [second[i] for i in two_hop]
            )
            for i, ranking in zip(two_hop, rescored, strict=True):
                second_relevance[i] = ranking
        return [Evidence(relevance, hops.first), Evidence(second_relevance, second)]


def _with_title(question: Question, title: str) -> Question:
    """The question with the title appended and without its picture."""
    text = f"{question.question} {title}" if title else question.question
    return dataclasses.replace(question, question=text, image=None)


def _without_best(first: Ranking, candidates: Ranking) -> Ranking:
    """Returns the candidates without the first hop's best; new candidates come last."""
    rest = tuple(dict.fromkeys((*first.sources, *candidates.sources)))[1:]
    return Ranking(first.question_id, rest, (0.0,) * len(rest))


def _names(question: Question, title: str) -> bool:
    """Whether the question contains the title as whole words: Nigeria does not name Niger."""
    return bool(re.search(rf"(?<!\w){re.escape(title)}(?!\w)", question.question, re.IGNORECASE))


def _interleaved(first: Ranking, second: Ranking, top_k: int) -> Ranking:
    pairs = itertools.zip_longest(first.sources, second.sources)
    names = tuple(dict.fromkeys(name for pair in pairs for name in pair if name))[:top_k]
    return Ranking(first.question_id, names, tuple(1.0 / (i + 1) for i in range(len(names))))
