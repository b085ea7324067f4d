"""Opens what training runs left in their workdirs, as the parts of a system."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from flax import nnx
from ml_collections import ConfigDict

from mmqa_jax.core.checkpoint import load_metadata, load_params
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.clip_tokenizer import ClipTokenizer, open_tokenizer
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.tokenizers import WordPiece
from mmqa_jax.models.dual_encoder import DualEncoder
from mmqa_jax.models.presets import dual_encoder_from_config
from mmqa_jax.models.two_sided_vlp import TwoSidedVLP
from mmqa_jax.models.vlp import VLP
from mmqa_jax.retrieval.embedder import Embedder
from mmqa_jax.systems import webqa
from mmqa_jax.systems.cached_reranker import CachedReranker
from mmqa_jax.systems.parts import Reader, Reranker
from mmqa_jax.training.recipes import make_packing, make_vlp_config, text_of
from mmqa_jax.training.rerank import two_sides
from mmqa_jax.training.run import read_config


def load_embedder(folder: str | os.PathLike) -> tuple[Embedder, ConfigDict]:
    """The trained dual encoder of a contrastive run, and the run's config."""
    config, tokenizer = _read_run(folder, ("contrastive",))
    model_config = dual_encoder_from_config(config.model, tokenizer.vocab_size)
    model = _load(folder, lambda: DualEncoder(model_config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    embedder = Embedder(
        graphdef,
        state,
        tokenizer,
        image_size=config.pictures.size,
        buckets=tuple(config.inference.buckets),
        batch_size=config.inference.batch_size,
        text_of=text_of(config),
    )
    return embedder, config


def load_reranker(
    folder: str | os.PathLike, corpus: Corpus, batch_size: int | None = None
) -> webqa.Reranker:
    """The trained source selector of a rerank run; `batch_size` instead of its config's."""
    config, corpus, tokenizer, vlp = _load_vlp(folder, corpus, "rerank", batch_size)
    sides = two_sides(config.model, make_packing(config), vlp.config)
    if sides is None:
        return Reranker(config, corpus, tokenizer, vlp)
    return CachedReranker(config, corpus, tokenizer, TwoSidedVLP.of(vlp, sides))


def load_reader(folder: str | os.PathLike, corpus: Corpus, batch_size: int | None = None) -> Reader:
    """The trained reader of an answer run; `batch_size` instead of its config's."""
    return Reader(*_load_vlp(folder, corpus, "answer", batch_size))


def _load_vlp(
    folder: str | os.PathLike, corpus: Corpus, task: str, batch_size: int | None
) -> tuple[ConfigDict, Corpus, WordPiece, VLP]:
    config, tokenizer = _read_run(folder, (task,))
    if batch_size is not None:
        config.inference.batch_size = batch_size
    model_config = make_vlp_config(config, tokenizer)
    model = _load(folder, lambda: VLP(model_config, rngs=nnx.Rngs(0)))
    return config, corpus, tokenizer, model


def _read_run(
    folder: str | os.PathLike, tasks: tuple[str, ...]
) -> tuple[ConfigDict, WordPiece | ClipTokenizer]:
    folder = Path(folder)
    metadata = load_metadata(folder)
    if metadata.get("task") not in tasks:
        raise UserError(
            f"{folder}: holds a model of task {metadata.get('task')!r}, {' or '.join(tasks)} was "
            "expected; name the workdir of such a training run."
        )
    config = read_config(folder)
    if config.get("task") != metadata["task"]:
        raise UserError(
            f"{folder / 'config.json'}: is not of the run that model.json belongs to; copy the run "
            "anew or train it again in a new --workdir."
        )
    return config, open_tokenizer(folder / "tokenizer.json")


def _load(folder: str | os.PathLike, build: Any) -> Any:
    graphdef, abstract = nnx.split(nnx.eval_shape(build))
    return nnx.merge(graphdef, load_params(folder, abstract))
