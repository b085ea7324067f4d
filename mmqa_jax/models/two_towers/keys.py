"""CLIP and SigLIP checkpoints in the layouts of transformers, in and out, and of OpenAI, in.

CLIPModel, SiglipModel, and Siglip2Model for NaFlex; SigLIP 2's models of a fixed size are published
as SiglipModel. OpenAI's layout is that of its own CLIPs, open_clip's and UniIR's.

OpenAI's `ViT-B-32.pt` and its like are TorchScript archives, or the state dict in one, of float16
tensors. There is no config beside them: the shapes determine it, with QuickGELU and heads of 64
units, as in openai/CLIP clip/model.py (`build_model`). What tells OpenAI's own from others are
three integers that its archives keep among the tensors.

open_clip's models (LAION's, DataComp's, MetaCLIP's, DFN's and others) have the same layout without
them, other heads and mostly GELU. `open_clip_config.json` beside them says what no tensor shows,
the heads and the activation: open_clip/model.py CLIPVisionCfg and CLIPTextCfg, whose defaults
absent keys have. A folder of the hub has the tensors in `open_clip_model.safetensors` or
`open_clip_pytorch_model.bin`.

UniIR's CLIP_SF (https://github.com/TIGER-AI-Lab/UniIR) has OpenAI's names behind `clip_model.`. It
is trained so that a text with a picture is the sum of both vectors; which checkpoints are embedded
so, the layout says.
"""

import functools
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.models.common import comparison
from mmqa_jax.models.two_towers import config as sizes
from mmqa_jax.models.two_towers.config import (
    CLIPConfig,
    SiglipConfig,
    SiglipTextConfig,
    SiglipVisionConfig,
    TextConfig,
    VisionConfig,
)
from mmqa_jax.models.two_towers.processor import check_processor, read_preparation
from mmqa_jax.weights import keymap
from mmqa_jax.weights.config_json import check_keys, kinds
from mmqa_jax.weights.formats.safetensors import DerivedSource, TensorSource
from mmqa_jax.weights.layouts import Checkpoint, Published, config_file, open_source, read_hf_config
from mmqa_jax.weights.output_folder import OPEN_CLIP_CONFIG, OPEN_CLIP_WEIGHTS

UNIIR = "uniir"  # the layout of the record of a conversion
_WRAPPER = "clip_model."
_HEAD = 64  # units of every head of OpenAI's
# Heads of the published image towers whose heads are of another size (open_clip model_configs).
_OTHER_HEADS = {1280: 16, 1408: 16, 1664: 16, 1792: 16}
_BLOCK = "transformer.resblocks."
_LINEARS = {"attn.out_proj": "out", "mlp.c_fc": "mlp_in", "mlp.c_proj": "mlp_out"}
_NORMS = {"ln_1": "ln_1", "ln_2": "ln_2"}
_SIZES = ("input_resolution", "context_length", "vocab_size")  # in OpenAI's own files alone
# Those, and the causal mask of the text tower, which is computed.
_IGNORED = (rf"^({'|'.join(_SIZES)})$", r"(^|\.)attn_mask$")

_PATCHES = "visual.conv1.weight"
_POSITIONS = "visual.positional_embedding"
_TOKENS = "token_embedding.weight"
_CONTEXT = "positional_embedding"
_PROJECTION = "text_projection"
_INNER = f"{_BLOCK}0.mlp.c_fc.weight"
# The tensors that determine the sizes, and how many axes they have.
_RANKS = {
    _PATCHES: 4,
    _POSITIONS: 2,
    f"visual.{_INNER}": 2,
    _TOKENS: 2,
    _CONTEXT: 2,
    _PROJECTION: 2,
    _INNER: 2,
}


def open_openai(path: Path) -> Checkpoint | None:
    """The CLIP in a file or folder of these layouts; None: it is of another.

    `open_clip_config.json` in the same folder says what the tensors do not.
    """
    if path.is_dir():
        path = open_clip_file(path) or path
    if not path.is_file():
        return None
    source = open_source(path)
    if _is_uniir(source):
        source = _without_wrapper(source)
        config, tensors = clip_openai_config(source), _split_attention(source)
        return Checkpoint(config, _key_map, tensors, UNIIR)
    keys = source.specs().keys()
    if not any(key.startswith("visual.") for key in keys):
        return None
    config, unknown = open_clip_config(path.parent), {}
    is_openais_own = set(_SIZES) <= keys
    if config is None:
        config = clip_openai_config(source)
        unknown = {} if is_openais_own else usual_constants(config)
    layout = "openai" if is_openais_own else "open_clip"
    remedy = f"put the {OPEN_CLIP_CONFIG} that it was published with beside it"
    tensors = _split_attention(source)
    return Checkpoint(config, _key_map, tensors, layout, unknown=unknown, remedy=remedy)


def usual_constants(config: sizes.CLIPConfig) -> dict[str, Any]:
    """What no tensor shows of a CLIP that is not OpenAI's own, with the values of most."""
    heads = _OTHER_HEADS.get(config.vision.width, config.vision.heads)
    return {
        "vision.heads": heads,
        "text.heads": config.text.heads,
        "vision.activation": "gelu",
        "text.activation": "gelu",
    }


def _key_map(config: sizes.CLIPConfig) -> keymap.KeyMap:
    """Key map of the keys of `_split_attention`."""
    patches = keymap.conv_patches(config.vision.patch_size)
    return keymap.KeyMap(
        rules=[
            keymap.Rule("logit_scale", "logit_scale"),
            keymap.Rule("visual.class_embedding", "vision/class_token"),
            keymap.Rule(_PATCHES, "vision/patch/kernel", patches),
            keymap.Rule(_POSITIONS, "vision/positions"),
            *keymap.norm_rules("visual.ln_pre", "vision/ln_pre"),
            *_block_rules(f"visual.{_BLOCK}{{layer}}.", "vision/layers"),
            *keymap.norm_rules("visual.ln_post", "vision/ln_post"),
            keymap.Rule(
                "visual.proj", "vision/proj/kernel"
            ),  # [in, out] here, unlike torch's Linear
            keymap.Rule(_TOKENS, "text/tokens/table"),
            keymap.Rule(_CONTEXT, "text/positions"),
            *_block_rules(f"{_BLOCK}{{layer}}.", "text/layers"),
            *keymap.norm_rules("ln_final", "text/ln_final"),
            keymap.Rule(_PROJECTION, "text/proj/kernel"),
        ],
        ignore=_IGNORED,
    )


def clip_openai_config(source: TensorSource) -> sizes.CLIPConfig:
    """The config that a checkpoint's shapes determine, with QuickGELU and heads of 64."""
    shapes = {key: spec.shape for key, spec in source.specs().items()}
    if "visual.layer1.0.conv1.weight" in shapes:
        raise UserError(
            f"{source.name}: its image tower is a ResNet; only that tower can be converted, with "
            "--model=modified_resnet."
        )
    missing = [key for key, rank in _RANKS.items() if len(shapes.get(key, ())) != rank]
    if missing:
        raise UserError(
            f"{source.name}: no whole CLIP in OpenAI's layout: it lacks {', '.join(missing)}; give "
            "the .pt file as OpenAI published it, or all of its state dict."
        )
    width, _, _, patch = shapes[_PATCHES]
    side = round((shapes[_POSITIONS][0] - 1) ** 0.5)  # patches
    text_width, embed_dim = shapes[_PROJECTION]
    return sizes.CLIPConfig(
        vision=sizes.VisionConfig(
            image_size=side * patch,
            patch_size=patch,
            width=width,
            layers=_count_blocks(shapes, "visual."),
            heads=max(width // _HEAD, 1),
            mlp_width=shapes[f"visual.{_INNER}"][0],
            embed_dim=embed_dim,
        ),
        text=sizes.TextConfig(
            vocab_size=shapes[_TOKENS][0],
            context=shapes[_CONTEXT][0],
            width=text_width,
            layers=_count_blocks(shapes, ""),
            heads=max(text_width // _HEAD, 1),
            mlp_width=shapes[_INNER][0],
            embed_dim=embed_dim,
        ),
    )


def _split_attention(source: TensorSource) -> TensorSource:
    """The checkpoint with each attention's fused projection split into query, key and value.

    `attn.in_proj_weight` (3 * width, width) becomes `attn.in_proj_weight[q]`, `[k]` and `[v]`,
    (width, width) each; `attn.in_proj_bias` likewise.
    """
    tensors = {}
    for key, spec in source.specs().items():
        if not re.search(r"\.in_proj_(weight|bias)$", key) or not spec.shape or spec.shape[0] % 3:
            tensors[key] = spec, functools.partial(source.read, key)
            continue
        part = jax.ShapeDtypeStruct((spec.shape[0] // 3, *spec.shape[1:]), spec.dtype)
        for third, name in enumerate("qkv"):
            tensors[f"{key}[{name}]"] = part, functools.partial(_read_third, source, key, third)
    return DerivedSource(source.name, tensors)


def _read_third(source: TensorSource, key: str, third: int) -> np.ndarray:
    return np.split(source.read(key), 3)[third]


def _block_rules(block: str, path: str) -> list[keymap.Rule]:
    rules = keymap.transformer_rules(block, path, _LINEARS, _NORMS)
    for part in "qkv":
        weight, bias = (f"{block}attn.in_proj_{kind}[{part}]" for kind in ("weight", "bias"))
        rules += [
            keymap.Rule(weight, f"{path}/{part}/kernel", keymap.TRANSPOSE),
            keymap.Rule(bias, f"{path}/{part}/bias"),
        ]
    return rules


def _count_blocks(keys: Iterable[str], tower: str) -> int:
    pattern = re.compile(rf"{re.escape(tower + _BLOCK)}(\d{{1,4}})\.")
    return 1 + max(int(match[1]) for key in keys if (match := pattern.match(key)))


# The config of open_clip.

# What a text or image tower may do otherwise, and how CLIP does it.
_BLOCKS: Mapping[str, tuple[Any, ...]] = {
    "ls_init_value": (),
    "final_ln_after_pool": (False,),
    "block_type": ("default",),
    "qk_norm": (False,),
    "scaled_cosine_attn": (False,),
    "scale_heads": (False,),
    "scale_attn_inner": (False,),
    "scale_attn": (False,),
    "scale_fc": (False,),
    "act_kwargs": ({},),
}
_OPENAI_VISION: Mapping[str, tuple[Any, ...]] = _BLOCKS | {
    "attentional_pool": (False,),
    "no_ln_pre": (False,),
    "pos_embed_type": ("learnable",),
    "pool_type": ("tok",),
    "global_average_pool": (False,),
    "input_patchnorm": (False,),
    "timm_model_name": (),
}
_OPENAI_TEXT: Mapping[str, tuple[Any, ...]] = _BLOCKS | {
    "embed_cls": (False,),
    "no_causal_mask": (False,),
    "pool_type": ("argmax",),
    "proj_type": ("linear",),
    "proj_bias": (False,),
    "hf_model_name": (),
    "hf_tokenizer_name": (),
    "tokenizer_mode": ("clip",),
    "tokenizer_kwargs": ({}, {"clean": "lower"}),
}
_HARMLESS = ("output_tokens", "patch_dropout", "attn_pooler_queries", "attn_pooler_heads")
_UNUSED_ENDS = ("timm_", "hf_")  # of a tower that is not open_clip's own, which a name switches on
_PREPROCESSING: Mapping[str, tuple[Any, ...]] = {
    "interpolation": ("bicubic",),
    "resize_mode": ("shortest", "squash"),
    "mode": ("RGB",),
}


def open_clip_file(path: Path) -> Path | None:
    """The tensors of a folder as open_clip publishes it; None where it is none of these."""
    if not (path / OPEN_CLIP_CONFIG).is_file():
        return None
    return next((path / name for name in OPEN_CLIP_WEIGHTS if (path / name).is_file()), None)


def open_clip_config(folder: Path) -> sizes.CLIPConfig | None:
    """The config in a folder's `open_clip_config.json`; None if there is none."""
    file = folder / OPEN_CLIP_CONFIG
    if not file.is_file():
        return None
    content = read_json(file)
    model = content.get("model_cfg") if isinstance(content, dict) else None
    towers = [model.get(key) for key in ("vision_cfg", "text_cfg")] if _is_object(model) else [None]
    if not all(map(_is_object, towers)) or not isinstance(model.get("embed_dim"), int):
        raise UserError(
            f"{file}: has no `model_cfg` with embed_dim, vision_cfg and text_cfg; fetch the file "
            "that open_clip published with the checkpoint."
        )
    vision, text = towers
    if "siglip" in str(vision.get("timm_model_name")) and not text.get("hf_model_name"):
        raise UserError(
            f"{file}: a SigLIP in timm's layout; convert the same weights as google publishes them "
            "(google/siglip-..., google/siglip2-...) with --model=siglip."
        )
    check_keys(
        model,
        f"{file}, model_cfg",
        read=kinds(size="embed_dim", object="vision_cfg text_cfg", flag="quick_gelu"),
        harmless=("init_logit_scale", "cast_dtype", "output_dict"),
        fixed={
            "custom_text": (False,),
            "multimodal_cfg": (),
            "init_logit_bias": (),
            "nonscalar_logit_scale": (False,),
        },
    )
    if isinstance(vision.get("layers"), list):
        raise UserError(
            f"{file}, vision_cfg: the image tower is a ResNet; only that tower can be converted, "
            "with --model=modified_resnet."
        )
    both = kinds(size="layers width", number="mlp_ratio", object_or_null="norm_kwargs")
    of_pictures = kinds(size="patch_size head_width", any="image_size")
    of_texts = kinds(size="context_length vocab_size heads")
    _check_tower(vision, f"{file}, vision_cfg", both | of_pictures, _OPENAI_VISION)
    _check_tower(text, f"{file}, text_cfg", both | of_texts, _OPENAI_TEXT)
    image_size = _side(vision.get("image_size", 224), file)
    preprocessing = content.get("preprocess_cfg") or {}
    if not _is_object(preprocessing):
        raise UserError(f"{file}: preprocess_cfg is not an object; fetch the file again.")
    check_keys(
        preprocessing,
        f"{file}, preprocess_cfg",
        read=("size", "mean", "std"),
        harmless=("fill_color",),  # only where pictures are padded
        fixed=_PREPROCESSING,
    )
    preprocessed = _side(preprocessing.get("size", image_size), file)
    if preprocessed != image_size:
        raise UserError(
            f"{file}, preprocess_cfg: size is for pictures of {preprocessed} pixels, "
            f"the image tower reads {image_size}; use another checkpoint."
        )
    activation = "quick_gelu" if model.get("quick_gelu") else "gelu"
    width, text_width = vision.get("width", 768), text.get("width", 512)
    return sizes.CLIPConfig(
        vision=sizes.VisionConfig(
            image_size=image_size,
            patch_size=vision.get("patch_size", 16),
            width=width,
            layers=vision.get("layers", 12),
            heads=width // vision.get("head_width", 64),
            mlp_width=int(width * vision.get("mlp_ratio", 4.0)),
            embed_dim=model["embed_dim"],
            activation=activation,
            eps=_eps(vision, f"{file}, vision_cfg"),
            pixel_mean=_channels(preprocessing, "mean", sizes.PIXEL_MEAN, file),
            pixel_std=_channels(preprocessing, "std", sizes.PIXEL_STD, file),
        ),
        text=sizes.TextConfig(
            vocab_size=text.get("vocab_size", 49408),
            context=text.get("context_length", 77),
            width=text_width,
            layers=text.get("layers", 12),
            heads=text.get("heads", 8),
            mlp_width=int(text_width * text.get("mlp_ratio", 4.0)),
            embed_dim=model["embed_dim"],
            activation=activation,
            eps=_eps(text, f"{file}, text_cfg"),
        ),
    )


def squashes(folder: Path) -> bool:
    """Whether the config in a folder has pictures scaled to a square, not cropped (DFN's large)."""
    file = folder / OPEN_CLIP_CONFIG
    content = read_json(file) if file.is_file() else {}
    preprocessing = content.get("preprocess_cfg") if _is_object(content) else None
    return _is_object(preprocessing) and preprocessing.get("resize_mode") == "squash"


def head_width(folder: Path) -> int:
    """`head_width` of the image tower that the config in a folder names; CLIP's 64 without one."""
    file = folder / OPEN_CLIP_CONFIG
    content = read_json(file) if file.is_file() else {}
    tower: Any = content
    for key in ("model_cfg", "vision_cfg"):
        tower = tower.get(key, {}) if _is_object(tower) else {}
    return tower.get("head_width", 64) if _is_object(tower) else 64


def _check_tower(
    tower: Mapping[str, Any], where: str, read: Mapping[str, str], fixed: Mapping[str, Any]
) -> None:
    unused = [key for key in tower if key.startswith(_UNUSED_ENDS) and key not in fixed]
    check_keys(tower, where, read=read, harmless=(*_HARMLESS, *unused, "pad_id"), fixed=fixed)


def _eps(tower: Mapping[str, Any], where: str) -> float:
    norm = tower.get("norm_kwargs") or {}
    check_keys(norm, f"{where}, norm_kwargs", read=kinds(number="eps"))
    return norm.get("eps", 1e-5)


def _side(size: Any, file: Path) -> int:
    sides = size[-2:] if isinstance(size, list) else [size]  # channels may come first
    if not all(type(side) is int and side >= 1 for side in sides):
        raise UserError(
            f"{file}: its pictures are of {size!r} pixels, expected a whole number of at least 1 "
            "or two of them; repair the file or fetch it again."
        )
    if len(set(sides)) != 1:
        raise UserError(
            f"{file}: its pictures are of {size} pixels; only square pictures are supported, use "
            "another checkpoint."
        )
    return sides[0]


def _channels(
    preprocessing: Mapping[str, Any], key: str, usual: tuple[float, ...], file: Path
) -> tuple[float, float, float]:
    values = preprocessing.get(key)
    if values is None:
        values = usual
    if not isinstance(values, list | tuple):  # one for all
        values = [values] * 3
    least = 0 if key == "mean" else 1e-6
    if len(values) != 3 or not all(type(x) in (int, float) and least <= x <= 1 for x in values):
        raise UserError(
            f"{file}, preprocess_cfg: {key} is {values!r}, expected three numbers up to 1; repair "
            "the file or fetch it again."
        )
    red, green, blue = map(float, values)
    return red, green, blue


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_uniir(source: TensorSource) -> bool:
    """Whether tensors are a CLIP_SF's."""
    wrapped = [key.startswith(_WRAPPER) for key in source.specs()]
    if any(wrapped) and not all(wrapped):
        raise UserError(
            f"{source.name}: has tensors beside UniIR's CLIP, as CLIP_FF has (feature fusion); "
            "only CLIP_SF can be converted."
        )
    return bool(wrapped) and all(wrapped)


def _without_wrapper(source: TensorSource) -> TensorSource:
    """The tensors by OpenAI's names."""
    return DerivedSource(
        source.name,
        {
            key.removeprefix(_WRAPPER): (spec, functools.partial(source.read, key))
            for key, spec in source.specs().items()
        },
    )


FIXED, FLEXIBLE = "siglip", "siglip2"  # SigLIP's model types of transformers

_BLOCK_LINEARS = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.out_proj": "out",
    "mlp.fc1": "mlp_in",
    "mlp.fc2": "mlp_out",
}
_BLOCK_NORMS = {"layer_norm1": "ln_1", "layer_norm2": "ln_2"}
_VISION, _TEXT = "vision_model.", "text_model."

_KEYS = kinds(object_or_null="vision_config text_config")
_CLIP_KEYS = kinds(size="projection_dim", object_or_null="vision_config_dict text_config_dict")
_FIXED = {"tie_word_embeddings": (True, False)}  # they predict no words
_TOWER = kinds(
    size="hidden_size num_hidden_layers num_attention_heads intermediate_size",
    number="layer_norm_eps",
    name="hidden_act",
)
_OF_PICTURES = _FIXED | {"num_channels": (3,), "is_causal": (False,)}
# Of each tower of CLIP: the keys that are read, and those that have only these values here.
_CLIP_TOWERS: Mapping[str, tuple[Mapping[str, str], Mapping[str, tuple[Any, ...]]]] = {
    "vision": (_TOWER | kinds(size="image_size patch_size"), _OF_PICTURES),
    "text": (
        _TOWER | kinds(size="vocab_size max_position_embeddings", integer_or_null="eos_token_id"),
        _FIXED | {"is_causal": (True,)},
    ),
}
_SIGLIP_VISION = _TOWER | kinds(size="patch_size")
_SIGLIP_TEXT = _TOWER | kinds(
    size="vocab_size max_position_embeddings", size_or_null="projection_size"
)
# Dropout is of training, projection_dim of a tower by itself; old vision configs have a vocab_size.
_TRAINING = ("attention_dropout", "dropout")
_OF_CLIP_ALONE = ("projection_dim", "vocab_size")
# Of the key maps of SigLIP: one number, and a probe [1, 1, width].
_SCALAR = keymap.Transform(lambda x: x.reshape(()), lambda x: x.reshape(1))
_PROBE = keymap.Transform(lambda x: x.reshape(-1), lambda x: x.reshape(1, 1, -1))
# torch's MultiheadAttention: (3 * out, in) <-> [in, 3, out].
_IN_KERNEL = keymap.Transform(
    lambda x: x.T.reshape(x.shape[1], 3, -1), lambda x: x.reshape(x.shape[0], -1).T
)
_IN_BIAS = keymap.Transform(lambda x: x.reshape(3, -1), lambda x: x.reshape(-1))


def key_map(config: CLIPConfig | SiglipConfig) -> keymap.KeyMap:
    """Key map of transformers' CLIPModel, SiglipModel and Siglip2Model."""
    is_clip = isinstance(config, CLIPConfig)
    scalars = [keymap.Rule("logit_scale", "logit_scale")]
    if not is_clip:
        scalars = [keymap.Rule(name, name, _SCALAR) for name in ("logit_scale", "logit_bias")]
    projection = [keymap.Rule("visual_projection.weight", "vision/proj/kernel", keymap.TRANSPOSE)]
    return keymap.KeyMap(
        rules=[
            *scalars,
            *vision_rules(config.vision),
            *(projection if is_clip else []),
            keymap.Rule(f"{_TEXT}embeddings.token_embedding.weight", "text/tokens/table"),
            keymap.Rule(f"{_TEXT}embeddings.position_embedding.weight", "text/positions"),
            *keymap.transformer_rules(
                f"{_TEXT}encoder.layers.{{layer}}.", "text/layers", _BLOCK_LINEARS, _BLOCK_NORMS
            ),
            *keymap.norm_rules(f"{_TEXT}final_layer_norm", "text/ln_final"),
            *(
                [keymap.Rule("text_projection.weight", "text/proj/kernel", keymap.TRANSPOSE)]
                if is_clip
                else keymap.linear_rules(f"{_TEXT}head", "text/proj")
            ),
        ],
        ignore=[r"embeddings\.position_ids$"],  # a buffer of old versions
    )


def vision_rules(config: VisionConfig | SiglipVisionConfig) -> list[keymap.Rule]:
    """Rules of the vision tower but CLIP's projection (its `pre_layrnorm` is spelled so)."""
    is_clip, embeddings = isinstance(config, VisionConfig), f"{_VISION}embeddings."
    flexible = not is_clip and config.flexible
    rules = [
        keymap.Rule(
            f"{embeddings}patch_embedding.weight",
            "vision/patch/kernel",
            keymap.TRANSPOSE if flexible else keymap.conv_patches(config.patch_size),
        ),
        keymap.Rule(f"{embeddings}position_embedding.weight", "vision/positions"),
    ]
    if is_clip:
        rules.insert(0, keymap.Rule(f"{embeddings}class_embedding", "vision/class_token"))
        rules += keymap.norm_rules(f"{_VISION}pre_layrnorm", "vision/ln_pre")
    else:
        rules.insert(1, keymap.Rule(f"{embeddings}patch_embedding.bias", "vision/patch/bias"))
    rules += keymap.transformer_rules(
        f"{_VISION}encoder.layers.{{layer}}.", "vision/layers", _BLOCK_LINEARS, _BLOCK_NORMS
    )
    rules += keymap.norm_rules(f"{_VISION}post_layernorm", "vision/ln_post")
    if is_clip or not config.head:
        return rules
    head = f"{_VISION}head."
    return [
        *rules,
        keymap.Rule(f"{head}probe", "vision/head/probe", _PROBE),
        keymap.Rule(f"{head}attention.in_proj_weight", "vision/head/kernel", _IN_KERNEL),
        keymap.Rule(f"{head}attention.in_proj_bias", "vision/head/bias", _IN_BIAS),
        *keymap.linear_rules(f"{head}attention.out_proj", "vision/head/out"),
        *keymap.norm_rules(f"{head}layernorm", "vision/head/norm"),
        *keymap.linear_rules(f"{head}mlp.fc1", "vision/head/mlp_in"),
        *keymap.linear_rules(f"{head}mlp.fc2", "vision/head/mlp_out"),
    ]


def clip_config(published: Mapping[str, Any], where: str = "config.json") -> CLIPConfig:
    """Our config from transformers' `config.json`; absent values are transformers' defaults."""
    check_keys(published, where, read=_KEYS | _CLIP_KEYS, fixed=_FIXED)
    vision, text = (_clip_tower(published, kind, where) for kind in ("vision", "text"))
    embed_dim = published.get("projection_dim", 512)
    # Transformers pools at the largest id when an old config says 2 (a wrong value, kept).
    eos = text.get("eos_token_id", 49407)
    common = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
    of_text = {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}
    return CLIPConfig(
        vision=VisionConfig(
            image_size=vision.get("image_size", 224),
            patch_size=vision.get("patch_size", 32),
            embed_dim=embed_dim,
            **_sizes(common | vision),
        ),
        text=TextConfig(
            vocab_size=text.get("vocab_size", 49408),
            context=text.get("max_position_embeddings", 77),
            embed_dim=embed_dim,
            eos_token_id=None if eos == 2 else eos,
            **_sizes(common | of_text | text),
        ),
    )


def _clip_tower(published: Mapping[str, Any], kind: str, where: str) -> dict[str, Any]:
    """`vision_config` or `text_config`; the whole of it is `*_config_dict` where that is given.

    transformers completes the latter by defaults and lets all of it take precedence.
    """
    key = f"{kind}_config_dict"
    if published.get(key) is None:
        key = f"{kind}_config"
    tower = published.get(key) or {}
    read, fixed = _CLIP_TOWERS[kind]
    harmless = (*_TRAINING, *_OF_CLIP_ALONE)
    check_keys(tower, f"{where}, {key}", read=read, harmless=harmless, fixed=fixed)
    return tower


def siglip_config(published: Mapping[str, Any], where: str = "config.json") -> SiglipConfig:
    """Our config from transformers' `config.json`; absent values are transformers' defaults."""
    check_keys(published, where, read=_KEYS, fixed=_FIXED)
    vision, text = (published.get(f"{kind}_config") or {} for kind in ("vision", "text"))
    fixed = _FIXED | {"is_causal": (False,)}
    check_keys(text, f"{where}, text_config", read=_SIGLIP_TEXT, harmless=_TRAINING, fixed=fixed)
    flexible = published.get("model_type") == FLEXIBLE
    sizes = _sizes(text)
    return SiglipConfig(
        siglip_vision_config(vision, f"{where}, vision_config", flexible=flexible),
        SiglipTextConfig(
            vocab_size=text.get("vocab_size", 32_000),
            length=text.get("max_position_embeddings", 64),
            embed_dim=text.get("projection_size") or sizes["width"],
            **sizes,
        ),
    )


def siglip_vision_config(
    published: Mapping[str, Any],
    where: str,
    *,
    flexible: bool = False,
    may_lack_head: bool = False,
) -> SiglipVisionConfig:
    """The vision tower's config from its own part of a `config.json`.

    Args:
      published, where: see `siglip_config`.
      flexible: NaFlex.
      may_lack_head: the model reads patches, so that the tower may have no pooling head.
    """
    read = _SIGLIP_VISION | kinds(size="num_patches" if flexible else "image_size")
    read |= kinds(flag="vision_use_head") if may_lack_head else {}
    fixed = _OF_PICTURES | {"vision_use_head": (True,)}
    check_keys(published, where, read=read, harmless=_TRAINING, fixed=fixed)
    patch = published.get("patch_size", 16)
    if flexible:
        image_size = patch * _grid(published.get("num_patches", 256), where)
    else:
        image_size = published.get("image_size", 224)
    return SiglipVisionConfig(
        image_size=image_size,
        patch_size=patch,
        flexible=flexible,
        head=published.get("vision_use_head", True),
        **_sizes(published),
    )


def _sizes(tower: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "width": tower.get("hidden_size", 768),
        "layers": tower.get("num_hidden_layers", 12),
        "heads": tower.get("num_attention_heads", 12),
        "mlp_width": tower.get("intermediate_size", 3072),
        "activation": tower.get("hidden_act", "gelu_pytorch_tanh"),
        "eps": tower.get("layer_norm_eps", 1e-6),
    }


def _grid(positions: int, where: str) -> int:
    side = math.isqrt(positions)
    if side * side != positions:
        raise UserError(
            f"{where}: num_patches is {positions}, expected a square number, the "
            "positions of a grid; use another checkpoint."
        )
    return side


def to_hf(config: CLIPConfig | SiglipConfig) -> dict[str, Any]:
    """transformers' config.json of a CLIPModel, SiglipModel or Siglip2Model."""
    text, vision = config.text, vision_to_hf(config.vision)
    kind = vision["model_type"].removesuffix("_vision_model")
    sizes = {"vocab_size": text.vocab_size, "max_position_embeddings": text.length}
    of_text = {**_tower_to_hf(text), "model_type": f"{kind}_text_model", **sizes}
    if isinstance(text, TextConfig):
        # 2 tells transformers to pool at the largest id (see clip_config).
        of_text["eos_token_id"] = 2 if text.eos_token_id is None else text.eos_token_id
    else:
        of_text["projection_size"] = text.embed_dim
    return {
        "architectures": [{"clip": "CLIPModel", FLEXIBLE: "Siglip2Model"}.get(kind, "SiglipModel")],
        "model_type": kind,
        **({"projection_dim": text.embed_dim} if kind == "clip" else {}),
        "vision_config": vision,
        "text_config": of_text,
    }


def vision_to_hf(config: VisionConfig | SiglipVisionConfig) -> dict[str, Any]:
    """The vision tower's part of a config.json, or of CLIP's, its own."""
    tower = _tower_to_hf(config)
    if isinstance(config, VisionConfig):
        sizes = {"image_size": config.image_size, "patch_size": config.patch_size}
        return {**tower, "model_type": "clip_vision_model", **sizes}
    size = {"num_patches": config.patches} if config.flexible else {"image_size": config.image_size}
    return {
        **tower,
        "model_type": f"{FLEXIBLE if config.flexible else FIXED}_vision_model",
        "patch_size": config.patch_size,
        **size,
        **({} if config.head else {"vision_use_head": False}),
    }


def _tower_to_hf(
    config: VisionConfig | TextConfig | SiglipVisionConfig | SiglipTextConfig,
) -> dict[str, Any]:
    return {
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp_width,
        **({"projection_dim": config.embed_dim} if config.family == "clip" else {}),
        "hidden_act": config.activation,
        "layer_norm_eps": config.eps,
    }


def open_clip(path: Path) -> Checkpoint:
    """CLIP as transformers' `CLIPModel`, OpenAI, open_clip or UniIR (CLIP_SF) publishes it.

    A folder with transformers' config.json is read as such.
    """
    file = config_file(path)
    if not (path.is_dir() and file.exists()) and (checkpoint := open_openai(path)):
        return checkpoint
    config = clip_config(read_hf_config(path, "clip"), str(file))
    check_processor(file.parent, config.vision.image_size)
    return Checkpoint(config, key_map, open_source(path), "transformers")


def open_siglip(path: Path) -> Checkpoint:
    """SigLIP as transformers publishes it."""
    file = config_file(path)
    config = siglip_config(read_hf_config(path, FIXED, FLEXIBLE), str(file))
    read_preparation(file.parent, config.vision)
    return Checkpoint(config, key_map, open_source(path), "transformers")


def publish_clip(config: CLIPConfig | SiglipConfig, state: nnx.State) -> Published:
    """CLIPModel; of SigLIP SiglipModel or Siglip2Model."""
    return Published(keymap.untied_source(state, key_map(config)), to_hf(config))


publish_siglip = publish_clip


# Beside transformers.


def _inputs(config: CLIPConfig | SiglipConfig) -> dict[str, Any]:
    text, vision = config.text, config.vision
    if isinstance(text, TextConfig):
        ids = comparison.tokens(text.vocab_size - 1, text.context)
        end = text.eos_token_id
        ids[0, -1] = text.vocab_size - 1 if end is None else end
        return {"ids": ids, "pixels": comparison.picture(vision)}
    ids = comparison.tokens(text.vocab_size, text.length)
    if not vision.flexible:
        return {"ids": ids, "pixels": comparison.picture(vision)}
    shapes = np.array([comparison.GRID], np.int32)
    size = (1, shapes.prod(), vision.patch_size**2 * 3)
    patches = comparison.noise().standard_normal(size).astype(np.float32)
    return {"ids": ids, "pixels": (patches, shapes)}


def _run_towers(model: Any, inputs: Mapping[str, Any]) -> comparison.Outputs:
    ids, pixels = inputs["ids"], inputs["pixels"]
    stacks = {
        "text": model.text.hidden_states(ids),
        "picture": model.vision.hidden_states(pixels),
    }
    ends = {"text vector": model.encode_text(ids), "picture vector": model.encode_image(pixels)}
    return comparison.Outputs(stacks, ends)


def text_and_pixels(inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A text and a picture as transformers' models name them."""
    if not isinstance(inputs["pixels"], tuple):
        pixels = comparison.channels_first(inputs["pixels"])
        return {"input_ids": inputs["ids"], "pixel_values": pixels}
    patches, shapes = inputs["pixels"]
    return {
        "input_ids": inputs["ids"],
        "pixel_values": patches,
        "spatial_shapes": shapes,
        "pixel_attention_mask": np.ones(patches.shape[:2], np.int64),
    }


_VECTORS = {"text vector": "text_embeds", "picture vector": "image_embeds"}
_TOWERS = {"text": "text_model", "picture": "vision_model"}
_COMPARED = _run_towers, _VECTORS, _TOWERS, _inputs, text_and_pixels
CLIP_CHECK = comparison.Check("CLIPModel", *_COMPARED)
SIGLIP_CHECK = comparison.Check("AutoModel", *_COMPARED)
