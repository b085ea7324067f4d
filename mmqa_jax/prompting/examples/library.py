"""In-context examples: a library of solved questions, and how a question's shots are chosen.

PICa adds the similarities of questions and pictures, on WebQA of questions and gold sources
(WebQA, 6.3); RMR takes the cosine of the mean of both embeddings or of whichever is there (RMR,
equations 2 to 4).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.core.host import cache_dir
from mmqa_jax.data.corpus import fold_of
from mmqa_jax.data.pictures.store import EncodedPicture
from mmqa_jax.data.schema import Question
from mmqa_jax.retrieval.embeddings import cached_vectors

Similarity = Literal[
    *("random", "question", "caption", "image"),
    *("question_and_image", "question_and_sources", "bimodal", "bimodal_unnormalized"),
]
# Similarities that are sums of others -> these.
_SUMS = {
    "question_and_image": ("question", "image"),
    "question_and_sources": ("question", "sources"),
}
_BLOCK = 512  # queries whose similarities to the whole library are held at once
_DECODED = 256  # pictures that are decoded at once, and kept in the cache together
_EMPTY = "the library of examples is empty; name a split with answers, or set shots to 0."


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
      image: embeds pictures (`embed_pictures`); None: no pictures. For `bimodal`,
        `bimodal_unnormalized` and `question_and_sources` it must be the image side of `text` (one
        space).
      picture: a question's picture, as `image` takes it; None where it has none.
      sources: of a question's gold sources each one's text, or its picture for `image`.
    """

    text: Any
    image: Any | None = None
    picture: Callable[[Question], EncodedPicture | None] = lambda question: None
    sources: Callable[[Question], Sequence[str | EncodedPicture]] = lambda question: ()


class ExampleLibrary:
    """Solved questions, and the nearest of them for others.

    Args:
      examples: the library; each has an answer.
      embedders: of the examples; None: shots can only be chosen at random.
      of_queries: of the queries, where their pictures and sources lie elsewhere; the same models.
      same_ids: whether an id names the same question in library and queries. Of another corpus it
        does not: then no example is left out for its id or its fold.
      text_of: the text of a question that is embedded.
      folds: questions and examples are dealt by the hash of their ids into so many parts; an
        example of a question's own part is never its shot. 1: no parts. With 2, one split is both
        the library and the queries.
      cache: folder of kept embeddings.
      vectors: of questions and pictures, in place of the embedders; see `select` for ties.
      index: makes an index (retrieval/indexes/index.py) over the examples' vectors, which then
        finds the nearest; None: the products with all of them do.
      on_empty: what to tell a user who asks for shots of an empty library.
      read_picture: the encoded picture of an example; None where it has none.
    """

    def __init__(
        self,
        examples: Sequence[Question],
        embedders: Embedders | None = None,
        *,
        text_of: Callable[[Question], str] = lambda question: question.question,
        folds: int = 1,
        cache: Path | None = None,
        vectors: PublishedVectors | None = None,
        of_queries: Embedders | None = None,
        same_ids: bool = True,
        index: Callable[[Float32[np.ndarray, "N D"]], Any] | None = None,
        on_empty: str = _EMPTY,
        read_picture: Callable[[Question], bytes | None] = lambda question: None,
    ):
        self.read_picture = read_picture
        self.examples, self._embedders, self._published = list(examples), embedders, vectors
        self._of_queries = of_queries or embedders
        self._same_ids, self._make_index, self._on_empty = same_ids, index, on_empty
        self._text_of, self._folds = text_of, folds
        self._cache = cache or cache_dir() / "vectors"
        self._fold = np.array([fold_of(example.id, folds) for example in self.examples], int)
        self._row = {example.id: row for row, example in enumerate(self.examples)}
        self._kept: dict[str, Any] = {}  # the library's own vectors, by kind
        self._indexes: dict[str, Any] = {}  # over them, by similarity

    def select(
        self, queries: Sequence[Question], count: int, similarity: Similarity, *, seed: int = 0
    ) -> list[list[Shot]]:
        """The shots of every query, most similar first.

        Ties go to the earlier example; with published vectors to the later one, as PICa's
        `argsort()[-n:][::-1]` gives them where the sort is stable. An example with the query's own
        id is left out. A library with fewer than `count` examples gives all that it has.

        Args:
          similarity: `random` (by `seed` and the query's id, whatever the other queries), or of
            the `question`, `caption` or `image` alone, of `question_and_image` (the sum, PICa),
            `question_and_sources` (the sum, PICa on WebQA), `bimodal` (RMR, of unit vectors), or
            `bimodal_unnormalized` (RMR's equation 2 as printed, of vectors as CLIP gives them).
        """
        if count == 0:
            return [[] for _ in queries]
        if not self.examples:
            raise UserError(self._on_empty)
        if similarity == "random":
            return [self._random(query, count, seed) for query in queries]
        if self._embedders is None and self._published is None:
            raise UserError(
                f"option similarity={similarity}: the library has no embedder; set "
                "parts.library.text_model, or similarity to random."
            )
        if self._make_index is not None:
            return self._indexed(queries, count, similarity)
        return list(self._nearest(queries, count, similarity))

    def named(self, query: Question, names: Sequence[str], count: int) -> list[Shot]:
        """The first `count` of the named examples that the library has and the query may see."""
        allowed = self._allowed(query)
        rows = [self._row[name] for name in names if name in self._row]
        examples = [self.examples[row] for row in rows if allowed[row]][:count]
        return [Shot(example, float("nan")) for example in examples]

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
                nearest = _largest(row, count, last_first=self._published is not None)
                yield [Shot(self.examples[i], float(row[i])) for i in nearest if row[i] > -np.inf]

    def _similarities(
        self, queries: Sequence[Question], similarity: str
    ) -> Iterator[tuple[Float32[np.ndarray, "B N"], Sequence[Question]]]:
        """Blocks of queries with their similarities to all N examples."""
        kinds = _SUMS.get(similarity, (similarity,))
        pairs = [
            (self._vectors(queries, kind, self._of_queries), self._own(kind)) for kind in kinds
        ]
        for start in range(0, len(queries), _BLOCK):
            block = slice(start, start + _BLOCK)
            yield (
                sum(of_queries[block] @ library.T for of_queries, library in pairs),
                queries[block],
            )

    def _own(self, kind: str) -> Float32[np.ndarray, "N D"]:
        if kind not in self._kept:
            self._kept[kind] = self._vectors(self.examples, kind, self._embedders)
        return self._kept[kind]

    def _indexed(
        self, queries: Sequence[Question], count: int, similarity: str
    ) -> list[list[Shot]]:
        """Finds the nearest by the index; of equal similarities any comes first."""
        kinds = _SUMS.get(similarity, (similarity,))  # a sum is the product of joined vectors
        if similarity not in self._indexes:
            library = np.concatenate([self._own(kind) for kind in kinds], axis=1)
            self._indexes[similarity] = self._make_index(library)
        joined = [self._vectors(queries, kind, self._of_queries) for kind in kinds]
        vectors = np.concatenate(joined, axis=1)
        shots_of: list[list[Shot]] = [[] for _ in queries]
        for members, allowed in self._by_fold(queries):
            available = np.count_nonzero(allowed)
            if not available:
                continue
            # One more, in case the query itself is among them.
            most = min(count + 1, available)
            mask = None if available == len(allowed) else allowed
            near = self._indexes[similarity].search(vectors[members], most, mask)
            for member, rows, scores in zip(members, *near, strict=True):
                library = self._own_row(queries[member])
                pairs = zip(rows, scores, strict=True)
                shots = [Shot(self.examples[i], float(score)) for i, score in pairs if i != library]
                shots_of[member] = shots[:count]
        return shots_of

    def _by_fold(
        self, queries: Sequence[Question]
    ) -> Iterator[tuple[Int[np.ndarray, " q"], Bool[np.ndarray, " N"]]]:
        """The indices of the queries of every fold, and which examples are of another one."""
        if not self._same_ids or self._folds == 1:
            yield np.arange(len(queries)), np.ones(len(self.examples), bool)
            return
        folds = np.array([fold_of(query.id, self._folds) for query in queries], int)
        for fold in np.unique(folds):
            yield np.flatnonzero(folds == fold), self._fold != fold

    def _vectors(
        self, questions: Sequence[Question], kind: str, embedders: Embedders | None
    ) -> Float32[np.ndarray, "n D"]:
        """Unit vectors of questions; zeros where a question has no text or picture of the kind.

        Published vectors are as they are in their files.
        """
        if self._published is not None:
            return self._published.of(questions, kind)
        if kind == "question":
            return self._texts([self._text_of(question) for question in questions])
        if kind == "caption":
            return self._texts([str(question.extra.get("caption", "")) for question in questions])
        if kind == "sources":
            return self._sources([embedders.sources(question) for question in questions])
        texts = [self._text_of(question) for question in questions]
        if embedders.image is None:
            if kind.startswith("bimodal"):  # whose cosines do not depend on lengths
                return self._texts(texts)
            raise UserError(
                f"similarity of the {kind}: needs an encoder of pictures; set "
                "parts.library.image_model to a CLIP or SigLIP or a contrastive run."
            )
        by_text, by_image = (None, None) if kind != "bimodal_unnormalized" else self._unscaled
        images = self._images([embedders.picture(question) for question in questions], by_image)
        if kind == "image":
            return images
        has_text = np.array([bool(text) for text in texts])
        return bimodal(self._texts(texts, by_text), images, has_text, images.any(axis=1))

    @functools.cached_property
    def _unscaled(self) -> tuple[Any, Any]:
        """The encoders of texts and of pictures, whose vectors are as their towers give them."""
        text, image = self._embedders.text, self._embedders.image
        by_text = text.unscaled()
        return by_text, by_text if image is text else image.unscaled()

    def _texts(
        self, texts: Sequence[str], embedder: Any | None = None
    ) -> Float32[np.ndarray, "n D"]:
        """The vectors of texts, by another encoder than the library's own where one is given."""
        embedder = embedder or self._embedders.text
        vectors = cached_vectors(
            self._cache,
            f"text {embedder.fingerprint}",
            texts,
            lambda rows: embedder.embed_questions([texts[row] for row in rows]),
        )
        return vectors * np.array([bool(text.strip()) for text in texts])[:, None]

    def _images(
        self, pictures: Sequence[EncodedPicture | None], embedder: Any | None = None
    ) -> Float32[np.ndarray, "n D"]:
        """The vectors of pictures; zeros where there is none, or it cannot be decoded."""
        embed = functools.partial(self._pictures, embedder or self._embedders.image)
        vectors = np.zeros((len(pictures), self._embedders.image.dim), np.float32)
        present = [row for row, picture in enumerate(pictures) if picture is not None]
        if present:
            known = {pictures[row].digest: pictures[row] for row in present}
            vectors[present] = _each_once(embed, known, [pictures[r].digest for r in present])
        return vectors

    def _pictures(
        self, embedder: Any, pictures: Sequence[EncodedPicture]
    ) -> Float32[np.ndarray, "n D"]:
        def embed(rows: np.ndarray) -> np.ndarray:
            decoded = list(pool.map(lambda row: pictures[row].decode(), rows))
            whole = [number for number, pixels in enumerate(decoded) if pixels is not None]
            vectors = np.zeros((len(rows), embedder.dim), np.float32)
            if whole:
                vectors[whole] = embedder.embed_pictures([decoded[number] for number in whole])
            return vectors

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            return cached_vectors(
                self._cache,
                f"picture {embedder.fingerprint}",
                [picture.digest for picture in pictures],
                embed,
                unit="pictures",
                block=_DECODED,
            )

    def _sources(
        self, sources: Sequence[Sequence[str | EncodedPicture]]
    ) -> Float32[np.ndarray, "n D"]:
        """The mean of the unit vectors of each question's sources; zeros where it has none.

        The product of two means is the mean of the pairwise cosines (WebQA, section 6.3). A source
        that several questions share is embedded once, a broken picture by its caption.
        """
        owned = [(row, source) for row, of_question in enumerate(sources) for source in of_question]
        rows = np.array([row for row, _ in owned], int)
        vectors = np.zeros((len(owned), self._embedders.text.dim), np.float32)
        pictures = [None if isinstance(source, str) else source for _, source in owned]
        if any(pictures):
            vectors = self._images(pictures)
        seen = vectors.any(axis=1)
        texts = [source if isinstance(source, str) else source.caption for _, source in owned]
        written = [text for text, has in zip(texts, seen, strict=True) if not has]
        if written:
            vectors[~seen] = _each_once(self._texts, {text: text for text in written}, written)
        means = np.zeros((len(sources), vectors.shape[1]), np.float32)
        for kind in (~seen, seen):
            np.add.at(means, rows[kind], vectors[kind])
        counts = np.bincount(rows, minlength=len(sources))
        return means / np.maximum(counts, 1)[:, None].astype(np.float32)

    def _allowed(self, query: Question) -> Bool[np.ndarray, " N"]:
        """Which examples may be shots of a query."""
        allowed = np.ones(len(self.examples), bool)
        if self._same_ids and self._folds > 1:
            allowed = self._fold != fold_of(query.id, self._folds)
        row = self._own_row(query)
        if row is not None:
            allowed[row] = False
        return allowed

    def _own_row(self, query: Question) -> int | None:
        """The example that is the query itself; None if there is none."""
        return self._row.get(query.id) if self._same_ids else None


def _each_once(
    embed: Callable[[list[Any]], np.ndarray], contents: Mapping[Any, Any], keys: Sequence[Any]
) -> Float32[np.ndarray, "n D"]:
    """The vectors of `contents[key]` for all keys, each of which is embedded once."""
    place = {key: number for number, key in enumerate(contents)}
    return embed(list(contents.values()))[[place[key] for key in keys]]


def bimodal(
    texts: Float32[np.ndarray, "n D"],
    images: Float32[np.ndarray, "n D"],
    has_text: Bool[np.ndarray, " n"],
    has_image: Bool[np.ndarray, " n"],
) -> Float32[np.ndarray, "n D"]:
    """RMR's embedding (equation 2), scaled to length 1: the mean of both, or whichever is there.

    The longer one of text and picture counts for more, unless both are unit vectors.
    """
    weights = has_text.astype(np.float32) + has_image
    mean = (texts * has_text[:, None] + images * has_image[:, None]) / np.maximum(weights, 1)[
        :, None
    ]
    return mean / np.maximum(np.linalg.norm(mean, axis=1, keepdims=True), 1e-12)


def _largest(
    scores: Float32[np.ndarray, " N"], count: int, *, last_first: bool = False
) -> Int[np.ndarray, " n"]:
    """Returns the indices of the largest scores, in falling order; of equal scores the lower index
    comes first, with `last_first` the higher one."""
    if count < len(scores):
        least = np.partition(scores, len(scores) - count)[len(scores) - count]
        candidates = np.flatnonzero(scores >= least)
    else:
        candidates = np.arange(len(scores))
    if last_first:
        candidates = candidates[::-1]
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


# Vectors of OK-VQA's questions and their pictures as PICa's authors published them.
#
# okvqa_qa_line2sample_idx_{train,val}2014.json {line: "image_id<->question_id"}
# coco_clip_vitb16_{train,val}2014_okvqa_question.npy float[N, D], a row per line
# coco_clip_vitb16_{train,val}2014_okvqa_convertedidx_image.npy the same of the picture
#
# They are the folder coco_clip_new of github.com/microsoft/PICa, whose code takes plain dot
# products of them, and nothing here normalizes them (gpt3_api_okvqa.py, get_context_keys).


# Similarities that these vectors give.
SIMILARITIES = ("question", "image", "question_and_image")
_INDEX = "okvqa_qa_line2sample_idx_{}.json"
_FILES = {
    "question": "coco_clip_vitb16_{}_okvqa_question.npy",
    "image": "coco_clip_vitb16_{}_okvqa_convertedidx_image.npy",
}
_SPLITS = ("train2014", "val2014")


class PublishedVectors:
    """The vectors of a folder of these files, read when they are first asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._lines: dict[str, int] = {}  # split -> number of lines
        self._places: dict[str, tuple[int, str]] = {}  # question -> row in both splits, image_id
        for split in _SPLITS:
            before = len(self._places)
            for line, (image_id, name) in enumerate(_samples(folder / _INDEX.format(split))):
                if name in self._places:
                    raise UserError(
                        f"{folder / _INDEX.format(split)}, line {line}: question {name} is there "
                        "twice; fetch the file again."
                    )
                self._places[name] = (before + line, image_id)
            self._lines[split] = len(self._places) - before
        self._kept: dict[str, np.ndarray] = {}  # both splits' vectors, by kind

    def of(self, questions: Sequence[Question], kind: str) -> Float32[np.ndarray, "n D"]:
        """Returns the vectors of questions (kind `question`) or of their pictures (`image`)."""
        if kind not in _FILES:
            raise UserError(
                f"similarity of the {kind}: {self.folder} has vectors of questions and pictures "
                f"alone; set similarity to one of {', '.join(SIMILARITIES)}, or leave "
                "parts.library.vectors empty and name models."
            )
        rows = [self._row(question) for question in questions]
        if kind not in self._kept:
            self._kept[kind] = self._read(kind)
        return self._kept[kind][rows]

    def _row(self, question: Question) -> int:
        if question.id not in self._places:
            raise UserError(
                f"{self.folder}: has no vector of question {question.id}; prepare the questions of "
                "OK-VQA's release, or leave parts.library.vectors empty and name models."
            )
        row, image_id = self._places[question.id]
        known = str(question.extra.get("image_id", image_id))
        if known != image_id:
            raise UserError(
                f"{self.folder}: question {question.id} is on picture {image_id} there, but on "
                f"{known} in the prepared data; take both from OK-VQA's release."
            )
        return row

    def _read(self, kind: str) -> Float32[np.ndarray, "N D"]:
        paths = [self.folder / _FILES[kind].format(split) for split in _SPLITS]
        arrays = [_array(path) for path in paths]
        for path, vectors, split in zip(paths, arrays, _SPLITS, strict=True):
            if len(vectors) != self._lines[split]:
                raise UserError(
                    f"{path}: has {len(vectors):,} rows, but {_INDEX.format(split)} has "
                    f"{self._lines[split]:,} lines; take both from one release."
                )
        train, val = (vectors.shape[1] for vectors in arrays)
        if train != val:
            raise UserError(
                f"{paths[1]}: its vectors have {val} dimensions, those of {paths[0].name} {train}; "
                "take both from one release."
            )
        return np.concatenate(arrays)


def _samples(path: Path) -> list[tuple[str, str]]:
    """(image_id, question_id) of every line of an index."""
    data = read_json(path)
    if not isinstance(data, dict) or not data:
        raise UserError(
            f'{path}: an object {{line: "image_id<->question_id"}} was expected; fetch it again.'
        )
    return [_sample(data.get(str(line)), f"{path}, line {line}") for line in range(len(data))]


def _sample(value: Any, where: str) -> tuple[str, str]:
    image_id, _, name = value.partition("<->") if isinstance(value, str) else ("", "", "")
    if not image_id.isdecimal() or not name:
        raise UserError(
            f'{where}: is {value!r}; "image_id<->question_id" was expected, of every line from 0; '
            "fetch the file again."
        )
    return image_id, name


def _array(path: Path) -> Float32[np.ndarray, "N D"]:
    try:
        stored = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise UserError(
            f"{path}: no such file; fetch the folder coco_clip_new of github.com/microsoft/PICa."
        ) from error
    except Exception as error:  # numpy parses the header as Python, which can raise nearly any
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(
            f"{path}: cannot be read as an array of numbers ({reason:.150}); fetch it again."
        ) from error
    shape, kind = getattr(stored, "shape", ()), getattr(stored, "dtype", None)
    if len(shape) != 2 or not np.issubdtype(kind, np.floating):
        raise UserError(
            f"{path}: holds {'x'.join(map(str, shape)) or 'no array'} of {kind}; floats in rows "
            "and columns were expected; fetch it again."
        )
    vectors = np.asarray(stored, np.float32)
    broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(broken):
        raise UserError(
            f"{path}, row {broken[0]}: holds a value that is no finite number; fetch it again."
        )
    return vectors
