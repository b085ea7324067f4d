"""LLaVA's checkpoints: transformers' layouts and the original's, and export to transformers.

All layouts share one key map. Its rules are those of the tower (CLIP, SigLIP) and the decoder under
transformers' published prefixes (llava-hf/llava-1.5-7b-hf); renames bring the others there:
transformers 4.52 to 5 (`model.language_model.`), and haotian-liu/LLaVA (`model.mm_projector.0`,
`model.layers.0`), with its vision tower within or, where it has none, in a CLIP's or SigLIP's
folder beside it. A SigLIP is read there as in LLaVA-VL/LLaVA-NeXT's siglip_encoder.py: all patches,
before the published tower's last layer, which is cut off as its head is.

An entry of `TOWERS` is a model type of `vision_config`. Most names there begin with
`vision_model.`.
"""

import dataclasses
import functools
import logging
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.models.common import comparison
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.families import FAMILIES as DECODERS
from mmqa_jax.models.llama.keys import llama_rules, to_published_tensors, to_rule_tensors, unread
from mmqa_jax.models.llava import (
    families,
    gemma4_patches,
    gemma4_vision,
    intern_vit,
    llama4_vision,
    pixtral,
)
from mmqa_jax.models.llava.config import ORIGINAL_IMAGE_TOKEN, LlavaConfig
from mmqa_jax.models.llava.connectors import KINDS, PREFIX
from mmqa_jax.models.llava.gemma4_patches import Gemma4PatchesConfig
from mmqa_jax.models.llava.network import Llava, expand_images
from mmqa_jax.models.llava.processor import processor_to_hf, with_budget, with_split
from mmqa_jax.models.qwen_vl import network as qwen_vl
from mmqa_jax.models.two_towers import keys as two_towers
from mmqa_jax.models.two_towers.config import (
    SIGLIP_MEAN,
    SIGLIP_STD,
    SiglipVisionConfig,
    VisionConfig,
    vit_l_14_336,
)
from mmqa_jax.models.two_towers.processor import check_processor, processors, read_preparation
from mmqa_jax.weights import layouts
from mmqa_jax.weights.config_json import check_keys, kinds
from mmqa_jax.weights.formats.safetensors import DerivedSource, TensorSource
from mmqa_jax.weights.keymap import KeyMap, Rule, untied_source
from mmqa_jax.weights.quantization import read_rounding

NAFLEX = f"{two_towers.FLEXIBLE}_vision_model"
Vision = VisionConfig | SiglipVisionConfig
# Copies of what a processor's file says, and a switch of the authors' code.
_IDEFICS3_HARMLESS = ("max_image_size", "size", "use_base_siglip")
_IDEFICS3 = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 32,
}


class Tower(NamedTuple):
    """How transformers publishes a tower."""

    # (vision_config, name of the file) -> our config; absent values are transformers' defaults.
    read: Callable[[Mapping[str, Any], str], Any]
    # Our config -> vision_config; one without a model type has the family's.
    write: Callable[[Any], dict[str, Any]]
    rules: Callable[[Any], list[Rule]]  # our config -> rules of its tensors


def clip_or_siglip(published: Mapping[str, Any], where: str) -> Vision:
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


def _idefics3(published: Mapping[str, Any], where: str) -> SiglipVisionConfig:
    """A SigLIP without a head.

    transformers finds a patch's position by comparing fractions in float32, which for some sides of
    a grid (19, 25, 29, 31, ...) gives the position before; those of the published models, 26, 27
    and 32, are not among them. Here each patch has its own position.
    """
    layouts.check_model_type(published, where, "idefics3_vision", "smolvlm_vision")
    sizes = {key: value for key, value in published.items() if key not in _IDEFICS3_HARMLESS}
    sizes = {**_IDEFICS3, **sizes, "vision_use_head": False}
    return two_towers.siglip_vision_config(sizes, where, may_lack_head=True)


def _without_head(config: SiglipVisionConfig) -> dict[str, Any]:
    published = two_towers.vision_to_hf(config)
    del published["vision_use_head"], published["model_type"]
    return published


def _naflex(published: Mapping[str, Any], where: str) -> SiglipVisionConfig:
    """A SigLIP 2 of pictures of any size."""
    layouts.check_model_type(published, where, NAFLEX)
    return two_towers.siglip_vision_config(published, where, flexible=True, may_lack_head=True)


_CLIP_OR_SIGLIP = Tower(clip_or_siglip, two_towers.vision_to_hf, two_towers.vision_rules)
_OF_IDEFICS3 = Tower(_idefics3, _without_head, two_towers.vision_rules)
TOWERS: Mapping[str, Tower] = {
    **dict.fromkeys(("clip_vision_model", "siglip_vision_model"), _CLIP_OR_SIGLIP),
    **dict.fromkeys(("idefics3_vision", "smolvlm_vision"), _OF_IDEFICS3),
    NAFLEX: Tower(_naflex, two_towers.vision_to_hf, two_towers.vision_rules),
    llama4_vision.MODEL_TYPE: Tower(llama4_vision.read, llama4_vision.write, llama4_vision.rules),
    pixtral.MODEL_TYPE: Tower(pixtral.read, pixtral.write, pixtral.rules),
    gemma4_patches.MODEL_TYPE: Tower(
        gemma4_patches.read, gemma4_patches.write, gemma4_patches.rules
    ),
    gemma4_vision.MODEL_TYPE: Tower(gemma4_vision.read, gemma4_vision.write, gemma4_vision.rules),
    intern_vit.MODEL_TYPE: Tower(intern_vit.read, intern_vit.write, intern_vit.rules),
}


LLAMA_PREFIX = "language_model."
_TOWER, _PROJECTOR = "vision_tower.", PREFIX
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
_SOUND = r"^model\.(audio_tower|embed_audio)\."  # tensors of what Gemma 4 hears by
# What a CLIP's or SigLIP's folder holds beside its vision tower.
_REST_OF_CLIP = (
    r"^vision_tower\.(text_model\.|text_projection\.|visual_projection\.|logit_(scale|bias)$)"
)
# The decoder's family by the original's model type, and by that of forks of its code.
MODEL_TYPES = {
    "llava": "llama",
    "llava_qwen": "qwen2",
    **{f"llava_{family}": family for family in DECODERS},
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
_SIGHT = "use_bidirectional_attention"  # of Gemma 4's text_config
_READ = kinds(object="text_config", object_or_null="vision_config", flag="tie_word_embeddings")
# Copies of what text_config or vision_config say, and of training.
_HARMLESS = ("ignore_index", "vocab_size", "image_seq_length", "hidden_size")
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
    prefixes = families.ALL[config.family].prefixes
    rename = [(f"^{re.escape(theirs)}", ours) for theirs, ours in prefixes.items()]
    rules: list[Rule] = [
        *_tower_rules(config),
        *KINDS[config.connector].rules(config),
        *llama_rules(config.llama, prefix=LLAMA_PREFIX, path="llama/"),
    ]
    tied = ((_HEAD, _TABLE),) if config.llama.tied else ()
    ignore = (*ignore, *unread(config.llama))
    return KeyMap(rules, rename=(*rename, *_RENAME), ignore=ignore, tied=tied)


def has_head(source: TensorSource) -> bool:
    """Whether a checkpoint has a head beside its embedding table."""
    return any(key.endswith("lm_head.weight") for key in source.specs())


def _tower_rules(config: LlavaConfig) -> list[Rule]:
    rules = TOWERS[families.ALL[config.family].tower].rules(config.vision)
    return [dataclasses.replace(rule, key=f"{_TOWER}{rule.key}") for rule in rules]


def open_llava(
    folder: Path, clip: Path | None = None, published: Mapping[str, Any] | None = None
) -> layouts.Checkpoint:
    """Opens a LLaVA checkpoint of any layout, reading headers only.

    A vision tower in the checkpoint is the one that is used. (haotian-liu/LLaVA reads CLIP's own:
    LLaVA-1.5's tower was frozen in training, and differs from it only by the file's precision.)

    Args:
      folder: config.json and weights (see `open_source`), transformers' or haotian-liu/LLaVA's.
      clip: folder of the CLIP or SigLIP that it was trained with (transformers' CLIPModel,
        SiglipModel or vision model alone): its vision tower where the checkpoint has none, and its
        sizes where the original's config names another than CLIP ViT-L/14 at 336 pixels. None takes
        the folder that `mm_vision_tower` of the original's config names, if there is one.
      published: its config; None: that of config.json.
    """
    file = layouts.config_file(folder)
    published = read_json(file) if published is None else published
    published, make_whole = read_rounding(published, str(file))
    source, ignore = make_whole(layouts.open_source(folder)), _BUFFERS
    if "text_config" in published:
        config = read_llava_config(file.parent, published, has_head(source))
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
    if config.family == "llava" and not any(_TOWER in key for key in source.specs()):
        if clip is None:
            raise UserError(
                f"{source.name}: holds no vision tower; give the folder of the CLIP that it was "
                "trained with (openai/clip-vit-large-patch14-336) as well."
            )
        tower = layouts.with_prefixes(layouts.open_source(clip), {_TOWER: ""})
        source = layouts.joined(f"{source.name} with {tower.name}", source, tower)
        ignore = (*_BUFFERS, _REST_OF_CLIP)
    source = to_rule_tensors(source, config.llama)
    if any(re.match(_SOUND, key) for key in source.specs()):
        ignore = (*ignore, _SOUND)
        logging.getLogger(__name__).warning(
            "%s: its audio_tower and embed_audio are left out; it hears nothing here", file
        )
    if config.image_token < 0 and isinstance(config.vision, SiglipVisionConfig):
        tower = r"^vision_tower\.vision_model\."
        ignore += (rf"{tower}encoder\.layers\.{config.vision.layers}\.", rf"{tower}head\.")
    layout = "haotian-liu/LLaVA" if config.image_token < 0 else "transformers"
    key_map = functools.partial(llava_key_map, ignore=ignore)
    return layouts.Checkpoint(config, key_map, source, layout)


def read_llava_config(
    folder: Path, published: Mapping[str, Any], has_head: bool = False
) -> LlavaConfig:
    """Our config of transformers', with what the files of pictures in its folder say."""
    config = llava_config(published, str(layouts.config_file(folder)), has_head)
    return _with_processor(config, folder)


def publish_llava(config: LlavaConfig, state: nnx.State) -> layouts.Published:
    """The class of its family in transformers.

    transformers looks the placeholder up in the embedding table. Where its id is outside (the
    original's layout), the table and the head get further rows, as in transformers' own
    conversion: the first is `<image>`, the second `<pad>`; the tokenizer that goes with it needs
    both as well.
    """
    source = untied_source(state, llava_key_map(config))
    source = to_published_tensors(source, config.llama, LLAMA_PREFIX)
    tokens = config.llama.vocab_size
    if 0 <= config.image_token < tokens:
        prefixes = families.ALL[config.family].prefixes
        source = layouts.with_prefixes(source, prefixes)
        return layouts.Published(source, llava_to_hf(config), processor_to_hf(config))
    wider = -(-(tokens + 2) // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    llama = dataclasses.replace(config.llama, vocab_size=wider)
    config = dataclasses.replace(config, llama=llama, image_token=tokens)
    entries = llava_to_hf(config) | {"pad_token_id": tokens + 1}
    return layouts.Published(widen_vocabulary(source, wider), entries)


def llava_config(
    published: Mapping[str, Any], where: str = "config.json", has_head: bool = False
) -> LlavaConfig:
    """Our config from transformers' `config.json`; absent values are transformers' defaults.

    has_head: the tensors have a head, which decides where the file does not say whether it is the
      embedding table.
    """
    layouts.check_model_type(published, where, *families.FAMILIES)
    family = families.FAMILIES[published["model_type"]]
    check_published(published, where, family)
    return LlavaConfig(
        family=published["model_type"], **fields_from_hf(published, where, family, has_head)
    )


def check_published(
    published: Mapping[str, Any],
    where: str,
    family: families.Family,
    more: Mapping[str, str] = types.MappingProxyType({}),
) -> None:
    """Checks the keys of a `config.json`; `more`: kinds of further ones that are read."""
    read = {**_READ, **family.kinds, **more}
    harmless = (*_HARMLESS, *family.harmless)
    check_keys(published, where, read=read, harmless=harmless, fixed=family.fixed)


def fields_from_hf(
    published: Mapping[str, Any], where: str, family: families.Family, has_head: bool = False
) -> dict[str, Any]:
    """The fields of LlavaConfig in a `config.json` whose keys are checked.

    Args:
      published, where, has_head: see `llava_config`.
      family: whose defaults absent values have.
    """
    fields = {name: published.get(key, default) for name, (key, default) in family.keys.items()}
    if "image_token_index" not in published and "image_token_id" in published:
        fields["image_token"] = published["image_token_id"]
    for name in family.inverse:
        value = fields[name]
        fields[name] = round(1 / value) if value else 0
        if not value or 1 / fields[name] != value:
            raise UserError(
                f"{where}: {family.keys[name][0]} is {value!r}, expected 1 over a whole number; "
                "use a checkpoint as it was published."
            )
    fields |= family.computes
    layer = fields["feature_layer"]
    if type(layer) is not int:
        raise UserError(
            f"{where}: vision_feature_layer is {layer!r}, which is not supported; use a checkpoint "
            "that reads one layer."
        )
    tower, vision = published.get("vision_config") or {}, family.vision
    tower = {key: value for key, value in tower.items() if key not in family.tower_harmless}
    for name, (keys, usual) in family.of_tower.items():
        of_tower = {key: tower.pop(key, usual) for key in keys.split()}
        check_keys(of_tower, f"{where}, vision_config", read=kinds(size=keys))
        if len(set(of_tower.values())) > 1:
            raise UserError(
                f"{where}, vision_config: {', '.join(of_tower)} are {[*of_tower.values()]}, "
                "expected one number; use a checkpoint as it was published."
            )
        fields[name] = next(iter(of_tower.values()))
    if tower or vision is None:
        tower = {"model_type": family.tower} | tower
        vision = TOWERS[family.tower].read(tower, f"{where}, vision_config")
    if isinstance(vision, Gemma4PatchesConfig):
        fields["merge"] = vision.merge
    if family.length and not isinstance(vision, SiglipVisionConfig):
        raise UserError(
            f"{where}, vision_config: model_type is {tower['model_type']!r}, expected "
            f"{family.tower!r}; use a checkpoint as it was published."
        )
    if family.length:
        tokens = published.get(family.length_key, family.length)
        fields["merge"] = max(vision.side // math.isqrt(tokens), 1)
        if (vision.side / fields["merge"]) ** 2 != tokens:
            raise UserError(
                f"{where}: {family.length_key} is {tokens}, expected the number of equal squares "
                f"of the {vision.side} x {vision.side} patches of a picture; use a checkpoint as "
                "it was published."
            )
    llama = _decoder(published, f"{where}, text_config", family, has_head)
    whole = {**family.text, **published["text_config"]}.get(_SIGHT) == "vision"
    sight = family.sight or (family.seen_whole if whole else "causal")
    llama = dataclasses.replace(llama, picture_sight=sight)
    if not family.is_capped:  # transformers' classes take the decoder's head without them
        llama = dataclasses.replace(llama, logit_cap=None, logit_divisor=1.0)
    return {
        "resize": "squash" if isinstance(vision, SiglipVisionConfig) else "pad",
        **fields,
        "vision": vision,
        "llama": llama,
        "budget": family.budget,
        "split": family.split and family.split.usual(vision.image_size),
    }


def _decoder(
    published: Mapping[str, Any], where: str, family: families.Family, has_head: bool
) -> LlamaConfig:
    text = published["text_config"]
    fixed = {key: value for key, value in text.items() if key in family.text_fixed}
    check_keys(fixed, where, read=(), fixed=family.text_fixed)
    text = {
        key: value
        for key, value in text.items()
        if key not in (*family.text_fixed, *family.text_harmless)
    }
    ties = [
        part["tie_word_embeddings"] for part in (published, text) if "tie_word_embeddings" in part
    ]
    tied = any(ties) if ties else family.tied and not has_head
    return LlamaConfig.from_hf({**family.text, **text, "tie_word_embeddings": tied}, where)


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
    family = families.ALL[config.family]
    for field, value in family.computes.items():
        if getattr(config, field) != value and field != "resize":
            raise UserError(
                f"model.{field} is {getattr(config, field)!r}: {family.architecture} has "
                f"{value!r}, and no key for it in its config.json; it cannot be exported."
            )
    fields = {key: getattr(config, name) for name, (key, _) in family.keys.items()}
    fields |= {family.keys[name][0]: 1 / getattr(config, name) for name in family.inverse}
    lengths = {family.length_key: config.features} if family.length_key else {}
    lengths |= {family.width_key: config.llama.hidden} if family.width_key else {}
    whole = config.llama.picture_sight == family.seen_whole
    sight = {} if family.sight else {_SIGHT: "vision" if whole else None}
    of_tower = {
        key: getattr(config, name)
        for name, (keys, _) in family.of_tower.items()
        for key in keys.split()
    }
    vision = TOWERS[family.tower].write(config.vision) | of_tower
    return {
        "architectures": [family.architecture],
        "model_type": config.family,
        **fields,
        "tie_word_embeddings": config.llama.tied,
        "text_config": config.llama.to_hf() | sight,
        "vision_config": {"model_type": family.tower, **vision},
        **lengths,
    }


def _with_processor(config: LlavaConfig, folder: Path) -> LlavaConfig:
    """Checks the picture processor beside a checkpoint, and takes from it how pictures are cut, or
    a SigLIP's filter."""
    if config.split is not None:
        return with_split(folder, config)
    if config.budget is not None:
        return with_budget(folder, config)
    if not isinstance(config.vision, SiglipVisionConfig):
        check_processor(folder)
        return config
    filters = {"bicubic": "squash", "bilinear": "squash_bilinear"}
    for processor, file in processors(folder):
        if processor.get("do_pan_and_scan"):
            raise UserError(
                f"{file}: do_pan_and_scan is true, and crops beside a picture are not read here; "
                "set it to false, as it was published."
            )
    usual = "bilinear" if config.resize == filters["bilinear"] else "bicubic"
    resample = read_preparation(folder, config.vision, usual).resample
    return dataclasses.replace(config, resize=filters[resample])


def _read_vision_config(folder: Path) -> VisionConfig | SiglipVisionConfig:
    return clip_or_siglip(read_json(folder / "config.json"), str(folder / "config.json"))


# Beside transformers.


def _inputs(config: LlavaConfig) -> dict[str, Any]:
    if config.is_sized:
        return _inputs_of_units(config)
    row = comparison.around_a_picture(config, config.features)
    ids = expand_images([row], [1], config).input_ids
    pixels = comparison.picture(config.vision)
    is_nested = families.ALL[config.family].nested
    inputs = {"ids": ids, "pixels": pixels[None] if is_nested else pixels}
    if config.llama.picture_sight == "prompt":
        inputs["types"] = np.zeros(ids.shape, np.int64)
    elif config.llama.picture_sight != "causal":
        inputs["types"] = (ids == config.image_token).astype(np.int64)
    return inputs


def _inputs_of_units(config: LlavaConfig) -> dict[str, Any]:
    """Words around a picture of 5 x 7 units; transformers has its patches row by row."""
    units = config.units
    picture = comparison.noise().integers(0, 256, (*(n * units.unit for n in comparison.GRID), 3))
    batch = qwen_vl.lay_out([picture.astype(np.uint8)], units, math.prod(comparison.GRID))
    row = comparison.around_a_picture(config, config.picture_tokens(picture.shape))
    counts = np.where(np.equal(row, config.image_token), math.prod(comparison.GRID), 1)
    ids = np.repeat(row, counts)[None]
    order = np.lexsort(batch.places[0].T[::-1])
    pixels = batch.patches[:, order].astype(np.float32) / 255
    if config.budget is None:  # LFM2-VL
        theirs = {
            "pixel_values": (pixels - SIGLIP_MEAN[0]) / SIGLIP_STD[0],
            "spatial_shapes": batch.grid.astype(np.int64),
            "pixel_attention_mask": np.ones(order[None].shape, np.int64),
        }
    else:
        places = batch.places[:, order, ::-1]
        if not config.vision.layers:  # transformers has large patches, one a unit
            patch = (config.vision.merge, config.vision.patch_size)
            shape = (comparison.GRID[0], patch[0], comparison.GRID[1], patch[0], *patch[1:] * 2, 3)
            pixels = pixels.reshape(shape).transpose(0, 2, 1, 4, 3, 5, 6)
            pixels = pixels.reshape(1, math.prod(comparison.GRID), -1)
            places = np.indices(comparison.GRID)[::-1].reshape(1, 2, -1).swapaxes(1, 2)
        theirs = {
            "mm_token_type_ids": (ids == config.image_token).astype(np.int64),
            "pixel_values": pixels,
            "image_position_ids": places.astype(np.int64),
        }
    theirs["input_ids"] = ids
    return {"ids": ids, "batch": batch, "order": order, "theirs": theirs}


def _as_theirs(inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    if "theirs" in inputs:
        return inputs["theirs"]
    more = {"token_type_ids": inputs["types"]} if "types" in inputs else {}
    return two_towers.text_and_pixels(inputs) | more


def _run(model: Llava, inputs: Mapping[str, Any]) -> comparison.Outputs:
    if "batch" in inputs:
        batch = model.vision.normalize(inputs["batch"])
        outputs = run_pictured(model, inputs["ids"], batch, batch)
        if "picture" not in outputs.stacks:
            return outputs
        picture = outputs.stacks["picture"][:, :, inputs["order"]]
        return outputs._replace(stacks=outputs.stacks | {"picture": picture})
    pixels = inputs["pixels"].reshape(-1, *inputs["pixels"].shape[-3:])
    return run_pictured(model, inputs["ids"], pixels, pixels)


def run_pictured(model: Llava, ids: jax.Array, pictures: Any, pixels: Any) -> comparison.Outputs:
    """A prompt with pictures; `pixels` are what the tower's layers get of them."""
    embedded = model.embed(ids, model.encode_images(pictures))
    layers = model.llama.layer_outputs(embedded, pictures=model.seen_whole(ids))
    stacks = {"": comparison.states_of(embedded, layers)}
    if model.config.vision.layers:
        stacks["picture"] = model.vision.hidden_states(pixels)
    logits = model.llama.logits(model.llama.norm(layers[-1]))
    return comparison.Outputs(stacks, {"logits": logits})


# Idefics3's names of both come second, Llama 4's third.
STACKS = {
    "picture": ("model.vision_tower", "model.vision_model", "vision_model.model"),
    "": ("model.language_model", "model.text_model", "language_model.model"),
}
CHECK = comparison.Check(
    "AutoModelForImageTextToText",
    _run,
    {"logits": "logits"},
    STACKS,
    _inputs,
    _as_theirs,
)
