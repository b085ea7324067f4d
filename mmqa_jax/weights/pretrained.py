"""Models that exist already, initialized from published weights before they are trained."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.trees import flatten_named
from mmqa_jax.models.bert.keys import (
    BUFFERS,
    OLD_NAMES,
    bert_key_map,
    bert_rules,
    mlm_rules,
    mlm_tied,
    read_bert_config,
)
from mmqa_jax.models.bert.network import Bert, BertConfig
from mmqa_jax.models.vlp.keys import SOURCE_HEAD, TYPE_TABLE, fit_types, vlp_key_map
from mmqa_jax.models.vlp.network import VLP
from mmqa_jax.weights.keymap import KeyMap, Transform, load_model
from mmqa_jax.weights.layouts import Shapes, shapes_of
from mmqa_jax.weights.sources import open_source

# Parameters that pretrained BERT weights do not have.
_VISUAL = (r"^region_content/", r"^region_place/")


def fill_bert(
    model: Bert,
    folder: str | os.PathLike,
    *,
    num_layers: int | None = None,
    rows: np.ndarray | None = None,
) -> None:
    """Fills a BERT (the text tower of a dual encoder) in place.

    Args:
      model: its config must have the checkpoint's sizes and constants.
      folder: `config.json` and weights (see `open_source`), e.g. `minilm_path()`.
      num_layers: take only the checkpoint's first so many layers, the number of the model's;
        None requires that the numbers be equal.
      rows: int[vocab_size], the row of the checkpoint's embedding table for each of the model's
        tokens (data.tokenizers.vocabulary_rows); None where the vocabularies are the same.
    """
    published = read_bert_config(Path(folder))
    constants = ("heads", "activation", "eps")
    key_map = bert_key_map(model.config)
    key_map = _fit_trunk(key_map, model.config, published, folder, num_layers, rows, constants)
    load_model(model, key_map, open_source(folder))


def init_vlp_from_bert(
    model: VLP,
    folder: str | os.PathLike,
    *,
    num_layers: int | None = None,
    rows: np.ndarray | None = None,
    fresh: Sequence[str] = (),
) -> None:
    """Fills a VLP's trunk from BERT or MiniLM weights, in place.

    Region embeddings and source head stay as they are. Where the checkpoint has no
    masked-LM head (MiniLM), its transform starts as the identity, so that hidden states meet
    the tied embedding table as they are. Two token types fill VLP's six (rows 2, 3, 4 <- 0,
    row 5 <- 1).

    Args:
      model: VLP whose trunk has the checkpoint's widths.
      folder, num_layers, rows: as for `fill_bert`.
      fresh: patterns of further parameters that stay as they are.
    """
    published = read_bert_config(Path(folder))
    trunk = model.config.bert
    source = open_source(folder)
    has_head = any(key.startswith("cls.predictions.transform.") for key in source.specs())
    key_map = KeyMap(
        rules=[*bert_rules("bert.", "bert/"), *(mlm_rules("mlm_head") if has_head else [])],
        # The encoder's keys may lack `bert.`; give it to all.
        rename=[(r"^(embeddings|encoder|pooler)\.", r"bert.\1."), *OLD_NAMES],
        ignore=[BUFFERS, r"^bert\.pooler\.", r"^cls\.seq_relationship\."],
        fresh=(*_VISUAL, SOURCE_HEAD, *fresh) + (() if has_head else (r"^mlm_head/",)),
        tied=mlm_tied("bert."),
    )
    key_map = fit_types(key_map, published.types, trunk.types)
    # VLP's eps (1e-5) is not BERT's, yet VLP started from BERT: eps is not compared.
    constants = ("heads", "activation")
    key_map = _fit_trunk(key_map, trunk, published, folder, num_layers, rows, constants)
    load_model(model, key_map, source)
    if not has_head:
        kernel = model.mlm_head.dense.kernel
        kernel.set_value(np.eye(trunk.hidden, dtype=kernel.dtype))


def start_vlp(path: str | os.PathLike, model: VLP) -> None:
    """Fills a VLP from a checkpoint of VLP's pretraining or of WebQA's fine-tuning, in place.

    The source head stays as it is where the checkpoint has none (pretraining), and so do those
    tensors of the region embeddings that have another shape there (VinVL's or CLIP's model from
    VLP's checkpoint): of VinVL's all but the bias of the positions, for the original takes a
    checkpoint tensor by tensor (modeling.py l.763-773).

    Args:
      path: a file or folder (see `open_source`), e.g. `model.11.bin`.
      model: a VLP whose trunk has the checkpoint's sizes. A checkpoint with two token types
        fills six by VLP's rule.
    """
    source = open_source(path)
    shapes, config = shapes_of(source), model.config
    key_map = vlp_key_map(config, source_head="context_classifier.weight" in shapes)
    if TYPE_TABLE in shapes:
        key_map = fit_types(key_map, shapes[TYPE_TABLE][0], config.bert.types)
    load_model(model, _fit_regions(key_map, shapes, model), source)


def _fit_regions(key_map: KeyMap, theirs: Shapes, model: VLP) -> KeyMap:
    """The map without those tensors of the region embeddings whose shapes differ."""
    ours = {name: value.shape for name, value in flatten_named(nnx.state(model)).items()}
    unfit = [
        rule
        for rule in key_map.rules
        # torch keeps a kernel as (out, in).
        if rule.path.startswith("region_") and theirs.get(rule.key) != ours[rule.path][::-1]
    ]
    if not unfit:
        return key_map
    rules = [rule for rule in key_map.rules if rule not in unfit]
    taken = {rule.key for rule in rules}
    left = [key for key in theirs if re.match(r"vis_(pe_)?embed\.", key) and key not in taken]
    return dataclasses.replace(
        key_map,
        rules=rules,
        ignore=(*key_map.ignore, *(f"^{re.escape(key)}$" for key in left)),
        fresh=(*key_map.fresh, *(f"^{rule.path}$" for rule in unfit)),
    )


def _fit_trunk(
    key_map: KeyMap,
    ours: BertConfig,
    published: BertConfig,
    folder: str | os.PathLike,
    num_layers: int | None,
    rows: np.ndarray | None,
    constants: tuple[str, ...],
) -> KeyMap:
    """The map that takes the first `num_layers` layers and `rows` of the embedding table."""
    wanted = published.layers if num_layers is None else num_layers
    if wanted != ours.layers:
        raise UserError(
            f"{folder}: the model has {ours.layers} layers, {wanted} of the checkpoint's "
            f"{published.layers} are to be read; give num_layers={ours.layers} to take the first "
            f"{ours.layers}, or change the model."
        )
    for field in constants:
        mine, theirs = getattr(ours, field), getattr(published, field)
        if mine != theirs:
            raise UserError(
                f"{folder}: the model's {field} is {mine!r}, the checkpoint's {theirs!r}; "
                "set it to the checkpoint's."
            )
    if not 0 < wanted <= published.layers:
        raise UserError(
            f"num_layers: {wanted} layers wanted, the checkpoint has {published.layers}; choose "
            f"1 to {published.layers}."
        )
    if dropped := "|".join(map(str, range(wanted, published.layers))):
        ignore = (*key_map.ignore, rf"encoder\.layer\.({dropped})\.")
        key_map = dataclasses.replace(key_map, ignore=ignore)
    if rows is not None:
        pick = Transform(lambda table: table[rows], None)
        key_map = key_map.with_transform("embeddings.word_embeddings.weight", pick)
    return key_map
