"""VLP and WebQA_Baseline checkpoints.

Keys: WebQnA/WebQA_Baseline pytorch_pretrained_bert/modeling.py.
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from mmqa_jax.core.trees import flatten_named
from mmqa_jax.models.bert import keys as bert
from mmqa_jax.models.vlp.atlas_reader import AtlasVLPConfig
from mmqa_jax.models.vlp.network import VLP, ClipVLPConfig, VLPConfig
from mmqa_jax.weights import layouts
from mmqa_jax.weights.config_json import config_from_json
from mmqa_jax.weights.keymap import KeyMap, Transform, linear_rules, load_model, untied_source

# Rows of a two-row type table that fill VLP's six (modeling.py l.693-700): 2, 3, 4 <- 0; 5 <- 1.
_TYPE_ROWS = np.array([0, 1, 0, 0, 0, 1])
_EXPAND_TYPES = Transform(lambda table: table[_TYPE_ROWS], None)
TYPE_TABLE = "bert.embeddings.token_type_embeddings.weight"
_WORDS = "bert.embeddings.word_embeddings.weight"

SOURCE_HEAD = r"^source_head/"
# Of our own additions (AtlasVLPConfig, ClipVLPConfig): older folders of any VLP hold all of them.
_OFF = {"region_tags": False, "copy_head": False, "written_words": None, "vision": None}


# Parameters that pretrained BERT weights do not have.
_VISUAL = (r"^region_content/", r"^region_place/")


def read_vlp(value: Any, where: str) -> VLPConfig:
    """The config of a VLP, ours included, that a folder of weights holds (config_to_json)."""
    if isinstance(value, Mapping):
        value = {key: item for key, item in value.items() if key not in _OFF or item != _OFF[key]}
        if "vision" not in value:
            value.pop("vision_layer", None)
    return config_from_json(VLPConfig | AtlasVLPConfig | ClipVLPConfig, value, where)


def vlp_key_map(config: VLPConfig, *, source_head: bool = True) -> KeyMap:
    """Key map of WebQA_Baseline's BertForWebqa.

    Args:
      config: the model's sizes; the frontend's number of linears decides the keys.
      source_head: the checkpoint has `context_classifier`. VLP's own pretraining checkpoints
        have none: the head then stays as it is.
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
            *bert.bert_rules("bert.", "bert/"),
            *bert.mlm_rules("mlm_head"),
            *content,
            *linear_rules("vis_pe_embed.0", "region_place/linears/0"),
            *head,
        ],
        rename=bert.OLD_NAMES,
        # The pooler exists and is used by neither task; the VQA head belongs to VLP's VQA2 runs.
        ignore=[bert.BUFFERS, r"^bert\.pooler\.", r"^ans_classifier\."],
        fresh=() if source_head else (SOURCE_HEAD,),
        tied=bert.mlm_tied("bert.")[:1],  # the original's decoder has no bias of its own
    )


def open_vlp(path: Path) -> layouts.Checkpoint:
    """A VLP or WebQA_Baseline checkpoint; a missing source head is newly initialized."""
    source = layouts.open_source(path)
    config = layouts.read_own_config(read_vlp, path)
    shapes = layouts.shapes_of(source)
    content = "vis_embed.0.weight"
    layouts.require_keys(
        shapes, (content, "vis_pe_embed.0.weight", *bert.bert_size_keys("bert.")), source, "VLP"
    )
    linears = [
        shapes[key] for key in layouts.numbered_keys(shapes, r"vis_embed\.(\d{1,4})\.weight")
    ]
    types = shapes["bert.embeddings.token_type_embeddings.weight"][0]
    unknown = {} if config else bert.unknown_heads(shapes[_WORDS][1], "bert.heads")
    config = config or VLPConfig(
        bert=dataclasses.replace(bert.bert_sizes(shapes, "bert."), types=6, eps=1e-5),
        region_features=linears[0][1],
        region_positions=shapes["vis_pe_embed.0.weight"][1],
        visual_hidden=tuple(shape[0] for shape in linears[:-1]),
    )

    def key_map(config: VLPConfig) -> KeyMap:
        mapping = vlp_key_map(config, source_head="context_classifier.weight" in shapes)
        return fit_types(mapping, types, config.bert.types)

    return layouts.Checkpoint(config, key_map, source, "vlp", unknown=unknown)


def publish_vlp(config: VLPConfig, state: nnx.State) -> layouts.Published:
    """BertForWebqa's keys, with six token types."""
    return layouts.Published(
        untied_source(state, vlp_key_map(config)), layouts.own_config("vlp", config)
    )


def fit_types(key_map: KeyMap, theirs: int, ours: int) -> KeyMap:
    """The key map that makes two token types (BERT's) six (VLP's), where that is the difference."""
    if (theirs, ours) != (2, 6):
        return key_map  # equal, or a difference that loading reports
    return key_map.with_transform(TYPE_TABLE, _EXPAND_TYPES)


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
    published = bert.read_bert_config(Path(folder))
    trunk = model.config.bert
    source = layouts.open_source(folder)
    has_head = any(key.startswith("cls.predictions.transform.") for key in source.specs())
    key_map = KeyMap(
        rules=[
            *bert.bert_rules("bert.", "bert/"),
            *(bert.mlm_rules("mlm_head") if has_head else []),
        ],
        # The encoder's keys may lack `bert.`; give it to all.
        rename=[(r"^(embeddings|encoder|pooler)\.", r"bert.\1."), *bert.OLD_NAMES],
        ignore=[bert.BUFFERS, r"^bert\.pooler\.", r"^cls\.seq_relationship\."],
        fresh=(*_VISUAL, SOURCE_HEAD, *fresh) + (() if has_head else (r"^mlm_head/",)),
        tied=bert.mlm_tied("bert."),
    )
    key_map = fit_types(key_map, published.types, trunk.types)
    # VLP's eps (1e-5) is not BERT's, yet VLP started from BERT: eps is not compared.
    constants = ("heads", "activation")
    key_map = bert.fit_trunk(key_map, trunk, published, folder, num_layers, rows, constants)
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
    source = layouts.open_source(path)
    shapes, config = layouts.shapes_of(source), model.config
    key_map = vlp_key_map(config, source_head="context_classifier.weight" in shapes)
    if TYPE_TABLE in shapes:
        key_map = fit_types(key_map, shapes[TYPE_TABLE][0], config.bert.types)
    load_model(model, _fit_regions(key_map, shapes, model), source)


def _fit_regions(key_map: KeyMap, theirs: layouts.Shapes, model: VLP) -> KeyMap:
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
