"""CLIP as WebQA's dense retriever: a converted checkpoint and its byte-pair tokenizer.

Pictures are embedded from their pixels alone and snippets from their text alone, truncated to
CLIP's 77 tokens; questions are embedded as written. UniIR's CLIP_SF embeds a text
and a picture, of a question or a source, as the sum of both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.serving import AUTO, BatchSize, loading_mesh
from mmqa_jax.data.pictures.resize import Resize
from mmqa_jax.data.published_tokenizers import load_clip_tokenizer
from mmqa_jax.data.tokenizers import Preprocessing
from mmqa_jax.models.encoders.dual_encoder import clip_dual_encoder
from mmqa_jax.models.two_towers.network import TwoTowers
from mmqa_jax.models.two_towers.openai import UNIIR, squashes
from mmqa_jax.retrieval.embedder import Embedder, dual_encoder_cost, one_picture_each
from mmqa_jax.retrieval.embeddings import BROKEN, check_finite
from mmqa_jax.retrieval.two_towers import as_dual_encoder, check_kind, load_two_towers
from mmqa_jax.weights.folder import read_record
from mmqa_jax.weights.record import is_converted

_BUCKETS = (16, 32, 48, 77)


class ScoreFusionEmbedder(Embedder):
    """An Embedder of a dual encoder with the fusion `sum`, for questions as well as sources."""

    def embed_questions(
        self, texts: Sequence[str], pictures: Sequence[np.ndarray | None] | None = None
    ) -> Float32[np.ndarray, "n D"]:
        """See Embedder; text and picture are added as the towers give them, a "" not at all."""
        pictures = one_picture_each(texts, pictures)
        vectors = np.zeros((len(texts), self.dim), np.float32)
        pictured = np.array([picture is not None for picture in pictures], bool)
        batches = self._source_batches(texts, pictured, lambda own: [pictures[n] for n in own])
        self._collect(batches, vectors, "texts")
        check_finite(vectors, "embedder: the questions", BROKEN)
        return vectors


def load_clip_embedder(
    folder: str | os.PathLike,
    *,
    batch_size: BatchSize = AUTO,
    mesh: Mapping[str, int] | None = None,
) -> Embedder:
    """The embedder of a CLIP, converted by `mmqa convert --model=clip` or as transformers has it.

    Pictures must be resized as CLIP does: `PictureStore(..., embedder.resize, alpha="dropped")`.
    Texts and pictures are prepared as by the code that the checkpoint was published with, or by the
    one that `mmqa convert --preprocessing` named.

    Args:
      batch_size: texts or pictures per call, over all devices.
      mesh: see core.serving.serving_mesh.
    """
    check_kind(folder, "clip")  # before its tokenizer, which another kind need not have
    tokenizer = load_clip_tokenizer(folder)
    devices = loading_mesh(mesh)
    clip: TwoTowers = load_two_towers(folder, "clip", devices)
    config = clip.config
    if len(tokenizer_ids := {tokenizer.cls_id, tokenizer.sep_id}) < 2 or (
        max(*tokenizer_ids, tokenizer.vocab_size - 1) >= config.text.vocab_size
    ):
        raise UserError(
            f"{folder}: the tokenizer's ids do not fit the model's {config.text.vocab_size} "
            "tokens; put the checkpoint's own tokenizer there."
        )
    sums = is_converted(Path(folder)) and read_record(folder).record.get("layout") == UNIIR
    dual_config = clip_dual_encoder(config, fusion="sum" if sums else "image")
    graphdef, state = as_dual_encoder(clip, dual_config, devices)
    context = config.text.context
    return (ScoreFusionEmbedder if sums else Embedder)(
        graphdef,
        state,
        tokenizer,
        image_size=config.vision.image_size,
        buckets=tuple(sorted({min(size, context) for size in _BUCKETS})),
        batch_size=batch_size,
        cost=dual_encoder_cost(dual_config, context),
        text_of=lambda source: source.text,
        resize=_resize(Path(folder), tokenizer.preprocessing),
        recipe=dual_config.fusion if sums else "",
    )


def _resize(folder: Path, preprocessing: Preprocessing) -> Resize:
    """How the code that a checkpoint was published with makes pictures square."""
    if preprocessing == "transformers":
        return "crop"
    return "squash" if squashes(folder) else "crop_openai"
