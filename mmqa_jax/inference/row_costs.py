"""What an example costs each program that uses a trained model, for `auto` batch sizes.

Bytes are those of the largest shape of a run's inputs, estimated as in retrieval/encoder_costs.py.
Compiled for a v5e the programs of configs/webqa and configs/okvqa use 0.5 to 0.9 of them.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from mmqa_jax.core.serving import RowCost
from mmqa_jax.data.packing import Bucket
from mmqa_jax.inference.from_config import make_packing, make_vlp_config
from mmqa_jax.models.presets import (
    dual_encoder_from_config,
    text_classifier_from_config,
    vqa_from_config,
)
from mmqa_jax.models.vlp_extensions import ExtendedVLPConfig
from mmqa_jax.retrieval.encoder_costs import (
    dual_encoder_cost,
    layer_bytes,
    tower_bytes,
    value_bytes,
)
from mmqa_jax.retrieval.modality import MODALITIES

_ANY_VOCABULARY = 30_522  # no size here depends on it but the beams', a little


def embed_cost(config: ConfigDict) -> RowCost:
    """Of a dual encoder: sources, or texts."""
    model = dual_encoder_from_config(config.model, _ANY_VOCABULARY)
    return dual_encoder_cost(model, max(config.inference.buckets))


def rerank_cost(config: ConfigDict) -> RowCost:
    """Of VLP's source head: pairs of the bucket with the most columns."""
    return RowCost("pairs", 32, 128, _vlp_bytes(config, make_vlp_config(config, _ANY_VOCABULARY)))


def answer_cost(config: ConfigDict) -> RowCost:
    """Of VLP's beam search: questions, with their keys and values and their beams."""
    model = make_vlp_config(config, _ANY_VOCABULARY)
    columns = _most_columns(config)
    bert, options = model.bert, config.inference
    cache = 2 * bert.layers * columns * bert.hidden * value_bytes(bert.dtype)
    beams = options.num_beams * bert.vocab_size * 3 * 4
    return RowCost("questions", 64, 64, _vlp_bytes(config, model) + cache + beams)


def candidates_cost(config: ConfigDict) -> RowCost:
    """Of a VQA model: questions with their picture."""
    section, length = config.model, max(config.batches.lengths)
    model = vqa_from_config(section, _ANY_VOCABULARY, answers=1)
    fusion = model.fusion
    if section.image == "grid":
        columns, features = section.grid**2, section.image_features
    elif section.image == "regions":
        columns, features = config.features.get("slots", 100), section.region_features
    elif section.image == "patches":
        columns = section.pictures * model.vision.patches
        features = model.vision.patch_size**2 * 3
    else:
        columns, features = length, 0
    seen = layer_bytes(max(columns, length), fusion.hidden, fusion.heads, fusion.mlp, fusion.dtype)
    return RowCost("questions", 64, 128, seen + 2 * 4.0 * columns * features)


def modality_cost(config: ConfigDict) -> RowCost:
    """Of the classifier of questions."""
    model = text_classifier_from_config(config.model, _ANY_VOCABULARY, len(MODALITIES))
    return RowCost("questions", 64, 512, tower_bytes(model.bert, config.batches.length))


def _vlp_bytes(config: ConfigDict, model: ExtendedVLPConfig) -> float:
    packing = make_packing(config, inference=True)
    pictures = max(Bucket(*one).pictures for one in packing.buckets)
    regions = pictures * packing.slots_per_picture * (packing.region_dim + packing.position_dim)
    shown = 0.0
    if model.vision is not None:
        shown = pictures * tower_bytes(model.vision, packing.slots_per_picture + 1)
    return max(tower_bytes(model.bert, _most_columns(config)), shown) + 2 * 4.0 * regions


def _most_columns(config: ConfigDict) -> int:
    packing = make_packing(config, inference=True)
    buckets = [Bucket(*one) for one in packing.buckets]
    return max(b.pictures * packing.slots_per_picture + b.text for b in buckets)
