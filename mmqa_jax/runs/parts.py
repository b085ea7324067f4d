"""Opens the parts of a system from what `mmqa train`, `convert`, `embed` and `index` wrote.

A part is described by a few plain values, the same in a row's config (section `parts`) and in the
flags of `mmqa search`, `rerank` and `answer`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.serving import OnModel, ignored
from mmqa_jax.core.store import Store
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Modality, Question
from mmqa_jax.retrieval.fusion import DEFAULT_WEIGHT, check_weight
from mmqa_jax.retrieval.milvus import PREFIX as MILVUS
from mmqa_jax.retrieval.retriever import Retriever
from mmqa_jax.runs import identity
from mmqa_jax.runs.part import OpenParts
from mmqa_jax.runs.resumable import Resumable

EMBEDDINGS, INDEX = "embeddings", "index"  # subfolders of the folder that `mmqa embed` writes


@dataclasses.dataclass(frozen=True)
class RetrieverSpec:
    """How sources are retrieved.

    Attributes:
      method: `bm25`, `dense`, or both: `fused` by a convex combination of their scores, `rrf` by
        reciprocal-rank fusion.
      model: workdir of a contrastive run, or a converted CLIP (not for bm25).
      index: folder of `mmqa embed` and `mmqa index` with that model (not for bm25), or the Milvus
        collection that `mmqa index` filled (milvus://HOST:PORT/COLLECTION).
      modality: `unknown` searches all sources; `known` those of the gold sources' modality;
        `classified` those of the modality that a classifier predicts.
      modality_model: workdir of a modality run, the paper's BERT classifier (classified); by
        default logistic regression over the words of the train questions (ours).
      index_kind: `exact` refuses an index that searches approximately (recall@200 to 2,000 of
        WebQA's CLIP needs all of the top 2,000); `any` takes both.
      webqa_compat: bm25 with the quirks of WebQA's baseline.
      second_hop: search again with the title of the first result (ours).
      fusion_weight: of the dense scores, from 0 (BM25 alone) to 1 (fused); None: the default.
    """

    method: Literal["bm25", "dense", "fused", "rrf"]
    model: str = ""
    index: str = ""
    modality: Literal["unknown", "known", "classified"] = "unknown"
    modality_model: str = ""
    index_kind: Literal["any", "exact"] = "any"
    webqa_compat: bool = False
    second_hop: bool = False
    fusion_weight: float | None = None

    def check(self, section: str = "", *, restricted: bool = False) -> None:
        """Raises UserError if the values contradict each other.

        Args:
          section: of the config that has them; "": they are flags.
          restricted: whether each question's own candidates alone are ranked.
        """
        named, other = (f"config key {section}.", "") if section else ("--", "--")
        if self.webqa_compat and (self.method != "bm25" or self.second_hop):
            raise UserError(
                f"{named}webqa_compat: works only with plain {other}method=bm25; leave it out."
            )
        if self.fusion_weight is not None:
            check_weight(self.fusion_weight, f"{named}fusion_weight")
            if self.method != "fused":
                raise UserError(
                    f"{named}fusion_weight: works only with {other}method=fused; leave it out."
                )
        if restricted and (self.method in ("fused", "rrf") or self.modality != "unknown"):
            raise UserError(
                "--candidates=restricted: works with --method=bm25 or dense and without "
                "--modality; change one."
            )
        if self.modality_model and self.modality != "classified":
            raise UserError(
                f"{named}modality_model={self.modality_model}: classifies questions, but "
                f"{other}modality={self.modality}; set it to classified or leave the model out."
            )
        if self.method != "bm25" and not (self.model and self.index):
            in_row = f": needs {section}.model and {section}.index"
            needs = in_row if section else " needs --model and --index"
            raise UserError(f"{named}method={self.method}{needs}; give both.")

    def paths(self) -> list[str]:
        """What it reads: folders, and a collection of Milvus."""
        return [self.index, self.modality_model, self.model]

    def fingerprint(self) -> str:
        """16 hex digits of the settings, model and index.

        Folders are identified by content, not by path; a collection of Milvus by its name.
        """
        in_milvus = self.index.startswith(MILVUS)
        named = self.index if in_milvus else ""
        settings = dataclasses.replace(self, model="", index=named, modality_model="")
        index = "" if in_milvus or not self.index else f"{self.index}/{INDEX}"
        return identity.of_folders(self.model, index, self.modality_model, text=str(settings))

    def open(self, row: OpenParts, name: str = "retriever") -> Any:
        """The retriever over the row's corpus, with what it finished kept on disk."""

        def make(store: Store, on_model: OnModel) -> Any:
            retriever = open_retriever(row.corpus, self, on_model)
            return Resumable(retriever, store, row.seconds)

        return row.once("retriever", self.fingerprint(), make, name)


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

    def paths(self) -> list[str]:
        """The folders that it reads."""
        return [self.model, *([] if self.similarity is None else self.similarity.paths())]

    def open(self, row: OpenParts) -> Any:
        """The reranker over the row's corpus, with what it finished kept on disk."""

        def make(store: Store, on_model: OnModel) -> Any:
            from mmqa_jax.tasks.rerank import load_reranker

            reranker = load_reranker(self.model, row.corpus)
            on_model("model", reranker)
            return Resumable(reranker, store, row.seconds)

        reranker = row.once("reranker", identity.of_folders(self.model), make, "reranker")
        if self.similarity is None:
            return reranker
        retriever = self.similarity.open(row, "reranker.similarity")
        return with_similarity(reranker, retriever, row.corpus, self.similarity_weight)


@dataclasses.dataclass(frozen=True)
class ReaderSpec:
    """How questions are answered: `model` is the workdir of an answer run."""

    model: str

    def paths(self) -> list[str]:
        """The folder that it reads."""
        return [self.model]

    def open(self, row: OpenParts) -> Any:
        """The reader over the row's corpus, with what it finished kept on disk."""

        def make(store: Store, on_model: OnModel) -> Any:
            from mmqa_jax.tasks.answer import load_reader

            reader = load_reader(self.model, row.corpus)
            on_model("model", reader)
            return Resumable(reader, store, row.seconds)

        return row.once("reader", identity.of_folders(self.model), make, "reader")


def open_retriever(corpus: Corpus, spec: RetrieverSpec, on_model: OnModel = ignored) -> Retriever:
    """The retriever over a corpus.

    Raises:
      UserError: the index or its embeddings belong to another model or corpus, or the index is
        of another kind.
    """
    weight = DEFAULT_WEIGHT if spec.fusion_weight is None else spec.fusion_weight
    return _open(corpus, spec, on_model, remember=False)(weight)


def open_fusions(
    corpus: Corpus, spec: RetrieverSpec, on_model: OnModel = ignored
) -> Callable[[float], Retriever]:
    """`fused` at any weight: the retrievers of all weights search the same questions once.

    Raises:
      UserError: as `open_retriever`.
    """
    return _open(corpus, spec, on_model, remember=True)


def _open(
    corpus: Corpus, spec: RetrieverSpec, on_model: OnModel, *, remember: bool
) -> Callable[[float], Retriever]:
    spec.check()
    dense = None
    if spec.method != "bm25":
        dense = open_dense(corpus, spec.model, spec.index, exact=spec.index_kind == "exact")
        on_model("model", dense.embedder)

    @functools.cache
    def over(modality: Any) -> Callable[[float], Retriever]:
        return retrievers_over(corpus, spec, dense, modality, remember)

    if spec.modality == "unknown":
        return over(None)
    from mmqa_jax.retrieval.modality import ByModality

    choose = open_predictor(corpus, spec, on_model)
    return lambda weight: ByModality(lambda modality: over(modality)(weight), choose)


def open_predictor(
    corpus: Corpus, spec: RetrieverSpec, on_model: OnModel = ignored
) -> Callable[[Sequence[Question]], Sequence[Modality | None]]:
    """The function that tells which modality questions need, of a spec with such a `modality`."""
    from mmqa_jax.retrieval.modality import modality_predictor

    classifier = None if spec.modality == "known" else _open_classifier(corpus, spec)
    if classifier is not None and spec.modality_model:
        on_model("modality_model", classifier)
    return modality_predictor(corpus, classifier)


def open_dense(
    corpus: Corpus, model: str, index: str, *, exact: bool = False, one_shape: bool = False
) -> Any:
    """The dense retriever over the whole corpus; UserError as `open_retriever`.

    Args:
      exact: refuse an index that searches approximately.
      one_shape: here and below, for a few questions: see tasks/vlp.py, in_one_shape.
    """
    from mmqa_jax.retrieval.dense import DenseRetriever
    from mmqa_jax.tasks.embedder import open_embedder

    embedder, pictures = open_embedder(Path(model), corpus, one_shape=one_shape)
    loaded = _open_index(index, embedder.fingerprint, corpus.fingerprint)
    if exact and not loaded.is_exact:
        raise UserError(
            f"{index}: searches approximately, but parts.retriever.index_kind=exact; run `mmqa "
            "index --kind=exact` over its embeddings."
        )
    return DenseRetriever(corpus, embedder, loaded, pictures)


def _open_index(index: str, model_fingerprint: str, corpus_fingerprint: str) -> Any:
    """The index in a folder of `mmqa index`, or in Milvus."""
    from mmqa_jax.retrieval.embeddings import open_embeddings
    from mmqa_jax.retrieval.index import load_index
    from mmqa_jax.retrieval.milvus import PREFIX, open_milvus

    if index.startswith(PREFIX):
        return open_milvus(index, model_fingerprint, corpus_fingerprint)
    embeddings = open_embeddings(Path(index) / EMBEDDINGS, model_fingerprint, corpus_fingerprint)
    return load_index(Path(index) / INDEX, embeddings, model_fingerprint)


def with_similarity(reranker: Any, retriever: Any, corpus: Corpus, weight: float) -> Any:
    """The reranker combined with the retriever's similarity and second hop (ours)."""
    from mmqa_jax.extensions.second_hop import SecondHopReranker, SecondHopRetriever

    return SecondHopReranker(SecondHopRetriever(retriever, corpus), reranker, weight)


def _open_classifier(corpus: Corpus, spec: RetrieverSpec) -> Any:
    if spec.modality_model:
        from mmqa_jax.tasks.modality import load_question_classifier

        return load_question_classifier(spec.modality_model)
    from mmqa_jax.retrieval.modality import fit_classifier

    return fit_classifier(corpus.questions("train"), corpus)


def retrievers_over(
    corpus: Corpus, spec: RetrieverSpec, dense: Any, modality: Any, remember: bool = False
) -> Callable[[float], Retriever]:
    """Retrievers over the sources of one modality (None: over all), by their fusion weight.

    Args:
      dense: the dense retriever over the whole corpus; None where the method needs none.
      remember: see HybridSearch.
    """
    from mmqa_jax.retrieval.bm25 import BM25Retriever
    from mmqa_jax.retrieval.bm25_webqa import WebQABM25Retriever
    from mmqa_jax.retrieval.dense import DenseRetriever
    from mmqa_jax.retrieval.fusion import HybridSearch, RankFusion, ScoreFusion
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

    def hops(retriever: Any) -> Any:
        if not spec.second_hop:
            return retriever
        from mmqa_jax.extensions.second_hop import SecondHopRetriever

        return SecondHopRetriever(retriever, subset)

    if spec.method == "fused":  # scores are combined in each hop, which ends with ranks
        hybrid = HybridSearch(dense, retrievers[0], remember=remember)
        return lambda weight: hops(ScoreFusion(hybrid, weight))
    found = [hops(retriever) for retriever in retrievers]
    return lambda _: found[0] if len(found) == 1 else RankFusion(found)
