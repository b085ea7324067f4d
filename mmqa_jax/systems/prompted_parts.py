"""Opens the parts of a prompted system: its language model, library of examples and knowledge."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mmqa_jax.core.config import spec_of
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.host import cache_dir
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.datasets.scienceqa import HAS_PICTURE
from mmqa_jax.data.picture_store import EncodedPicture, PictureStore
from mmqa_jax.data.schema import Question
from mmqa_jax.prompting.published_vectors import SIMILARITIES, PublishedVectors
from mmqa_jax.prompting.shots import TEXTS
from mmqa_jax.prompting.templates import load_template
from mmqa_jax.retrieval.cached_vectors import cached_vectors
from mmqa_jax.retrieval.fusion import DEFAULT_WEIGHT
from mmqa_jax.retrieval.knowledge import KnowledgeBase
from mmqa_jax.systems.parts import (
    OnModel,
    RetrieverSpec,
    ignored,
    open_dense,
    open_embedder,
    retrievers_over,
)


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
      cache: file of a response cache that several rows share; "" is the workdir's own.
    """

    model: str
    backend: Literal["engine", "openai"] = "engine"
    tokenizer: str = ""
    dtype: str = "auto"
    mesh: dict[str, int | Literal["auto"]] = dataclasses.field(default_factory=dict)
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    server: dict[str, Any] = dataclasses.field(default_factory=dict)
    cache: str = ""


# Of an LLMSpec, what changes no answer beyond its last bits: where the engine runs, its sizes (but
# `length`, to which prompts are shortened), and how a server is asked.
LLM_FREE = (
    *("mesh", "engine.slots", "engine.buckets", "engine.prefill_tokens", "engine.block"),
    *("engine.decode_block", "engine.scan_layers", "server"),
)


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
      vectors: folder of the vectors that PICa's authors published (OK-VQA), which are compared in
        place of embeddings by `text_model` and `image_model`; "": none.
      index_kind: how the nearest examples are found: `exact`, by the products with all of them, or
        `scann`, by the retrieval room's ScaNN index.
    """

    data: str = ""
    split: str = "train"
    folds: int = 1
    text_model: str = "minilm"
    image_model: str = ""
    text: Literal["question", "question_and_choices"] = "question"
    modality: Literal["", "text", "image"] = ""
    vectors: str = ""
    index_kind: Literal["exact", "scann"] = "exact"


# Of a config's section with these keys.
LIBRARY = spec_of(LibrarySpec, minimum=1)


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
    top_k: int = 1
    max_words: int = 100
    modality: Literal["", "text", "image"] = ""
    text_model: str = "minilm"
    index: str = ""
    text: Literal["question", "question_and_choices", "question_and_caption"] = "question"
    section_key: str = ""


@dataclasses.dataclass(frozen=True)
class CaptionsSpec:
    """Side files that describe pictures; see systems/captions.py.

    Attributes:
      captions: file of captions, by the id of a question, a picture (image_id) or a source.
      tags: file of tags; "": none.
    """

    captions: str
    tags: str = ""


def check_prompted(options: Mapping[str, Any], library: Mapping[str, Any]) -> None:
    """Refuses, before anything is opened, what could only fail later.

    Args:
      options: of the setting, its defaults included.
      library: the config section `parts.library`.

    Raises:
      UserError: an unknown template, or as `check_similarity`.
    """
    if "template" in options:
        load_template(options["template"])
    similarity = options.get("similarity")
    if similarity in (None, "answer_aware") or options.get("shots", 1) == 0:
        return
    check_similarity(similarity, library)


def check_similarity(
    similarity: str,
    library: Mapping[str, Any],
    *,
    key: str = "options.similarity",
    section: str = "parts.library",
) -> None:
    """Refuses a similarity that the models of a library cannot give.

    Args:
      library: the values of its config section.
      key, section: where the config has both, for the messages.

    Raises:
      UserError: it needs another encoder, one space for two encoders, or ScaNN.
    """
    if similarity == "random":
        return
    spec, place = LibrarySpec(**library), f"config key {key}={similarity}"
    if spec.vectors:
        if similarity not in SIMILARITIES or spec.index_kind != "exact":
            raise UserError(
                f"{place}: {section}.vectors compares questions and pictures, and exactly; set it "
                f"to one of {', '.join(SIMILARITIES)} and {section}.index_kind to exact, or leave "
                "the vectors out."
            )
        return
    if not spec.text_model:
        raise UserError(
            f"{place}: the library has no embedder; set {section}.text_model, or {key} to random."
        )
    if similarity in ("image", "question_and_image") and not spec.image_model:
        raise UserError(
            f"{place}: needs an encoder of pictures; set {section}.image_model to a converted CLIP "
            "or a contrastive run."
        )
    one_space = not spec.image_model or Path(spec.image_model) == Path(spec.text_model)
    if similarity in ("bimodal", "question_and_sources") and not one_space:
        raise UserError(
            f"{place}: adds vectors of texts and pictures, but those of {section}.text_model="
            f"{spec.text_model} and {section}.image_model={spec.image_model} are no common space; "
            f"name the same CLIP or contrastive run for both, or set {section}.image_model to ''."
        )
    if spec.index_kind == "scann":
        _check_scann(section)


def _check_scann(section: str) -> None:
    from mmqa_jax.retrieval.index import scann_available

    if not scann_available():
        raise UserError(
            f"config key {section}.index_kind=scann: ScaNN cannot be imported (it is Linux-only); "
            "install `scann`, or set it to exact."
        )


def open_llm(spec: LLMSpec, cache: Path) -> Any:
    """The language model with its response cache in the file `cache`, or in the spec's own.

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


def open_library(
    corpus: Corpus,
    spec: LibrarySpec,
    section: str = "parts.library",
    on_model: OnModel = ignored,
) -> Any:
    """The library of in-context examples.

    Args:
      corpus: the row's own, whose examples are used if the spec names no data.
      section: of the config that has the spec, for messages.

    Raises:
      UserError: no such data, model or vectors.
    """
    from mmqa_jax.data.corpus import open_corpus
    from mmqa_jax.prompting.shots import ExampleLibrary

    home = open_corpus(spec.data) if spec.data else corpus
    examples = _examples(home, spec)
    vectors = PublishedVectors(Path(spec.vectors)) if spec.vectors else None
    embedded = spec.text_model and vectors is None
    embedders = _example_embedders(corpus, home, spec) if embedded else (None, None)
    if embedders[0] is not None:
        on_model("text_model", embedders[0].text)
        if spec.image_model:
            on_model("image_model", embedders[0].image)
    return ExampleLibrary(
        [example for example in examples if example.split == spec.split],
        embedders[0],
        text_of=TEXTS[spec.text],
        folds=spec.folds,
        vectors=vectors,
        of_queries=embedders[1],
        same_ids=_same_ids(corpus, home),
        index=_scann_index if spec.index_kind == "scann" else None,
        on_empty=_no_examples(examples, spec, section),
    )


def _examples(home: Corpus, spec: LibrarySpec) -> list[Question]:
    """The solved questions of all splits, of the spec's modality."""
    solved = [q for q in home.questions() if q.answers or q.answer_index is not None]
    if not spec.modality:
        return solved
    return [q for q in solved if has_picture(q) == (spec.modality == "image")]


def _no_examples(examples: list[Question], spec: LibrarySpec, section: str) -> str:
    """What to tell a user whose split has no examples."""
    with_answers = "with answers" + (f" of modality {spec.modality}" if spec.modality else "")
    splits = sorted({example.split for example in examples})
    remedy = f"name a split {with_answers} ({', '.join(splits)})"
    if not splits:
        remedy = f"no split of {spec.data or 'this corpus'} has questions {with_answers}, name"
        remedy = f"{remedy} other data in {section}.data"
    return (
        f"config key {section}.split={spec.split}: the library of examples is empty; {remedy}, or "
        "set shots to 0."
    )


def _same_ids(corpus: Corpus, home: Corpus) -> bool:
    """Whether an id names the same question in both: they are one corpus, or one benchmark."""
    if corpus is home or corpus.fingerprint == home.fingerprint:
        return True
    name = home.manifest.get("name")
    return name is not None and name == corpus.manifest.get("name")


def _scann_index(vectors: np.ndarray) -> Any:
    """ScaNN's index over the examples' vectors, in memory alone."""
    from mmqa_jax.retrieval.embeddings import Embeddings
    from mmqa_jax.retrieval.index import build_index

    return build_index(Embeddings(vectors, "", ""), "scann")


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
    embedder, pictures = _open_text_embedder(spec.text_model, home)
    texts = [embedder.text_of(source) for source in home.sources]
    vectors = cached_vectors(
        cache_dir() / "vectors",
        f"text {embedder.fingerprint}",
        texts,
        lambda rows: embedder.embed_questions([texts[row] for row in rows]),
    )
    embeddings = Embeddings(vectors, embedder.fingerprint, home.fingerprint)
    return DenseRetriever(home, embedder, ExactIndex(embeddings), pictures)


def _open_text_embedder(model: str, corpus: Corpus) -> tuple[Any, PictureStore]:
    from mmqa_jax.retrieval.minilm import load_minilm_embedder

    if model == "minilm":
        return load_minilm_embedder(), PictureStore(corpus, size=1)
    return open_embedder(Path(model), corpus)


def has_picture(question: Question) -> bool:
    """Whether a benchmark shows a picture with a question, be its file there or not."""
    return bool(question.extra.get(HAS_PICTURE, True))


def _example_embedders(corpus: Corpus, home: Corpus, spec: LibrarySpec) -> tuple[Any, Any]:
    """Embedders of the library's examples, of `home`, and of the row's questions, of `corpus`."""
    text, pictures = _open_text_embedder(spec.text_model, home)
    image = text
    if not spec.image_model:
        image, pictures = None, None
    elif spec.text_model == "minilm" or Path(spec.image_model) != Path(spec.text_model):
        image, pictures = open_embedder(Path(spec.image_model), home)
    own = _embedders(home, text, image, pictures)
    if corpus is home:
        return own, own
    return own, _embedders(corpus, text, image, pictures and pictures.over(corpus))


def _embedders(corpus: Corpus, text: Any, image: Any, pictures: PictureStore | None) -> Any:
    from mmqa_jax.prompting.shots import Embedders

    if pictures is None:
        return Embedders(text, sources=lambda question: _sources(corpus, None, question))
    return Embedders(
        text,
        image,
        lambda question: pictures.encoded(question.image),
        lambda question: _sources(corpus, pictures, question),
    )


def _sources(
    corpus: Corpus, pictures: PictureStore | None, question: Question
) -> list[str | EncodedPicture]:
    """A question's gold sources: a snippet's text, a picture, or else its caption."""
    found: list[str | EncodedPicture] = []
    for source in (corpus.sources[row] for row in corpus.positive_rows(question)):
        picture = pictures and pictures.encoded(source.image, source.text)
        found.append(picture or source.text)
    return found
