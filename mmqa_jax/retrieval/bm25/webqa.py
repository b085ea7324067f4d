"""BM25 as WebQA's baseline runs it, quirks included (`webqa_compat`; vlp/BM25_retrieval).

The baseline passes gensim 3.8's `summarization.bm25.BM25` not lists of words but `doc2bow` lists,
whose entries are (word id, count) pairs. BM25 takes each pair for a word: it occurs once in its
document, a document's length is its number of distinct words, and a query word matches only
documents in which it occurs exactly as often as in the query. Documents that match nothing are
ranked too, since the baseline always takes two. Kept to reproduce table 7; `bm25/in_memory.py` is
the correct one. (WebQA_Baseline vlp/BM25_retrieval/*.py)
"""

from __future__ import annotations

import array
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from mmqa_jax.core.errors import UserError, check_several
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Ranking, Source
from mmqa_jax.retrieval.rankings import check_top_k, to_rankings

Pair = tuple[str, int]  # a word and its count in a text


def word_counts(text: str) -> dict[str, int]:
    """Words split at whitespace, case and punctuation kept, with their counts, sorted by word."""
    return dict(sorted(Counter(text.split()).items()))


class WebQABM25:
    """Gensim 3.8's BM25 over (word, count) pairs; texts are identified by row.

    Args:
      texts: one per row, in the baseline's order: ties go to the later row.
      k1, b: as in BM25.
      epsilon: a pair in more than half of the texts has a negative idf; it gets `epsilon` times
        the mean idf instead (the mean over all pairs, including negative ones).
    """

    def __init__(
        self, texts: Sequence[str], k1: float = 1.5, b: float = 0.75, epsilon: float = 0.25
    ):
        check_several(texts, "WebQABM25")
        if not len(texts):
            raise UserError("BM25: the corpus is empty, at least one source was expected.")
        self._texts, self._settings = list(texts), (k1, b, epsilon)
        # gensim's Dictionary numbers new words text by text, sorted within a text.
        self._word_ids: dict[str, int] = {}
        numbers: dict[Pair, int] = {}
        pairs = array.array("i")  # of all texts, concatenated
        lengths = np.zeros(len(texts), np.int64)
        for row, text in enumerate(texts):
            counts = word_counts(text)
            for word in counts:
                self._word_ids.setdefault(word, len(self._word_ids))
            pairs.extend(numbers.setdefault(pair, len(numbers)) for pair in counts.items())
            lengths[row] = len(counts)
        if not numbers:
            raise UserError(
                f"BM25: none of the {len(texts)} sources contains a word; check their text fields."
            )
        self._numbers = numbers
        # The inverted index: the rows of every pair, in row order, concatenated.
        flat = np.frombuffer(pairs, np.int32)
        order = np.argsort(flat, kind="stable")
        self._rows = np.repeat(np.arange(len(texts), dtype=np.int32), lengths)[order]
        found_in = np.bincount(flat, minlength=len(numbers))  # texts per pair
        self._ends = np.cumsum(found_in)
        self._idf = np.array(
            [math.log(len(texts) - n + 0.5) - math.log(n + 0.5) for n in found_in.tolist()]
        )
        self._idf[self._idf < 0] = epsilon * self._idf.mean()
        # f + k1 * (1 - b + b * length / mean length) with f = 1.
        self._saturation = 1 + k1 * (1 - b + b * lengths / (lengths.sum() / len(texts)))

    def __len__(self) -> int:
        return len(self._texts)

    def scores(self, query: str) -> np.ndarray:
        """Scores of all rows, float64[rows]; `"` is removed from the query first."""
        counts = word_counts(query.replace('"', ""))
        known = [pair for pair in counts.items() if pair[0] in self._word_ids]
        scores = np.zeros(len(self))
        # Word by word in gensim's order: equal terms must be summed in the same order to tie.
        for pair in sorted(known, key=lambda pair: self._word_ids[pair[0]]):
            number = self._numbers.get(pair)
            if number is None:
                continue
            start = self._ends[number - 1] if number else 0
            rows = self._rows[start : self._ends[number]]
            scores[rows] += self._idf[number] * (self._settings[0] + 1) / self._saturation[rows]
        return scores

    def search(self, queries: Sequence[str], top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """The best `top_k` rows of every query: (rows int32[n, top_k], scores float32[n, top_k]).

        Best first; equal scores with the later row first, in the order of
        `sorted(range(n), key=...)[-k:]`. UserError if `top_k` is out of range.
        """
        check_several(queries, "WebQABM25.search")
        check_top_k(top_k, len(self), None, "BM25")
        rows = np.zeros((len(queries), top_k), np.int32)
        scores = np.zeros((len(queries), top_k), np.float32)
        for number, query in enumerate(queries):
            all_scores = self.scores(query)
            bound = np.partition(all_scores, len(self) - top_k)[len(self) - top_k]
            candidates = np.flatnonzero(all_scores >= bound)  # more than top_k if scores tie
            order = np.lexsort((-candidates, -all_scores[candidates]))[:top_k]
            rows[number] = candidates[order]
            scores[number] = all_scores[rows[number]]
        return rows, scores

    def search_within(
        self, query: str, rows: Sequence[int], top_k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ranks the given rows as a corpus of their own, as in the baseline: rows int32[m] and
        scores float32[m] with m = min(top_k, number of rows), best first; equal scores with the one
        later in `rows` first."""
        texts = [self._texts[row] for row in rows]
        if not any(text.split() for text in texts):  # all score 0
            order, scores = np.arange(len(texts))[::-1], np.zeros(len(texts), np.float32)
        else:
            best, found_scores = WebQABM25(texts, *self._settings).search([query], len(texts))
            order, scores = best[0], found_scores[0]
        return np.asarray(rows, np.int32)[order[:top_k]], scores[:top_k]


class WebQABM25Retriever:
    """Table 7's BM25 rows: facts and captions without their titles, snippets before pictures.

    A corpus of one modality gives the known-modality rows, the whole corpus the unknown-modality
    row. Within a modality, the baseline uses the order of its id lists, this class the corpus's;
    only ties differ.
    """

    def __init__(self, corpus: Corpus):
        self.corpus = corpus
        self._order = [*corpus.modality_rows("text"), *corpus.modality_rows("image")]
        self.bm25 = WebQABM25([corpus.sources[row].text for row in self._order])

    def search(self, questions: Sequence[Question], top_k: int) -> list[Ranking]:
        """The `top_k` sources of every question, best first."""
        top_k = min(top_k, len(self.corpus))
        best = self.bm25.search([question.question for question in questions], top_k)
        ids = [self.corpus.sources[row].id for row in self._order]
        return to_rankings([question.id for question in questions], *best, ids)

    def search_within(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> list[Ranking]:
        """Ranks each question's own candidates, whatever their order in `candidates`.

        The baseline's order is gold, then snippets, then pictures, so that gold sources lose
        every tie.
        """
        index_of = {row: index for index, row in enumerate(self._order)}
        ids = [self.corpus.sources[row].id for row in self._order]
        rankings = []
        for question, ranking in zip(questions, candidates, strict=True):
            others = [name for name in ranking.sources if name not in question.positives]
            others.sort(key=lambda name: self._source(name).modality == "image")  # stable
            names = [name for name in question.positives if name in ranking.sources] + others
            rows = [index_of[self.corpus.row[name]] for name in names]
            best, scores = self.bm25.search_within(question.question, rows, len(rows))
            rankings += to_rankings([question.id], best[None], scores[None], ids)
        return rankings

    def _source(self, name: str) -> Source:
        return self.corpus.sources[self.corpus.row[name]]
