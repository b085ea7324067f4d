"""Models written back as they are published: safetensors and transformers' config.json."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from mmqa_jax.core.files import write_json
from mmqa_jax.models.bart_config import BartConfig
from mmqa_jax.models.bert import BertConfig
from mmqa_jax.models.clip import CLIPConfig
from mmqa_jax.models.llama_config import LlamaConfig
from mmqa_jax.models.llava import LlavaConfig
from mmqa_jax.models.mcan import MCANConfig
from mmqa_jax.models.mcan_openvqa import MCANOpenVQAConfig
from mmqa_jax.models.modified_resnet import ModifiedResNetConfig
from mmqa_jax.models.oscar import OscarConfig
from mmqa_jax.models.vlp import VLPConfig
from mmqa_jax.weights.bart import bart_key_map
from mmqa_jax.weights.bert import bert_key_map, bert_to_hf
from mmqa_jax.weights.clip import clip_key_map, clip_to_hf
from mmqa_jax.weights.config_json import config_to_json
from mmqa_jax.weights.keymap import untied_source
from mmqa_jax.weights.llama import llama_key_map, stacked_source
from mmqa_jax.weights.llava import to_transformers
from mmqa_jax.weights.mcan import mcan_openvqa_key_map, mcan_source
from mmqa_jax.weights.modified_resnet import modified_resnet_source
from mmqa_jax.weights.openers import OWN_CONFIG
from mmqa_jax.weights.oscar import oscar_key_map
from mmqa_jax.weights.safetensors_io import SHARD_BYTES, TensorSource, write_sharded
from mmqa_jax.weights.vlp import vlp_key_map


class Published(NamedTuple):
    """A model under published keys, with the config.json that goes with it."""

    source: TensorSource
    config: dict[str, Any]


def publish_llama(config: LlamaConfig, state: nnx.State) -> Published:
    """LlamaForCausalLM."""
    return Published(stacked_source(state, llama_key_map(config)), config.to_hf())


def publish_llava(config: LlavaConfig, state: nnx.State) -> Published:
    """LlavaForConditionalGeneration."""
    entries, source = to_transformers(config, state)
    return Published(source, entries)


def publish_oscar(config: OscarConfig, state: nnx.State) -> Published:
    """The original's BertForImageCaptioning."""
    regions = {
        "img_feature_dim": config.region_features,
        "img_feature_type": "faster_r-cnn",
        "use_img_layernorm": int(config.region_norm),
        "img_layer_norm_eps": config.region_eps,
        "tie_weights": True,
    }
    entries = bert_to_hf(config.bert) | {"architectures": ["BertForImageCaptioning"]} | regions
    return Published(untied_source(state, oscar_key_map(config)), entries)


def publish_bart(config: BartConfig, state: nnx.State) -> Published:
    """BartForConditionalGeneration."""
    return Published(untied_source(state, bart_key_map()), config.to_hf())


def publish_bert(config: BertConfig, state: nnx.State) -> Published:
    """BertModel, without a pooler if the model has none (transformers makes a new one then)."""
    return Published(untied_source(state, bert_key_map(config)), bert_to_hf(config))


def publish_clip(config: CLIPConfig, state: nnx.State) -> Published:
    """CLIPModel."""
    return Published(untied_source(state, clip_key_map(config)), clip_to_hf(config))


def publish_vlp(config: VLPConfig, state: nnx.State) -> Published:
    """BertForWebqa's keys, with six token types."""
    return Published(untied_source(state, vlp_key_map(config)), _own_config("vlp", config))


def publish_mcan(config: MCANConfig, state: nnx.State) -> Published:
    """Keys of Prophet's MCAN or MCANForFinetune, rotary tables included."""
    return Published(mcan_source(state, config), _own_config("mcan", config))


def publish_mcan_openvqa(config: MCANOpenVQAConfig, state: nnx.State) -> Published:
    """Keys of openvqa's MCAN."""
    own = _own_config("mcan_openvqa", config)
    return Published(untied_source(state, mcan_openvqa_key_map(config)), own)


def publish_modified_resnet(config: ModifiedResNetConfig, state: nnx.State) -> Published:
    """OpenAI's keys (`visual.*`)."""
    own = _own_config("modified_resnet", config)
    return Published(modified_resnet_source(state, config), own)


def write_published(
    folder: str | os.PathLike,
    published: Published,
    *,
    more: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
    on_bytes: Callable[[int], None] = lambda size: None,
) -> None:
    """Writes the weights (see `write_sharded`), then config.json: a folder with it is whole.

    Args:
      folder: made if absent.
      published: the model.
      more: further entries of config.json (bos_token_id, eos_token_id, ...).
      shard_bytes, on_bytes: see `write_sharded`.
    """
    write_sharded(folder, published.source, shard_bytes=shard_bytes, on_bytes=on_bytes)
    dtype = np.dtype(next(iter(published.source.specs().values())).dtype).name
    entries = {**published.config, "torch_dtype": dtype, **(more or {})}
    write_json(Path(folder) / "config.json", entries)


def _own_config(name: str, config: Any) -> dict[str, Any]:
    return {OWN_CONFIG: {"model": name, "config": config_to_json(config)}}
