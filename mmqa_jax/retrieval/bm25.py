"""BM25 over snippets and captions, on bm25s.

bm25s computes the scores (with the chosen method's formula; `lucene`, the default, is Robertson's
BM25 with the idf ln(1 + (N - n + .5) / (n + .5)), which is positive even for very common words).
Tokenization, the top k with ties in row order, and the restricted setting are ours. So is that a
source without a word of the query is no result, as in Lucene: bm25s's own `retrieve` fills up its
top k with such sources, whose scores are 0.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from mmqa_jax.core.arguments import check_questions, check_several
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Ranking, source_text
from mmqa_jax.retrieval.rankings import by_score, to_rankings

WORD = re.compile(r"\w+")
_BLOCK = 64  # scores per block when bounding the top k; any size is correct


def words(text: str, stop_words: bool = True) -> list[str]:
    """Lowercase words of `text`; with `stop_words`, without the 33 most common English ones.

    The paper's baseline splits at spaces, keeps case and drops nothing (WebQnA/WebQA_Baseline).
    """
    removed = english_stop_words() if stop_words else ()
    return [word for word in WORD.findall(text.lower()) if word not in removed]


@functools.cache
def _bm25s() -> ModuleType:
    # Imported on first use: the import runs a JAX computation, so hosts must be joined first.
    import bm25s
    import bm25s.stopwords

    # It logs every small index that the restricted setting builds.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s


@functools.cache
def english_stop_words() -> frozenset[str]:
    """The 33 most common English words, as bm25s has them."""
    return frozenset(_bm25s().stopwords.STOPWORDS_EN)


class BM25:
    """BM25 index over texts, which are identified by row.

    Args:
      texts: one text per row (`source_text` of every source, in corpus order).
      k1: saturation of term counts.
      b: strength of length normalization, 0..1.
      stop_words: leave out the most common English words.
      method: bm25s's name of the variant (`lucene`, `robertson`, `atire`).

    Raises:
      UserError: no texts, or no words in them.
      TypeError: one text in place of several, as of `search`.
    """

    def __init__(
        self,
        texts: Sequence[str],
        k1: float = 1.5,
        b: float = 0.75,
        *,
        stop_words: bool = True,
        method: str = "lucene",
    ):
        check_several(texts, "BM25")
        if not len(texts):
            raise UserError("BM25: the corpus is empty, at least one source was expected.")
        vocabulary: dict[str, int] = {}
        token_ids = [
            [vocabulary.setdefault(word, len(vocabulary)) for word in words(text, stop_words)]
            for text in texts
        ]
        if not vocabulary:
            raise UserError(
                f"BM25: none of the {len(texts)} sources contains a word; check their text fields."
            )
        self.stop_words = stop_words
        self._settings = {"k1": k1, "b": b, "method": method}
        self._index = _bm25s_index(token_ids, vocabulary, self._settings)
        # Token ids of all rows, concatenated, for the restricted setting; 4 bytes per token.
        self._offsets = np.cumsum([0, *map(len, token_ids)], dtype=np.int64)
        self._token_ids = np.fromiter(
            (token for row in token_ids for token in row), np.int32, self._offsets[-1]
        )

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

        Raises:
          UserError: `top_k` out of range.
        """
        check_several(queries, "BM25.search")
        check_top_k(top_k, len(self), allowed, "BM25")
        rows = np.full((len(queries), top_k), -1, np.int32)
        scores = np.zeros((len(queries), top_k), np.float32)
        for number, query in enumerate(queries):
            all_scores = self._scores(query)  # [rows]
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
        candidates = np.asarray(rows, np.int32)
        if len(candidates) and (candidates.min() < 0 or candidates.max() >= len(self)):
            raise UserError(
                f"BM25: candidate rows must be in 0..{len(self) - 1}, got "
                f"{candidates.min()}..{candidates.max()}; the index belongs to another corpus."
            )
        local: dict[int, int] = {}
        token_ids = [
            [
                local.setdefault(token, len(local))
                for token in self._token_ids[self._offsets[row] : self._offsets[row + 1]].tolist()
            ]
            for row in candidates
        ]
        scores = np.zeros(len(candidates), np.float32)
        query_ids = [local[token] for token in self._query_ids(query) if token in local]
        if query_ids:
            index = _bm25s_index(
                token_ids, {str(token): i for token, i in local.items()}, self._settings
            )
            scores = index.get_scores_from_ids(query_ids)
        order = np.argsort(-scores, kind="stable")[:top_k]
        order = order[scores[order] > 0]
        return candidates[order], scores[order]

    def scores(self, query: str, rows: Sequence[int]) -> np.ndarray:
        """The scores that `search` gives the rows, float32[rows]."""
        return self._scores(query)[np.asarray(rows, np.int32)]

    def _query_ids(self, query: str) -> list[int]:
        vocabulary = self._index.vocab_dict
        return [vocabulary[word] for word in words(query, self.stop_words) if word in vocabulary]

    def _scores(self, query: str) -> np.ndarray:
        """Scores of all rows, float32[rows]; a repeated query word counts repeatedly."""
        token_ids = self._query_ids(query)
        if not token_ids:
            return np.zeros(len(self), np.float32)
        return self._index.get_scores_from_ids(token_ids)


class BM25Retriever:
    """A Retriever: BM25 over titles, snippets and captions.

    Args:
      index: of the corpus on disk (bm25_disk.py), with BM25's methods; None: made in memory.
    """

    def __init__(self, corpus: Corpus, index: Any = None):
        self.corpus = corpus
        self.bm25 = index or BM25([source_text(source) for source in corpus.sources])

    def search(self, questions: Sequence[Question], top_k: int) -> list[Ranking]:
        """The `top_k` sources of the whole collection for every question, best first.

        Fewer where fewer share a word with the question; none where it has no word that is known.
        """
        check_questions(questions, "BM25Retriever.search")
        texts = [question.question for question in questions]
        found = self.bm25.search(texts, min(top_k, len(self.corpus)))
        return to_rankings([question.id for question in questions], *found, self.corpus.ids)

    def search_within(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> list[Ranking]:
        """Each question's own candidates, as a corpus of their own (WebQA 6.1), best first.

        Those without a word of the question are left out.
        """
        rankings = []
        for question, given in zip(questions, candidates, strict=True):
            rows = [self.corpus.row[name] for name in given.sources]
            found, scores = self.bm25.search_within(question.question, rows, len(rows))
            names = tuple(self.corpus.sources[int(row)].id for row in found)
            rankings.append(Ranking(question.id, names, tuple(map(float, scores))))
        return rankings

    def score(self, questions: Sequence[Question], candidates: Sequence[Ranking]) -> list[Ranking]:
        """The same sources with the scores that `search` gives them, best first.

        Unlike `search_within`, whose statistics are those of the candidates.
        """
        rankings = []
        for question, given in zip(questions, candidates, strict=True):
            rows = [self.corpus.row[name] for name in given.sources]
            scores = self.bm25.scores(question.question, rows).tolist()
            rankings.append(by_score(question.id, dict(zip(given.sources, scores, strict=True))))
        return rankings


def check_top_k(top_k: int, rows: int, allowed: np.ndarray | None, what: str) -> None:
    """UserError unless 1 <= top_k <= number of allowed rows; TypeError for what is no mask."""
    if allowed is not None and not (isinstance(allowed, np.ndarray) and allowed.dtype == bool):
        kind = getattr(allowed, "dtype", type(allowed).__name__)
        raise TypeError(
            f"{what}: the allowed rows are {kind}, a NumPy mask was expected; give bool[{rows}], "
            "True for the rows that may be found."
        )
    if allowed is not None and allowed.shape != (rows,):
        raise UserError(
            f"{what}: the mask of allowed rows has shape {allowed.shape}, ({rows},) was expected."
        )
    available = rows if allowed is None else int(np.count_nonzero(allowed))
    if not 1 <= top_k <= available:
        raise UserError(
            f"{what}: top_k={top_k} is out of range, {available} sources are available; "
            f"choose 1 to {available}."
        )


def _bm25s_index(token_ids: list[list[int]], vocabulary: dict, settings: dict) -> Any:
    index = _bm25s().BM25(**settings, backend="numpy")
    index.index((token_ids, vocabulary), create_empty_token=False, show_progress=False)
    return index


def _top_rows(scores: np.ndarray, top_k: int) -> np.ndarray:
    """Rows of the `top_k` highest scores, best first, equal scores in row order. O(rows)."""
    candidates = np.arange(len(scores))
    blocks = scores[: len(scores) // _BLOCK * _BLOCK].reshape(-1, _BLOCK).max(axis=1)
    if len(blocks) >= top_k:
        # top_k blocks reach this bound, so the k-th best score does too; few rows remain.
        bound = np.partition(blocks, len(blocks) - top_k)[len(blocks) - top_k]
        candidates = np.flatnonzero(scores >= bound)
    found = scores[candidates]
    last = np.partition(found, len(found) - top_k)[len(found) - top_k]
    above = candidates[found > last]
    chosen = np.concatenate([above, candidates[found == last][: top_k - len(above)]])
    return chosen[np.lexsort((chosen, -scores[chosen]))]
