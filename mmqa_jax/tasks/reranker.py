"""Opens what selects sources: a run of a source head, or a published cross-encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.inference.cross_encoder import open_cross_encoder
from mmqa_jax.tasks.opening import Options
from mmqa_jax.tasks.rerank import load_reranker
from mmqa_jax.weights.text_encoders import published_folder


def open_reranker(model: str | Path, corpus: Corpus, options: Options | None = None) -> Any:
    """The reranker that a path or name means, over a corpus.

    Args:
      model: a rerank run, or a published cross-encoder, Qwen3-Reranker or Qwen3-VL-Reranker: its
        folder, or ORG/NAME in the Hugging Face cache.
      options: `batch_size` and `mesh`, in place of those of the run's `inference`.
    """
    if folder := published_folder(model):
        return open_cross_encoder(folder, corpus, **(options or {}))
    return load_reranker(model, corpus, options)
