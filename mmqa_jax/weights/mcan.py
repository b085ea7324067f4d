"""Checkpoints of both MCANs: Prophet's (`epoch13.pkl`) and openvqa's (`epoch13.pkl`).

Both projects save training states: a dict with `state_dict` beside optimizer and rates.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.mcan import MCAN, MCANConfig
from mmqa_jax.models.mcan_layers import FusionConfig, grid_rotation
from mmqa_jax.models.mcan_openvqa import MCANOpenVQA, MCANOpenVQAConfig
from mmqa_jax.weights.bert import BUFFERS, bert_rules
from mmqa_jax.weights.keymap import (
    TRANSPOSE,
    KeyMap,
    Rule,
    StateSource,
    linear_rules,
    load_into,
    load_model,
    norm_rules,
)
from mmqa_jax.weights.published import PublishedSource, renames
from mmqa_jax.weights.safetensors_io import TensorSource
from mmqa_jax.weights.sources import open_source

_LINEARS = {"linear_q": "query", "linear_k": "key", "linear_v": "value", "linear_merge": "out"}
# Prophet's rope(q, k) is declared forward(k, q): what linear_k makes asks, what linear_q makes
# is asked.
_SWAPPED = _LINEARS | {"linear_q": "key", "linear_k": "query"}

# Part of the fusion -> published name.
_FLAT = {
    "flatten_question": "attflat_lang",
    "flatten_image": "attflat_img",
    "norm": "proj_norm",
}
_OPENVQA = _FLAT | {
    "encoder/attention": "backbone.enc_list.{layer}.mhatt",
    "encoder/attention_norm": "backbone.enc_list.{layer}.norm1",
    "encoder/ffn": "backbone.enc_list.{layer}.ffn.mlp",
    "encoder/ffn_norm": "backbone.enc_list.{layer}.norm2",
    "decoder/attention": "backbone.dec_list.{layer}.mhatt1",
    "decoder/attention_norm": "backbone.dec_list.{layer}.norm1",
    "decoder/guided": "backbone.dec_list.{layer}.mhatt2",
    "decoder/guided_norm": "backbone.dec_list.{layer}.norm2",
    "decoder/ffn": "backbone.dec_list.{layer}.ffn.mlp",
    "decoder/ffn_norm": "backbone.dec_list.{layer}.norm3",
}
# After `_prefixes`: each half or third of a layer is numbered by itself in the file.
_PROPHET = _FLAT | {
    "encoder/attention": "encoder.{layer}.attention.mhatt",
    "encoder/attention_norm": "encoder.{layer}.attention.norm1",
    "encoder/ffn": "encoder.{layer}.ffn.mlp",
    "encoder/ffn_norm": "encoder.{layer}.ffn.norm1",
    "decoder/attention": "decoder.{layer}.attention",
    "decoder/attention_norm": "decoder.{layer}.attention.norm1",
    "decoder/guided": "decoder.{layer}.guided.mhatt1",
    "decoder/guided_norm": "decoder.{layer}.guided.norm1",
    "decoder/ffn": "decoder.{layer}.ffn.mlp",
    "decoder/ffn_norm": "decoder.{layer}.ffn.norm1",
}

_PARALLEL = (r"^module\.", "")  # torch.nn.DataParallel's


def mcan_key_map(config: MCANConfig) -> KeyMap:
    """Key map of Prophet's MCAN and, where the config has new answers, MCANForFinetune.

    BERT's pooler, which the model does not use, is read and written only if `config.text.pooler`.
    """
    text = config.text
    pooler = linear_rules("bert.pooler.dense", "bert/pooler") if text.pooler else []
    return KeyMap(
        rules=[
            *bert_rules("bert.", "bert/"),
            *pooler,
            *linear_rules("lang_adapt.0", "text_adapter"),
            *linear_rules("img_feat_linear.0", "image_adapter", bias=False),
            *_fusion_rules(_PROPHET, config.fusion, _SWAPPED),
            *linear_rules("proj", "head"),
            *(linear_rules("proj1", "new_head") if config.new_answers else []),
        ],
        rename=renames(_prefixes(config)),
        ignore=[
            BUFFERS,
            r"^decoder\.\d+\.attention\.rope\.(sin|cos)$",  # computed; `check_rotation`
            *([] if text.pooler else [r"^bert\.pooler\."]),
        ],
    )


def mcan_openvqa_key_map(config: MCANOpenVQAConfig) -> KeyMap:
    """Key map of openvqa's MCAN for VQA; older versions name the region linear otherwise."""
    return KeyMap(
        rules=[
            Rule("embedding.weight", "words/table"),
            Rule("lstm.weight_ih_l0", "lstm/input/kernel", TRANSPOSE),
            Rule("lstm.bias_ih_l0", "lstm/input/bias"),
            Rule("lstm.weight_hh_l0", "lstm/recurrent/kernel", TRANSPOSE),
            Rule("lstm.bias_hh_l0", "lstm/recurrent/bias"),
            *linear_rules("adapter.frcn_linear", "region_adapter"),
            *_fusion_rules(_OPENVQA, config.fusion, _LINEARS),
            *linear_rules("proj", "head"),
        ],
        # The linear's name in mcan-vqa, and in openvqa before its adapters.
        rename=[_PARALLEL, (r"^(img_feat_linear|frcnfeat_linear)\.", "adapter.frcn_linear.")],
    )


def load_mcan(path: str | os.PathLike, model: MCAN, *, pretrained: bool = False) -> None:
    """Fills Prophet's MCAN from a checkpoint, in place.

    Args:
      path: Prophet's training state, a torch state dict, or safetensors.
      model: an MCAN of the checkpoint's sizes; nothing of it needs to be initialised.
      pretrained: the checkpoint comes from pretraining and knows no new answers. They start as
        Prophet's do (mcan_for_finetune.py): weights 0, bias the mean of the known answers'.

    Raises:
      UserError: a missing or broken file, tensors or rotary positions that do not fit.
    """
    source = open_source(path)
    if pretrained:
        source = _with_new_answers(source, model.config)
    state = load_into(nnx.state(model), mcan_key_map(model.config), source)
    check_rotation(source, model.config)
    nnx.update(model, state)


def load_mcan_openvqa(path: str | os.PathLike, model: MCANOpenVQA) -> None:
    """Fills openvqa's MCAN from its training state, a torch state dict or safetensors, in place.

    Raises:
      UserError: a missing or broken file, tensors that do not fit.
    """
    key_map = mcan_openvqa_key_map(model.config)
    load_model(model, key_map, open_source(path))


def mcan_source(state: nnx.State, config: MCANConfig) -> PublishedSource:
    """An MCAN's tensors under Prophet's keys."""
    rotation = _rotation(config)
    constants = {
        f"backbone.dec_list.{3 * layer}.rope.{name}": table
        for layer in range(config.fusion.layers)
        for name, table in rotation.items()
    }
    source = StateSource(state, mcan_key_map(config))
    return PublishedSource(source, _prefixes(config), constants)


def _with_new_answers(source: TensorSource, config: MCANConfig) -> TensorSource:
    """The checkpoint with `proj1` added as Prophet's parameter_init makes it."""
    specs = source.specs()
    if "proj1.bias" in specs:
        raise UserError(
            f"{source.name}: has new answers of its own (proj1), so it is no pretrained "
            "checkpoint; load it with pretrained=False."
        )
    if "proj.bias" not in specs or not config.new_answers:
        return source  # loading says what is missing
    weight = np.zeros((config.new_answers, config.fusion.flat_out), np.float32)
    bias = np.full(config.new_answers, source.read("proj.bias").mean(), np.float32)
    return PublishedSource(source, {}, {"proj1.weight": weight, "proj1.bias": bias})


def _prefixes(config: MCANConfig) -> dict[str, str]:
    """Prophet counts every attention and every MLP as a layer."""
    table = {}
    for layer in range(config.fusion.layers):
        for offset, part in enumerate(("attention", "ffn")):
            table[f"backbone.enc_list.{2 * layer + offset}."] = f"encoder.{layer}.{part}."
        for offset, part in enumerate(("attention", "guided", "ffn")):
            table[f"backbone.dec_list.{3 * layer + offset}."] = f"decoder.{layer}.{part}."
    return table


def _fusion_rules(
    parts: Mapping[str, str], config: FusionConfig, image_linears: Mapping[str, str]
) -> list[Rule]:
    """Rules of models.mcan_layers.Fusion.

    Args:
      parts: part of the fusion -> published name.
      config: its sizes.
      image_linears: published name -> ours of the linears of the image's self-attention.
    """
    rules = []
    for part, key in parts.items():
        path, kind = f"fusion/{part}", part.split("/")[-1]
        if kind in ("attention", "guided"):
            names = image_linears if part == "decoder/attention" else _LINEARS
            for theirs, ours in names.items():
                bias = config.value_bias or ours != "value"
                rules += linear_rules(f"{key}.{theirs}", f"{path}/{ours}", bias=bias)
        elif kind == "ffn":
            rules += _mlp_rules(key, path)
        elif kind.startswith("flatten"):
            rules += _mlp_rules(f"{key}.mlp", f"{path}/mlp")
            rules += linear_rules(f"{key}.linear_merge", f"{path}/merge")
        elif config.norm == "unbiased":
            rules += [Rule(f"{key}.a_2", f"{path}/scale"), Rule(f"{key}.b_2", f"{path}/bias")]
        else:
            rules += norm_rules(key, path)
    return rules


def _mlp_rules(key: str, path: str) -> list[Rule]:
    up = linear_rules(f"{key}.fc.linear", f"{path}/up")
    return up + linear_rules(f"{key}.linear", f"{path}/down")


def _rotation(config: MCANConfig) -> dict[str, np.ndarray]:
    rotation = grid_rotation(config.grid, config.head_dim, config.rope_base)
    return {"sin": rotation.sin, "cos": rotation.cos}


def check_rotation(source: TensorSource, config: MCANConfig) -> None:
    """Refuses a checkpoint that was trained on another grid or another base."""
    tables = _rotation(config)
    for key in source.specs():
        name = key.rpartition(".rope.")[2]
        if name == key or name not in tables:
            continue
        table = source.read(key)
        if table.shape != tables[name].shape or np.abs(table - tables[name]).max() > 1e-5:
            raise UserError(
                f"{source.name}, {key}: rotary positions of shape {table.shape} that are not those "
                f"of a grid of {config.grid} x {config.grid} with base {config.rope_base:g}; set "
                "mcan.grid and mcan.rope_base to the checkpoint's."
            )
