"""LLaVA-1.5 checkpoints: transformers' layouts and the original's, and export to transformers.

All layouts share one key map. Its rules are those of CLIP and LLaMA under transformers'
published prefixes (llava-hf/llava-1.5-7b-hf); renames bring the others there: transformers 4.52
to 5 (`model.language_model.`), and haotian-liu/LLaVA (`model.mm_projector.0`, `model.layers.0`),
with its vision tower within or, where it has none, in a CLIP folder beside it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.core.mesh import DEFAULT_RULES, Rules
from mmqa_jax.models.clip import CLIPConfig, TextConfig, VisionConfig, vit_l_14_336
from mmqa_jax.models.llama_config import LlamaConfig
from mmqa_jax.models.llava import ORIGINAL_IMAGE_TOKEN, Llava, LlavaConfig
from mmqa_jax.weights.clip import clip_config, clip_key_map, vision_to_hf
from mmqa_jax.weights.keymap import KeyMap, Rule, linear_rules, make_loaded
from mmqa_jax.weights.llama import llama_rules, stacked_source
from mmqa_jax.weights.safetensors_io import TensorSource
from mmqa_jax.weights.sources import open_source

_LLAMA, _TOWER, _PROJECTOR = "language_model.", "vision_tower.", "multi_modal_projector."
_TABLE, _HEAD = f"{_LLAMA}model.embed_tokens.weight", f"{_LLAMA}lm_head.weight"

_RENAME = (
    # transformers 4.52 and later
    (r"^model\.language_model\.", f"{_LLAMA}model."),
    (r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),
    # haotian-liu/LLaVA
    (r"^vision_tower\.vision_tower\.", _TOWER),
    (r"^model\.mm_projector\.0\.", f"{_PROJECTOR}linear_1."),
    (r"^model\.mm_projector\.2\.", f"{_PROJECTOR}linear_2."),
    (r"^model\.(embed_tokens|layers|norm)\.", rf"{_LLAMA}model.\1."),
    # both
    (r"^lm_head\.", f"{_LLAMA}lm_head."),
    # transformers 5: CLIP's vision model without its prefix
    (
        r"^vision_tower\.(embeddings|pre_layrnorm|encoder|post_layernorm)\.",
        rf"{_TOWER}vision_model.\1.",
    ),
)
_BUFFERS = (r"rotary_emb\.inv_freq$", r"embeddings\.position_ids$")
# What a CLIP folder holds beside its vision tower.
_REST_OF_CLIP = r"^vision_tower\.(text_model\.|text_projection\.|visual_projection\.|logit_scale$)"

# Options of haotian-liu/LLaVA: what the code takes for absent ones, and LLaVA-1.5's value.
_ORIGINAL_OPTIONS = {
    "mm_projector_type": ("linear", "mlp2x_gelu"),
    "mm_vision_select_feature": ("patch", "patch"),
    "mm_patch_merge_type": ("flat", "flat"),
    "mm_use_im_start_end": (False, False),
    "s2": (False, False),
}
_VOCABULARY_MULTIPLE = 64  # transformers' conversion pads the word table to it


class LlavaCheckpoint(NamedTuple):
    """What is needed to fill a Llava: its config, the key map, and the tensors."""

    config: LlavaConfig
    key_map: KeyMap
    source: TensorSource


class WithTower:
    """A LLaVA without its vision tower and a CLIP folder's tensors, as one checkpoint."""

    def __init__(self, llava: TensorSource, clip: TensorSource):
        self.name = f"{llava.name} with {clip.name}"
        self._llava, self._clip = llava, clip

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every tensor; CLIP's keys follow `vision_tower.`."""
        tower = {f"{_TOWER}{key}": spec for key, spec in self._clip.specs().items()}
        return self._llava.specs() | tower

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor from its checkpoint."""
        if key.startswith(_TOWER):
            return self._clip.read(key.removeprefix(_TOWER))
        return self._llava.read(key)


class WiderVocabulary:
    """A Llava's tensors with more rows in word table and head, each the mean of the rows there.

    A new row's logit is then the mean of all logits, never the largest: greedy answers stay.
    """

    def __init__(self, source: TensorSource, rows: int):
        self.name = source.name
        self._source, self._rows = source, rows

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every tensor, by key."""
        found = self._source.specs()
        for key in (_TABLE, _HEAD):
            if key in found:
                spec = found[key]
                found[key] = jax.ShapeDtypeStruct((self._rows, spec.shape[1]), spec.dtype)
        return found

    def read(self, key: str) -> np.ndarray:
        """Reads one tensor."""
        tensor = self._source.read(key)
        if key not in (_TABLE, _HEAD):
            return tensor
        mean = tensor.mean(axis=0, keepdims=True, dtype=np.float32).astype(tensor.dtype)
        return np.concatenate([tensor, np.repeat(mean, self._rows - len(tensor), axis=0)])


def llava_key_map(config: LlavaConfig) -> KeyMap:
    """Key map of every layout, see the module."""
    # The text tower's config is of no account: only the vision tower's rules are taken.
    clip = CLIPConfig(config.vision, TextConfig(embed_dim=config.vision.embed_dim))
    tower = [
        dataclasses.replace(rule, key=f"{_TOWER}{rule.key}")
        for rule in clip_key_map(clip).rules
        if rule.key.startswith("vision_model.")
    ]
    rules: list[Rule] = [
        *tower,
        *linear_rules(f"{_PROJECTOR}linear_1", "projector/linear_1", config.projector_bias),
        *linear_rules(f"{_PROJECTOR}linear_2", "projector/linear_2", config.projector_bias),
        *llama_rules(config.llama, _LLAMA, "llama/"),
    ]
    tied = ((_HEAD, _TABLE),) if config.llama.tied else ()
    return KeyMap(rules, rename=_RENAME, ignore=_BUFFERS, tied=tied)


def open_llava(folder: str | os.PathLike, clip: str | os.PathLike | None = None) -> LlavaCheckpoint:
    """Opens a LLaVA-1.5 checkpoint of any layout, reading headers only.

    A vision tower in the checkpoint is the one that is taken. (haotian-liu/LLaVA reads CLIP's own:
    LLaVA-1.5's tower was frozen in training, and differs from it by the file's precision alone.)

    Args:
      folder: config.json and weights (see `open_source`), transformers' or haotian-liu/LLaVA's.
      clip: folder of the CLIP that it was trained with (transformers' CLIPModel or
        CLIPVisionModel): its vision tower where the checkpoint has none, and its sizes where the
        original's config names another CLIP than ViT-L/14 at 336 pixels. None takes the folder
        that `mm_vision_tower` of the original's config names, if there is one.

    Raises:
      UserError: a missing or broken file, another model's config, an option that LLaVA-1.5 has
        not, or no vision tower.
    """
    folder = Path(folder)
    file = folder / "config.json"
    published = read_json(file)
    if "text_config" in published:
        config = hf_config(published, str(file))
    elif "mm_vision_tower" in published:
        named = str(published["mm_vision_tower"])
        clip = named if clip is None and os.path.isdir(named) else clip
        vision = None if clip is None else _read_vision_config(Path(clip))
        config = original_config(published, vision, str(file))
    else:
        raise UserError(
            f"{file}: has neither `text_config` (transformers) nor `mm_vision_tower` (the "
            "original); give the folder of a LLaVA-1.5 checkpoint."
        )
    key_map, source = llava_key_map(config), open_source(folder)
    if not any(_TOWER in key for key in source.specs()):
        if clip is None:
            raise UserError(
                f"{source.name}: holds no vision tower; give the folder of the CLIP that it was "
                "trained with (openai/clip-vit-large-patch14-336) as well."
            )
        source = WithTower(source, open_source(clip))
        key_map = dataclasses.replace(key_map, ignore=(*key_map.ignore, _REST_OF_CLIP))
    return LlavaCheckpoint(config, key_map, source)


def load_llava(
    folder: str | os.PathLike,
    *,
    clip: str | os.PathLike | None = None,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
    param_dtype: str = "float32",
    **changes: Any,
) -> Llava:
    """Reads a LLaVA-1.5 checkpoint.

    Args:
      folder, clip: see `open_llava`.
      mesh: where the parameters go, each tensor straight onto its shards; None is the default
        device.
      rules: logical axis -> mesh axis.
      param_dtype: of the parameters; bfloat16 halves memory where nothing is trained.
      changes: fields of both towers' configs that the checkpoint does not decide (dtype,
        attention, remat, unroll).

    Raises:
      UserError: as `open_llava`, or tensors that do not fit.
    """
    config, key_map, source = open_llava(folder, clip)
    config = config.with_both(**changes)
    where = {"mesh": mesh, "rules": rules, "param_dtype": param_dtype}
    return make_loaded(lambda: Llava(config, rngs=nnx.Rngs(0)), key_map, source, **where)


def to_transformers(config: LlavaConfig, state: nnx.State) -> tuple[dict[str, Any], TensorSource]:
    """A model as transformers has it: the entries of `config.json`, and the tensors.

    transformers looks the placeholder up in the word table. Where it lies outside (the original's
    layout), the table and the head get further rows, as in transformers' own conversion: the
    first is `<image>`, the second `<pad>`; the tokenizer that goes with it needs both as well.

    Args:
      config, state: of a Llava with stacked layers.
    """
    source: TensorSource = stacked_source(state, llava_key_map(config))
    words = config.llama.vocab_size
    if 0 <= config.image_token < words:
        return to_hf(config), source
    wider = -(-(words + 2) // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    llama = dataclasses.replace(config.llama, vocab_size=wider)
    config = dataclasses.replace(config, llama=llama, image_token=words)
    return to_hf(config) | {"pad_token_id": words + 1}, WiderVocabulary(source, wider)


def hf_config(published: Mapping[str, Any], where: str = "config.json") -> LlavaConfig:
    """Our config from transformers' `config.json`; absent values are transformers' defaults.

    Raises:
      UserError: another model's config, or an option that our LLaVA has not.
    """
    if published.get("model_type") != "llava":
        raise UserError(
            f"{where}: model_type is {published.get('model_type')!r}, expected 'llava'; give a "
            "LLaVA-1.5 checkpoint."
        )
    layer = published.get("vision_feature_layer", -2)
    strategy = published.get("vision_feature_select_strategy", "default")
    if not isinstance(layer, int) or strategy != "default":
        raise UserError(
            f"{where}: vision_feature_layer {layer!r} with select strategy {strategy!r} is not "
            "supported; use a checkpoint that reads one layer without the class token."
        )
    text = published["text_config"]
    tied = published.get("tie_word_embeddings", False) or text.get("tie_word_embeddings", False)
    vision = vit_l_14_336().vision
    if published.get("vision_config"):
        kind = {"model_type": "clip_vision_model"}
        vision = _vision_config(kind | published["vision_config"], f"{where}, vision_config")
    return LlavaConfig(
        vision=vision,
        llama=LlamaConfig.from_hf(text | {"tie_word_embeddings": tied}, f"{where}, text_config"),
        feature_layer=layer,
        projector_activation=published.get("projector_hidden_act", "gelu"),
        projector_bias=published.get("multimodal_projector_bias", True),
        image_token=published.get("image_token_index", published.get("image_token_id", 32000)),
    )


def original_config(
    published: Mapping[str, Any], vision: VisionConfig | None, where: str = "config.json"
) -> LlavaConfig:
    """Our config from haotian-liu/LLaVA's `config.json`.

    Args:
      published: the file's content: a LLaMA's, and options `mm_*`.
      vision: of the CLIP that it was trained with; None takes ViT-L/14 at 336 pixels, if that is
        the one that `published` names.
      where: name of the file, for messages.

    Raises:
      UserError: another model's config, another version's options, another CLIP.
    """
    kind = published.get("model_type")
    if kind not in ("llava", "llava_llama"):
        raise UserError(
            f"{where}: model_type is {kind!r}, expected 'llava' or 'llava_llama'; give a LLaVA-1.5 "
            "checkpoint."
        )
    for option, (absent, expected) in _ORIGINAL_OPTIONS.items():
        value = published.get(option, absent)
        if value != expected:
            raise UserError(
                f"{where}: {option} is {value!r}, LLaVA-1.5's is {expected!r}; give a checkpoint "
                "of that version."
            )
    named = str(published["mm_vision_tower"])
    if vision is None:
        if Path(named).name != "clip-vit-large-patch14-336":
            raise UserError(
                f"{where}: mm_vision_tower is {named!r}, whose sizes are not known here; give the "
                "folder of this CLIP as well."
            )
        vision = vit_l_14_336().vision
    width = published.get("mm_hidden_size", vision.width)
    if width != vision.width:
        raise UserError(
            f"{where}: mm_hidden_size is {width}, the vision tower's width {vision.width}; give "
            f"the folder of the CLIP that it was trained with ({named})."
        )
    return LlavaConfig(
        vision=vision,
        llama=LlamaConfig.from_hf({**published, "model_type": "llama"}, where),
        feature_layer=published.get("mm_vision_select_layer", -2),
        image_token=ORIGINAL_IMAGE_TOKEN,
    )


def to_hf(config: LlavaConfig) -> dict[str, Any]:
    """transformers' `config.json`, without token ids but the placeholder's."""
    vision = config.vision
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": config.image_token,
        "image_seq_length": vision.patches,
        "projector_hidden_act": config.projector_activation,
        "multimodal_projector_bias": config.projector_bias,
        "vision_feature_layer": config.feature_layer,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": config.llama.tied,
        "text_config": config.llama.to_hf(),
        "vision_config": vision_to_hf(vision),
    }


def _read_vision_config(folder: Path) -> VisionConfig:
    return _vision_config(read_json(folder / "config.json"), str(folder / "config.json"))


def _vision_config(published: Mapping[str, Any], where: str) -> VisionConfig:
    """CLIP's vision tower from the config of a CLIPModel or of its vision tower alone."""
    kind = published.get("model_type")
    if kind == "clip_vision_model":
        sizes = {"vision_config": published}
        if "projection_dim" in published:
            sizes["projection_dim"] = published["projection_dim"]
        return clip_config(sizes).vision
    if kind != "clip":
        raise UserError(
            f"{where}: model_type is {kind!r}, expected 'clip' or 'clip_vision_model'; LLaVA-1.5 "
            "sees with CLIP."
        )
    return clip_config(published).vision
