"""LLaVA's checkpoints: transformers' layouts and the original's, and export to transformers.

All layouts share one key map. Its rules are those of the tower (CLIP, SigLIP) and the decoder under
transformers' published prefixes (llava-hf/llava-1.5-7b-hf); renames bring the others there:
transformers 4.52 to 5 (`model.language_model.`), and haotian-liu/LLaVA (`model.mm_projector.0`,
`model.layers.0`), with its vision tower within or, where it has none, in a CLIP's or SigLIP's
folder beside it. A SigLIP is read there as in LLaVA-VL/LLaVA-NeXT's siglip_encoder.py: all patches,
before the published tower's last layer, which is cut off as its head is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.models.common import comparison
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.families import FAMILIES
from mmqa_jax.models.llama.keys import llama_rules, to_published_tensors, to_rule_tensors
from mmqa_jax.models.llava.network import ORIGINAL_IMAGE_TOKEN, Llava, LlavaConfig, expand_images
from mmqa_jax.models.two_towers import keys as two_towers
from mmqa_jax.models.two_towers.config import (
    SiglipVisionConfig,
    VisionConfig,
    vit_l_14_336,
)
from mmqa_jax.models.two_towers.processor import check_processor, read_preparation
from mmqa_jax.weights import layouts
from mmqa_jax.weights.config_json import check_keys, kinds
from mmqa_jax.weights.formats.safetensors import DerivedSource, TensorSource
from mmqa_jax.weights.keymap import KeyMap, Rule, linear_rules, untied_source

LLAMA_PREFIX = "language_model."
_TOWER, _PROJECTOR = "vision_tower.", "multi_modal_projector."
_TABLE, _HEAD = f"{LLAMA_PREFIX}model.embed_tokens.weight", f"{LLAMA_PREFIX}lm_head.weight"

_RENAME = (
    # transformers 4.52 and later
    (r"^model\.language_model\.", f"{LLAMA_PREFIX}model."),
    (r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),
    # haotian-liu/LLaVA
    (r"^vision_tower\.vision_tower\.", _TOWER),
    (r"^model\.mm_projector\.0\.", f"{_PROJECTOR}linear_1."),
    (r"^model\.mm_projector\.2\.", f"{_PROJECTOR}linear_2."),
    (r"^model\.(embed_tokens|layers|norm)\.", rf"{LLAMA_PREFIX}model.\1."),
    # both
    (r"^lm_head\.", f"{LLAMA_PREFIX}lm_head."),
    # transformers 5: the vision model without its prefix
    (
        r"^vision_tower\.(embeddings|pre_layrnorm|encoder|post_layernorm|head)\.",
        rf"{_TOWER}vision_model.\1.",
    ),
)
_BUFFERS = (r"rotary_emb\.inv_freq$", r"embeddings\.position_ids$")
# What a CLIP's or SigLIP's folder holds beside its vision tower.
_REST_OF_CLIP = (
    r"^vision_tower\.(text_model\.|text_projection\.|visual_projection\.|logit_(scale|bias)$)"
)
# The decoder's family by the original's model type, and by that of forks of its code.
MODEL_TYPES = {
    "llava": "llama",
    "llava_qwen": "qwen2",
    **{f"llava_{family}": family for family in FAMILIES},
}

# Options of haotian-liu/LLaVA: what the code takes for absent ones, and LLaVA-1.5's value.
_ORIGINAL_OPTIONS = {
    "mm_projector_type": ("linear", "mlp2x_gelu"),
    "mm_vision_select_feature": ("patch", "patch"),
    "mm_patch_merge_type": ("flat", "flat"),
    "mm_use_im_start_end": (False, False),
    "s2": (False, False),
    "image_aspect_ratio": ("pad", "pad"),
}
# Further keys of the original's that are read, and of its training; `use_mm_proj` is always true.
_ORIGINAL_READ = ("mm_vision_tower", "mm_hidden_size", "mm_vision_select_layer")
_ORIGINAL_HARMLESS = (
    *("freeze_mm_mlp_adapter", "freeze_mm_vision_resampler", "tune_mm_mlp_adapter"),
    *("tune_mm_vision_resampler", "unfreeze_mm_vision_tower", "mm_projector_lr"),
    *("mm_vision_tower_lr", "mm_use_im_patch_token", "use_mm_proj", "mm_resampler_type"),
    *("tokenizer_model_max_length", "tokenizer_padding_side", "image_grid_pinpoints"),
    *("image_crop_resolution", "image_split_resolution", "vision_config"),
)
HF_READ = kinds(
    object="text_config",
    object_or_null="vision_config",
    integer="image_token_index image_token_id",
    flag="tie_word_embeddings multimodal_projector_bias",
    name="projector_hidden_act",
    any="vision_feature_layer vision_feature_select_strategy",
)
# Copies of what text_config or vision_config say, and of training.
HF_HARMLESS = ("ignore_index", "vocab_size", "image_seq_length", "hidden_size")
_VOCABULARY_MULTIPLE = 64  # transformers' conversion pads the embedding table to it


def widen_vocabulary(source: TensorSource, rows: int) -> TensorSource:
    """A LLaVA's tensors with more rows in embedding table and head, each the mean of the others.

    A new row's logit is then the mean of all logits, never the largest: greedy answers stay.
    """

    def read(key: str) -> np.ndarray:
        tensor = source.read(key)
        mean = tensor.mean(axis=0, keepdims=True, dtype=np.float32).astype(tensor.dtype)
        return np.concatenate([tensor, np.repeat(mean, rows - len(tensor), axis=0)])

    wider = {
        key: (jax.ShapeDtypeStruct((rows, spec.shape[1]), spec.dtype), functools.partial(read, key))
        for key, spec in source.specs().items()
        if key in (_TABLE, _HEAD)
    }
    return layouts.joined(source.name, source, DerivedSource(source.name, wider))


def llava_key_map(config: LlavaConfig, ignore: Sequence[str] = _BUFFERS) -> KeyMap:
    """Key map of every layout, see the module."""
    rules: list[Rule] = [
        *_tower_rules(config.vision),
        *linear_rules(f"{_PROJECTOR}linear_1", "projector/linear_1", config.projector_bias),
        *linear_rules(f"{_PROJECTOR}linear_2", "projector/linear_2", config.projector_bias),
        *llama_rules(config.llama, prefix=LLAMA_PREFIX, path="llama/"),
    ]
    tied = ((_HEAD, _TABLE),) if config.llama.tied else ()
    return KeyMap(rules, rename=_RENAME, ignore=ignore, tied=tied)


def _tower_rules(vision: VisionConfig | SiglipVisionConfig) -> list[Rule]:
    return [
        dataclasses.replace(rule, key=f"{_TOWER}{rule.key}")
        for rule in two_towers.vision_rules(vision)
    ]


def open_llava(folder: Path, clip: Path | None = None) -> layouts.Checkpoint:
    """Opens a LLaVA checkpoint of any layout, reading headers only.

    A vision tower in the checkpoint is the one that is used. (haotian-liu/LLaVA reads CLIP's own:
    LLaVA-1.5's tower was frozen in training, and differs from it only by the file's precision.)

    Args:
      folder: config.json and weights (see `open_source`), transformers' or haotian-liu/LLaVA's.
      clip: folder of the CLIP or SigLIP that it was trained with (transformers' CLIPModel,
        SiglipModel or vision model alone): its vision tower where the checkpoint has none, and its
        sizes where the original's config names another than CLIP ViT-L/14 at 336 pixels. None takes
        the folder that `mm_vision_tower` of the original's config names, if there is one.
    """
    file = layouts.config_file(folder)
    published = read_json(file)
    if "text_config" in published:
        config = _with_processor(llava_config(published, str(file)), file.parent)
    elif "mm_vision_tower" in published:
        named = Path(str(published["mm_vision_tower"]))
        clip = named if clip is None and named.is_dir() else clip
        vision = None if clip is None else _read_vision_config(clip)
        config = original_config(published, vision, str(file))
    else:
        raise UserError(
            f"{file}: has neither `text_config` (transformers) nor `mm_vision_tower` (the "
            "original); give the folder of a LLaVA checkpoint."
        )
    source, ignore = layouts.open_source(folder), _BUFFERS
    if not any(_TOWER in key for key in source.specs()):
        if clip is None:
            raise UserError(
                f"{source.name}: holds no vision tower; give the folder of the CLIP that it was "
                "trained with (openai/clip-vit-large-patch14-336) as well."
            )
        tower = layouts.with_prefixes(layouts.open_source(clip), {_TOWER: ""})
        source = layouts.joined(f"{source.name} with {tower.name}", source, tower)
        ignore = (*_BUFFERS, _REST_OF_CLIP)
    source = to_rule_tensors(source, config.llama)
    if config.image_token < 0 and isinstance(config.vision, SiglipVisionConfig):
        tower = r"^vision_tower\.vision_model\."
        ignore += (rf"{tower}encoder\.layers\.{config.vision.layers}\.", rf"{tower}head\.")
    layout = "haotian-liu/LLaVA" if config.image_token < 0 else "transformers"
    key_map = functools.partial(llava_key_map, ignore=ignore)
    return layouts.Checkpoint(config, key_map, source, layout)


def publish_llava(config: LlavaConfig, state: nnx.State) -> layouts.Published:
    """LlavaForConditionalGeneration.

    transformers looks the placeholder up in the embedding table. Where its id is outside (the
    original's layout), the table and the head get further rows, as in transformers' own
    conversion: the first is `<image>`, the second `<pad>`; the tokenizer that goes with it needs
    both as well.
    """
    source = untied_source(state, llava_key_map(config))
    source = to_published_tensors(source, config.llama, LLAMA_PREFIX)
    tokens = config.llama.vocab_size
    if 0 <= config.image_token < tokens:
        return layouts.Published(source, llava_to_hf(config))
    wider = -(-(tokens + 2) // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    llama = dataclasses.replace(config.llama, vocab_size=wider)
    config = dataclasses.replace(config, llama=llama, image_token=tokens)
    entries = llava_to_hf(config) | {"pad_token_id": tokens + 1}
    return layouts.Published(widen_vocabulary(source, wider), entries)


def llava_config(published: Mapping[str, Any], where: str = "config.json") -> LlavaConfig:
    """Our config from transformers' `config.json`; absent values are transformers' defaults."""
    layouts.check_model_type(published, where, "llava")
    check_keys(published, where, read=HF_READ, harmless=HF_HARMLESS)
    return LlavaConfig(**fields_from_hf(published, where, LlavaConfig, vit_l_14_336().vision))


def fields_from_hf(
    published: Mapping[str, Any],
    where: str,
    kind: type[LlavaConfig],
    vision: VisionConfig | SiglipVisionConfig,
) -> dict[str, Any]:
    """The fields of LlavaConfig in a `config.json` whose keys are checked.

    Args:
      published, where: see `llava_config`.
      kind: whose defaults absent values have.
      vision: the tower where the file has none.
    """
    layer = published.get("vision_feature_layer", kind.feature_layer)
    if type(layer) is not int:
        raise UserError(
            f"{where}: vision_feature_layer is {layer!r}, which is not supported; use a checkpoint "
            "that reads one layer."
        )
    tied = {"tie_word_embeddings": True} if published.get("tie_word_embeddings") else {}
    if published.get("vision_config"):
        tower = "siglip_vision_model"
        if isinstance(vision, VisionConfig):
            tower = "clip_vision_model"
        tower_config = {"model_type": tower} | published["vision_config"]
        vision = _vision_config(tower_config, f"{where}, vision_config")
    llama = LlamaConfig.from_hf(published["text_config"] | tied, f"{where}, text_config")
    token = published.get("image_token_id", kind.image_token)
    return {
        "vision": vision,
        # transformers' LLaVA takes the decoder's head without its cap or divisor.
        "llama": dataclasses.replace(llama, logit_cap=None, logit_divisor=1.0),
        "feature_layer": layer,
        "select": published.get("vision_feature_select_strategy", kind.select),
        "resize": "squash" if isinstance(vision, SiglipVisionConfig) else "pad",
        "projector_activation": published.get("projector_hidden_act", "gelu"),
        "projector_bias": published.get("multimodal_projector_bias", True),
        "image_token": published.get("image_token_index", token),
    }


def original_config(
    published: Mapping[str, Any],
    vision: VisionConfig | SiglipVisionConfig | None,
    where: str = "config.json",
) -> LlavaConfig:
    """Our config from haotian-liu/LLaVA's `config.json`.

    Args:
      published: the file's content: a decoder's, and options `mm_*`.
      vision: of the tower that it was trained with, whole; None takes CLIP ViT-L/14 at 336 pixels,
        if that is the one that `published` names.
      where: name of the file, for messages.
    """
    layouts.check_model_type(published, where, *MODEL_TYPES)
    is_siglip = isinstance(vision, SiglipVisionConfig)
    for option, (absent, expected) in _ORIGINAL_OPTIONS.items():
        value = published.get(option, absent)
        if value != expected:
            raise UserError(
                f"{where}: {option} is {value!r}, LLaVA-1.5's is {expected!r}; give a checkpoint "
                "of that version."
            )
    known = {*_ORIGINAL_OPTIONS, *_ORIGINAL_READ, *_ORIGINAL_HARMLESS}
    text = {key: value for key, value in published.items() if key not in known}
    named = str(published["mm_vision_tower"])
    if vision is None:
        if Path(named).name != "clip-vit-large-patch14-336":
            raise UserError(
                f"{where}: mm_vision_tower is {named!r}, whose sizes are not known here; give the "
                "folder of this CLIP or SigLIP as well."
            )
        vision = vit_l_14_336().vision
    width = published.get("mm_hidden_size", vision.width)
    if width != vision.width:
        raise UserError(
            f"{where}: mm_hidden_size is {width}, the vision tower's width {vision.width}; give "
            f"the folder of the tower that it was trained with ({named})."
        )
    layer = published.get("mm_vision_select_layer", -2)
    if type(layer) is not int:
        raise UserError(
            f"{where}: mm_vision_select_layer is {layer!r}, expected a whole number; repair the "
            "file or fetch it again."
        )
    if is_siglip:
        if layer != -2:
            raise UserError(
                f"{where}: mm_vision_select_layer is {layer}, but the code that reads a SigLIP "
                "always takes the last layer but one (-2); correct the file."
            )
        # What is read is the last layer of a tower without the published one's last.
        vision, layer = dataclasses.replace(vision, layers=vision.layers - 1, head=False), -1
    family = MODEL_TYPES[published["model_type"]]
    return LlavaConfig(
        vision=vision,
        llama=LlamaConfig.from_hf({**text, "model_type": family}, where),
        feature_layer=layer,
        select="full" if is_siglip else "default",
        image_token=ORIGINAL_IMAGE_TOKEN,
    )


def llava_to_hf(config: LlavaConfig) -> dict[str, Any]:
    """transformers' `config.json`, without token ids but the placeholder's."""
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": config.image_token,
        "image_seq_length": config.features,
        "projector_hidden_act": config.projector_activation,
        "multimodal_projector_bias": config.projector_bias,
        "vision_feature_layer": config.feature_layer,
        "vision_feature_select_strategy": config.select,
        "tie_word_embeddings": config.llama.tied,
        "text_config": config.llama.to_hf(),
        "vision_config": two_towers.vision_to_hf(config.vision),
    }


def _with_processor(config: LlavaConfig, folder: Path) -> LlavaConfig:
    """Checks the picture processor beside a checkpoint, and takes a SigLIP's filter from it."""
    if not isinstance(config.vision, SiglipVisionConfig):
        check_processor(folder)
        return config
    filters = {"bicubic": "squash", "bilinear": "squash_bilinear"}
    return dataclasses.replace(
        config, resize=filters[read_preparation(folder, config.vision).resample]
    )


def _read_vision_config(folder: Path) -> VisionConfig | SiglipVisionConfig:
    return _vision_config(read_json(folder / "config.json"), str(folder / "config.json"))


def _vision_config(published: Mapping[str, Any], where: str) -> VisionConfig | SiglipVisionConfig:
    """The tower from the config of a CLIPModel, a SiglipModel or a vision model alone."""
    kind = published.get("model_type")
    if kind in (two_towers.FIXED, f"{two_towers.FIXED}_vision_model"):
        sizes = published.get("vision_config") or {} if kind == two_towers.FIXED else published
        return two_towers.siglip_vision_config(sizes, where, may_lack_head=True)
    if kind == "clip_vision_model":
        sizes = {"vision_config": published}
        if "projection_dim" in published:
            sizes["projection_dim"] = published["projection_dim"]
        return two_towers.clip_config(sizes, where).vision
    towers = ("clip", "siglip")
    layouts.check_model_type(
        published, where, *towers, *(f"{tower}_vision_model" for tower in towers)
    )
    return two_towers.clip_config(published, where).vision


# Beside transformers.


def _inputs(config: LlavaConfig) -> dict[str, np.ndarray]:
    row = comparison.around_a_picture(config, config.features)
    ids = expand_images([row], [1], config).input_ids
    return {"ids": ids, "pixels": comparison.picture(config.vision)}


def run_pictured(model: Llava, ids: jax.Array, pictures: Any, pixels: Any) -> comparison.Outputs:
    """A prompt with pictures; `pixels` are what the tower's layers get of them."""
    embedded = model.embed(ids, model.encode_images(pictures))
    layers = model.llama.layer_outputs(embedded)
    stacks = {
        "picture": model.vision.hidden_states(pixels),
        "": comparison.states_of(embedded, layers),
    }
    logits = model.llama.logits(model.llama.norm(layers[-1]))
    return comparison.Outputs(stacks, {"logits": logits})


STACKS = {"picture": "model.vision_tower", "": "model.language_model"}
CHECK = comparison.Check(
    "LlavaForConditionalGeneration",
    lambda model, x: run_pictured(model, x["ids"], x["pixels"], x["pixels"]),
    {"logits": "logits"},
    STACKS,
    _inputs,
    two_towers.text_and_pixels,
)
