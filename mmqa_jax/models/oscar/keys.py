"""Oscar and Oscar+ checkpoints: `pytorch_model.bin` with `config.json`, in and out.

Keys: microsoft/Oscar oscar/modeling/modeling_bert.py (BertForImageCaptioning,
BertImgForPreTraining), as released with VinVL (VinVL_MODEL_ZOO.md). Oscar's first captioners
(2020), whose head has other names, are not read.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.models.bert import keys as bert
from mmqa_jax.models.oscar.network import OscarConfig
from mmqa_jax.weights.config_json import kinds
from mmqa_jax.weights.keymap import KeyMap, linear_rules, norm_rules, untied_source
from mmqa_jax.weights.layouts import Checkpoint, Published, config_file, open_source, require_keys

# Values of img_feature_type whose regions are vectors; the others are indices into a code book.
_VECTORS = ("faster_r-cnn", "frcnn")


_READ = kinds(
    size="img_feature_dim",
    number="img_layer_norm_eps",
    name="img_feature_type",
    any="use_img_layernorm",  # 0, 1 or null
)
# Of training, of other heads, and of regions as codes; that the head is the embedding table is
# checked by its tensors.
_HARMLESS = (
    *("tie_weights", "freeze_embedding", "label_smoothing", "drop_worst_ratio", "loss_type"),
    *("drop_worst_after", "code_voc", "classifier", "cls_hidden_scale", "num_contrast_classes"),
    *("training_head_type", "max_text_seq_length", "num_choice", "use_b", "visual_embedding_dim"),
)


def oscar_key_map(config: OscarConfig) -> KeyMap:
    """Key map of BertForImageCaptioning and BertImgForPreTraining.

    Pre-training's second head and, if the config has none, the pooler are ignored. The decoder
    must be the embedding table, as `--tie_weights` makes it.
    """
    pooler = linear_rules("bert.pooler.dense", "bert/pooler") if config.bert.pooler else []
    norm = norm_rules("bert.LayerNorm", "region_norm") if config.region_norm else []
    return KeyMap(
        rules=[
            *bert.bert_rules("bert.", "bert/"),
            *pooler,
            *linear_rules("bert.img_embedding", "region_embedding"),
            *norm,
            *bert.mlm_rules("mlm_head"),
        ],
        rename=bert.OLD_NAMES,
        ignore=[bert.BUFFERS, r"^cls\.seq_relationship\."]
        + ([] if config.bert.pooler else [r"^bert\.pooler\."]),
        tied=bert.mlm_tied("bert.")[:1],  # the original's decoder has no bias of its own
    )


def oscar_config(published: Mapping[str, Any], where: str = "config.json") -> OscarConfig:
    """Our config from a published `config.json`; absent values are the original's defaults."""
    kind = published.get("img_feature_type", _VECTORS[0])
    if kind not in _VECTORS:
        raise UserError(
            f"{where}: img_feature_type {kind!r} is not supported; expected one of "
            f"{', '.join(_VECTORS)}, a checkpoint whose regions are vectors."
        )
    return OscarConfig(
        bert.bert_config(published, where, read=_READ, harmless=_HARMLESS),
        region_features=published.get("img_feature_dim", 2054),
        region_norm=bool(published.get("use_img_layernorm")),
        region_eps=published.get("img_layer_norm_eps", 1e-12),
    )


def open_oscar(path: Path) -> Checkpoint:
    """An Oscar or Oscar+ as the original saves it, with its pooler if it has one."""
    file = config_file(path)
    config = oscar_config(read_json(file), str(file))
    source = open_source(path)
    require_keys(source.specs(), ("bert.img_embedding.weight",), source, "Oscar")
    pooler = "bert.pooler.dense.weight" in source.specs()
    config = dataclasses.replace(config, bert=dataclasses.replace(config.bert, pooler=pooler))
    return Checkpoint(config, oscar_key_map, source, "oscar")


def publish_oscar(config: OscarConfig, state: nnx.State) -> Published:
    """The original's BertForImageCaptioning."""
    regions = {
        "img_feature_dim": config.region_features,
        "img_feature_type": "faster_r-cnn",
        "use_img_layernorm": int(config.region_norm),
        "img_layer_norm_eps": config.region_eps,
        "tie_weights": True,
    }
    entries = bert.bert_to_hf(config.bert) | {"architectures": ["BertForImageCaptioning"]} | regions
    return Published(untied_source(state, oscar_key_map(config)), entries)
