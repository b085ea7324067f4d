"""In-context examples: a library of solved questions, and how a question's shots are chosen.

PICa adds the similarities of questions and pictures, on WebQA of questions and gold sources
(reference.md 4); RMR takes the cosine of the mean of both embeddings or of whichever is there (RMR,
equations 2 to 4).
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
from mmqa_jax.data.splits import fold_of
from mmqa_jax.retrieval.cached_vectors import cached_vectors

Similarity = Literal[
    *("random", "question", "caption", "image"),
    *("question_and_image", "question_and_sources", "bimodal"),
]
# Similarities that are sums of others -> these.
_SUMS = {
    "question_and_image": ("question", "image"),
    "question_and_sources": ("question", "sources"),
}
_BLOCK = 512  # queries whose similarities to the whole library are held at once


def question_and_choices(question: Question) -> str:
    """The question with its hint and choices, as text to embed."""
    parts = (question.question, str(question.extra.get("hint", "")), " ".join(question.choices))
    return " ".join(part for part in parts if part)


def question_and_caption(question: Question) -> str:
    """The caption of the question's picture, then the question."""
    return f"{question.extra.get('caption', '')} {question.question}".strip()


# What is embedded of a question, by the name that configs have for it.
TEXTS: dict[str, Callable[[Question], str]] = {
    "question": lambda question: question.question,
    "question_and_choices": question_and_choices,
    "question_and_caption": question_and_caption,
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
      sources: of a question's gold sources each one's text, or its pixels for `image`.
    """

    text: Any
    image: Any | None = None
    pixels: Callable[[Question], np.ndarray | None] = lambda question: None
    sources: Callable[[Question], Sequence[str | np.ndarray]] = lambda question: ()


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
        self._fold = np.array([fold_of(example.id, folds) for example in self.examples], int)
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
            the `question`, `caption` or `image` alone, of `question_and_image` (the sum, PICa),
            `question_and_sources` (the sum, PICa on WebQA), or `bimodal` (RMR).

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

    def named(self, query: Question, names: Sequence[str], count: int) -> list[Shot]:
        """The first `count` of the named examples that the library has and the query may see."""
        allowed = self._allowed(query)
        rows = [self._row[name] for name in names if name in self._row]
        found = [self.examples[row] for row in rows if allowed[row]][:count]
        return [Shot(example, float("nan")) for example in found]

    def _random(self, query: Question, count: int, seed: int) -> list[Shot]:
        allowed = np.flatnonzero(self._allowed(query))
        chosen = seeded(query.id, seed).choice(allowed, min(count, len(allowed)), replace=False)
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
        kinds = _SUMS.get(similarity, (similarity,))
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
        if kind == "sources":
            return self._sources(questions)
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
        pixels = [self._embedders.pixels(question) for question in questions]
        shown = np.array([picture is not None for picture in pixels], bool)
        vectors = np.zeros((len(questions), self._embedders.image.dim), np.float32)
        if shown.any():
            vectors[shown] = self._pictures([picture for picture in pixels if picture is not None])
        return vectors, shown

    def _pictures(self, pictures: Sequence[np.ndarray]) -> Float32[np.ndarray, "n D"]:
        embedder = self._embedders.image
        return cached_vectors(
            self._cache,
            f"image {embedder.fingerprint}",
            [picture.tobytes() for picture in pictures],
            lambda: embedder.embed_pictures(pictures),
        )

    def _sources(self, questions: Sequence[Question]) -> Float32[np.ndarray, "n D"]:
        """The mean of the unit vectors of a question's sources; zeros where it has none.

        The product of two means is the mean of the pairwise cosines (WebQA, section 6.3).
        """
        owned = [
            (row, source)
            for row, question in enumerate(questions)
            for source in self._embedders.sources(question)
        ]
        means = np.zeros((len(questions), self._embedders.text.dim), np.float32)
        for embed, kind in ((self._texts, str), (self._pictures, np.ndarray)):
            # A source that several questions share is embedded once.
            places: dict[str | bytes, tuple[int, Any]] = {}
            rows, numbers = [], []
            for row, source in owned:
                if isinstance(source, kind):
                    key = source if isinstance(source, str) else source.tobytes()
                    rows.append(row)
                    numbers.append(places.setdefault(key, (len(places), source))[0])
            if rows:
                vectors = embed([source for _, source in places.values()])
                np.add.at(means, np.array(rows), vectors[numbers])
        counts = np.bincount([row for row, _ in owned], minlength=len(questions))
        return means / np.maximum(counts, 1)[:, None].astype(np.float32)

    def _allowed(self, query: Question) -> Bool[np.ndarray, " N"]:
        """Which examples may be shots of a query."""
        allowed = np.ones(len(self.examples), bool)
        if self._folds > 1:
            allowed = self._fold != fold_of(query.id, self._folds)
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


def seeded(name: str, seed: int) -> np.random.Generator:
    """Random numbers of one question, whatever the other questions are."""
    return np.random.default_rng([seed, int(_digest(name)[:16], 16)])


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def shots_record(shots: Sequence[Shot]) -> list[Mapping[str, Any]]:
    """Ids and similarities of shots, for a trace; a random shot has no similarity."""
    return [
        {"id": shot.question.id}
        | ({} if np.isnan(shot.similarity) else {"similarity": round(shot.similarity, 6)})
        for shot in shots
    ]
