"""Parts of a row whose finished batches are kept: a run that was interrupted repeats none."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mmqa_jax.core.progress import Progress
from mmqa_jax.core.store import Store
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.inference.fusion_reader import read_prediction
from mmqa_jax.retrieval.rankings import check_scores, rescored

_QUESTIONS_PER_BATCH = 256  # per search
Seconds = defaultdict[str, float]


class Resumable:
    """A retriever, reranker or reader whose results are kept in a store.

    It has the interface of the part that it wraps, so that papers run with either.

    Args:
      part: computes what the store does not have.
      store: of results by question and what was asked of it.
      seconds: question id -> seconds, to which the time spent on each question is added, over all
        attempts.
    """

    def __init__(self, part: Any, store: Store, seconds: Seconds):
        self.part, self.store, self.seconds = part, store, seconds

    def search(self, questions: Sequence[Question], top_k: int) -> list[Ranking]:
        """As the retriever's."""
        keys = [_key(question, "search", str(top_k)) for question in questions]

        def search(rows: list[int]) -> list[Ranking]:
            return self.part.search([questions[row] for row in rows], top_k)

        return self._searched(questions, keys, search)

    def search_within(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> list[Ranking]:
        """As the retriever's."""
        keys = [
            _key(question, "within", *ranking.sources)
            for question, ranking in zip(questions, candidates, strict=True)
        ]

        def search(rows: list[int]) -> list[Ranking]:
            asked = [questions[row] for row in rows]
            return self.part.search_within(asked, [candidates[row] for row in rows])

        return self._searched(questions, keys, search)

    def score(self, questions: Sequence[Question], candidates: Sequence[Ranking]) -> list[Ranking]:
        """As the reranker's; each (question, source) pair is kept by itself."""
        pairs = [
            (question, source)
            for question, ranking in zip(questions, candidates, strict=True)
            for source in ranking.sources
        ]
        keys = [_key(question, source) for question, source in pairs]

        def score(rows: list[int]) -> Iterator[dict[int, float]]:
            left = [
                dataclasses.replace(
                    ranking,
                    sources=tuple(
                        source
                        for source in ranking.sources
                        if _key(question, source) not in self.store
                    ),
                )
                for question, ranking in zip(questions, candidates, strict=True)
            ]
            for batch in self.part.score_batches(questions, left):
                scores = dict(zip(batch.indices.tolist(), batch.scores.tolist(), strict=True))
                for number, one in scores.items():  # what is kept is refused by every restart
                    question, source = pairs[rows[number]]
                    check_scores(question.id, {source: one})
                yield scores

        scores = self._results([question.id for question, _ in pairs], keys, score)
        return rescored(candidates, np.array(scores, np.float32))

    def answer(self, questions: Sequence[Question], cited: Sequence[Ranking]) -> list[Prediction]:
        """As the reader's."""
        keys = [
            _key(question, *ranking.sources)
            for question, ranking in zip(questions, cited, strict=True)
        ]

        def answer(rows: list[int]) -> Iterator[dict[int, Any]]:
            asked = [questions[row] for row in rows]
            for batch in self.part.answer_batches(asked, [cited[row] for row in rows]):
                yield {number: [one.answer, one.beams] for number, one in batch}

        results = self._results([ranking.question_id for ranking in cited], keys, answer)
        return [
            Prediction(
                ranking.question_id,
                text,
                ranking.sources,
                ranking.scores,
                tuple((beam, score) for beam, score in beams),
                read=ranking.sources,
            )
            for ranking, (text, beams) in zip(cited, results, strict=True)
        ]

    def read(
        self, questions: Sequence[Question], passages: Sequence[Sequence[str]]
    ) -> list[Prediction]:
        """As Fusion-in-Decoder's."""
        keys = [_key(question, *own) for question, own in zip(questions, passages, strict=True)]

        def read(rows: list[int]) -> Iterator[dict[int, Any]]:
            asked = [questions[row] for row in rows]
            yield from map(dict, self.part.read_batches(asked, [passages[row] for row in rows]))

        results = self._results([question.id for question in questions], keys, read)
        return [
            read_prediction(question, own, tuple((beam, score) for beam, score in beams))
            for question, own, beams in zip(questions, passages, results, strict=True)
        ]

    def _searched(
        self,
        questions: Sequence[Question],
        keys: Sequence[str],
        search: Callable[[list[int]], list[Ranking]],
    ) -> list[Ranking]:
        def batches(rows: list[int]) -> Iterator[dict[int, Any]]:
            with Progress("Searching", len(rows), "questions") as progress:
                for start in range(0, len(rows), _QUESTIONS_PER_BATCH):
                    rankings = search(rows[start : start + _QUESTIONS_PER_BATCH])
                    kept = [[ranking.sources, ranking.scores] for ranking in rankings]
                    yield dict(enumerate(kept, start))
                    progress.advance(len(rankings))

        results = self._results([question.id for question in questions], keys, batches)
        return [
            Ranking(question.id, tuple(sources), tuple(scores))
            for question, (sources, scores) in zip(questions, results, strict=True)
        ]

    def _results(
        self,
        question_ids: Sequence[str],
        keys: Sequence[str],
        compute: Callable[[list[int]], Iterable[Mapping[int, Any]]],
    ) -> list[Any]:
        """The results by key, in order; those that are missing are computed and kept.

        Args:
          question_ids: of each key's question.
          compute: places of missing keys -> batches of results by their place in that list.
        """
        missing = [place for place, key in enumerate(keys) if key not in self.store]
        if missing:
            began = time.perf_counter()
            for batch in compute(missing):
                seconds = (time.perf_counter() - began) / max(len(batch), 1)
                self.store.add(
                    {keys[missing[number]]: [result, seconds] for number, result in batch.items()}
                )
                began = time.perf_counter()
        results = []
        for question_id, key in zip(question_ids, keys, strict=True):
            result, seconds = self.store[key]
            self.seconds[question_id] += seconds
            results.append(result)
        return results


def _key(question: Question, *more: str) -> str:
    """Key of a question's text and picture (a second hop changes them) and of `more`."""
    content = "\0".join((question.question, question.image or "", *more))
    return f"{question.id} {hashlib.sha256(content.encode()).hexdigest()[:16]}"
