"""Opens the parts of a prompted system: its language model, library of examples and knowledge."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.host import cache_dir
from mmqa_jax.core.serving import OnModel, ignored
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.prompting.shots import TEXTS
from mmqa_jax.prompting.templates import load_template
from mmqa_jax.retrieval.cached_vectors import cached_vectors
from mmqa_jax.retrieval.fusion import DEFAULT_WEIGHT
from mmqa_jax.retrieval.knowledge import KnowledgeBase
from mmqa_jax.runs.part import OpenParts
from mmqa_jax.runs.parts import RetrieverSpec, open_dense, retrievers_over
from mmqa_jax.tasks.library import LibrarySpec, check_similarity, open_text_embedder


@dataclasses.dataclass(frozen=True)
class LLMSpec:
    """The language model of a prompted system.

    Attributes:
      model: as `mmqa prompt --model`: `smollm2`, a folder or GGUF file, ORG/NAME in the Hugging
        Face cache, or a server's name for it.
      backend: `engine` (this process) or `openai` (a server, see prompting/backend_http.py).
      tokenizer: for the engine, if the model's folder has none.
      dtype, mesh: of the engine's weights and arithmetic, see local_model.ModelConfig.
      engine, server: values of these sections of configs/prompt/default.py that differ.
      cache: folder of a response cache that several rows share; "" is the workdir's own.
    """

    model: str
    backend: Literal["engine", "openai"] = "engine"
    tokenizer: str = ""
    dtype: str = "auto"
    mesh: dict[str, int | Literal["auto"]] = dataclasses.field(default_factory=dict)
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    server: dict[str, Any] = dataclasses.field(default_factory=dict)
    cache: str = ""

    def paths(self) -> list[str]:
        """Weights in this process; a server's name of its model is no path."""
        return [] if self.backend == "openai" else [self.model]

    def open(self, row: OpenParts) -> Any:
        """The language model with its response cache."""
        return row.closing(open_llm(self, row.journals / "responses"))


# Of an LLMSpec, what changes no answer beyond its last bits: where the engine runs, its sizes (but
# `length`, to which prompts are shortened), how a server is asked, and where answers are kept.
LLM_FREE = (
    *("mesh", "engine.slots", "engine.buckets", "engine.prefill_tokens", "engine.block"),
    *("engine.decode_block", "engine.scan_layers", "server", "cache"),
)


@dataclasses.dataclass(frozen=True)
class KnowledgeSpec:
    """A knowledge base and how passages are found in it.

    Attributes:
      data: folder of `mmqa prepare`; "" is the row's own.
      retriever: `bm25`, `dense`, both by scores (`fused`) or ranks (`rrf`); `random` passages are
        a control.
      top_k: passages of a question.
      max_words: longer passages are cut there; 0: never.
      modality: only snippets (`text`), only pictures' captions (`image`), or all.
      text_model: of dense retrieval: `minilm`, a converted CLIP or a contrastive run.
      index: folder of `mmqa embed` and `mmqa index` with that model; "": the passages' texts are
        embedded here, and kept on disk by content.
      text: what is searched for: the question, with hint and choices, or behind the caption.
      section_key: see KnowledgeBase; the titles of sources that may be found for a question.
    """

    data: str = ""
    retriever: Literal["bm25", "dense", "fused", "rrf", "random"] = "bm25"
    top_k: int = at_least(1, 1)
    max_words: int = at_least(0, 100)
    modality: Literal["", "text", "image"] = ""
    text_model: str = "minilm"
    index: str = ""
    text: Literal["question", "question_and_choices", "question_and_caption"] = "question"
    section_key: str = ""

    def paths(self) -> list[str]:
        """The folders that it reads."""
        return [self.index, self.data, self.text_model]

    def open(self, row: OpenParts) -> KnowledgeBase:
        """The knowledge base."""
        return open_knowledge(row.corpus, self, row.on_model("knowledge"))


def check_prompted(options: Mapping[str, Any], library: LibrarySpec) -> None:
    """Refuses, before anything is opened, what could only fail later.

    Args:
      options: of the setting, its defaults included.
      library: of the row.

    Raises:
      UserError: an unknown template, or as `check_similarity`.
    """
    if "template" in options:
        load_template(options["template"])
    similarity = options.get("similarity")
    if similarity in (None, "answer_aware") or options.get("shots", 1) == 0:
        return
    check_similarity(similarity, library)


def open_llm(spec: LLMSpec, cache: Path) -> Any:
    """The language model with its response cache in the folder `cache`, or in the spec's own.

    Raises:
      UserError: no such model or server, or an unknown setting.
    """
    from mmqa_jax.core.config import find_config, load_config
    from mmqa_jax.prompting.cache import Cached, ResponseCache
    from mmqa_jax.prompting.open import open_backend, spans_processes

    changes: dict[str, Any] = {"model.dtype": spec.dtype}
    changes |= {f"model.mesh.{axis}": size for axis, size in spec.mesh.items()}
    changes |= {f"engine.{key}": value for key, value in spec.engine.items()}
    changes |= {f"server.{key}": value for key, value in spec.server.items()}
    config = load_config(find_config("configs/prompt/default.py"), changes)
    if spans_processes(spec.backend, config):
        raise UserError(
            "config key parts.llm.mesh: spans the processes of this launch, which each answer "
            "questions of their own; leave it at auto, or let it multiply to the devices of one "
            "process."
        )
    backend = open_backend(
        spec.backend, spec.model, spec.tokenizer or None, config, "config key parts.llm.model"
    )
    return Cached(backend, ResponseCache(spec.cache or cache))


def open_knowledge(
    corpus: Corpus, spec: KnowledgeSpec, on_model: OnModel = ignored
) -> KnowledgeBase:
    """The knowledge base.

    Args:
      corpus: the row's own, whose sources are searched if the spec names no data.

    Raises:
      UserError: no such data or model, no sources of the modality, or top_k below 1.
    """
    from mmqa_jax.data.corpus import open_sources
    from mmqa_jax.retrieval.knowledge import RandomRetriever
    from mmqa_jax.retrieval.modality import one_modality

    home = open_sources(spec.data) if spec.data else corpus
    if not (home.modality_rows(spec.modality) if spec.modality else home.sources):
        raise UserError(_no_passages(spec))
    subset = one_modality(home, spec.modality) if spec.modality else home
    if spec.retriever == "random":
        retriever: Any = RandomRetriever(subset)
    else:
        dense = None if spec.retriever == "bm25" else _open_dense(home, spec)
        if dense is not None:
            on_model("text_model", dense.embedder)
        method = RetrieverSpec(spec.retriever)
        retriever = retrievers_over(home, method, dense, spec.modality or None)(DEFAULT_WEIGHT)
    return KnowledgeBase(
        subset,
        retriever,
        top_k=spec.top_k,
        max_words=spec.max_words,
        text_of=TEXTS[spec.text],
        section_key=spec.section_key,
    )


def _no_passages(spec: KnowledgeSpec) -> str:
    """What to tell a user whose knowledge base has no sources, or none of the modality."""
    of_modality = f"{spec.modality} sources" if spec.modality else "sources"
    place = f"data={spec.data}: this corpus" if spec.data else "data is empty: the row's own corpus"
    leave_out = f" (parts.knowledge.modality={spec.modality})" if spec.modality else ""
    return (
        f"config key parts.knowledge.{place} has no {of_modality}{leave_out}; name a corpus that "
        "has some."
    )


def _open_dense(home: Corpus, spec: KnowledgeSpec) -> Any:
    """Dense retrieval over the texts of all sources, or over an index."""
    from mmqa_jax.retrieval.dense import DenseRetriever
    from mmqa_jax.retrieval.embeddings import Embeddings
    from mmqa_jax.retrieval.exact import ExactIndex

    if spec.index:
        return open_dense(home, spec.text_model, spec.index)
    embedder, pictures = open_text_embedder(spec.text_model, home)
    texts = [embedder.text_of(source) for source in home.sources]
    vectors = cached_vectors(
        cache_dir() / "vectors",
        f"text {embedder.fingerprint}",
        texts,
        lambda rows: embedder.embed_questions([texts[row] for row in rows]),
    )
    embeddings = Embeddings(vectors, embedder.fingerprint, home.fingerprint)
    return DenseRetriever(home, embedder, ExactIndex(embeddings), pictures)
