"""Opens the parts of a system from what `mmqa train`, `convert`, `embed` and `index` wrote.

A part is described by a few plain values, the same in a row's config (section `parts`) and in the
flags of `mmqa search`, `rerank` and `answer`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.picture_store import PictureStore
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


def open_dense(corpus: Corpus, model: str, index: str, *, one_shape: bool = False) -> Any:
    """The dense retriever over the whole corpus; UserError as `open_retriever`.

    `one_shape`, here and below, is for a few questions: see inference/loading.py.
    """
    from mmqa_jax.retrieval.dense import DenseRetriever
    from mmqa_jax.retrieval.embeddings import open_embeddings
    from mmqa_jax.retrieval.index import load_index

    embedder, pictures = open_embedder(Path(model), corpus, one_shape=one_shape)
    embeddings = open_embeddings(Path(index) / EMBEDDINGS, embedder.fingerprint, corpus.fingerprint)
    loaded = load_index(Path(index) / INDEX, embeddings, embedder.fingerprint)
    return DenseRetriever(corpus, embedder, loaded, pictures)


def open_embedder(
    model: Path, corpus: Corpus, *, one_shape: bool = False
) -> tuple[Any, PictureStore]:
    """The embedder of a contrastive run or a converted CLIP, and pictures sized for it."""
    from mmqa_jax.inference.loading import load_embedder
    from mmqa_jax.retrieval.clip import load_clip_embedder
    from mmqa_jax.weights.folder import is_converted

    if is_converted(model):
        embedder = load_clip_embedder(model)
        return embedder, PictureStore(corpus, embedder.image_size, "crop")
    embedder, config = load_embedder(model, one_shape=one_shape)
    return embedder, PictureStore(corpus, config.pictures.size, config.pictures.resize)


def open_reranker(
    corpus: Corpus,
    model: str | Path,
    batch_size: int | None = None,
    *,
    one_shape: bool = False,
) -> Any:
    """The reranker of a rerank run: over pairs or, with `joint_layers`, over cached sources."""
    from mmqa_jax.inference.loading import load_source_head
    from mmqa_jax.inference.reranker import Reranker
    from mmqa_jax.models.two_sided_vlp import TwoSidedVLP
    from mmqa_jax.systems.extensions.cached_reranker import CachedReranker

    head = load_source_head(model, batch_size, one_shape=one_shape)
    if head.sides is None:
        return Reranker(head.config, corpus, head.tokenizer, head.model)
    vlp = TwoSidedVLP.of(head.model, head.sides)
    return CachedReranker(head.config, corpus, head.tokenizer, vlp)


def with_similarity(reranker: Any, retriever: Any, corpus: Corpus, weight: float) -> Any:
    """The reranker combined with the retriever's similarity and second hop (ours)."""
    from mmqa_jax.systems.extensions.second_hop import SecondHopReranker, SecondHopRetriever

    return SecondHopReranker(SecondHopRetriever(retriever, corpus), reranker, weight)


def open_reader(
    corpus: Corpus,
    model: str | Path,
    batch_size: int | None = None,
    *,
    one_shape: bool = False,
) -> Any:
    """The reader of an answer run."""
    from mmqa_jax.inference.loading import load_reader

    return load_reader(model, corpus, batch_size, one_shape=one_shape)


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
