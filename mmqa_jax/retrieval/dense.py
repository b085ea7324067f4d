"""Dense retrieval: nearest sources by the dual encoder's cosine similarity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mmqa_jax.core.errors import UserError, check_questions
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.pictures.store import PictureStore
from mmqa_jax.data.schema import Question, Ranking
from mmqa_jax.retrieval.embedder import Embedder
from mmqa_jax.retrieval.rankings import Asks, to_rankings


class DenseRetriever:
    """A Retriever over embedded sources.

    Args:
      corpus: the sources to search; row i of `index` is source i.
      embedder: embeds the questions, with their pictures if it sees.
      index: an ExactIndex, ScannIndex or ModalityIndex.
      pictures: pixels of the questions' pictures, as the embedder takes them.
      asks: what of a question is embedded. By its picture, one without finds nothing.
    """

    def __init__(
        self,
        corpus: Corpus,
        embedder: Embedder,
        index: Any,
        pictures: PictureStore,
        asks: Asks = "both",
    ):
        if asks == "picture" and not embedder.image_size:
            raise UserError(
                "asks=picture: the encoder reads texts alone; use one that sees, such as a CLIP."
            )
        self.corpus, self.embedder, self.index, self.pictures = corpus, embedder, index, pictures
        self.asks = asks
        # Texts and pictures of the questions that were embedded last, and their vectors.
        self._last: tuple[list[tuple[str, str | None]] | None, np.ndarray] = None, np.zeros((0, 0))
        # The vectors that were searched for last, and their rows and scores [n, k].
        self._last_search = None, (np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32))

    def over(self, corpus: Corpus, index: Any) -> DenseRetriever:
        """The same retriever over another corpus and its index."""
        return type(self)(corpus, self.embedder, index, self.pictures, self.asks)

    def search(self, questions: Sequence[Question], top_k: int) -> list[Ranking]:
        """The `top_k` sources of the whole collection for every question, best first."""
        return self._nearest(questions, self._embed(questions), top_k)

    def search_within(
        self, questions: Sequence[Question], candidates: Sequence[Ranking]
    ) -> list[Ranking]:
        """Each question's own candidates, best first (the restricted setting)."""
        return self._within(questions, self._embed(questions), candidates)

    def search_and_score(
        self, questions: Sequence[Question], top_k: int, others: Sequence[Ranking]
    ) -> tuple[list[Ranking], list[Ranking]]:
        """`search`, and `search_within` of each question's `others`, embedding it once."""
        vectors = self._embed(questions)
        return self._nearest(questions, vectors, top_k), self._within(questions, vectors, others)

    def _nearest(
        self, questions: Sequence[Question], vectors: np.ndarray, top_k: int
    ) -> list[Ranking]:
        top_k = min(top_k, len(self.corpus))
        searched, (rows, scores) = self._last_search
        if searched is not vectors or rows.shape[1] < top_k:
            rows, scores = self.index.search(vectors, top_k)
            self._last_search = vectors, (rows, scores)
        return self._rankings(questions, vectors, (rows[:, :top_k], scores[:, :top_k]))

    def _within(
        self, questions: Sequence[Question], vectors: np.ndarray, candidates: Sequence[Ranking]
    ) -> list[Ranking]:
        rows = [[self.corpus.row[name] for name in ranking.sources] for ranking in candidates]
        most = max([1, *map(len, rows)])
        return self._rankings(questions, vectors, self.index.search_within(vectors, rows, most))

    def _embed(self, questions: Sequence[Question]) -> np.ndarray:  # -> float32[n, dim]
        check_questions(questions, "DenseRetriever.search")
        asked = [(question.question, question.image) for question in questions]
        last, vectors = self._last
        if asked == last:  # whoever fuses or refuses asks for the same questions again
            return vectors
        pixels = None  # an encoder of texts alone sees no pictures
        if self.embedder.image_size and self.asks != "text":
            pixels = [self.pictures.question_pixels(question) for question in questions]
        if self.asks == "picture":
            vectors = self._embed_pictures(pixels)
        else:
            vectors = self._vectors([q.question for q in questions], pixels)
        self._last = asked, vectors
        return vectors

    def _vectors(
        self, texts: Sequence[str], pixels: Sequence[np.ndarray | None] | None
    ) -> np.ndarray:
        """Questions as the index takes them."""
        return self.embedder.embed_questions(texts, pixels)

    def _embed_pictures(self, pixels: Sequence[np.ndarray | None]) -> np.ndarray:
        """Unit vectors of pictures; of none zeros, which `_rankings` leaves out."""
        vectors = np.zeros((len(pixels), self.embedder.dim), np.float32)
        present = [row for row, picture in enumerate(pixels) if picture is not None]
        if present:
            vectors[present] = self.embedder.embed_pictures([pixels[row] for row in present])
        return vectors

    def _rankings(
        self,
        questions: Sequence[Question],
        vectors: np.ndarray,
        neighbors: tuple[np.ndarray, np.ndarray],
    ) -> list[Ranking]:
        rows, scores = neighbors
        if self.asks == "picture":  # -1 is padding
            rows = np.where(vectors.any(axis=1)[:, None], rows, -1)
        return to_rankings([question.id for question in questions], rows, scores, self.corpus.ids)
