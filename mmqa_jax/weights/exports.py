"""Models written back as they are published: safetensors and transformers' config.json."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from mmqa_jax.core.files import write_json
from mmqa_jax.models.bart_config import BartConfig
from mmqa_jax.models.bert import BertConfig
from mmqa_jax.models.clip import CLIPConfig, TextConfig, VisionConfig
from mmqa_jax.models.llama_config import LlamaConfig
from mmqa_jax.models.llava import LlavaConfig
from mmqa_jax.models.mcan import MCANConfig
from mmqa_jax.models.mcan_openvqa import MCANOpenVQAConfig
from mmqa_jax.models.modified_resnet import ModifiedResNetConfig
from mmqa_jax.models.oscar import OscarConfig
from mmqa_jax.models.vlp import VLPConfig
from mmqa_jax.weights.bart import bart_key_map
from mmqa_jax.weights.bert import bert_key_map
from mmqa_jax.weights.clip import clip_key_map
from mmqa_jax.weights.config_json import config_to_json
from mmqa_jax.weights.keymap import KeyMap, StateSource
from mmqa_jax.weights.llama import llama_key_map
from mmqa_jax.weights.llava import to_transformers
from mmqa_jax.weights.mcan import mcan_openvqa_key_map, mcan_source
from mmqa_jax.weights.modified_resnet import modified_resnet_source
from mmqa_jax.weights.openers import OWN_CONFIG
from mmqa_jax.weights.oscar import oscar_key_map
from mmqa_jax.weights.safetensors_io import SAFETENSORS, TensorSource, write_safetensors
from mmqa_jax.weights.vlp import vlp_key_map

SHARD_BYTES = 5_000_000_000  # of a safetensors file, transformers' own limit


class Published(NamedTuple):
    """A model under published keys, with the config.json that goes with it."""

    source: TensorSource
    config: dict[str, Any]


def publish_llama(config: LlamaConfig, state: nnx.State) -> Published:
    """LlamaForCausalLM."""
    return Published(_untied(state, llama_key_map(config)), config.to_hf())


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
    return Published(_untied(state, oscar_key_map(config)), entries)


def publish_bart(config: BartConfig, state: nnx.State) -> Published:
    """BartForConditionalGeneration."""
    return Published(_untied(state, bart_key_map()), config.to_hf())


def publish_bert(config: BertConfig, state: nnx.State) -> Published:
    """BertModel, without a pooler if the model has none (transformers makes a new one then)."""
    return Published(_untied(state, bert_key_map(config)), bert_to_hf(config))


def publish_clip(config: CLIPConfig, state: nnx.State) -> Published:
    """CLIPModel."""
    return Published(_untied(state, clip_key_map(config)), clip_to_hf(config))


def publish_vlp(config: VLPConfig, state: nnx.State) -> Published:
    """BertForWebqa's keys, with six token types."""
    return Published(_untied(state, vlp_key_map(config)), _own_config("vlp", config))


def publish_mcan(config: MCANConfig, state: nnx.State) -> Published:
    """Keys of Prophet's MCAN or MCANForFinetune, rotary tables included."""
    return Published(mcan_source(state, config), _own_config("mcan", config))


def publish_mcan_openvqa(config: MCANOpenVQAConfig, state: nnx.State) -> Published:
    """Keys of openvqa's MCAN."""
    own = _own_config("mcan_openvqa", config)
    return Published(_untied(state, mcan_openvqa_key_map(config)), own)


def publish_modified_resnet(config: ModifiedResNetConfig, state: nnx.State) -> Published:
    """OpenAI's keys (`visual.*`)."""
    own = _own_config("modified_resnet", config)
    return Published(modified_resnet_source(state, config), own)


def write_published(
    folder: str | os.PathLike,
    published: Published,
    *,
    more: Mapping[str, Any],
    shard_bytes: int = SHARD_BYTES,
    on_bytes: Callable[[int], None] = lambda size: None,
) -> None:
    """Writes config.json and model.safetensors, or shards and their index.

    One tensor is in memory at a time. config.json is written last: a folder with it is whole.

    Args:
      folder: made if absent.
      published: the model.
      more: further entries of config.json.
      shard_bytes: largest file; a bigger model is split, with an index.
      on_bytes: called with the size of each tensor that is written.
    """
    folder = Path(folder)
    specs = published.source.specs()
    shards: list[dict[str, Any]] = [{}]
    size = total = 0
    for key, spec in specs.items():
        tensor = spec.size * np.dtype(spec.dtype).itemsize
        if shards[-1] and size + tensor > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][key] = spec
        size += tensor
        total += tensor
    names = [SAFETENSORS]
    if len(shards) > 1:
        stem, suffix = SAFETENSORS.split(".")
        names = [f"{stem}-{n:05d}-of-{len(shards):05d}.{suffix}" for n in range(1, len(shards) + 1)]

    def tensors(keys):
        for key in keys:
            tensor = published.source.read(key)
            yield key, tensor
            on_bytes(tensor.nbytes)

    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard, tensors(shard))
    if len(shards) > 1:
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / f"{SAFETENSORS}.index.json", index)
    write_json(folder / "config.json", {**published.config, **more})


def bert_to_hf(config: BertConfig) -> dict[str, Any]:
    """transformers' config.json of a BertModel."""
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp,
        "max_position_embeddings": config.positions,
        "type_vocab_size": config.types,
        "layer_norm_eps": config.eps,
        "hidden_act": config.activation,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "initializer_range": config.init_stddev,
        "position_embedding_type": "absolute",
    }


def clip_to_hf(config: CLIPConfig) -> dict[str, Any]:
    """transformers' config.json of a CLIPModel."""
    vision, text = config.vision, config.text
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": vision.embed_dim,
        "vision_config": {
            **_clip_tower(vision),
            "model_type": "clip_vision_model",
            "image_size": vision.image_size,
            "patch_size": vision.patch_size,
        },
        "text_config": {
            **_clip_tower(text),
            "model_type": "clip_text_model",
            "vocab_size": text.vocab_size,
            "max_position_embeddings": text.context,
            # 2 tells transformers to pool at the largest id (see weights.clip.clip_config).
            "eos_token_id": 2 if text.eos_token_id is None else text.eos_token_id,
        },
    }


def _clip_tower(config: VisionConfig | TextConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp_width,
        "projection_dim": config.embed_dim,
        "hidden_act": config.activation,
        "layer_norm_eps": config.eps,
    }


def _untied(state: nnx.State, key_map: KeyMap) -> StateSource:
    """Each tensor once; transformers ties the other names."""
    return StateSource(state, dataclasses.replace(key_map, tied=()))


def _own_config(name: str, config: Any) -> dict[str, Any]:
    return {OWN_CONFIG: {"model": name, "config": config_to_json(config)}}
