"""ModernVBERT's checkpoints in transformers' layout, alone or within ColModernVBertForRetrieval."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.llama.keys import apart
from mmqa_jax.models.llava.processor import with_split
from mmqa_jax.models.llava.tiles import RowTiles
from mmqa_jax.models.modernbert.keys import (
    modernbert_config,
    modernbert_fused,
    modernbert_rules,
    renumbered,
)
from mmqa_jax.models.modernvbert.network import ModernVBertConfig
from mmqa_jax.models.two_towers import keys as two_towers
from mmqa_jax.weights import layouts
from mmqa_jax.weights.config_json import check_keys, kinds
from mmqa_jax.weights.keymap import TRANSPOSE, KeyMap, Rule

MODEL_TYPE = "modernvbert"
_READ = kinds(
    object="text_config vision_config", integer="image_token_id", size="pixel_shuffle_factor"
)
# Of training and of heads that make no vectors; copies of what the parts say.
_HARMLESS = (
    *("initializer_cutoff_factor", "classifier_pooling", "classifier_dropout", "classifier_bias"),
    *("tie_word_embeddings", "vocab_size", "hidden_size"),
)
_TEXT, _TOWER = "text_model.", "vision_model."


def modernvbert_config(
    published: Mapping[str, Any], where: str = "config.json"
) -> ModernVBertConfig:
    """Our config from transformers' config.json; absent values are its defaults."""
    check_keys(published, where, read=_READ, harmless=_HARMLESS)
    parts = {}
    for name, kind in (("text_config", "modernbert"), ("vision_config", "siglip_vision_model")):
        part = published.get(name) or {}
        if part.get("model_type", kind) != kind:
            raise UserError(
                f"{where}, {name}: model_type is {part['model_type']!r}, expected {kind!r}; use a "
                "checkpoint that transformers has written."
            )
        parts[name] = {key: value for key, value in part.items() if key != "model_type"}
    tower, place = parts["vision_config"], f"{where}, vision_config"
    vision = two_towers.siglip_vision_config(tower, place, may_lack_head=True)
    return ModernVBertConfig(
        vision=dataclasses.replace(vision, head=False),
        text=modernbert_config(parts["text_config"], f"{where}, text_config"),
        merge=published.get("pixel_shuffle_factor", 4),
        image_token=published.get("image_token_id", 50407),
    )


def modernvbert_key_map(config: ModernVBertConfig) -> KeyMap:
    """Key map of the encoder, of a source with `modernbert_fused` apart; heads are ignored."""
    rules = two_towers.vision_rules(config.vision)
    return KeyMap(
        rules=[
            *(dataclasses.replace(rule, key=f"{_TOWER}{rule.key}") for rule in rules),
            Rule("connector.modality_projection.weight", "projector/kernel", TRANSPOSE),
            *modernbert_rules(config.text, _TEXT, "text/"),
        ],
        rename=[
            (r"^model\.", ""),
            (r"^vision_model\.(embeddings|encoder|post_layernorm)\.", rf"{_TOWER}{_TOWER}\1."),
            *renumbered(config.text, _TEXT),
        ],
        ignore=[r"^(lm_head|projection_head|head|classifier)\.", r"^vision_model\..*head\."],
    )


def open_modernvbert(
    folder: Path, published: Mapping[str, Any] | None = None
) -> layouts.Checkpoint:
    """Opens a checkpoint, reading headers only.

    Args:
      folder: of transformers.
      published: its config; None: that of config.json.
    """
    file = layouts.config_file(folder)
    if published is None:
        published = layouts.read_hf_config(folder, MODEL_TYPE)
    config = read_modernvbert_config(file.parent, published)
    source = apart(layouts.open_source(folder), modernbert_fused(config.text))
    return layouts.Checkpoint(config, modernvbert_key_map, source, "transformers")


def read_modernvbert_config(folder: Path, published: Mapping[str, Any]) -> ModernVBertConfig:
    """Our config of transformers', with what the files of pictures in its folder say."""
    config = modernvbert_config(published, str(layouts.config_file(folder)))
    usual = RowTiles.usual(config.vision.image_size)
    return with_split(folder, dataclasses.replace(config, split=usual))
