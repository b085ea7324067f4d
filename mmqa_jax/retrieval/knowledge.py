"""Knowledge for prompts: passages that a retriever finds for a question or for any text."""

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mmqa_jax.core.errors import check_several
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.retrieval.rankings import Retriever, to_rankings


class Passage(NamedTuple):
    """A snippet, or a picture's caption, of a knowledge base."""

    id: str
    title: str
    text: str
    score: float


class KnowledgeBase:
    """A corpus behind a retriever.

    Args:
      corpus: its sources are the passages.
      retriever: over this corpus.
      top_k: passages of a question.
      max_words: longer passages are cut there; 0: never.
      text_of: the text of a question that is searched for.
      section_key: key of a question's `extra` with the title of the sources that may be found for
        it, an oracle; "": all may. A question whose title no source has finds nothing.
    """

    def __init__(
        self,
        corpus: Corpus,
        retriever: Retriever,
        *,
        top_k: int = 1,
        max_words: int = 0,
        text_of: Callable[[Question], str] = lambda question: question.question,
        section_key: str = "",
    ):
        self.corpus, self.retriever = corpus, retriever
        self._top_k, self._max_words = top_k, max_words
        self._text_of, self._section_key = text_of, section_key
        self._titled: dict[str, list[str]] = {}  # ids of the sources of every title
        for source in corpus.sources if section_key else ():
            self._titled.setdefault(source.title, []).append(source.id)

    def find(self, texts: Sequence[str], top_k: int) -> list[list[Passage]]:
        """The `top_k` passages of every text, best first; none where no passage shares a word."""
        check_several(texts, "KnowledgeBase.find")
        queries = [Question(str(n), "", text) for n, text in enumerate(texts)]
        return self._passages(self.retriever.search(queries, min(top_k, len(self.corpus))), top_k)

    def of_questions(self, questions: Sequence[Question]) -> list[list[Passage]]:
        """The passages of every question, best first, as many as this knowledge base is set to."""
        texts = [self._text_of(question) for question in questions]
        if not self._section_key:
            return self.find(texts, self._top_k)
        queries = [Question(str(n), "", text) for n, text in enumerate(texts)]
        sections = [Ranking(q.id, *self._section(question)) for q, question in
               zip(queries, questions, strict=True)]  # fmt: skip
        return self._passages(self.retriever.search_within(queries, sections), self._top_k)

    def _section(self, question: Question) -> tuple[tuple[str, ...], tuple[float, ...]]:
        """Ids of the sources of a question's own section, without an order yet."""
        title = str(question.extra.get(self._section_key, ""))
        names = tuple(self._titled.get(title, ())) if title else ()
        return names, (0.0,) * len(names)

    def _passages(self, rankings: Sequence[Ranking], top_k: int) -> list[list[Passage]]:
        return [
            [
                self._passage(name, score)
                for name, score in zip(ranking.sources[:top_k], ranking.scores, strict=False)
                if score > 0
            ]
            for ranking in rankings
        ]

    def _passage(self, name: str, score: float) -> Passage:
        source = self.corpus.sources[self.corpus.row[name]]
        words = source.text.split()
        shortened = words[: self._max_words] if self._max_words else words
        return Passage(name, source.title, " ".join(shortened), float(score))


def passages_of(
    knowledge: KnowledgeBase | None, questions: Sequence[Question]
) -> list[list[Passage] | None]:
    """The passages of every question; None where there is no knowledge base."""
    return [None] * len(questions) if knowledge is None else list(knowledge.of_questions(questions))


class RandomRetriever:
    """A Retriever that draws sources by the text of the question: the control of a knowledge base.

    Scores fall from 1, and say nothing.
    """

    def __init__(self, corpus: Corpus, seed: int = 0):
        self.corpus, self._seed = corpus, seed

    def search(self, questions: Sequence[Question], top_k: int) -> list[Ranking]:
        """`top_k` different sources of every question."""
        rows = [self._rng(q).choice(len(self.corpus), top_k, replace=False) for q in questions]
        scores = np.broadcast_to(_falling(top_k), (len(questions), top_k))
        names = [q.id for q in questions]
        return to_rankings(names, np.array(rows, int), scores, self.corpus.ids)

    def search_within(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> list[Ranking]:
        """Each question's own candidates in a random order."""
        return [
            Ranking(
                question.id,
                tuple(self._rng(question).permutation(ranking.sources).tolist()),
                tuple(_falling(len(ranking.sources)).tolist()),
            )
            for question, ranking in zip(questions, candidates, strict=True)
        ]

    def _rng(self, question: Question) -> np.random.Generator:
        digest = hashlib.sha256(question.question.encode()).digest()
        return np.random.default_rng([self._seed, int.from_bytes(digest[:8], "big")])


def _falling(count: int) -> np.ndarray:
    return 1.0 - np.arange(count) / max(count, 1)
