"""Pretrained weights that a run starts from: a BERT, VLP's own, a converted CLIP or SigLIP.

`mmqa convert --model=clip` (or siglip) writes the folder of a converted one. Only training reads
it; a trained run holds its own copy.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.tokenizers import Tokenizer, minilm_tokenizer, vocabulary_rows
from mmqa_jax.models.bert.keys import fill_bert
from mmqa_jax.weights.bundled import minilm_path
from mmqa_jax.weights.folder import load_converted, read_record
from mmqa_jax.weights.record import is_converted

if TYPE_CHECKING:
    from mmqa_jax.models.encoders.dual_encoder import DualEncoder, DualEncoderConfig
    from mmqa_jax.models.encoders.heads import TextClassifier

# Puts weights into a model of shapes (nnx.eval_shape), in place. What stays a shape is drawn at
# random afterwards.
Loader = Callable[[Any], None]

_TITLES = {"clip": "CLIP", "siglip": "SigLIP"}
# How the model is computed: may differ between the folder and the config.
_COMPUTE = ("dtype", "remat", "attention", "unroll")


def check_two_towers_init(task: Any, model: DualEncoderConfig) -> None:
    """Refuses an `init` from which the config's CLIP or SigLIP cannot start."""
    if task.init == "scratch":
        return
    place = f"config key init={task.init}"
    kind = task.model.published
    if not is_converted(task.init):
        raise UserError(
            f"{place}: model.{kind}={getattr(task.model, kind)} starts from a folder of `mmqa "
            f"convert --model={kind}`, or from `scratch`; name one."
        )
    _check(
        place,
        task.init,
        {"text": model.text, "vision": model.vision},
        f"set model.{kind}, model.changes (text) and model.vision to its sizes",
        kind=kind,
        free=(*_COMPUTE, "eos_token_id"),  # the folder's own tokenizer settles the last
    )


def check_clip_frontend(task: Any) -> None:
    """Refuses a `features.root` that does not hold the CLIP of the config's VLP frontend."""
    _check(
        f"config key features.root={task.features.root}",
        task.features.root,
        {"vision": task.model.clip_vision()},
        "set model.clip, model.vision and pictures.size to its sizes",
    )


def dual_encoder_loader(task: Any, tokenizer: Any) -> Loader | None:
    """Loads a converted CLIP or SigLIP whole, or a BERT into the text tower."""
    if task.init == "scratch":
        return None

    def load(model: DualEncoder) -> None:
        if task.model.published:
            state = nnx.state(load_converted(task.init, param_dtype="float32"))
            if model.config.logit_bias is not None and "logit_bias" not in state:
                del state["logit_scale"]  # of the other loss
            elif model.config.logit_bias is None:
                state.pop("logit_bias", None)
            nnx.update(model, state)
            return
        rows, layers = bert_rows(task, tokenizer), model.text.config.layers
        fill_bert(model.text, bert_folder(task), num_layers=layers, rows=rows)

    return load


def classifier_loader(task: Any, tokenizer: Tokenizer) -> Loader | None:
    """Loads a BERT into a text classifier."""
    if task.init == "scratch":
        return None

    def load(model: TextClassifier) -> None:
        rows, layers = bert_rows(task, tokenizer), model.bert.config.layers
        fill_bert(model.bert, bert_folder(task), num_layers=layers, rows=rows)

    return load


def vlp_loader(
    task: Any, tokenizer: Tokenizer, *, fresh: Sequence[str] = (), after_bert: Loader | None = None
) -> Loader | None:
    """Loads VLP's own weights or a BERT, and a converted CLIP's vision tower as frontend.

    Args:
      fresh: patterns of parameters beyond VLP's, which no BERT has.
      after_bert: called with the model once it has a BERT's weights.
    """
    by_clip = task.model.frontend == "clip"
    if task.init == "scratch" and not by_clip:
        return None

    from mmqa_jax.models.vlp.keys import init_vlp_from_bert, start_vlp

    def load(vlp: Any) -> None:
        if task.init.endswith((".bin", ".safetensors")):
            start_vlp(task.init, vlp)
        elif task.init != "scratch":
            rows, layers = bert_rows(task, tokenizer), vlp.config.bert.layers
            init_vlp_from_bert(vlp, bert_folder(task), num_layers=layers, rows=rows, fresh=fresh)
            if after_bert is not None:
                after_bert(vlp)
        if by_clip:
            clip = load_converted(task.features.root, param_dtype="float32")
            nnx.update(vlp.region_content.tower, nnx.state(clip.vision))

    return load


def bert_folder(task: Any) -> str | os.PathLike:
    return minilm_path() if task.init == "minilm" else task.init


def bert_rows(task: Any, tokenizer: Tokenizer) -> np.ndarray | None:
    """Rows of MiniLM's embedding table for a smaller vocabulary, None for its own."""
    if task.tokenizer != "minilm:corpus":
        return None
    return vocabulary_rows(tokenizer, minilm_tokenizer())


def _check(
    place: str,
    folder: str,
    towers: Mapping[str, Any],
    remedy: str,
    kind: str = "clip",
    free: Collection[str] = _COMPUTE,
) -> None:
    """Compares the folder's towers with the wanted configs, but for the fields in `free`."""
    record = read_record(folder)
    if record.architecture.name != kind:
        raise UserError(
            f"{place}: holds a model of kind {record.architecture.name!r}, {kind} was expected; "
            f"convert one with `mmqa convert --model={kind}`."
        )
    differing = []
    for tower, wanted in towers.items():
        has = dataclasses.asdict(getattr(record.config, tower))
        for name, value in dataclasses.asdict(wanted).items():
            if name not in free and has[name] != value:
                differing.append(f"{tower}.{name} {has[name]} (config: {value})")
    if differing:
        raise UserError(
            f"{place}: this {_TITLES[kind]} has {', '.join(differing)}; {remedy}, or give another "
            "folder."
        )
