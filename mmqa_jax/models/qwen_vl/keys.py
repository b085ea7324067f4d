"""Checkpoints of Qwen2-VL, 2.5-VL, 3-VL and 3.5: transformers' layouts, and export to them.

Keys are those of Qwen/Qwen2.5-VL-7B-Instruct on the hub (`visual.`, `model.`, `lm_head.`), to which
those of transformers 4.52 and later, and of Qwen3-VL, are renamed (`model.visual.`,
`model.language_model.`).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.models.common import comparison
from mmqa_jax.models.common.config_checks import check_known
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.expert_tensors import experts_paired
from mmqa_jax.models.llama.keys import (
    Fused,
    Parts,
    apart,
    llama_rules,
    proposing,
    to_published_tensors,
    to_rule_tensors,
    together,
)
from mmqa_jax.models.llama.network import added
from mmqa_jax.models.qwen_vl import network as qwen_vl
from mmqa_jax.models.qwen_vl import omni
from mmqa_jax.models.two_towers.processor import close
from mmqa_jax.weights import keymap, layouts
from mmqa_jax.weights.config_json import check_keys, kinds
from mmqa_jax.weights.formats.safetensors import DerivedSource, TensorSource

_RENAME = (
    (r"^model\.visual\.", "visual."),
    (r"^model\.language_model\.", "model."),
    (r"^(model\.projector|mlp_AR)\.", "projector."),
)
_TOKENS = {
    "image_token": "image_token_id",
    "video_token": "video_token_id",
    "vision_start_token": "vision_start_token_id",
    "vision_end_token": "vision_end_token_id",
}
_READ = kinds(flag="tie_word_embeddings", object="vision_config")
# Our fields of the tower -> their keys, and transformers' defaults.
_TOWER = {
    "layers": ("depth", 32),
    "width": ("hidden_size", 3584),
    "heads": ("num_heads", 16),
    "mlp": ("intermediate_size", 3420),
    "out": ("out_hidden_size", 3584),
    "patch": ("patch_size", 14),
    "temporal": ("temporal_patch_size", 2),
    "merge": ("spatial_merge_size", 2),
}
_QWEN3_TOWER = {
    **_TOWER,
    "layers": ("depth", 27),
    "width": ("hidden_size", 1152),
    "mlp": ("intermediate_size", 4304),
    "patch": ("patch_size", 16),
}
_DEEPSTACK = "deepstack_visual_indexes"
_LARGE = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
}


@dataclasses.dataclass(frozen=True)
class _Published:
    """How transformers publishes a family."""

    architecture: str  # its class
    tower: str  # `QwenVisionConfig.family`
    text: str  # the family of its language model (`models.llama.families`)
    # Of the language model's absent keys, where they are not its family's own.
    text_defaults: Mapping[str, Any]
    # sections, theta: of M-RoPE, where the config does not say them.
    sections: tuple[int, int, int]
    theta: float
    # Our fields of the tower -> their keys and defaults; `mlp` by `mlp_ratio` is `width` times as
    # much.
    sizes: Mapping[str, tuple[str, int]]
    further: Mapping[str, str]  # kinds of the tower's other keys
    activation: str  # of the tower's MLPs, where the config does not say it
    # Ids of pictures and videos, where the config does not say them.
    tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)
    parts: str = ""  # the model type that those of its parts begin with; "" is its own
    # Our fields of tokens -> their keys.
    token_keys: Mapping[str, str] = dataclasses.field(default_factory=lambda: _TOKENS)
    # Keys that change nothing, of the model, its tower or its language model.
    harmless: tuple[str, ...] = ()
    # Keys of a language model whose keys stand beside the tower's -> their only values.
    fixed: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)


_QWEN2_5_VL = _Published(
    architecture="Qwen2_5_VLForConditionalGeneration",
    tower="qwen2_5_vl",
    text="qwen2",
    text_defaults=_LARGE,
    sections=(16, 24, 24),
    theta=1000000.0,
    sizes=_TOWER,
    further=kinds(size="window_size", list="fullatt_block_indexes"),
    activation="silu",
)
_QWEN3_VL = _Published(
    architecture="Qwen3VLForConditionalGeneration",
    tower="qwen3_vl",
    text="qwen3",
    text_defaults={"max_position_embeddings": 128000},
    sections=(24, 20, 20),
    theta=500000.0,
    sizes=_QWEN3_TOWER,
    further=kinds(size="num_position_embeddings", list="deepstack_visual_indexes"),
    activation="gelu_pytorch_tanh",
)
_QWEN3_5 = dataclasses.replace(
    _QWEN3_VL,
    architecture="Qwen3_5ForConditionalGeneration",
    text="qwen3_5_text",
    text_defaults={},
    sections=(11, 11, 10),
    theta=10000.0,
    further=kinds(size="num_position_embeddings"),
    tokens=dict(zip(_TOKENS, (248056, 248057, 248053, 248054), strict=True)),
)
_GLM4V = _Published(
    architecture="Glm4vForConditionalGeneration",
    tower="glm4v",
    text="glm4",
    text_defaults={
        **{"partial_rotary_factor": 1.0, "head_dim": None, "rms_norm_eps": 1e-5},
        "max_position_embeddings": 32768,
    },
    sections=(8, 12, 12),
    theta=10000.0,
    sizes={
        **_TOWER,
        "layers": ("depth", 24),
        "width": ("hidden_size", 1536),
        "heads": ("num_heads", 12),
        "mlp": ("out_hidden_size", 4096),
        "out": ("out_hidden_size", 4096),
        "merger_mlp": ("intermediate_size", 13696),
    },
    further=kinds(size="image_size", number="rms_norm_eps", flag="attention_bias"),
    activation="silu",
    tokens=dict(zip(_TOKENS, (151343, 151344, 151339, 151340), strict=True)),
    parts="glm4v",
    token_keys={
        **_TOKENS,
        "vision_start_token": "image_start_token_id",
        "vision_end_token": "image_end_token_id",
    },
    harmless=(
        *("video_start_token_id", "video_end_token_id", "attention_dropout"),
        "hidden_dropout_prob",
    ),
)
PUBLISHED: Mapping[str, _Published] = {  # by model_type
    "qwen2_vl": dataclasses.replace(
        _QWEN2_5_VL,
        architecture="Qwen2VLForConditionalGeneration",
        tower="qwen2_vl",
        sizes={
            **_TOWER,
            "width": ("embed_dim", 1280),
            "mlp": ("mlp_ratio", 4),
            "out": ("hidden_size", 3584),
        },
        further={},
        activation="quick_gelu",
    ),
    "qwen2_5_vl": _QWEN2_5_VL,
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": dataclasses.replace(
        _QWEN3_VL,
        architecture="Qwen3VLMoeForConditionalGeneration",
        text="qwen3_moe",
        text_defaults={
            "max_position_embeddings": 128000,
            "num_key_value_heads": 16,
            "num_attention_heads": 16,
            "head_dim": None,
            "moe_intermediate_size": 1408,
            "num_local_experts": 60,
            "num_experts_per_tok": 4,
        },
    ),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": dataclasses.replace(
        _QWEN3_5,
        architecture="Qwen3_5MoeForConditionalGeneration",
        text="qwen3_5_moe_text",
    ),
    "glm4v": _GLM4V,
    "glm46v": dataclasses.replace(_GLM4V, architecture="Glm46VForConditionalGeneration"),
    "glm4v_moe": dataclasses.replace(
        _GLM4V,
        architecture="Glm4vMoeForConditionalGeneration",
        text="glm4_moe",
        text_defaults={
            **{"vocab_size": 151424, "max_position_embeddings": 65536, "attention_bias": True},
        },
        tokens=dict(zip(_TOKENS, (151363, 151364, 151339, 151340), strict=True)),
        parts="glm4v_moe",
    ),
    "paddleocr_vl": _Published(
        architecture="PaddleOCRVLForConditionalGeneration",
        tower="paddleocr_vl",
        text="paddleocr_vl_text",
        text_defaults={},
        sections=(16, 24, 24),
        theta=500000.0,
        sizes={
            "layers": ("num_hidden_layers", 27),
            "width": ("hidden_size", 1152),
            "heads": ("num_attention_heads", 16),
            "mlp": ("intermediate_size", 4304),
            "patch": ("patch_size", 14),
            "merge": ("spatial_merge_size", 2),
        },
        further=kinds(size="image_size", number="layer_norm_eps"),
        activation="gelu_pytorch_tanh",
        tokens=dict(zip(_TOKENS, (100295, 100296, 101305, 101306), strict=True)),
        harmless=(
            *("attention_dropout", "temporal_patch_size", "pad_token_id", "ignored_index"),
            *("max_sequence_length", "use_flash_attention", "weight_share_add_bias"),
        ),
        fixed={
            **{"compression_ratio": (1.0,), "hidden_dropout_prob": (0.0,)},
            "attention_probs_dropout_prob": (0.0,),
            **{"rope_is_neox_style": (True,), "use_3d_rope": (True,), "sliding_window": (None,)},
        },
    ),
}


def model_type_of(config: qwen_vl.QwenVLConfig) -> str:
    """The key of `PUBLISHED` for a config."""
    pair = config.vision.family, config.llama.family
    return next(name for name, row in PUBLISHED.items() if (row.tower, row.text) == pair)


_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_new"}  # theirs -> ours


def open_qwen_vl(path: Path, published: Mapping[str, Any] | None = None) -> layouts.Checkpoint:
    """Opens a checkpoint of a Qwen-VL, reading headers only.

    Args:
      path: transformers' folder.
      published: its config; None: that of config.json.
    """
    file = layouts.config_file(path)
    if published is None:
        published = layouts.read_hf_config(path, *PUBLISHED, *omni.MODEL_TYPES)
    published, make_whole = layouts.read_rounding(published, str(file))
    is_omni = published["model_type"] in omni.MODEL_TYPES
    config = read_qwen_vl_config(file.parent, published)  # refused before the tensors are opened
    source = make_whole(layouts.open_source(path))
    if is_omni:
        source = omni.thinker_tensors(source)
    if config.llama.experts:
        source = _experts_turned(source, (config.llama.hidden, 2 * config.llama.mlp))
    if config.vision.family == "paddleocr_vl":
        for prefix in ("visual.", "model.visual."):
            source = together(source, _fused(config.vision), prefix)
    source = to_rule_tensors(source, config.llama)
    return layouts.Checkpoint(config, qwen_vl_key_map, source, "transformers")


def read_qwen_vl_config(folder: Path, published: Mapping[str, Any]) -> qwen_vl.QwenVLConfig:
    """Our config of transformers', with what the files of pictures in its folder say."""
    where = str(layouts.config_file(folder))
    if published["model_type"] in omni.MODEL_TYPES:
        published = omni.thinker(published, where)
    config = qwen_vl_config(published, where)
    return dataclasses.replace(config, vision=with_processor(config.vision, folder))


def _experts_turned(source: TensorSource, gate_up: tuple[int, int]) -> TensorSource:
    """The tensors of all experts of a layer with their last two axes exchanged.

    Files on the hub keep (E, in, out), those that transformers 5 writes (E, out, in), as other
    mixtures do.

    gate_up: the last two axes of `gate_up_proj` in files that are to be turned.
    """
    specs = source.specs()
    is_turned = any(
        spec.shape[1:] == gate_up for key, spec in specs.items() if key.endswith("gate_up_proj")
    )
    tensors: dict[str, Any] = {}
    for key, spec in specs.items():
        read = functools.partial(source.read, key)
        if is_turned and key.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            count, rows, columns = spec.shape
            spec = jax.ShapeDtypeStruct((count, columns, rows), spec.dtype)
            read = functools.partial(lambda read: np.ascontiguousarray(read().swapaxes(1, 2)), read)
        tensors[key] = spec, read
    return DerivedSource(source.name, tensors)


def publish_qwen_vl(config: qwen_vl.QwenVLConfig, state: nnx.State) -> layouts.Published:
    """The class of its family in transformers (`PUBLISHED`), as on the hub."""
    source = keymap.untied_source(state, qwen_vl_key_map(config))
    if config.llama.family == "qwen3_moe":
        ours = 2 * config.llama.mlp, config.llama.hidden
        source = _experts_turned(experts_paired(source), ours)
    else:
        source = to_published_tensors(source, config.llama, "model.")
    if config.vision.family == "paddleocr_vl":
        source = apart(source, _fused(config.vision))
    if config.vision.family not in ("qwen2_vl", "qwen2_5_vl"):
        source = layouts.with_prefixes(
            source,
            {
                **{"model.visual.": "visual.", "model.projector.": "projector."},
                "model.language_model.": "model.",
            },
        )
    return layouts.Published(source, qwen_vl_to_hf(config), processor_to_hf(config.vision))


def _fused(vision: qwen_vl.QwenVisionConfig) -> Fused:
    """Queries, keys and values, which PaddleOCR-VL's tower keeps apart."""
    rows = dict.fromkeys((f"self_attn.{part}_proj" for part in "qkv"), vision.width)
    return {"self_attn.qkv_proj": Parts(rows)}


# Parts of a tower in checkpoints: of Qwens and GLMs, and what others call them.
_PARTS = {
    "patch": "visual.patch_embed.proj",
    "positions": "visual.pos_embed",
    "patch_norm": "visual.post_conv_layernorm",
    "end_norm": "visual.post_layernorm",
    "layer": "visual.blocks.{layer}.",
    "norms": "norm",
    "qkv": "attn.qkv",
    "out": "attn.proj",
    "plain": ("mlp.linear_fc1", "mlp.linear_fc2"),
    "merger": ("visual.merger.norm", "visual.merger.linear_fc1", "visual.merger.linear_fc2"),
}
_QWEN2_MERGER = ("visual.merger.ln_q", "visual.merger.mlp.0", "visual.merger.mlp.2")
_OTHER_PARTS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_vl": {"plain": ("mlp.fc1", "mlp.fc2"), "merger": _QWEN2_MERGER},
    "qwen2_5_vl": {"merger": _QWEN2_MERGER},
    "glm4v": {"positions": "visual.embeddings.position_embedding"},
    "paddleocr_vl": {
        "patch": "visual.vision_model.embeddings.patch_embedding",
        "positions": "visual.vision_model.embeddings.position_embedding",
        "end_norm": "visual.vision_model.post_layernorm",
        "layer": "visual.vision_model.encoder.layers.{layer}.",
        "norms": "layer_norm",
        "qkv": "self_attn.qkv_proj",
        "out": "self_attn.out_proj",
        "plain": ("mlp.fc1", "mlp.fc2"),
        "merger": ("projector.pre_norm", "projector.linear_1", "projector.linear_2"),
    },
}


def qwen_vl_key_map(config: qwen_vl.QwenVLConfig) -> keymap.KeyMap:
    """Key map of every layout, see the module."""
    vision, switches = config.vision, config.vision.switches
    parts = {**_PARTS, **_OTHER_PARTS.get(vision.family, {})}
    rules = [
        keymap.Rule(f"{parts['patch']}.weight", "vision/patch/kernel", _patches_in_time(vision)),
        *_layer_rules(vision, parts),
        *llama_rules(config.llama, path="llama/"),
    ]
    if switches.patch_bias:
        rules.append(keymap.Rule(f"{parts['patch']}.bias", "vision/patch/bias"))
    if vision.positions:
        rules.append(keymap.Rule(f"{parts['positions']}.weight", "vision/positions"))
    for norm in ("patch_norm", "end_norm"):
        if getattr(switches, norm):
            rules += _norm_rules(vision, parts[norm], f"vision/{norm}")
    if switches.merger == "gated":
        merger, ours = "visual.merger.", "vision/merger/"
        rules.append(keymap.Rule("visual.downsample.weight", f"{ours}join/kernel", _joined(vision)))
        rules.append(keymap.Rule("visual.downsample.bias", f"{ours}join/bias"))
        rules += keymap.norm_rules(f"{merger}post_projection_norm", f"{ours}norm")
        of_linears = {"linear": "proj", **{part: f"{part}_proj" for part in ("gate", "up", "down")}}
        for part, key in of_linears.items():
            rules.append(
                keymap.Rule(f"{merger}{key}.weight", f"{ours}{part}/kernel", keymap.TRANSPOSE)
            )
    else:
        norm, *linears = parts["merger"]
        rules += _norm_rules(vision, norm, "vision/merger/norm")
        for number, linear in enumerate(linears, start=1):
            rules += keymap.linear_rules(linear, f"vision/merger/linear_{number}")
    if vision.deepstack:
        theirs, ours = "visual.deepstack_merger_list.{layer}", "vision/deepstack"
        rules += keymap.norm_rules(f"{theirs}.norm", f"{ours}/norm")
        rules += keymap.linear_rules(f"{theirs}.linear_fc1", f"{ours}/linear_1")
        rules += keymap.linear_rules(f"{theirs}.linear_fc2", f"{ours}/linear_2")
    tied = (("lm_head.weight", "model.embed_tokens.weight"),) if config.llama.tied else ()
    unread = r"packing_position_embedding|^visual\.vision_model\.head\."  # PaddleOCR-VL's
    ignore = (r"rotary_(pos_)?emb\.inv_freq$", unread, *proposing(config.llama))
    return keymap.KeyMap(rules, rename=_RENAME, ignore=ignore, tied=tied)


def _norm_rules(vision: qwen_vl.QwenVisionConfig, theirs: str, ours: str) -> list[keymap.Rule]:
    rules = keymap.norm_rules(theirs, ours)
    return rules[:1] if vision.switches.gated else rules  # RMS norms have no biases


def _layer_rules(vision: qwen_vl.QwenVisionConfig, parts: Mapping[str, Any]) -> list[keymap.Rule]:
    theirs, ours, switches = parts["layer"], "vision/layers/", vision.switches
    linears = {"qkv": parts["qkv"], "out": parts["out"]}
    if switches.gated:
        linears |= {part: f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    else:
        linears |= dict(zip(("up", "down"), parts["plain"], strict=True))
    rules = []
    for n in "12":
        rules += _norm_rules(vision, f"{theirs}{parts['norms']}{n}", f"{ours}norm_{n}")
    for path, key in linears.items():
        both = keymap.linear_rules(f"{theirs}{key}", f"{ours}{path}")
        has_bias = vision.qkv_bias if path == "qkv" else switches.biases
        rules += both if has_bias else both[:1]
    return rules


def _joined(vision: qwen_vl.QwenVisionConfig) -> keymap.Transform:
    """Conv2d weight (out, width, merge, merge) <-> kernel [merge * merge * width, out]."""
    shape = (vision.merge, vision.merge, vision.width, vision.out)
    return keymap.Transform(
        lambda x: x.transpose(2, 3, 1, 0).reshape(-1, x.shape[0]),
        lambda x: x.reshape(shape).transpose(3, 2, 0, 1),
    )


def _patches_in_time(vision: qwen_vl.QwenVisionConfig) -> keymap.Transform:
    """Conv3d weight (out, 3, time, patch, patch) <-> kernel [time * patch * patch * 3, out].

    PaddleOCR-VL's has no axis of time.
    """
    shape = (vision.temporal, vision.patch, vision.patch, 3, vision.width)
    flat = vision.family == "paddleocr_vl"

    def inverse(x):
        x = x.reshape(shape).transpose(4, 3, 0, 1, 2)
        return x[:, :, 0] if flat else x

    return keymap.Transform(
        lambda x: (x[:, :, None] if flat else x).transpose(2, 3, 4, 1, 0).reshape(-1, x.shape[0]),
        inverse,
    )


def qwen_vl_config(
    published: Mapping[str, Any], where: str = "config.json"
) -> qwen_vl.QwenVLConfig:
    """Our config from transformers' `config.json`; absent values are transformers' defaults.

    Reads the language model's keys in `text_config`, or beside `vision_config` (Qwen2.5-VL on the
    hub).
    """
    layouts.check_model_type(published, where, *PUBLISHED)
    family = published["model_type"]
    row = PUBLISHED[family]
    of_tokens = kinds(integer=" ".join(row.token_keys.values()))
    outside_text = {*_READ, *of_tokens, "text_config", "vision_token_id"}
    text, of_text = published.get("text_config"), f"{where}, text_config"
    if text is None:
        if row.tower in ("qwen3_vl", "glm4v"):
            raise UserError(f"{where}: lacks its text_config; fetch the file again.")
        text = {key: value for key, value in published.items() if key not in outside_text}
        text, of_text = {**text, "model_type": f"{family}_text"}, where
        published = {
            key: value for key, value in published.items() if key in (*outside_text, "model_type")
        }
    read = {**_READ, **of_tokens, **kinds(object_or_null="text_config")}
    check_keys(published, where, read=read, harmless=row.harmless)
    if "vision_config" not in published:
        raise UserError(f"{where}: lacks its vision_config; fetch the file again.")
    tied = published.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    tokens = {ours: published[key] for ours, key in row.token_keys.items() if key in published}
    llama = _llama({**text, "tie_word_embeddings": bool(tied)}, of_text, family)
    return qwen_vl.QwenVLConfig(
        vision=_tower(published["vision_config"], f"{where}, vision_config", family, llama.hidden),
        llama=llama,
        **{**row.tokens, **tokens},
    )


def _llama(text: Mapping[str, Any], where: str, family: str) -> LlamaConfig:
    """The language model's config, with M-RoPE."""
    row = PUBLISHED[family]
    layouts.check_model_type(text, where, f"{row.parts or family}_text")
    if text.get("use_sliding_window"):
        raise UserError(
            f"{where}: use_sliding_window is True, which is not supported with pictures; use a "
            "checkpoint without windows."
        )
    rope = dict(text.get("rope_scaling") or text.get("rope_parameters") or {})
    sections = rope.pop("mrope_section", row.sections)
    is_third = row.tower == "qwen3_vl"
    interleaved = rope.pop("mrope_interleaved", is_third)
    if interleaved is not is_third:
        raise UserError(
            f"{where}: mrope_interleaved is {interleaved!r}, which {row.architecture} does not "
            "have; use a checkpoint as it was published."
        )
    if not isinstance(sections, list | tuple) or not all(
        isinstance(section, int) for section in sections
    ):
        raise UserError(
            f"{where}: mrope_section is {sections!r}, expected three whole numbers; fetch the file "
            "again."
        )
    kind = rope.pop("type", None) or "default"
    rope.setdefault("rope_type", kind)
    if rope["rope_type"] == "mrope":
        rope["rope_type"] = "default"
    rope.setdefault("rope_theta", text.get("rope_theta") or row.theta)
    rest = {key: value for key, value in text.items() if not key.startswith("rope_")}
    for key, values in row.fixed.items():
        if rest.pop(key, values[0]) not in values:
            raise UserError(
                f"{where}: {key} is {text[key]!r}, expected {values[0]!r}; use a "
                "checkpoint as it was published."
            )
    rest = {key: value for key, value in rest.items() if key not in row.harmless}
    rest = {**row.text_defaults, **rest, "model_type": row.text}
    if row.text == "qwen3_moe":
        rest["norm_topk_prob"] = True  # transformers' class has no key for it
    config = LlamaConfig.from_hf({**rest, "rope_parameters": rope}, where)
    return dataclasses.replace(config, mrope=tuple(sections), mrope_interleaved=is_third)


def _tower(
    published: Mapping[str, Any], where: str, family: str, out: int
) -> qwen_vl.QwenVisionConfig:
    """The tower's config; `out` is the language model's width, where no key says it."""
    row = PUBLISHED[family]
    parts = row.parts or family
    known = {"model_type": family, **published}
    layouts.check_model_type(known, where, family, parts, f"{parts}_vision")
    patch = published.get("patch_size")
    sizes = " ".join(key for key, _ in row.sizes.values())
    check_keys(
        published,
        where,
        read={
            **kinds(size=sizes, name="hidden_act", object_or_null="rope_parameters"),
            **row.further,
        },
        harmless=("tokens_per_second", *row.harmless),  # of videos
        fixed={
            **dict.fromkeys(("in_channels", "in_chans", "num_channels"), (3,)),
            "spatial_patch_size": (patch,),
            **({} if _DEEPSTACK in row.further else {_DEEPSTACK: ([],)}),
        },
    )
    fields = {ours: published.get(key, default) for ours, (key, default) in row.sizes.items()}
    fields = {"out": out, "temporal": 1, **fields}
    if row.sizes["mlp"][0] == "mlp_ratio":
        fields["mlp"] *= fields["width"]
    rope = published.get("rope_parameters") or {}
    check_keys(
        rope,
        f"{where}, rope_parameters",
        read=kinds(number="rope_theta"),
        fixed={"rope_type": ("axial", "default")},
    )
    activation = published.get("hidden_act", row.activation)
    shared = {
        "family": row.tower,
        "activation": _ACTIVATIONS.get(activation, activation),
        "rope_theta": float(rope.get("rope_theta", 10000.0)),
        **fields,
    }
    if "image_size" in row.further:
        glm = row.tower == "glm4v"
        eps = ("rms_norm_eps", 1e-5) if glm else ("layer_norm_eps", 1e-6)
        return qwen_vl.QwenVisionConfig(
            **shared,
            window=0,
            full_layers=(),
            positions=published.get("image_size", 336 if glm else 384) // fields["patch"],
            eps=published.get(*eps),
            qkv_bias=published.get("attention_bias", not glm),
        )
    if row.tower == "qwen2_vl":
        return qwen_vl.QwenVisionConfig(**shared, window=0, full_layers=())
    if row.tower == "qwen2_5_vl":
        full = published.get("fullatt_block_indexes", (7, 15, 23, 31))
        window = published.get("window_size", 112)
        unit = fields["patch"] * fields["merge"]
        # transformers rounds down to whole units.
        window = window // fields["merge"] // fields["patch"] * unit
        if not window:
            raise UserError(
                f"{where}: window_size is {published.get('window_size')}, less than a unit of "
                f"{unit} pixels; use a checkpoint as it was published."
            )
        return qwen_vl.QwenVisionConfig(**shared, window=window, full_layers=tuple(sorted(full)))
    count = published.get("num_position_embeddings", 2304)
    side = math.isqrt(count)
    check_known(f"{where}: num_position_embeddings", count, [side**2])
    return qwen_vl.QwenVisionConfig(
        **shared,
        window=0,
        full_layers=(),
        positions=side,
        deepstack=tuple(
            published.get(_DEEPSTACK, (8, 16, 24) if _DEEPSTACK in row.further else ())
        ),
    )


def qwen_vl_to_hf(config: qwen_vl.QwenVLConfig) -> dict[str, Any]:
    """transformers' `config.json`, without token ids but those of pictures."""
    vision, family = config.vision, model_type_of(config)
    row = PUBLISHED[family]
    activations = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    tower: dict[str, Any] = {
        "model_type": f"{row.parts or family}_vision",
        **{key: getattr(vision, ours) for ours, (key, _) in row.sizes.items()},
        "in_channels": 3,
        "hidden_act": activations.get(vision.activation, vision.activation),
        "initializer_range": vision.init_stddev,
        "rope_parameters": {"rope_type": "axial", "rope_theta": vision.rope_theta},
    }
    if "mlp_ratio" in tower:
        tower["mlp_ratio"] = vision.mlp // vision.width
    if row.tower == "qwen2_5_vl":
        tower |= {
            "window_size": vision.window,
            "fullatt_block_indexes": list(vision.full_layers),
        }
    elif "image_size" in row.further:
        tower["image_size"] = vision.positions * vision.patch
        tower |= {"rms_norm_eps": vision.eps, "attention_bias": vision.qkv_bias}
        if row.tower != "glm4v":
            tower["layer_norm_eps"] = tower.pop("rms_norm_eps")
            del tower["attention_bias"], tower["in_channels"]
    elif row.tower == "qwen3_vl":
        tower["num_position_embeddings"] = vision.positions**2
        if _DEEPSTACK in row.further:
            tower[_DEEPSTACK] = list(vision.deepstack)
    plain = dataclasses.replace(config.llama, mrope=(), mrope_interleaved=False)
    text = plain.to_hf()
    del text["architectures"]
    rope = {"rope_type": "default", **(text.pop("rope_scaling") or {})}
    rope |= {"rope_theta": text.pop("rope_theta"), "mrope_section": list(config.llama.mrope)}
    if row.tower == "qwen3_vl":
        rope["mrope_interleaved"] = True
    text |= {"model_type": f"{row.parts or family}_text", "rope_parameters": rope}
    if "partial_rotary_factor" in text:
        rope["partial_rotary_factor"] = text.pop("partial_rotary_factor")
    return {
        "architectures": [row.architecture],
        "model_type": family,
        **{key: getattr(config, ours) for ours, key in row.token_keys.items()},
        "tie_word_embeddings": config.llama.tied,
        "text_config": text,
        "vision_config": tower,
    }


# transformers' image processor beside a Qwen-VL: which sizes and colors its pictures get.


_FILES = ("preprocessor_config.json", "processor_config.json")  # before transformers 5, and since
_LARGEST = 1 << 28  # pixels; smaller pictures are drawn up to the least
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "resample": (3, "bicubic", "BICUBIC"),
    "do_resize": (True,),
    "do_rescale": (True,),
    "do_normalize": (True,),
    "do_convert_rgb": (True,),
}


def with_processor(config: qwen_vl.QwenVisionConfig, folder: Path) -> qwen_vl.QwenVisionConfig:
    """The tower's config with the sizes and colors that the files of a folder say.

    Without such a file they are those of the family's processor in transformers.
    """
    processor: dict[str, Any] = {}
    where = folder / _FILES[0]
    for name in reversed(_FILES):
        if (folder / name).is_file():
            content = read_json(folder / name)
            if not isinstance(content, dict):
                raise UserError(
                    f"{folder / name}: is no JSON object of an image processor; fetch the file "
                    "again."
                )
            inner = content.get("image_processor", content if name == _FILES[0] else {})
            if isinstance(inner, dict) and inner:
                processor, where = inner, folder / name
    _check(processor, where, config)
    size = processor.get("size") or {}
    if not isinstance(size, dict) or set(size) - {
        *("shortest_edge", "longest_edge", "min_pixels", "max_pixels")
    }:
        raise UserError(
            f"{where}: size is {size!r}, expected shortest_edge and longest_edge, the least and "
            "the most pixels; use a checkpoint of a Qwen-VL."
        )
    fewest, largest = config.switches.areas
    least = processor.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels")
    most = processor.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels")
    least, most = least or fewest, most or largest
    for keys, value in (
        ("min_pixels or shortest_edge", least),
        ("max_pixels or longest_edge", most),
    ):
        if type(value) is not int or not 1 <= value <= _LARGEST:
            raise UserError(
                f"{where}: {keys} is {value!r}, expected a whole number from 1 to {_LARGEST:,}; "
                "fetch the file again."
            )
    frames = config.temporal if config.switches.by_frames else 1
    changes: dict[str, Any] = {"min_pixels": least // frames, "max_pixels": most // frames}
    for key, field in (("image_mean", "pixel_mean"), ("image_std", "pixel_std")):
        if processor.get(key) is not None:
            changes[field] = _of_channels(processor[key], f"{where}: {key}")
    if 0.0 in changes.get("pixel_std", ()):
        raise UserError(f"{where}: image_std has a 0, which divides; fetch the file again.")
    return dataclasses.replace(config, **changes)


def processor_to_hf(config: qwen_vl.QwenVisionConfig) -> dict[str, Any]:
    """transformers' preprocessor_config.json."""
    frames = config.temporal if config.switches.by_frames else 1
    return {
        "image_processor_type": config.switches.processor,
        **{key: values[0] for key, values in _FIXED.items()},
        "rescale_factor": 1 / 255,
        "patch_size": config.patch,
        "merge_size": config.merge,
        "temporal_patch_size": config.temporal,
        "image_mean": list(config.pixel_mean),
        "image_std": list(config.pixel_std),
        "size": {
            "shortest_edge": config.min_pixels * frames,
            "longest_edge": config.max_pixels * frames,
        },
    }


def _check(processor: Mapping[str, Any], where: Path, config: qwen_vl.QwenVisionConfig) -> None:
    expected = {
        **_FIXED,
        "patch_size": (config.patch,),
        "merge_size": (config.merge,),
        "temporal_patch_size": (config.temporal,),
    }
    for key, values in expected.items():
        value = processor.get(key)
        if value is not None and value not in values:
            raise UserError(
                f"{where}: {key} is {value!r}, expected {values[0]!r}, as Qwen's pictures are "
                "prepared here; use a checkpoint that was trained so."
            )
    factor = processor.get("rescale_factor")
    if factor is not None and not close(factor, 1 / 255):
        raise UserError(
            f"{where}: rescale_factor is {factor!r}, expected 1/255; use a checkpoint that was "
            "trained so."
        )


def _of_channels(value: Any, where: str) -> tuple[float, float, float]:
    fits = isinstance(value, list) and len(value) == 3
    if not fits or not all(isinstance(number, int | float) for number in value):
        raise UserError(f"{where} is {value!r}, expected three numbers; fetch the file again.")
    return tuple(map(float, value))


# Beside transformers.


def check_inputs(config: qwen_vl.QwenVLConfig) -> dict[str, Any]:
    """Words around a picture, which are as long together as a text of the other checks."""
    vision = config.vision
    size = (*(n * vision.unit for n in comparison.GRID), 3)
    picture = comparison.noise().integers(0, 256, size).astype(np.uint8)
    grid = qwen_vl.grid_of(picture.shape, vision)
    pictures = qwen_vl.lay_out([picture], vision, qwen_vl.bucket_of(grid, vision))
    row = comparison.around_a_picture(config, grid.units)
    made = qwen_vl.expand_pictures([row], [[picture.shape]], config)
    real = np.flatnonzero(pictures.places[0, :, 0] >= 0)
    of_unit = np.arange(vision.merge**2)
    theirs = (pictures.order[0, : grid.units, None] * len(of_unit) + of_unit).reshape(-1)
    if vision.family == "paddleocr_vl":  # row by row of the picture
        theirs = real = real[np.lexsort(pictures.places[0, real].T[::-1])]
    return {
        "ids": made.input_ids,
        "rows": made.rows,
        "positions": made.positions,
        "pictures": pictures,
        "real": real,
        "is picture": (made.input_ids == config.image_token).astype(np.int32),
        "patches": _published_patches(pictures.patches[0, theirs], vision),
        "grid": np.array([[1, *pictures.grid[0]]]),
    }


def _published_patches(patches: np.ndarray, vision: qwen_vl.QwenVisionConfig) -> np.ndarray:
    """Normalized patches [N, 3 * frames * patch * patch], or as PaddleOCR-VL has them."""
    patches = patches.reshape(-1, vision.patch, vision.patch, 3)
    patches = (patches / 255.0 - vision.pixel_mean) / vision.pixel_std
    frames = np.repeat(patches.transpose(0, 3, 1, 2)[:, :, None], vision.temporal, axis=2)
    is_flat = vision.family != "paddleocr_vl"
    frames = frames.reshape(len(frames), -1) if is_flat else frames[:, :, 0]
    return frames.astype(np.float32)


def _given(inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {
        "input_ids": inputs["ids"],
        "attention_mask": np.ones(inputs["ids"].shape, np.int64),
        "mm_token_type_ids": inputs["is picture"],
        "pixel_values": inputs["patches"],
        "image_grid_thw": inputs["grid"],
    }


def _run(model: qwen_vl.QwenVL, inputs: Mapping[str, Any]) -> comparison.Outputs:
    """The patches are those that are no padding, window by window as in transformers."""
    pictures, llama = inputs["pictures"], model.llama
    embedded, deepstack = model.embed(inputs["ids"], model.encode_images(pictures), inputs["rows"])
    # transformers adds to a layer's output after it, which is seen as the next layer's input.
    last = llama.config.layers - 1
    seen = deepstack[:last] if deepstack is not None and last else None
    layers = llama.layer_outputs(embedded, positions=inputs["positions"], deepstack=seen)
    hidden = added(layers[-1], deepstack, last)
    tower = model.vision
    patches = comparison.states_of(tower.embed(pictures), tower.layer_outputs(pictures))
    stacks = {
        "picture": patches[:, 0, inputs["real"]],
        "": comparison.states_of(embedded, layers),
    }
    return comparison.Outputs(stacks, {"logits": llama.logits(llama.norm(hidden))})


CHECK = comparison.Check(
    "AutoModelForImageTextToText",
    _run,
    {"logits": "logits"},
    {
        "picture": ("model.visual.vision_model.encoder", "model.visual"),
        "": "model.language_model",
    },
    check_inputs,
    _given,
)
