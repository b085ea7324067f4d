"""BM25 over snippets and captions; and WebQA's baseline, with its quirks.

Robertson's formula with Lucene's idf ln(1 + (N - n + .5) / (n + .5)), which is positive even for
very common words: the scores are those of bm25s's `lucene`, to the bit (computed and added in its
order), made for all sources at once. As in Lucene, a source without a word of the query is no
result: bm25s's own `retrieve` fills up its top k with such sources, whose scores are 0.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, Int64

from mmqa_jax.core.errors import UserError, check_questions, check_several
from mmqa_jax.core.paths import remove_tree
from mmqa_jax.core.store import Store, digest_of
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Ranking, Source, source_text
from mmqa_jax.data.text_analysis import Analyzer, Vocabulary
from mmqa_jax.retrieval.rankings import by_score, candidate_rows, check_top_k, to_rankings

_BLOCK = 64  # scores per block when bounding the top k; any size is correct
_KEPT = 16  # corpora whose words are kept
_TEXTS = 4096  # whose words are numbered at a time
_ANALYZER = Analyzer()
words = _ANALYZER.words  # of texts and queries where nothing else is said


class TextWords(NamedTuple):
    """The words of several texts."""

    words: list[str]  # each once
    # Indices into `words` of the words of all texts, concatenated.
    numbers: Int32[np.ndarray, " total"]
    offsets: Int64[np.ndarray, " texts+1"]  # where each text's begin, and the end of all


def words_of(texts: Sequence[str], analyzer: Analyzer = _ANALYZER) -> TextWords:
    """Counts the words of texts, one text per row; TypeError for one text in place of several."""
    check_several(texts, "BM25")
    if not len(texts):
        raise UserError("BM25: the corpus is empty, at least one source was expected.")
    vocabulary = Vocabulary(analyzer)
    numbers, lengths = [], []
    for start in range(0, len(texts), _TEXTS):
        block = texts[start : start + _TEXTS]
        of_block, rows = vocabulary.numbered(block)
        numbers.append(of_block.astype(np.int32))
        lengths.append(np.bincount(rows, minlength=len(block)))
    if not vocabulary.names:
        raise UserError(
            f"BM25: none of the {len(texts)} sources contains a word; check their text fields."
        )
    offsets = np.cumsum([0, *np.concatenate(lengths)])
    return TextWords(vocabulary.names, np.concatenate(numbers), offsets)


class BM25:
    """BM25 index over texts, which are identified by row.

    Args:
      texts: one text per row (`source_text` of every source, in corpus order), or their words.
      k1: saturation of term counts.
      b: strength of length normalization, 0..1.
      analyzer: makes words of texts and of queries.
      asks: queries are questions, whose words that ask (`who`, `does`) are not searched for.

    Raises:
      TypeError: one text in place of several, as of `search`.
    """

    def __init__(
        self,
        texts: Sequence[str] | TextWords,
        k1: float = 1.5,
        b: float = 0.75,
        *,
        analyzer: Analyzer = _ANALYZER,
        asks: bool = False,
    ):
        counted = texts if isinstance(texts, TextWords) else words_of(texts, analyzer)
        self._words_of = analyzer.question_words if asks else analyzer.words
        self._k1, self._b = k1, b
        self._number = {word: number for number, word in enumerate(counted.words)}
        self._numbers, self._offsets = counted.numbers, counted.offsets
        self._scored = _Scored(self._numbers, self._offsets, len(self._number), k1, b)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def search(
        self, queries: Sequence[str], top_k: int, allowed: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The best `top_k` rows of every query.

        Args:
          queries: n texts.
          top_k: at most the number of (allowed) rows.
          allowed: bool[rows], the rows that may be returned (known modality); None means all.

        Returns:
          (rows int32[n, top_k], scores float32[n, top_k]), best first; equal scores in row
          order. Where fewer rows share a word with the query, -1 and a score of 0 follow them.
        """
        check_several(queries, "BM25.search")
        check_top_k(top_k, len(self), allowed, "BM25")
        rows = np.full((len(queries), top_k), -1, np.int32)
        scores = np.zeros((len(queries), top_k), np.float32)
        for number, query in enumerate(queries):
            all_scores = self._scored.sums(self._query(query))  # [rows]
            if allowed is not None:
                all_scores = np.where(allowed, all_scores, np.float32(0))
            best = _top_rows(all_scores, top_k)
            best = best[all_scores[best] > 0]
            rows[number, : len(best)] = best
            scores[number, : len(best)] = all_scores[best]
        return rows, scores

    def search_within(
        self, query: str, rows: Sequence[int], top_k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ranks the given rows (a question's candidates): the paper's restricted setting.

        As in the paper's baseline, the candidates are treated as a corpus of their own: document
        frequencies and mean length are computed over them, not over the whole corpus.

        Returns:
          (rows int32[m], scores float32[m]), best first, equal scores in the order of `rows`: at
          most top_k rows, those that share a word with the query.
        """
        candidates = candidate_rows(rows, len(self), "BM25")
        of_rows = [self._numbers[self._offsets[r] : self._offsets[r + 1]] for r in candidates]
        local, numbers = np.unique(np.concatenate([*of_rows, []]), return_inverse=True)
        place = {number: i for i, number in enumerate(local.tolist())}
        asked = [place[number] for number in self._query(query) if number in place]
        scores = np.zeros(len(candidates), np.float32)
        if asked:
            offsets = np.cumsum([0, *map(len, of_rows)])
            scores = _Scored(numbers, offsets, len(local), self._k1, self._b).sums(asked)
        order = np.argsort(-scores, kind="stable")[:top_k]
        order = order[scores[order] > 0]
        return candidates[order], scores[order]

    def scores(self, query: str, rows: Sequence[int]) -> np.ndarray:
        """The scores that `search` gives the rows, float32[rows]."""
        return self._scored.sums(self._query(query))[np.asarray(rows, np.int32)]

    def coverage(self, query: str) -> float:
        """The largest share of a query's words that one row has, each by its idf; words that no row
        has weigh most."""
        held, total = np.zeros(len(self)), 0.0
        for word in self._words_of(query):
            rows = self._scored.rows_of(self._number[word]) if word in self._number else ()
            weight = idf_of(len(self), len(rows))
            total += weight
            if len(rows):
                held[rows] += weight
        return float(held.max() / total) if total else 0.0

    def _query(self, query: str) -> list[int]:
        """The numbers of a query's words; a repeated word counts repeatedly."""
        return [self._number[word] for word in self._words_of(query) if word in self._number]


@dataclasses.dataclass(frozen=True)
class Norms:
    """The part of BM25's denominator that a source's length decides: f / (f + norm). The mean
    length is in words."""

    k1: float
    b: float
    mean_length: float

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """float64, in the order of operations of bm25s, so that scores are equal to the bit."""
        return self.k1 * ((1 - self.b) + self.b * lengths / self.mean_length)

    def bounds(self, impacts: np.ndarray, other: Norms) -> np.ndarray:
        """What the impacts of another mean length can be here at most.

        A norm here is at least `share` times that of the other mean: its part of b is scaled by
        the ratio of the means, the rest is the same.
        """
        share = min(1.0, other.mean_length / self.mean_length)
        return 1 / (1 + share * (1 / impacts - 1))


def idf_of(rows: int, holders: int) -> float:
    """The weight of a word that so many of the sources have: Lucene's idf."""
    return math.log(1 + (rows - holders + 0.5) / (holders + 0.5))


def word_scores(
    idf: np.ndarray | np.float64, counts: np.ndarray, norms: np.ndarray
) -> Float32[np.ndarray, " n"]:
    """Returns what a word adds to the scores of sources, of their counts of it and their norms; its
    idf is rounded to float32, as bm25s keeps it."""
    return (idf * (counts / (norms + counts))).astype(np.float32)


class _Scored:
    """What each word of a collection gives each of its rows, of the numbers of all rows' words,
    concatenated, and where each row's begin."""

    def __init__(self, numbers: np.ndarray, offsets: np.ndarray, words: int, k1: float, b: float):
        lengths = np.diff(offsets)
        rows = len(lengths)
        pairs = numbers.astype(np.int64) * rows + np.repeat(np.arange(rows), lengths)
        pairs.sort()
        first = np.flatnonzero(np.r_[True, pairs[1:] != pairs[:-1]])
        counts = np.diff(np.append(first, len(pairs))).astype(np.float32)
        of_word, self._rows = np.divmod(pairs[first], rows)
        self._rows = self._rows.astype(np.int32)
        frequencies = np.bincount(of_word, minlength=words)
        self._starts = np.cumsum([0, *frequencies])
        idfs = np.array([idf_of(rows, n) for n in frequencies.tolist()]).astype(np.float32)
        norms = Norms(k1, b, lengths.mean()).of(lengths)
        self._scores = word_scores(idfs[of_word], counts, norms[self._rows])
        self._size = rows

    def rows_of(self, number: int) -> Int32[np.ndarray, " n"]:
        """The rows that have a word."""
        return self._rows[self._starts[number] : self._starts[number + 1]]

    def sums(self, numbers: Sequence[int]) -> Float32[np.ndarray, " rows"]:
        """The scores of all rows for the words of a query, added in their order."""
        total = np.zeros(self._size, np.float32)
        for number in numbers:
            span = slice(self._starts[number], self._starts[number + 1])
            total[self.rows_of(number)] += self._scores[span]
        return total


def kept_words(folder: Path, corpus: Corpus, analyzer: Analyzer = _ANALYZER) -> TextWords:
    """Counts the words of a corpus's sources, unless an earlier run kept them in the folder, which
    holds the words of the corpora that were used last."""
    texts = list(map(source_text, corpus.sources))
    if not corpus.fingerprint:
        return words_of(texts, analyzer)
    what = {"corpus": corpus.fingerprint, "analyzer": analyzer.to_json()}
    place = folder / digest_of(what)[:32]
    with Store(place, what, damage="drop", sync=False) as store:
        words, numbers, offsets = map(store.get, TextWords._fields)
        if words is None or numbers is None or offsets is None:
            counted = words_of(texts, analyzer)
            store.add(counted._asdict())
            _leave_newest(folder)
            return counted
    os.utime(place)
    return TextWords(words, numbers, offsets)


def _leave_newest(folder: Path) -> None:
    """Removes what has not been used for longest, but for `_KEPT` corpora."""
    by_age = sorted(folder.iterdir(), key=lambda place: place.stat().st_mtime)
    for place in by_age[:-_KEPT]:
        with contextlib.suppress(OSError):  # another process removes it too
            remove_tree(place)


class BM25Retriever:
    """A Retriever: BM25 over titles, snippets and captions, in memory, or by the index of the
    corpus on disk (bm25/on_disk.py), which has BM25's methods."""

    def __init__(self, corpus: Corpus, index: Any = None):
        self.corpus = corpus
        self.bm25 = index or BM25([source_text(source) for source in corpus.sources])

    def search(self, questions: Sequence[Question], top_k: int) -> list[Ranking]:
        """The `top_k` sources of the whole collection for every question, best first.

        Fewer where fewer share a word with the question; none where it has no word that is known.
        """
        check_questions(questions, "BM25Retriever.search")
        texts = [question.question for question in questions]
        best = self.bm25.search(texts, min(top_k, len(self.corpus)))
        return to_rankings([question.id for question in questions], *best, self.corpus.ids)

    def search_within(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> list[Ranking]:
        """Each question's own candidates, as a corpus of their own (WebQA 6.1), best first.

        Those without a word of the question are left out.
        """
        rankings = []
        for question, ranking in zip(questions, candidates, strict=True):
            rows = [self.corpus.row[name] for name in ranking.sources]
            best, scores = self.bm25.search_within(question.question, rows, len(rows))
            names = tuple(self.corpus.sources[int(row)].id for row in best)
            rankings.append(Ranking(question.id, names, tuple(map(float, scores))))
        return rankings

    def score(self, questions: Sequence[Question], candidates: Sequence[Ranking]) -> list[Ranking]:
        """Ranks the same sources by the scores that `search` gives them, best first.

        Unlike `search_within`, whose statistics are those of the candidates.
        """
        rankings = []
        for question, ranking in zip(questions, candidates, strict=True):
            rows = [self.corpus.row[name] for name in ranking.sources]
            scores = self.bm25.scores(question.question, rows).tolist()
            rankings.append(by_score(question.id, dict(zip(ranking.sources, scores, strict=True))))
        return rankings


def _top_rows(scores: np.ndarray, top_k: int) -> np.ndarray:
    """Rows of the `top_k` highest scores, best first, equal scores in row order. O(rows)."""
    candidates = np.arange(len(scores))
    blocks = scores[: len(scores) // _BLOCK * _BLOCK].reshape(-1, _BLOCK).max(axis=1)
    if len(blocks) >= top_k:
        # top_k blocks reach this bound, so the k-th best score does too; few rows remain.
        bound = np.partition(blocks, len(blocks) - top_k)[len(blocks) - top_k]
        candidates = np.flatnonzero(scores >= bound)
    values = scores[candidates]
    last = np.partition(values, len(values) - top_k)[len(values) - top_k]
    above = candidates[values > last]
    chosen = np.concatenate([above, candidates[values == last][: top_k - len(above)]])
    return chosen[np.lexsort((chosen, -scores[chosen]))]


# BM25 as WebQA's baseline runs it, quirks included (`webqa_compat`; vlp/BM25_retrieval).


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
