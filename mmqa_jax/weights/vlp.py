"""VLP and WebQA_Baseline checkpoints, and VLP started from BERT weights.

Keys: reference.md 2.5 (WebQA_Baseline pytorch_pretrained_bert/modeling.py).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.vlp import VLP, VLPConfig
from mmqa_jax.weights.bert import (
    BUFFERS,
    OLD_NAMES,
    bert_rules,
    first_layers,
    mlm_rules,
    mlm_tied,
    read_bert_config,
    trunk_layers,
    word_rows,
)
from mmqa_jax.weights.keymap import KeyMap, Transform, linear_rules, load_model
from mmqa_jax.weights.safetensors_io import SafetensorsSource
from mmqa_jax.weights.sources import open_source

# Rows of a two-row type table that fill VLP's six (modeling.py l.693-700): 2, 3, 4 <- 0; 5 <- 1.
_TYPE_ROWS = np.array([0, 1, 0, 0, 0, 1])
_EXPAND_TYPES = Transform(lambda table: table[_TYPE_ROWS], None)
_TYPE_TABLE = "bert.embeddings.token_type_embeddings.weight"

# Parameters that pretrained BERT weights do not know.
_VISUAL = (r"^region_content/", r"^region_place/")
_SOURCE_HEAD = r"^source_head/"
_COPY_HEAD = r"^copy_head/"


def vlp_key_map(config: VLPConfig, *, source_head: bool = True) -> KeyMap:
    """Key map of WebQA_Baseline's BertForWebqa.

    Args:
      config: the model's sizes; the frontend's number of linears decides the keys.
      source_head: the checkpoint has `context_classifier`. VLP's own pretraining checkpoints
        have not: the head then stays as it is.
    """
    content = [
        rule
        for index in range(len(config.visual_hidden) + 1)
        # A torch Sequential of Linear, ReLU, Linear, ...: linears have even numbers.
        for rule in linear_rules(f"vis_embed.{2 * index}", f"region_content/linears/{index}")
    ]
    head = linear_rules("context_classifier", "source_head") if source_head else []
    return KeyMap(
        rules=[
            *bert_rules("bert.", "bert/"),
            *mlm_rules("mlm_head"),
            *content,
            *linear_rules("vis_pe_embed.0", "region_place/linears/0"),
            *head,
        ],
        rename=OLD_NAMES,
        # The pooler exists and is used by neither task; the VQA head belongs to VLP's VQA2 runs.
        ignore=[BUFFERS, r"^bert\.pooler\.", r"^ans_classifier\."],
        fresh=() if source_head else (_SOURCE_HEAD,),
        tied=mlm_tied("bert.")[:1],  # the original's decoder has no bias of its own
    )


def load_vlp(
    path: str | os.PathLike, model: VLP, *, source_head: bool = True, fresh_visual: bool = False
) -> None:
    """Fills a VLP from a WebQA or VLP checkpoint, in place.

    Args:
      path: a file or folder (see `open_source`), e.g. `model.11.bin`.
      model: a VLP whose config has the checkpoint's sizes. A checkpoint with two token types
        fills six by VLP's rule.
      source_head: the checkpoint has the source-selection head; else it stays as it is.
      fresh_visual: leave the region embeddings as they are. VinVL features start so: their
        sizes differ from the VLP checkpoint's.

    Raises:
      UserError: a missing or broken file, tensors that do not fit.
    """
    source = open_source(path)
    key_map = vlp_key_map(model.config, source_head=source_head)
    types = source.specs().get(_TYPE_TABLE)
    if types is not None:
        key_map = fit_types(key_map, types.shape[0], model.config.bert.types)
    if fresh_visual:
        rules = [r for r in key_map.rules if not r.path.startswith("region_")]
        ignore = (*key_map.ignore, r"^vis_embed\.", r"^vis_pe_embed\.")
        fresh = (*key_map.fresh, *_VISUAL)
        key_map = dataclasses.replace(key_map, rules=rules, ignore=ignore, fresh=fresh)
    load_model(model, key_map, source)


def start_vlp(path: str | os.PathLike, model: VLP) -> None:
    """Fills a VLP from a checkpoint of VLP's pretraining or of WebQA's fine-tuning, in place.

    The source head stays as it is where the checkpoint has none (pretraining), and so do the
    region embeddings where it has other features' (VinVL's or CLIP's model from VLP's checkpoint).

    Raises:
      UserError: as `load_vlp`.
    """
    shapes = {key: spec.shape for key, spec in open_source(path).specs().items()}
    config = model.config
    content = (config.visual_hidden or (config.bert.hidden,))[0], config.region_features
    place = config.bert.hidden, config.region_positions
    same = (shapes.get("vis_embed.0.weight"), shapes.get("vis_pe_embed.0.weight"))
    load_vlp(
        path,
        model,
        source_head="context_classifier.weight" in shapes,
        fresh_visual=config.vision is not None or same != (content, place),
    )


def init_vlp_from_bert(
    model: VLP,
    folder: str | os.PathLike,
    *,
    num_layers: int | None = None,
    rows: np.ndarray | None = None,
    new_types: Sequence[int] = (),
) -> None:
    """Fills a VLP's trunk from BERT or MiniLM weights, in place.

    Region embeddings, source head and copy head stay as they are. Where the checkpoint has no
    masked-LM head (MiniLM), its transform starts as the identity, so that hidden states meet
    the tied word table as they are. Two token types fill VLP's six (rows 2, 3, 4 <- 0, row 5 <- 1).

    Args:
      model: VLP whose trunk has the checkpoint's widths.
      folder: `config.json` and safetensors, e.g. `minilm_path()`.
      num_layers: take only the checkpoint's first so many layers, the number of the model's
        trunk; None demands that the numbers be equal.
      rows: see weights.bert.fill_bert.
      new_types: token types that mean something the checkpoint has no type for (ours). To each
        a random vector of length 1, that of a word, is added: a copy of another type, like
        those VLP starts from, is told apart only after hundreds of steps.

    Raises:
      UserError: no such token types, or the trunk's constants or sizes are not the checkpoint's.
    """
    published = read_bert_config(folder)
    trunk = model.config.bert
    if not all(0 <= number < trunk.types for number in new_types):
        raise UserError(
            f"config key new_types={tuple(new_types)}: token types 0 to {trunk.types - 1} were "
            "expected; change the config."
        )
    # VLP's eps (1e-5) is not BERT's, yet VLP started from BERT: eps is not compared.
    wanted = trunk_layers(trunk, published, folder, num_layers, ("heads", "activation"))
    source = SafetensorsSource(folder)
    has_head = any(key.startswith("cls.predictions.transform.") for key in source.specs())
    key_map = KeyMap(
        rules=[*bert_rules("bert.", "bert/"), *(mlm_rules("mlm_head") if has_head else [])],
        # The encoder's keys may lack `bert.`; give it to all.
        rename=[(r"^(embeddings|encoder|pooler)\.", r"bert.\1."), *OLD_NAMES],
        ignore=[BUFFERS, r"^bert\.pooler\.", r"^cls\.seq_relationship\."],
        fresh=(*_VISUAL, _SOURCE_HEAD, _COPY_HEAD) + (() if has_head else (r"^mlm_head/",)),
        tied=mlm_tied("bert."),
    )
    key_map = fit_types(key_map, published.types, trunk.types)
    key_map = word_rows(first_layers(key_map, wanted, published.layers), rows)
    load_model(model, key_map, source)
    table = model.bert.embeddings.token_type.table
    for number in new_types:
        vector = jax.random.normal(jax.random.key(number), (trunk.hidden,), table.dtype)
        table[...] = table[...].at[number].add(vector / jnp.linalg.norm(vector))
    if not has_head:
        kernel = model.mlm_head.dense.kernel
        kernel[...] = jnp.eye(trunk.hidden, dtype=kernel.dtype)


def fit_types(key_map: KeyMap, theirs: int, ours: int) -> KeyMap:
    """The key map that makes two token types (BERT's) six (VLP's), where that is the difference."""
    if (theirs, ours) != (2, 6):
        return key_map  # equal, or a difference that loading reports
    rules = [
        dataclasses.replace(rule, transform=_EXPAND_TYPES) if rule.key == _TYPE_TABLE else rule
        for rule in key_map.rules
    ]
    return dataclasses.replace(key_map, rules=rules)
