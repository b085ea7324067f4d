"""Published checkpoints opened as config, key map and tensors, whatever their layout.

Headers are read, and nothing else. Where a layout has a config file it decides; where it has
none (research code saves tensors alone), the shapes tell the sizes, and what no shape shows (the
number of heads) is the published models' (`--set` of the command changes it).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.models.bart_config import BartConfig
from mmqa_jax.models.bert import BertConfig
from mmqa_jax.models.mcan import MCANConfig, mcan_prophet
from mmqa_jax.models.mcan_layers import FusionConfig
from mmqa_jax.models.mcan_openvqa import MCANOpenVQAConfig, mcan_small
from mmqa_jax.models.modified_resnet import ModifiedResNetConfig
from mmqa_jax.models.vlp import VLPConfig
from mmqa_jax.weights import mcan as mcan_weights
from mmqa_jax.weights import vlp as vlp_weights
from mmqa_jax.weights.bart import bart_key_map
from mmqa_jax.weights.bert import bert_config, bert_key_map
from mmqa_jax.weights.clip import clip_config, clip_key_map
from mmqa_jax.weights.clip_openai import (
    SplitAttention,
    clip_openai_config,
    clip_openai_key_map,
    is_openai_clip,
)
from mmqa_jax.weights.config_json import config_from_json
from mmqa_jax.weights.hf_config import config_file, hf_config
from mmqa_jax.weights.keymap import KeyMap
from mmqa_jax.weights.llama import open_llama
from mmqa_jax.weights.llava import open_llava
from mmqa_jax.weights.modified_resnet import modified_resnet_config, modified_resnet_key_map
from mmqa_jax.weights.oscar import oscar_config, oscar_key_map
from mmqa_jax.weights.safetensors_io import TensorSource
from mmqa_jax.weights.sources import open_source

# transformers' config.json of an exported model that transformers has not.
OWN_CONFIG = "mmqa_jax"

Shapes = Mapping[str, tuple[int, ...]]


class Checkpoint(NamedTuple):
    """What is needed to fill a model.

    Attributes:
      config: the model's.
      key_map: of the layout.
      source: the tensors.
      layout: what was recognised, for the record.
      check: (source, config) -> None, raises UserError where tensors that are no parameters
        contradict the config.
    """

    config: Any
    key_map: KeyMap
    source: TensorSource
    layout: str
    check: Callable[[TensorSource, Any], None] | None = None


def open_clip(path: Path) -> Checkpoint:
    """CLIP as `CLIPModel.save_pretrained` writes it, or a file as OpenAI published it."""
    if path.is_file() and is_openai_clip((source := open_source(path)).specs()):
        config = clip_openai_config(source)
        return Checkpoint(config, clip_openai_key_map(config), SplitAttention(source), "openai")
    config = clip_config(hf_config(path, "clip"))
    return Checkpoint(config, clip_key_map(config), open_source(path), "transformers")


def open_bert(path: Path) -> Checkpoint:
    """A BERT of transformers, with its pooler if it has one."""
    config = bert_config(hf_config(path, "bert"), str(config_file(path)))
    source = open_source(path)
    pooler = any(re.search(r"(^|\.)pooler\.dense\.weight$", key) for key in source.specs())
    config = dataclasses.replace(config, pooler=pooler)
    return Checkpoint(config, bert_key_map(config), source, "transformers")


def open_bart(path: Path) -> Checkpoint:
    """A BART of transformers, or a state dict alone, which has bart-large-cnn's sizes then."""
    file = config_file(path)
    config, layout = BartConfig(), "state dict"
    if path.is_dir() or file.exists():
        config, layout = BartConfig.from_hf(read_json(file), str(file)), "transformers"
    source = open_source(path)
    key_map = bart_key_map()
    bias = "final_logits_bias"
    if bias not in source.specs():  # zeros then, as in transformers
        key_map = dataclasses.replace(key_map, fresh=(rf"^{bias}$",))
    return Checkpoint(config, key_map, source, layout)


def open_any_llama(path: Path) -> Checkpoint:
    """A LLaMA of transformers, Meta, llama.cpp (GGUF) or llama2.c."""
    return Checkpoint(*open_llama(path))


def open_any_llava(path: Path, clip: Path | None = None) -> Checkpoint:
    """A LLaVA-1.5 of transformers or of haotian-liu/LLaVA."""
    config, *found = open_llava(path, clip)
    layout = "haotian-liu/LLaVA" if config.image_token < 0 else "transformers"
    return Checkpoint(config, *found, layout)


def open_oscar(path: Path) -> Checkpoint:
    """An Oscar or Oscar+ as the original saves it, with its pooler if it has one."""
    file = config_file(path)
    source = open_source(path)
    config = oscar_config(read_json(file), str(file))
    _demand(source.specs(), ("bert.img_embedding.weight",), source, "Oscar")
    pooler = "bert.pooler.dense.weight" in source.specs()
    config = dataclasses.replace(config, bert=dataclasses.replace(config.bert, pooler=pooler))
    return Checkpoint(config, oscar_key_map(config), source, "oscar")


def open_modified_resnet(path: Path) -> Checkpoint:
    """The image tower of a CLIP with a ResNet: OpenAI's archive, or its tensors."""
    source = open_source(path)
    config = _own(ModifiedResNetConfig, path) or modified_resnet_config(source)
    return Checkpoint(config, modified_resnet_key_map(config), source, "openai")


def open_vlp(path: Path) -> Checkpoint:
    """A VLP or WebQA_Baseline checkpoint; without a source head, that head starts anew."""
    source = open_source(path)
    config = _own(VLPConfig, path)
    shapes = {key: spec.shape for key, spec in source.specs().items()}
    content = "vis_embed.0.weight"
    _demand(shapes, (content, "vis_pe_embed.0.weight", *_bert_keys("bert.")), source, "VLP")
    linears = [shapes[key] for key in _numbered(shapes, r"vis_embed\.(\d+)\.weight")]
    types = shapes["bert.embeddings.token_type_embeddings.weight"][0]
    config = config or VLPConfig(
        bert=dataclasses.replace(_bert_sizes(shapes, "bert."), types=6, eps=1e-5),
        region_features=linears[0][1],
        region_positions=shapes["vis_pe_embed.0.weight"][1],
        visual_hidden=tuple(shape[0] for shape in linears[:-1]),
    )
    has_head = "context_classifier.weight" in shapes
    key_map = vlp_weights.vlp_key_map(config, source_head=has_head)
    key_map = vlp_weights.fit_types(key_map, types, config.bert.types)
    return Checkpoint(config, key_map, source, "vlp")


def open_mcan(path: Path) -> Checkpoint:
    """Prophet's MCAN, pretrained or finetuned."""
    source = open_source(path)
    shapes = {key: spec.shape for key, spec in source.specs().items()}
    base = mcan_prophet()
    inner = "backbone.enc_list.1.mlp.fc.linear.weight"
    image = "img_feat_linear.0.weight"
    own = ("lang_adapt.0.weight", image, inner, "proj.weight", *_FLAT_KEYS, *_bert_keys("bert."))
    _demand(shapes, own, source, "Prophet's MCAN")
    halves = len(_numbered(shapes, r"backbone\.enc_list\.(\d+)\..*norm1\.weight"))
    grid = shapes.get("backbone.dec_list.0.rope.sin", (base.grid**2,))[0]
    config = _own(MCANConfig, path) or MCANConfig(
        text=_bert_sizes(shapes, "bert."),
        fusion=_fusion_sizes(shapes, base.fusion, halves // 2, shapes[inner][0]),
        image_features=shapes[image][1],
        grid=round(grid**0.5),
        answers=shapes["proj.weight"][0],
        new_answers=shapes.get("proj1.weight", (0,))[0],
    )
    key_map = mcan_weights.mcan_key_map(config)
    return Checkpoint(config, key_map, source, "prophet", mcan_weights.check_rotation)


def open_mcan_openvqa(path: Path) -> Checkpoint:
    """openvqa's MCAN, of its older versions too."""
    source = open_source(path)
    shapes: dict[str, tuple[int, ...]] = {}
    for key, spec in source.specs().items():
        for pattern, replacement in mcan_weights.mcan_openvqa_key_map(mcan_small(1)).rename:
            key = re.sub(pattern, replacement, key)
        shapes[key] = spec.shape
    inner, region = "backbone.enc_list.0.ffn.mlp.fc.linear.weight", "adapter.frcn_linear.weight"
    own = ("embedding.weight", "lstm.weight_ih_l0", region, inner, "proj.weight", *_FLAT_KEYS)
    _demand(shapes, own, source, "openvqa's MCAN")
    layers = len(_numbered(shapes, r"backbone\.enc_list\.(\d+)\.norm1\.a_2"))
    config = _own(MCANOpenVQAConfig, path) or MCANOpenVQAConfig(
        vocab_size=shapes["embedding.weight"][0],
        fusion=_fusion_sizes(shapes, FusionConfig(), layers, shapes[inner][0]),
        word_features=shapes["embedding.weight"][1],
        region_features=shapes[region][1],
        answers=shapes["proj.weight"][0],
    )
    return Checkpoint(config, mcan_weights.mcan_openvqa_key_map(config), source, "openvqa")


def _own(kind: type, path: Path) -> Any:
    """The config that our export wrote beside tensors of research code, None without one."""
    file = config_file(path)
    if not path.is_dir() or not file.exists():
        return None
    content = read_json(file)
    own = content.get(OWN_CONFIG) if isinstance(content, dict) else None
    if own is None:
        return None
    return config_from_json(kind, own.get("config"), f"{file}, key {OWN_CONFIG}.config")


def _demand(
    shapes: Mapping[str, Any], keys: Iterable[str], source: TensorSource, what: str
) -> None:
    missing = [key for key in keys if key not in shapes]
    if missing:
        others = ", ".join(list(shapes)[:3]) or "no tensors"
        raise UserError(
            f"{source.name}: no checkpoint of {what}: it lacks {', '.join(missing[:6])}, and "
            f"begins with {others}; give a checkpoint of that model, or the --model of this one."
        )


def _numbered(shapes: Shapes, pattern: str) -> list[str]:
    """Keys that match, in the order of the number in them."""
    found = {int(match[1]): key for key in shapes if (match := re.fullmatch(pattern, key))}
    return [found[number] for number in sorted(found)]


def _bert_keys(prefix: str) -> tuple[str, ...]:
    embeddings = f"{prefix}embeddings."
    kinds = ("word", "position", "token_type")
    tables = tuple(f"{embeddings}{kind}_embeddings.weight" for kind in kinds)
    return (*tables, f"{prefix}encoder.layer.0.intermediate.dense.weight")


def _bert_sizes(shapes: Shapes, prefix: str) -> BertConfig:
    """A BERT's sizes; its heads have 64 units, as in all that Google published."""
    word, position, types, inner = (shapes[key] for key in _bert_keys(prefix))
    layer = rf"{re.escape(prefix)}encoder\.layer\.(\d+)\.output\.dense\.weight"
    return BertConfig(
        vocab_size=word[0],
        hidden=word[1],
        layers=len(_numbered(shapes, layer)),
        heads=max(word[1] // 64, 1),
        mlp=inner[0],
        positions=position[0],
        types=types[0],
    )


_FLAT_KEYS = (
    "attflat_lang.mlp.fc.linear.weight",
    "attflat_lang.mlp.linear.weight",
    "attflat_lang.linear_merge.weight",
)


def _fusion_sizes(shapes: Shapes, base: FusionConfig, layers: int, mlp: int) -> FusionConfig:
    """The fusion's sizes; its 8 heads are those of all published ones."""
    flat_mlp, hidden = shapes[_FLAT_KEYS[0]]
    return dataclasses.replace(
        base,
        hidden=hidden,
        layers=layers,
        mlp=mlp,
        flat_mlp=flat_mlp,
        glimpses=shapes[_FLAT_KEYS[1]][0],
        flat_out=shapes[_FLAT_KEYS[2]][0],
    )
