"""Oscar and Oscar+ checkpoints: `pytorch_model.bin` with `config.json`, in and out.

Keys: microsoft/Oscar oscar/modeling/modeling_bert.py (BertForImageCaptioning,
BertImgForPreTraining), as released with VinVL (VinVL_MODEL_ZOO.md). Oscar's first captioners
(2020), whose head has other names, are not read.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.core.mesh import DEFAULT_RULES, Rules
from mmqa_jax.models.oscar import Oscar, OscarConfig
from mmqa_jax.weights.bert import (
    BUFFERS,
    OLD_NAMES,
    bert_config,
    bert_rules,
    mlm_rules,
    mlm_tied,
)
from mmqa_jax.weights.keymap import KeyMap, linear_rules, make_loaded, norm_rules
from mmqa_jax.weights.sources import open_source

# Values of img_feature_type whose regions are vectors; the others are indices into a code book.
_VECTORS = ("faster_r-cnn", "frcnn")


def oscar_key_map(config: OscarConfig) -> KeyMap:
    """Key map of BertForImageCaptioning and BertImgForPreTraining.

    Pre-training's second head and, if the config has none, the pooler are ignored. The decoder
    must be the word table, as `--tie_weights` makes it.
    """
    pooler = linear_rules("bert.pooler.dense", "bert/pooler") if config.bert.pooler else []
    norm = norm_rules("bert.LayerNorm", "region_norm") if config.region_norm else []
    return KeyMap(
        rules=[
            *bert_rules("bert.", "bert/"),
            *pooler,
            *linear_rules("bert.img_embedding", "region_embedding"),
            *norm,
            *mlm_rules("mlm_head"),
        ],
        rename=OLD_NAMES,
        ignore=[BUFFERS, r"^cls\.seq_relationship\."]
        + ([] if config.bert.pooler else [r"^bert\.pooler\."]),
        tied=mlm_tied("bert.")[:1],  # the original's decoder has no bias of its own
    )


def oscar_config(published: Mapping[str, Any], where: str = "config.json") -> OscarConfig:
    """Our config from a published `config.json`; absent values are the original's defaults.

    Raises:
      UserError: an option that our Oscar has not (regions as codes, another activation).
    """
    kind = published.get("img_feature_type", _VECTORS[0])
    if kind not in _VECTORS:
        raise UserError(
            f"{where}: img_feature_type {kind!r} is not supported; expected one of "
            f"{', '.join(_VECTORS)}, a checkpoint whose regions are vectors."
        )
    return OscarConfig(
        bert_config(published, where),
        region_features=published.get("img_feature_dim", 2054),
        region_norm=bool(published.get("use_img_layernorm")),
        region_eps=published.get("img_layer_norm_eps", 1e-12),
    )


def load_oscar(
    folder: str | os.PathLike,
    *,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
    param_dtype: str = "float32",
    **changes: Any,
) -> Oscar:
    """Reads an Oscar or Oscar+ checkpoint.

    Args:
      folder: with `config.json` and `pytorch_model.bin` or `model.safetensors`.
      mesh: where the parameters go, each tensor straight onto its shards; None is the default
        device.
      rules: logical axis -> mesh axis.
      param_dtype: of the parameters.
      changes: fields of BertConfig that the checkpoint does not decide (dtype, attention, remat,
        unroll, dropouts, pooler).

    Raises:
      UserError: a missing or broken file, another model's, tensors that do not fit.
    """
    file = Path(folder) / "config.json"
    published = oscar_config(read_json(file), str(file))
    config = dataclasses.replace(published, bert=dataclasses.replace(published.bert, **changes))
    key_map, source = oscar_key_map(config), open_source(folder)
    where = {"mesh": mesh, "rules": rules, "param_dtype": param_dtype}
    return make_loaded(lambda: Oscar(config, rngs=nnx.Rngs(0)), key_map, source, **where)
