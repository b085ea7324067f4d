"""Opens what embeds questions and sources: a dual encoder, CLIP, SigLIP, a VLM, texts' encoders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.pictures.store import PictureStore
from mmqa_jax.models.encoders.late_interaction import is_late_interaction
from mmqa_jax.models.encoders.page_retrievers import page_retriever
from mmqa_jax.models.encoders.pictured_gemma import sees_pictures
from mmqa_jax.models.encoders.text_encoders import check_family, published_folder, published_kind
from mmqa_jax.retrieval.embedder import Embedder
from mmqa_jax.retrieval.embeddings import open_embeddings
from mmqa_jax.retrieval.indexes.index import load_index
from mmqa_jax.retrieval.indexes.milvus import PREFIX as MILVUS
from mmqa_jax.retrieval.indexes.milvus import open_milvus
from mmqa_jax.retrieval.late_interaction import dense_retriever, load_late_interaction_embedder
from mmqa_jax.retrieval.manifest import EMBEDDINGS, INDEX
from mmqa_jax.retrieval.page_embedder import load_page_embedder
from mmqa_jax.retrieval.rankings import Asks
from mmqa_jax.retrieval.text_encoder import load_text_embedder, load_two_towers
from mmqa_jax.retrieval.vlm_encoder import load_gemma_embedder, load_vlm_embedder
from mmqa_jax.weights.bundled import minilm_path
from mmqa_jax.weights.folder import read_record
from mmqa_jax.weights.record import is_converted
from mmqa_jax.weights.registry import architectures

if TYPE_CHECKING:
    from mmqa_jax.tasks.contrastive import DualEncoderTask
    from mmqa_jax.tasks.retriever import Retriever
    from mmqa_jax.tasks.task import Options


def load_embedder(
    folder: str | Path, options: Options | None = None, *, one_shape: bool = False
) -> tuple[Embedder, DualEncoderTask | Retriever]:
    """The trained encoder of a contrastive, example-retrieval or retriever run, and the run's task.

    `options` stand in place of those in the run's section `inference`; `one_shape` is for a few
    texts, see DualEncoderTask.in_one_shape.
    """
    from mmqa_jax.tasks.contrastive import Contrastive
    from mmqa_jax.tasks.example_retrieval import ExampleRetrieval
    from mmqa_jax.tasks.retriever import Retriever
    from mmqa_jax.tasks.task import read_run

    task, tokenizer = read_run(folder, (Contrastive, ExampleRetrieval, Retriever), options)
    if isinstance(task, Retriever):
        return task.open(Path(folder), tokenizer), task
    task = task.in_one_shape() if one_shape else task
    return task.open(folder, tokenizer, one_shape=one_shape), task


def open_embedder(
    model: Path, corpus: Corpus, options: Options | None = None, *, one_shape: bool = False
) -> tuple[Any, PictureStore]:
    """The embedder that a path or name means, and pictures sized for it.

    Args:
      model: a run; a CLIP or SigLIP, converted or as transformers has it; a Qwen3-VL-Embedding; an
        EmbeddingGemma 2; a retriever of pages; or a published encoder of texts, also one of late
        interaction, which embeds pictures by their captions. What is published is named by its
        folder, ORG/NAME in the Hugging Face cache, or `minilm`.
      options: `batch_size` and `mesh`, in place of those of the run's `inference`.
    """
    if str(model) == "minilm":
        model = minilm_path()
    converted = is_converted(model)
    folder = model if converted else published_folder(model)
    if folder:
        kind = read_record(folder).architecture.name if converted else published_kind(folder)
        entries = (entry for entry in architectures().values() if entry.embeds)
        family = next((e.name for e in entries if kind in (e.name, *e.embeds)), "")
        if retriever := page_retriever(folder):
            embedder: Embedder = load_page_embedder(folder, retriever, **(options or {}))
        elif family == "qwen_vl":
            embedder = load_vlm_embedder(folder, **(options or {}))
        elif not converted and sees_pictures(folder):
            embedder = load_gemma_embedder(folder, **(options or {}))
        elif family or converted:  # another converted one is refused there
            embedder = load_two_towers(folder, family or "clip", **(options or {}))
        else:
            check_family(folder)
            late = is_late_interaction(folder)
            load = load_late_interaction_embedder if late else load_text_embedder
            return load(folder, **(options or {})), PictureStore(corpus, size=1)
        pictures = PictureStore(corpus, embedder.image_size, embedder.resize, alpha=embedder.alpha)
        return embedder, pictures
    embedder, task = load_embedder(model, options, one_shape=one_shape)
    return embedder, task.open_pictures(corpus)


def open_dense(
    corpus: Corpus,
    model: str,
    index: str,
    *,
    exact: bool = False,
    one_shape: bool = False,
    asks: Asks = "both",
) -> Any:
    """Opens the dense retriever over a whole corpus; UserError where the index is of another one.

    `exact` refuses an index that searches approximately; `one_shape` is for a few questions, see
    in_one_shape of tasks/vlp.py.
    """
    embedder, pictures = open_embedder(Path(model), corpus, one_shape=one_shape)
    loaded = _open_index(index, embedder.fingerprint, corpus.fingerprint)
    if exact and not loaded.is_exact:
        raise UserError(
            f"{index}: searches approximately, but parts.retriever.index_kind=exact; run `mmqa "
            "index --kind=exact` over its embeddings."
        )
    return dense_retriever(corpus, embedder, loaded, pictures, asks)


def _open_index(index: str, model_fingerprint: str, corpus_fingerprint: str) -> Any:
    """The index in a folder of `mmqa index`, or in Milvus."""
    if index.startswith(MILVUS):
        return open_milvus(index, model_fingerprint, corpus_fingerprint)
    embeddings = open_embeddings(Path(index) / EMBEDDINGS, model_fingerprint, corpus_fingerprint)
    return load_index(Path(index) / INDEX, embeddings, model_fingerprint)
