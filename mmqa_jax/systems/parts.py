"""Opens the parts of a system from what `mmqa train`, `convert`, `embed` and `index` wrote.

A part is described by a few plain values, the same in a row's config (section `parts`) and in the
flags of `mmqa search`, `rerank` and `answer`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.datasets.scienceqa import HAS_PICTURE
from mmqa_jax.data.picture_store import PictureStore
from mmqa_jax.data.schema import Question
from mmqa_jax.retrieval.retriever import Retriever

EMBEDDINGS, INDEX = "embeddings", "index"  # subfolders of the folder that `mmqa embed` writes
_FUSED_DEPTH = 100


@dataclasses.dataclass(frozen=True)
class RetrieverSpec:
    """How sources are retrieved.

    Attributes:
      method: `bm25`, `dense` or `fused` (both, by reciprocal-rank fusion).
      model: workdir of a contrastive run, or a converted CLIP (dense, fused).
      index: folder of `mmqa embed` and `mmqa index` with that model (dense, fused).
      modality: `unknown` searches all sources; `known` those of the gold sources' modality;
        `classified` those of the modality predicted by a classifier of the train questions.
      webqa_compat: bm25 with the quirks of WebQA's baseline.
      second_hop: search again with the title of the first result (ours).
    """

    method: Literal["bm25", "dense", "fused"]
    model: str = ""
    index: str = ""
    modality: Literal["unknown", "known", "classified"] = "unknown"
    webqa_compat: bool = False
    second_hop: bool = False

    def check(self, *, restricted: bool = False) -> None:
        """Raises UserError if the values contradict each other."""
        if self.webqa_compat and (self.method != "bm25" or self.second_hop):
            raise UserError("--webqa_compat: works only with plain --method=bm25; leave it out.")
        if restricted and (self.method == "fused" or self.modality != "unknown"):
            raise UserError(
                "--candidates=restricted: works with --method=bm25 or dense and without "
                "--modality; change one."
            )
        if self.method != "bm25" and not (self.model and self.index):
            raise UserError(f"--method={self.method} needs --model and --index; give both.")


@dataclasses.dataclass(frozen=True)
class RerankerSpec:
    """How sources are selected.

    Attributes:
      model: workdir of a rerank run.
      similarity: the retriever whose cosines are combined with VLP's relevance, and whose second
        hop is reranked too (ours); None is the paper's VLP alone.
      similarity_weight: of the cosines; 0 uses the relevance alone.
    """

    model: str
    similarity: RetrieverSpec | None = None
    similarity_weight: float = 0.0


@dataclasses.dataclass(frozen=True)
class ReaderSpec:
    """How questions are answered: `model` is the workdir of an answer run."""

    model: str


@dataclasses.dataclass(frozen=True)
class LLMSpec:
    """The language model of a prompted system.

    Attributes:
      model: as `mmqa prompt --model`: `smollm2`, a folder or GGUF file, or a server's name for it.
      backend: `engine` (this process) or `openai` (a server, see prompting/backend_http.py).
      tokenizer: for the engine, if the model's folder has none.
      engine, server: values of these sections of configs/prompt/default.py that differ.
    """

    model: str
    backend: Literal["engine", "openai"] = "engine"
    tokenizer: str = ""
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    server: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class LibrarySpec:
    """Where in-context examples come from, and how they are compared with questions.

    Attributes:
      data: folder of `mmqa prepare`; "" is the row's own.
      split: of the examples.
      folds: see ExampleLibrary; 2 makes one split both library and queries.
      text_model: `minilm`, a converted CLIP or a contrastive run; "": no embeddings (random shots).
      image_model: a converted CLIP or a contrastive run that embeds the questions' pictures; "":
        none.
      text: what is embedded: the question, or the question with hint and choices.
      modality: only examples with a picture (`image`), without one (`text`), or all (RMR, table 4).
    """

    data: str = ""
    split: str = "train"
    folds: int = 1
    text_model: str = "minilm"
    image_model: str = ""
    text: Literal["question", "question_and_choices"] = "question"
    modality: Literal["", "text", "image"] = ""


def open_retriever(corpus: Corpus, spec: RetrieverSpec) -> Retriever:
    """The retriever over a corpus.

    Raises:
      UserError: the index or its embeddings belong to another model or corpus.
    """
    spec.check()
    dense = None if spec.method == "bm25" else open_dense(corpus, spec.model, spec.index)
    if spec.modality == "unknown":
        return _over(corpus, spec, dense, None)
    from mmqa_jax.retrieval.modality import ByModality, modality_predictor

    def over(modality: Any) -> Retriever:
        return _over(corpus, spec, dense, modality)

    return ByModality(over, modality_predictor(corpus, known=spec.modality == "known"))


def open_dense(corpus: Corpus, model: str, index: str) -> Any:
    """The dense retriever over the whole corpus; UserError as `open_retriever`."""
    from mmqa_jax.retrieval.dense import DenseRetriever
    from mmqa_jax.retrieval.embeddings import open_embeddings
    from mmqa_jax.retrieval.index import load_index

    embedder, pictures = open_embedder(Path(model), corpus)
    embeddings = open_embeddings(Path(index) / EMBEDDINGS, embedder.fingerprint, corpus.fingerprint)
    loaded = load_index(Path(index) / INDEX, embeddings, embedder.fingerprint)
    return DenseRetriever(corpus, embedder, loaded, pictures)


def open_embedder(model: Path, corpus: Corpus) -> tuple[Any, PictureStore]:
    """The embedder of a contrastive run or a converted CLIP, and pictures sized for it."""
    from mmqa_jax.inference.loading import load_embedder
    from mmqa_jax.retrieval.clip import load_clip_embedder
    from mmqa_jax.weights.folder import is_converted

    if is_converted(model):
        embedder = load_clip_embedder(model)
        return embedder, PictureStore(corpus, embedder.image_size, "crop")
    embedder, config = load_embedder(model)
    return embedder, PictureStore(corpus, config.pictures.size, config.pictures.resize)


def open_reranker(corpus: Corpus, model: str | Path, batch_size: int | None = None) -> Any:
    """The reranker of a rerank run: over pairs or, with `joint_layers`, over cached sources."""
    from mmqa_jax.inference.loading import load_source_head
    from mmqa_jax.inference.reranker import Reranker
    from mmqa_jax.models.two_sided_vlp import TwoSidedVLP
    from mmqa_jax.systems.extensions.cached_reranker import CachedReranker

    head = load_source_head(model, batch_size)
    if head.sides is None:
        return Reranker(head.config, corpus, head.tokenizer, head.model)
    vlp = TwoSidedVLP.of(head.model, head.sides)
    return CachedReranker(head.config, corpus, head.tokenizer, vlp)


def with_similarity(reranker: Any, retriever: Any, corpus: Corpus, weight: float) -> Any:
    """The reranker combined with the retriever's similarity and second hop (ours)."""
    from mmqa_jax.systems.extensions.second_hop import SecondHopReranker, SecondHopRetriever

    return SecondHopReranker(SecondHopRetriever(retriever, corpus), reranker, weight)


def open_reader(corpus: Corpus, model: str | Path, batch_size: int | None = None) -> Any:
    """The reader of an answer run."""
    from mmqa_jax.inference.loading import load_reader

    return load_reader(model, corpus, batch_size)


def open_llm(spec: LLMSpec, cache: Path) -> Any:
    """The language model with its response cache in the file `cache`.

    Raises:
      UserError: no such model or server, or an unknown setting.
    """
    from mmqa_jax.core.config import find_config, load_config
    from mmqa_jax.prompting.cache import Cached, ResponseCache
    from mmqa_jax.prompting.open import open_backend

    changes = {f"engine.{key}": value for key, value in spec.engine.items()}
    changes |= {f"server.{key}": value for key, value in spec.server.items()}
    config = load_config(find_config("configs/prompt/default.py"), changes)
    backend = open_backend(spec.backend, spec.model, spec.tokenizer or None, config)
    return Cached(backend, ResponseCache(cache))


def open_library(corpus: Corpus, spec: LibrarySpec) -> Any:
    """The library of in-context examples.

    Args:
      corpus: the row's own, whose examples are used if the spec names no data.

    Raises:
      UserError: no such data or model.
    """
    from mmqa_jax.data.corpus import open_corpus
    from mmqa_jax.prompting.shots import ExampleLibrary

    home = open_corpus(spec.data) if spec.data else corpus
    examples = [q for q in home.questions(spec.split) if q.answers or q.answer_index is not None]
    if spec.modality:
        examples = [q for q in examples if has_picture(q) == (spec.modality == "image")]
    embedders = _example_embedders(corpus, home, spec) if spec.text_model else None
    return ExampleLibrary(examples, embedders, text_of=_TEXTS[spec.text], folds=spec.folds)


def has_picture(question: Question) -> bool:
    """Whether a benchmark shows a picture with a question, be its file there or not."""
    return bool(question.extra.get(HAS_PICTURE, True))


def _example_embedders(corpus: Corpus, home: Corpus, spec: LibrarySpec) -> Any:
    """Embedders of the library's examples (of `home`) and of the row's questions."""
    from mmqa_jax.prompting.shots import Embedders
    from mmqa_jax.retrieval.minilm import load_minilm_embedder

    if spec.text_model == "minilm":
        text = load_minilm_embedder()
    else:
        text = open_embedder(Path(spec.text_model), home)[0]
    if not spec.image_model:
        return Embedders(text)
    image, pictures = open_embedder(Path(spec.image_model), home)
    of_examples = {question.id for question in home.questions(spec.split)}
    of_queries = open_embedder(Path(spec.image_model), corpus)[1] if spec.data else pictures

    def pixels(question: Question) -> Any:
        store = pictures if question.id in of_examples else of_queries
        return store.question_pixels(question)

    return Embedders(text, image, pixels)


def _question_and_choices(question: Question) -> str:
    """The question with its hint and choices, as text to embed."""
    parts = (question.question, str(question.extra.get("hint", "")), " ".join(question.choices))
    return " ".join(part for part in parts if part)


_TEXTS: dict[str, Callable[[Question], str]] = {
    "question": lambda question: question.question,
    "question_and_choices": _question_and_choices,
}


def _over(corpus: Corpus, spec: RetrieverSpec, dense: Any, modality: Any) -> Retriever:
    """The retriever over the sources of one modality; None: over all."""
    from mmqa_jax.retrieval.bm25 import BM25Retriever
    from mmqa_jax.retrieval.bm25_webqa import WebQABM25Retriever
    from mmqa_jax.retrieval.dense import DenseRetriever
    from mmqa_jax.retrieval.fusion import FusedRetriever
    from mmqa_jax.retrieval.modality import ModalityIndex, one_modality

    subset = corpus if modality is None else one_modality(corpus, modality)
    retrievers: list[Any] = []
    if spec.method != "dense":
        bm25 = WebQABM25Retriever if spec.webqa_compat else BM25Retriever
        retrievers.append(bm25(subset))
    if dense is not None and modality is not None:
        view = ModalityIndex(dense.index, corpus.modality_rows(modality))
        dense = DenseRetriever(subset, dense.embedder, view, dense.pictures)
    if dense is not None:
        retrievers.append(dense)
    if spec.second_hop:
        from mmqa_jax.systems.extensions.second_hop import SecondHopRetriever

        retrievers = [SecondHopRetriever(retriever, subset) for retriever in retrievers]
    return retrievers[0] if len(retrievers) == 1 else FusedRetriever(retrievers, _FUSED_DEPTH)
