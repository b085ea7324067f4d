"""In-context examples: a library of solved questions, and how a question's shots are chosen.

PICa adds the similarities of questions and pictures (reference.md 4), RMR takes the cosine of the
mean of both embeddings or of whichever is there (RMR, equations 2 to 4).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.host import cache_dir
from mmqa_jax.data.schema import Question
from mmqa_jax.retrieval.cached_vectors import cached_vectors

Similarity = Literal["random", "question", "caption", "image", "question_and_image", "bimodal"]
_BLOCK = 512  # queries whose similarities to the whole library are held at once


def question_and_choices(question: Question) -> str:
    """The question with its hint and choices, as text to embed."""
    parts = (question.question, str(question.extra.get("hint", "")), " ".join(question.choices))
    return " ".join(part for part in parts if part)


# What is embedded of a question, by the name that configs have for it.
TEXTS: dict[str, Callable[[Question], str]] = {
    "question": lambda question: question.question,
    "question_and_choices": question_and_choices,
}


class Shot(NamedTuple):
    """A solved question shown before the query."""

    question: Question
    similarity: float  # NaN: chosen at random


@dataclasses.dataclass(frozen=True)
class Embedders:
    """How questions are embedded.

    Attributes:
      text: embeds texts (`embed_questions`), as retrieval.embedder.Embedder.
      image: embeds pictures (`embed_pictures`); None: no pictures. For `bimodal` it must be the
        image side of `text` (one space).
      pixels: uint8[S, S, 3] of a question's picture for `image`; None where it has none.
    """

    text: Any
    image: Any | None = None
    pixels: Callable[[Question], np.ndarray | None] = lambda question: None


class ExampleLibrary:
    """Solved questions, and the nearest of them for others.

    Args:
      examples: the library; each has an answer.
      embedders: see Embedders; None: shots can only be chosen at random.
      text_of: the text of a question that is embedded.
      folds: questions and examples are dealt by the hash of their ids into so many parts; an
        example of a question's own part is never its shot. 1: no parts. With 2, one split is both
        the library and the queries.
      cache: folder of kept embeddings.
    """

    def __init__(
        self,
        examples: Sequence[Question],
        embedders: Embedders | None = None,
        *,
        text_of: Callable[[Question], str] = lambda question: question.question,
        folds: int = 1,
        cache: Path | None = None,
    ):
        self.examples, self._embedders = list(examples), embedders
        self._text_of, self._folds = text_of, folds
        self._cache = cache or cache_dir() / "vectors"
        self._fold = np.array([_fold(example.id, folds) for example in self.examples], int)
        self._row = {example.id: row for row, example in enumerate(self.examples)}
        self._kept: dict[str, Any] = {}  # the library's own vectors, by kind

    def select(
        self, queries: Sequence[Question], count: int, similarity: Similarity, *, seed: int = 0
    ) -> list[list[Shot]]:
        """The shots of every query, most similar first; ties go to the earlier example.

        An example with the query's own id is left out. A library with fewer than `count` examples
        gives all that it has.

        Args:
          similarity: `random` (by `seed` and the query's id, whatever the other queries), or of
            the `question`, `caption` or `image` alone, of `question_and_image` (the sum, PICa), or
            `bimodal` (RMR).

        Raises:
          UserError: shots from an empty library, or a similarity that needs an embedder.
        """
        if count == 0:
            return [[] for _ in queries]
        if not self.examples:
            raise UserError(
                "the library of examples is empty; name a split with answers, or set shots to 0."
            )
        if similarity == "random":
            return [self._random(query, count, seed) for query in queries]
        if self._embedders is None:
            raise UserError(
                f"option similarity={similarity}: the library has no embedder; set "
                "parts.library.text_model, or similarity to random."
            )
        return list(self._nearest(queries, count, similarity))

    def _random(self, query: Question, count: int, seed: int) -> list[Shot]:
        allowed = np.flatnonzero(self._allowed(query))
        rng = np.random.default_rng([seed, int(_digest(query.id)[:16], 16)])
        chosen = rng.choice(allowed, min(count, len(allowed)), replace=False)
        return [Shot(self.examples[row], float("nan")) for row in chosen]

    def _nearest(
        self, queries: Sequence[Question], count: int, similarity: str
    ) -> Iterator[list[Shot]]:
        for scores, block in self._similarities(queries, similarity):
            for query, row in zip(block, scores, strict=True):
                row = np.where(self._allowed(query), row, -np.inf)
                nearest = _largest(row, count)
                yield [Shot(self.examples[i], float(row[i])) for i in nearest if row[i] > -np.inf]

    def _similarities(
        self, queries: Sequence[Question], similarity: str
    ) -> Iterator[tuple[Float32[np.ndarray, "B N"], Sequence[Question]]]:
        """Blocks of queries with their similarities to all N examples."""
        kinds = ("question", "image") if similarity == "question_and_image" else (similarity,)
        pairs = [(self._vectors(queries, kind), self._own(kind)) for kind in kinds]
        for start in range(0, len(queries), _BLOCK):
            block = slice(start, start + _BLOCK)
            yield sum(of[block] @ own.T for of, own in pairs), queries[block]

    def _own(self, kind: str) -> Float32[np.ndarray, "N D"]:
        if kind not in self._kept:
            self._kept[kind] = self._vectors(self.examples, kind)
        return self._kept[kind]

    def _vectors(self, questions: Sequence[Question], kind: str) -> Float32[np.ndarray, "n D"]:
        """Unit vectors of questions; zeros where a question has no text or picture of the kind."""
        if kind == "question":
            return self._texts([self._text_of(question) for question in questions])
        if kind == "caption":
            return self._texts([str(question.extra.get("caption", "")) for question in questions])
        texts = [self._text_of(question) for question in questions]
        if self._embedders.image is None:
            if kind == "bimodal":
                return self._texts(texts)
            raise UserError(
                f"similarity of the {kind}: needs an encoder of pictures; set "
                "parts.library.image_model to a converted CLIP or a contrastive run."
            )
        images, shown = self._images(questions)
        if kind == "image":
            return images
        return bimodal(self._texts(texts), images, np.array([bool(t) for t in texts]), shown)

    def _texts(self, texts: Sequence[str]) -> Float32[np.ndarray, "n D"]:
        embedder = self._embedders.text
        vectors = cached_vectors(
            self._cache,
            f"text {embedder.fingerprint}",
            texts,
            lambda: embedder.embed_questions(texts),
        )
        return vectors * np.array([bool(text.strip()) for text in texts])[:, None]

    def _images(
        self, questions: Sequence[Question]
    ) -> tuple[Float32[np.ndarray, "n D"], Bool[np.ndarray, " n"]]:
        embedder = self._embedders.image
        pixels = [self._embedders.pixels(question) for question in questions]
        shown = np.array([picture is not None for picture in pixels], bool)
        found = [picture for picture in pixels if picture is not None]
        vectors = np.zeros((len(questions), embedder.dim), np.float32)
        if found:
            vectors[shown] = cached_vectors(
                self._cache,
                f"image {embedder.fingerprint}",
                [picture.tobytes() for picture in found],
                lambda: embedder.embed_pictures(found),
            )
        return vectors, shown

    def _allowed(self, query: Question) -> Bool[np.ndarray, " N"]:
        """Which examples may be shots of a query."""
        allowed = np.ones(len(self.examples), bool)
        if self._folds > 1:
            allowed = self._fold != _fold(query.id, self._folds)
        if query.id in self._row:
            allowed[self._row[query.id]] = False
        return allowed


def bimodal(
    texts: Float32[np.ndarray, "n D"],
    images: Float32[np.ndarray, "n D"],
    has_text: Bool[np.ndarray, " n"],
    has_image: Bool[np.ndarray, " n"],
) -> Float32[np.ndarray, "n D"]:
    """RMR's embedding (equation 2), scaled to length 1: the mean of both, or whichever is there."""
    weights = has_text.astype(np.float32) + has_image
    mean = (texts * has_text[:, None] + images * has_image[:, None]) / np.maximum(weights, 1)[
        :, None
    ]
    return mean / np.maximum(np.linalg.norm(mean, axis=1, keepdims=True), 1e-12)


def _largest(scores: Float32[np.ndarray, " N"], count: int) -> Int[np.ndarray, " n"]:
    """Indices of the largest scores, in falling order; of equal ones the lower index first."""
    if count < len(scores):
        least = np.partition(scores, len(scores) - count)[len(scores) - count]
        candidates = np.flatnonzero(scores >= least)
    else:
        candidates = np.arange(len(scores))
    return candidates[np.argsort(-scores[candidates], kind="stable")][:count]


def _fold(name: str, folds: int) -> int:
    return int(_digest(name)[:8], 16) % folds


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def shots_record(shots: Sequence[Shot]) -> list[Mapping[str, Any]]:
    """Ids and similarities of shots, for a trace; a random shot has no similarity."""
    return [
        {"id": shot.question.id}
        | ({} if np.isnan(shot.similarity) else {"similarity": round(shot.similarity, 6)})
        for shot in shots
    ]
