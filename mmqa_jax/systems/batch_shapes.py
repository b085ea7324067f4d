"""The shapes of a training batch, from the config alone: what a program is planned for.

Where a config leaves a size to the data, its largest is taken: of several buckets the one with the
most columns; of a vocabulary that is not at hand the published one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from mmqa_jax.data.packing import Bucket, PackingConfig
from mmqa_jax.inference.from_config import make_packing
from mmqa_jax.models.presets import TRUNKS
from mmqa_jax.models.vlp import VLPInputs

GOLD_SOURCES = 8  # of one question, in contrastive batches; WebQA's questions have fewer
VQA_ANSWERS = 3_129  # of openvqa's and Prophet's answer vocabularies for VQA v2
VQA_WORDS = 20_572  # of openvqa's token_dict.json for VQA v2
_MINILM = 30_522

Struct = jax.ShapeDtypeStruct


def vocabulary_size(config: ConfigDict) -> int:
    """Tokens of the config's tokenizer, which need not be there."""
    name = str(config.get("tokenizer", ""))
    size = name.removeprefix("corpus:")
    if name.startswith("corpus:") and size.isdecimal():
        return int(size)
    if name == "words":
        return VQA_WORDS
    trunk = config.model.get("trunk")
    if name.startswith("minilm") or trunk not in TRUNKS:
        return _MINILM
    return TRUNKS[trunk]().vocab_size


def training_batch(config: ConfigDict) -> dict[str, Any]:
    """A global batch of the config's task as the jitted step gets it."""
    makers: dict[str, Callable[[ConfigDict], dict[str, Any]]] = {
        "contrastive": _contrastive,
        "rerank": _rerank,
        "answer": _answer,
        "modality": _modality,
        "vqa": _vqa,
        "example_retrieval": _example_retrieval,
        "language_model": _language_model,
    }
    return makers[config.task](config)


def vlp_batch(config: ConfigDict, rows: int, *, inference: bool = False) -> VLPInputs:
    """Packed sequences of the bucket with the most columns."""
    packing = make_packing(config, inference=inference)
    bucket = largest_bucket(packing)
    slots = bucket.pictures * packing.slots_per_picture
    columns = slots + bucket.text
    probes = not inference and config.get("masking", {}).get("probes", False)
    return VLPInputs(
        input_ids=_ints(rows, columns),
        token_type_ids=_ints(rows, columns),
        position_ids=_ints(rows, columns),
        context_mask=_bools(rows, columns),
        answer_mask=_bools(rows, columns),
        region_features=_floats(rows, slots, packing.region_dim),
        region_positions=_floats(rows, slots, packing.position_dim),
        probe_mask=_bools(rows, columns) if probes else None,
    )


def largest_bucket(packing: PackingConfig) -> Bucket:
    """The one with the most columns, region slots included; of several that with most pictures."""
    slots = packing.slots_per_picture
    buckets = [Bucket(*b) for b in packing.buckets]
    return max(buckets, key=lambda b: (b.pictures * slots + b.text, b.pictures))


def _contrastive(config: ConfigDict) -> dict[str, Any]:
    batches, side = config.batches, config.pictures.size
    rows = batches.batch_size
    sources, length = rows * (1 + batches.get("num_negatives", 1)), max(batches.source_lengths)
    return {
        "query_ids": _ints(rows, batches.query_length),
        "query_mask": _bools(rows, batches.query_length),
        "source_ids": _ints(sources, length),
        "source_mask": _bools(sources, length),
        "pixels": Struct((sources, side, side, 3), np.uint8),
        "has_image": _bools(sources),
        "source_rows": _ints(sources),
        "positive": _ints(rows),
        "gold_rows": _ints(rows, GOLD_SOURCES),
        "truncated": _ints(rows),
    }


def _rerank(config: ConfigDict) -> dict[str, Any]:
    rows = config.batches.batch_size
    return {
        "inputs": vlp_batch(config, rows),
        "labels": _ints(rows),
        "weights": _floats(rows),
        "truncated": _ints(rows),
    }


def _answer(config: ConfigDict) -> dict[str, Any]:
    rows, most = config.batches.batch_size, config.masking.max_pred
    return {
        "inputs": vlp_batch(config, rows),
        "masked_ids": _ints(rows, most),
        "masked_positions": _ints(rows, most),
        "masked_weights": _floats(rows, most),
        "truncated": _ints(rows),
    }


def _modality(config: ConfigDict) -> dict[str, Any]:
    rows, length = config.batches.batch_size, config.batches.length
    return {
        "input_ids": _ints(rows, length),
        "mask": _bools(rows, length),
        "label": _ints(rows),
        "truncated": _ints(rows),
    }


def vqa_inputs(config: ConfigDict, rows: int) -> tuple[Struct, Struct]:
    """`question_ids` and `image` of the longest questions."""
    model, length = config.model, max(config.batches.lengths)
    if model.image == "caption":
        image = _bools(rows, length)
    elif model.image == "grid":
        image = _floats(rows, model.grid**2, model.image_features)
    else:
        image = _floats(rows, config.features.get("slots", 100), model.region_features)
    return _ints(rows, length), image


def _vqa(config: ConfigDict) -> dict[str, Any]:
    rows = config.batches.batch_size
    question_ids, image = vqa_inputs(config, rows)
    return {
        "question_ids": question_ids,
        "image": image,
        "targets": _floats(rows, VQA_ANSWERS),
        "truncated": _ints(rows),
    }


def _example_retrieval(config: ConfigDict) -> dict[str, Any]:
    batches = config.batches
    rows, candidates, length = batches.batch_size, batches.candidates, batches.length
    return {
        "query_ids": _ints(rows, length),
        "query_mask": _bools(rows, length),
        "candidate_ids": _ints(rows, candidates, length),
        "candidate_mask": _bools(rows, candidates, length),
        "scores": _floats(rows, candidates),
    }


def _language_model(config: ConfigDict) -> dict[str, Any]:
    batches = config.batches
    wide, few = (batches.batch_size, batches.length), (batches.batch_size, batches.targets)
    return {
        **{name: _ints(*wide) for name in ("input_ids", "segments", "positions")},
        **{name: _ints(*few) for name in ("target_positions", "target_ids", "target_segments")},
    }


def _ints(*shape: int) -> Struct:
    return Struct(shape, np.int32)


def _floats(*shape: int) -> Struct:
    return Struct(shape, np.float32)


def _bools(*shape: int) -> Struct:
    return Struct(shape, np.bool_)
