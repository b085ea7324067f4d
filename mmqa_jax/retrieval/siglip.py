"""SigLIP and SigLIP 2 as dense retrievers: cosines rank as their logits do.

As with CLIP, pictures are embedded from their pixels alone and snippets from their text alone.
Every text is padded to the length that the model was trained on.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from mmqa_jax.core.serving import AUTO, BatchSize, RowCost, loading_mesh
from mmqa_jax.data.pictures.resize import NaFlex, Resize
from mmqa_jax.data.published_tokenizers import load_siglip_tokenizer
from mmqa_jax.models.encoders.dual_encoder import DualEncoderConfig, siglip_dual_encoder
from mmqa_jax.models.two_towers.config import SiglipVisionConfig
from mmqa_jax.models.two_towers.network import TwoTowers
from mmqa_jax.models.two_towers.processor import read_preparation
from mmqa_jax.retrieval.embedder import Embedder, dual_encoder_cost, tower_bytes
from mmqa_jax.retrieval.two_towers import as_dual_encoder, load_two_towers

_RESIZE: Mapping[str, Resize] = {"bicubic": "squash", "bilinear": "squash_bilinear"}


def load_siglip_embedder(
    folder: str | os.PathLike,
    *,
    batch_size: BatchSize = AUTO,
    mesh: Mapping[str, int] | None = None,
) -> Embedder:
    """The embedder of a SigLIP, converted by `mmqa convert --model=siglip` or of transformers.

    Pictures must be prepared as its image processor does: `PictureStore(..., embedder.resize,
    alpha=embedder.alpha)`. Those of a NaFlex keep their shapes and fill one number of patches, so
    that nothing compiles twice.

    Args:
      batch_size: texts or pictures per call, over all devices.
      mesh: see core.serving.serving_mesh.
    """
    devices = loading_mesh(mesh)
    model: TwoTowers = load_two_towers(folder, "siglip", devices)
    config = model.config
    tokenizer = load_siglip_tokenizer(folder, config.text.vocab_size)
    resize = picture_resize(Path(folder), config.vision)
    dual_config = siglip_dual_encoder(config, fusion="image")
    graphdef, state = as_dual_encoder(model, dual_config, devices)
    return Embedder(
        graphdef,
        state,
        tokenizer,
        image_size=config.vision.image_size,
        buckets=(config.text.length,),
        batch_size=batch_size,
        cost=_cost(dual_config, resize),
        text_of=lambda source: source.text,
        resize=resize,
        alpha="white",
        recipe=f"{config} {resize}",
    )


def picture_resize(folder: Path, config: SiglipVisionConfig) -> Resize | NaFlex:
    """How pictures are made ready for the tower of a folder."""
    preparation = read_preparation(folder, config)
    if config.flexible:
        return NaFlex(config.patch_size, preparation.most_patches, preparation.resample)
    return _RESIZE[preparation.resample]


def _cost(config: DualEncoderConfig, resize: Resize | NaFlex) -> RowCost:
    cost = dual_encoder_cost(config, config.text.length)
    if isinstance(resize, NaFlex):
        seen = tower_bytes(config.vision, resize.most) + resize.most * resize.patch**2 * 3 * 5.0
        cost = dataclasses.replace(cost, bytes=max(cost.bytes, seen))
    return cost
