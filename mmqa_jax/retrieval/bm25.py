"""BM25 over snippets and captions, on bm25s.

bm25s computes the scores (the formula of the method chosen, `lucene` by default: Robertson's
BM25 with ln(1 + (N - n + .5) / (n + .5)), which no word of a long list can make negative).
The words, the top-k with its ties in row order, and the restricted setting are ours.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

import bm25s
import numpy as np
from bm25s.stopwords import STOPWORDS_EN

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.schema import Source
from mmqa_jax.retrieval.manifest import check_manifest, read_manifest, replace_folder

# It logs every small index that the restricted setting builds.
logging.getLogger("bm25s").setLevel(logging.WARNING)

_WORD = re.compile(r"\w+")
_STOP_WORDS = frozenset(STOPWORDS_EN)
_WHAT = "a BM25 index"
_BLOCK = 64  # scores per block when bounding the top k; any size is correct


def source_text(source: Source) -> str:
    """The text a source is found by: its title, then the snippet or caption."""
    return f"{source.title} {source.text}".strip()


def words(text: str, stop_words: bool = True) -> list[str]:
    """Lower-cased words of `text`; with `stop_words`, the 33 commonest English ones are left out.

    The paper's baseline splits at spaces, keeps case and drops nothing (reference.md 3).
    """
    found = _WORD.findall(text.lower())
    return [word for word in found if word not in _STOP_WORDS] if stop_words else found


class BM25:
    """BM25 index over texts; a text is known by its row.

    Args:
      texts: one text per row (`source_text` of every source, in corpus order).
      k1: saturation of a word's count.
      b: strength of length normalisation, 0..1.
      stop_words: leave the commonest English words out.
      method: bm25s's name of the variant (`lucene`, `robertson`, `atire`).

    Raises:
      UserError: no texts, or not one word in them.
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
        if not len(texts):
            raise UserError("BM25: the corpus is empty, at least one source was expected.")
        vocabulary: dict[str, int] = {}
        token_ids = [
            [vocabulary.setdefault(word, len(vocabulary)) for word in words(text, stop_words)]
            for text in texts
        ]
        if not vocabulary:
            raise UserError(
                f"BM25: none of the {len(texts)} sources holds a word; check their text fields."
            )
        self.stop_words = stop_words
        self._settings = {"k1": k1, "b": b, "method": method}
        self._index = _bm25s_index(token_ids, vocabulary, self._settings)
        # The words of every row, flat: 4 bytes a word, for the restricted setting.
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
          allowed: bool[rows], the rows that may be found (known modality); None means all.

        Returns:
          (rows int32[n, top_k], scores float32[n, top_k]), best first; equal scores in row
          order. Rows that share no word with the query score 0 and come last.

        Raises:
          UserError: `top_k` out of range.
        """
        check_top_k(top_k, len(self), allowed, "BM25")
        rows = np.zeros((len(queries), top_k), np.int32)
        scores = np.zeros((len(queries), top_k), np.float32)
        for number, query in enumerate(queries):
            all_scores = self._scores(query)  # [rows]
            if allowed is not None:
                all_scores = np.where(allowed, all_scores, np.float32(-np.inf))
            rows[number] = _top_rows(all_scores, top_k)
            scores[number] = all_scores[rows[number]]
        return rows, scores

    def search_within(
        self, query: str, rows: Sequence[int], top_k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ranks the given rows (a question's candidates): the paper's restricted setting.

        As in the paper's baseline, the candidates are a corpus of their own: document
        frequencies and the mean length are theirs, not the whole corpus's.

        Returns:
          (rows int32[m], scores float32[m]) with m = min(top_k, number of rows), best first;
          equal scores in the order of `rows`.
        """
        candidates = np.asarray(rows, np.int32)
        if len(candidates) and (candidates.min() < 0 or candidates.max() >= len(self)):
            raise UserError(
                f"BM25: candidate rows must lie in 0..{len(self) - 1}, got "
                f"{candidates.min()}..{candidates.max()}; the index is of another corpus."
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
        return candidates[order], scores[order]

    def save(self, folder: str | os.PathLike, corpus_fingerprint: str = "") -> None:
        """Writes the index to `folder`, whole or not at all."""
        manifest = {
            "what": _WHAT,
            "rows": len(self),
            "corpus_fingerprint": corpus_fingerprint,
            "stop_words": self.stop_words,
            **self._settings,
        }
        with replace_folder(folder, manifest) as temporary:
            self._index.save(str(temporary), show_progress=False)
            np.save(temporary / "token_ids.npy", self._token_ids)
            np.save(temporary / "offsets.npy", self._offsets)

    @classmethod
    def load(cls, folder: str | os.PathLike, corpus_fingerprint: str | None = None) -> BM25:
        """Opens a saved index, memory-mapped; UserError if it is of another corpus."""
        manifest = read_manifest(folder, _WHAT, "mmqa index")
        check_manifest(folder, manifest, {"corpus_fingerprint": corpus_fingerprint}, "mmqa index")
        index = cls.__new__(cls)
        index.stop_words = manifest["stop_words"]
        index._settings = {key: manifest[key] for key in ("k1", "b", "method")}
        try:
            index._index = bm25s.BM25.load(str(folder), mmap=True, show_progress=False)
            index._token_ids = np.load(Path(folder) / "token_ids.npy", mmap_mode="r")
            index._offsets = np.load(Path(folder) / "offsets.npy")
        except (OSError, ValueError) as error:
            raise UserError(
                f"{folder}: the BM25 index is damaged ({error}); run `mmqa index` again."
            ) from error
        return index

    def _query_ids(self, query: str) -> list[int]:
        vocabulary = self._index.vocab_dict
        return [vocabulary[word] for word in words(query, self.stop_words) if word in vocabulary]

    def _scores(self, query: str) -> np.ndarray:
        """Scores of all rows, float32[rows]; a word asked twice counts twice."""
        token_ids = self._query_ids(query)
        if not token_ids:
            return np.zeros(len(self), np.float32)
        return self._index.get_scores_from_ids(token_ids)


def check_top_k(top_k: int, rows: int, allowed: np.ndarray | None, what: str) -> None:
    """UserError unless 1 <= top_k <= number of rows that may be found."""
    if allowed is not None and allowed.shape != (rows,):
        raise UserError(
            f"{what}: the mask of allowed rows has shape {allowed.shape}, ({rows},) was expected."
        )
    available = rows if allowed is None else int(np.count_nonzero(allowed))
    if not 1 <= top_k <= available:
        raise UserError(
            f"{what}: top_k={top_k} is out of range, {available} sources can be found; "
            f"choose 1 to {available}."
        )


def _bm25s_index(token_ids: list[list[int]], vocabulary: dict, settings: dict) -> bm25s.BM25:
    index = bm25s.BM25(**settings, backend="numpy")
    index.index((token_ids, vocabulary), create_empty_token=False, show_progress=False)
    return index


def _top_rows(scores: np.ndarray, top_k: int) -> np.ndarray:
    """Rows of the `top_k` highest scores, best first, equal scores in row order. O(rows)."""
    candidates = np.arange(len(scores))
    blocks = scores[: len(scores) // _BLOCK * _BLOCK].reshape(-1, _BLOCK).max(axis=1)
    if len(blocks) >= top_k:
        # top_k blocks reach this bound, so the k-th best score does too: few rows are left.
        bound = np.partition(blocks, len(blocks) - top_k)[len(blocks) - top_k]
        candidates = np.flatnonzero(scores >= bound)
    found = scores[candidates]
    last = np.partition(found, len(found) - top_k)[len(found) - top_k]
    above = candidates[found > last]
    chosen = np.concatenate([above, candidates[found == last][: top_k - len(above)]])
    return chosen[np.lexsort((chosen, -scores[chosen]))]
