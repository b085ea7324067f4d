"""Resumable parts of a system: batches that an interrupted run finished are not repeated.

Each has the interface of the part that it wraps, so that the settings of papers/webqa.py run with
either. `seconds` (question id -> seconds) adds up the time spent on each question, over all
attempts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mmqa_jax.core.journal import Journal
from mmqa_jax.core.progress import Progress
from mmqa_jax.data.schema import Prediction, Question, Ranking
from mmqa_jax.retrieval.rankings import check_scores, rescored
from mmqa_jax.retrieval.retriever import Retriever

_QUESTIONS_PER_BATCH = 256  # per search
Seconds = defaultdict[str, float]


class ResumableRetriever:
    """A Retriever that keeps its rankings in a journal."""

    def __init__(self, retriever: Retriever, journal: Journal, seconds: Seconds):
        self.retriever, self.journal, self.seconds = retriever, journal, seconds

    def search(self, questions: Sequence[Question], top_k: int) -> list[Ranking]:
        """As the retriever's."""
        keys = [_key(question, "search", str(top_k)) for question in questions]

        def search(missing: list[int]) -> list[Ranking]:
            return self.retriever.search([questions[i] for i in missing], top_k)

        return self._run(keys, search, questions)

    def search_within(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> list[Ranking]:
        """As the retriever's."""
        keys = [
            _key(question, "within", *given.sources)
            for question, given in zip(questions, candidates, strict=True)
        ]

        def search(missing: list[int]) -> list[Ranking]:
            return self.retriever.search_within(
                [questions[i] for i in missing], [candidates[i] for i in missing]
            )

        return self._run(keys, search, questions)

    def _run(
        self,
        keys: Sequence[str],
        search: Callable[[list[int]], list[Ranking]],
        questions: Sequence[Question],
    ) -> list[Ranking]:
        missing = [i for i, key in enumerate(keys) if key not in self.journal]
        with Progress("Searching", len(missing), "questions") as progress:
            for start in range(0, len(missing), _QUESTIONS_PER_BATCH):
                batch, began = missing[start : start + _QUESTIONS_PER_BATCH], time.perf_counter()
                results = search(batch)
                seconds = (time.perf_counter() - began) / len(batch)
                self.journal.add(
                    {
                        keys[i]: {"sources": r.sources, "scores": r.scores, "seconds": seconds}
                        for i, r in zip(batch, results, strict=True)
                    }
                )
                progress.advance(len(batch))
        rankings = []
        for key, question in zip(keys, questions, strict=True):
            kept = self.journal[key]
            self.seconds[question.id] += kept["seconds"]
            rankings.append(Ranking(question.id, tuple(kept["sources"]), tuple(kept["scores"])))
        return rankings


class ResumableReranker:
    """A Reranker that keeps the score of every (question, source) pair in a journal."""

    def __init__(self, reranker: Any, journal: Journal, seconds: Seconds):
        self.reranker, self.journal, self.seconds = reranker, journal, seconds

    def score(self, questions: Sequence[Question], candidates: Sequence[Ranking]) -> list[Ranking]:
        """As the reranker's."""
        keys = [
            [_key(question, name) for name in given.sources]
            for question, given in zip(questions, candidates, strict=True)
        ]
        missing = [
            dataclasses.replace(
                given,
                sources=tuple(
                    name
                    for name, key in zip(given.sources, own, strict=True)
                    if key not in self.journal
                ),
            )
            for given, own in zip(candidates, keys, strict=True)
        ]
        asked = [(q, name) for q, given in zip(questions, missing, strict=True)
                 for name in given.sources]  # fmt: skip
        todo = [_key(question, name) for question, name in asked]
        if todo:
            for batch, seconds in _timed(
                self.reranker.score_batches(questions, missing), lambda b: len(b.indices)
            ):
                pairs = list(zip(batch.indices.tolist(), batch.scores.tolist(), strict=True))
                # What is kept would be refused by every restart.
                for i, score in pairs:
                    check_scores(asked[i][0].id, {asked[i][1]: score})
                self.journal.add({todo[i]: [score, seconds] for i, score in pairs})
        kept = [self.journal[key] for own in keys for key in own]
        for question, own in zip(questions, keys, strict=True):
            self.seconds[question.id] += sum(self.journal[key][1] for key in own)
        scores = np.array([score for score, _ in kept], np.float32)
        return rescored(candidates, scores)


class ResumableReader:
    """A Reader that keeps its answers in a journal, by question and cited sources."""

    def __init__(self, reader: Any, journal: Journal, seconds: Seconds):
        self.reader, self.journal, self.seconds = reader, journal, seconds

    def answer(self, questions: Sequence[Question], cited: Sequence[Ranking]) -> list[Prediction]:
        """As the reader's."""
        keys = [
            _key(question, *ranking.sources)
            for question, ranking in zip(questions, cited, strict=True)
        ]
        missing = [i for i, key in enumerate(keys) if key not in self.journal]
        if missing:
            batches = self.reader.answer_batches(
                [questions[i] for i in missing], [cited[i] for i in missing]
            )
            for batch, seconds in _timed(batches, len):
                self.journal.add(
                    {
                        keys[missing[i]]: {"answer": p.answer, "beams": p.beams, "seconds": seconds}
                        for i, p in batch
                    }
                )
        predictions = []
        for key, ranking in zip(keys, cited, strict=True):
            kept = self.journal[key]
            self.seconds[ranking.question_id] += kept["seconds"]
            beams = tuple((text, score) for text, score in kept["beams"])
            predictions.append(
                Prediction(
                    ranking.question_id, kept["answer"], ranking.sources, ranking.scores, beams
                )
            )
        return predictions


def _timed(batches: Iterable[Any], size: Callable[[Any], int]) -> Iterator[tuple[Any, float]]:
    """Yields every batch with the seconds per item."""
    began = time.perf_counter()
    for batch in batches:
        now = time.perf_counter()
        yield batch, (now - began) / max(size(batch), 1)
        began = time.perf_counter()


def _key(question: Question, *more: str) -> str:
    """Journal key of a question's text and picture (a second hop changes them) and of `more`."""
    content = "\0".join((question.question, question.image or "", *more))
    return f"{question.id} {hashlib.sha256(content.encode()).hexdigest()[:16]}"
