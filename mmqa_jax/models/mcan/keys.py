"""Checkpoints of both MCANs: Prophet's (`epoch13.pkl`) and openvqa's (`epoch13.pkl`).

Both projects save training states: a dict with `state_dict` beside optimizer and rates.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.bert import keys as bert
from mmqa_jax.models.mcan import network as mcan
from mmqa_jax.weights import keymap, layouts
from mmqa_jax.weights.formats.safetensors import TensorSource

_LINEARS = {"linear_q": "query", "linear_k": "key", "linear_v": "value", "linear_merge": "out"}
# Prophet's rope(q, k) is declared forward(k, q): linear_k makes the queries, linear_q the keys.
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

_ROTATION = "backbone.dec_list.0.rope.sin"
_PUBLISHED_WIDTHS, _HEADS = (512, 1024), 8

_FLAT_KEYS = (
    "attflat_lang.mlp.fc.linear.weight",
    "attflat_lang.mlp.linear.weight",
    "attflat_lang.linear_merge.weight",
)
_OPENVQA_RENAMES = (
    (r"^module\.", ""),  # torch.nn.DataParallel's
    # The linear's name in mcan-vqa, and in openvqa before its adapters.
    (r"^(img_feat_linear|frcnfeat_linear)\.", "adapter.frcn_linear."),
)


def mcan_key_map(config: mcan.MCANConfig) -> keymap.KeyMap:
    """Key map of Prophet's MCAN and, where the config has new answers, MCANForFinetune.

    BERT's pooler, which the model does not use, is read and written only if `config.text.pooler`.
    """
    text = config.text
    pooler = keymap.linear_rules("bert.pooler.dense", "bert/pooler") if text.pooler else []
    return keymap.KeyMap(
        rules=[
            *bert.bert_rules("bert.", "bert/"),
            *pooler,
            *keymap.linear_rules("lang_adapt.0", "text_adapter"),
            *keymap.linear_rules("img_feat_linear.0", "image_adapter", bias=False),
            *_fusion_rules(_PROPHET, config.fusion, _SWAPPED),
            *keymap.linear_rules("proj", "head"),
            *(keymap.linear_rules("proj1", "new_head") if config.new_answers else []),
        ],
        rename=layouts.renames(_prefixes(config)),
        ignore=[
            bert.BUFFERS,
            r"^decoder\.\d+\.attention\.rope\.(sin|cos)$",  # computed; `check_rotation`
            *([] if text.pooler else [r"^bert\.pooler\."]),
        ],
    )


def mcan_openvqa_key_map(config: mcan.MCANOpenVQAConfig) -> keymap.KeyMap:
    """Key map of openvqa's MCAN for VQA; older versions name the region linear otherwise."""
    return keymap.KeyMap(
        rules=[
            keymap.Rule("embedding.weight", "words/table"),
            keymap.Rule("lstm.weight_ih_l0", "lstm/input/kernel", keymap.TRANSPOSE),
            keymap.Rule("lstm.bias_ih_l0", "lstm/input/bias"),
            keymap.Rule("lstm.weight_hh_l0", "lstm/recurrent/kernel", keymap.TRANSPOSE),
            keymap.Rule("lstm.bias_hh_l0", "lstm/recurrent/bias"),
            *keymap.linear_rules("adapter.frcn_linear", "region_adapter"),
            *_fusion_rules(_OPENVQA, config.fusion, _LINEARS),
            *keymap.linear_rules("proj", "head"),
        ],
        rename=_OPENVQA_RENAMES,
    )


def open_mcan(path: Path) -> layouts.Checkpoint:
    """Prophet's MCAN, pretrained or finetuned."""
    source = layouts.open_source(path)
    shapes = layouts.shapes_of(source)
    base = mcan.mcan_prophet()
    inner = "backbone.enc_list.1.mlp.fc.linear.weight"
    image = "img_feat_linear.0.weight"
    needed = (
        "lang_adapt.0.weight",
        image,
        inner,
        "proj.weight",
        *_FLAT_KEYS,
        *bert.bert_size_keys("bert."),
    )
    layouts.require_keys(shapes, needed, source, "Prophet's MCAN")
    halves = len(layouts.numbered_keys(shapes, r"^backbone\.enc_list\.(\d{1,4})\..*norm1\.weight"))
    grid = shapes.get(_ROTATION, (base.grid**2,))[0]
    stated = layouts.read_own_config(mcan.MCANConfig, path)
    config = stated or mcan.MCANConfig(
        text=bert.bert_sizes(shapes, "bert."),
        fusion=_fusion_sizes(shapes, base.fusion, halves // 2, shapes[inner][0]),
        image_features=shapes[image][1],
        grid=round(grid**0.5),
        answers=shapes["proj.weight"][0],
        new_answers=shapes.get("proj1.weight", (0,))[0],
    )
    unknown = {}
    if stated is None:
        unknown = bert.unknown_heads(config.text.hidden, "text.heads") | _unknown_heads(
            config.fusion
        )
        if _ROTATION not in shapes:  # else `check_rotation` knows whether the base is right
            unknown |= {"grid": base.grid, "rope_base": base.rope_base}
    return layouts.Checkpoint(config, mcan_key_map, source, "prophet", check_rotation, unknown)


def open_mcan_openvqa(path: Path) -> layouts.Checkpoint:
    """openvqa's MCAN, of its older versions too."""
    source = layouts.open_source(path)
    shapes = layouts.shapes_of(source, _OPENVQA_RENAMES)
    inner, region = "backbone.enc_list.0.ffn.mlp.fc.linear.weight", "adapter.frcn_linear.weight"
    needed = ("embedding.weight", "lstm.weight_ih_l0", region, inner, "proj.weight", *_FLAT_KEYS)
    layouts.require_keys(shapes, needed, source, "openvqa's MCAN")
    layers = len(layouts.numbered_keys(shapes, r"backbone\.enc_list\.(\d{1,4})\.norm1\.a_2"))
    stated = layouts.read_own_config(mcan.MCANOpenVQAConfig, path)
    config = stated or mcan.MCANOpenVQAConfig(
        vocab_size=shapes["embedding.weight"][0],
        fusion=_fusion_sizes(shapes, mcan.FusionConfig(), layers, shapes[inner][0]),
        word_features=shapes["embedding.weight"][1],
        region_features=shapes[region][1],
        answers=shapes["proj.weight"][0],
    )
    unknown = {} if stated else _unknown_heads(config.fusion)
    return layouts.Checkpoint(config, mcan_openvqa_key_map, source, "openvqa", unknown=unknown)


def publish_mcan(config: mcan.MCANConfig, state: nnx.State) -> layouts.Published:
    """Keys of Prophet's MCAN or MCANForFinetune, rotary tables included."""
    constants = {
        f"backbone.dec_list.{3 * layer}.rope.{name}": table
        for layer in range(config.fusion.layers)
        for name, table in _rotation(config).items()
    }
    source = keymap.untied_source(state, mcan_key_map(config))
    source = layouts.with_arrays(layouts.with_prefixes(source, _prefixes(config)), constants)
    return layouts.Published(source, layouts.own_config("mcan", config))


def publish_mcan_openvqa(config: mcan.MCANOpenVQAConfig, state: nnx.State) -> layouts.Published:
    """Keys of openvqa's MCAN."""
    source = keymap.untied_source(state, mcan_openvqa_key_map(config))
    return layouts.Published(source, layouts.own_config("mcan_openvqa", config))


def _prefixes(config: mcan.MCANConfig) -> dict[str, str]:
    """Prophet counts every attention and every MLP as a layer."""
    table = {}
    for layer in range(config.fusion.layers):
        for offset, part in enumerate(("attention", "ffn")):
            table[f"backbone.enc_list.{2 * layer + offset}."] = f"encoder.{layer}.{part}."
        for offset, part in enumerate(("attention", "guided", "ffn")):
            table[f"backbone.dec_list.{3 * layer + offset}."] = f"decoder.{layer}.{part}."
    return table


def _fusion_rules(
    parts: Mapping[str, str], config: mcan.FusionConfig, image_linears: Mapping[str, str]
) -> list[keymap.Rule]:
    """Rules of models.mcan.network.Fusion.

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
                rules += keymap.linear_rules(f"{key}.{theirs}", f"{path}/{ours}", bias=bias)
        elif kind == "ffn":
            rules += _mlp_rules(key, path)
        elif kind.startswith("flatten"):
            rules += _mlp_rules(f"{key}.mlp", f"{path}/mlp")
            rules += keymap.linear_rules(f"{key}.linear_merge", f"{path}/merge")
        elif config.norm == "unbiased":
            rules += [
                keymap.Rule(f"{key}.a_2", f"{path}/scale"),
                keymap.Rule(f"{key}.b_2", f"{path}/bias"),
            ]
        else:
            rules += keymap.norm_rules(key, path)
    return rules


def _mlp_rules(key: str, path: str) -> list[keymap.Rule]:
    up = keymap.linear_rules(f"{key}.fc.linear", f"{path}/up")
    return up + keymap.linear_rules(f"{key}.linear", f"{path}/down")


def _rotation(config: mcan.MCANConfig) -> dict[str, np.ndarray]:
    rotation = mcan.grid_rotation(config.grid, config.head_dim, config.rope_base)
    return {"sin": rotation.sin, "cos": rotation.cos}


def check_rotation(source: TensorSource, config: mcan.MCANConfig) -> None:
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


def _unknown_heads(config: mcan.FusionConfig) -> dict[str, int]:
    """`Checkpoint.unknown` of a fusion: all published ones (small, large, Prophet's) have 8."""
    return {} if config.hidden in _PUBLISHED_WIDTHS else {"fusion.heads": _HEADS}


def _fusion_sizes(
    shapes: layouts.Shapes, base: mcan.FusionConfig, layers: int, mlp: int
) -> mcan.FusionConfig:
    """The fusion's sizes; see `_unknown_heads`."""
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
