"""EmbeddingGemma 2's encoder of texts: Gemma 4's layers, in which tokens see both ways.

It has no table of tokens beside its embeddings, and a linear behind its last norm. Original:
transformers models/embedding_gemma2/modular_embedding_gemma2.py. Its tower for pictures is in
`pictured_gemma.py`, that for sound is left out.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common.layers import Linear, normal_init
from mmqa_jax.models.encoders.heads import TextDecoder
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.family import FULL, SLIDING
from mmqa_jax.models.llama.keys import llama_key_map
from mmqa_jax.weights.config_json import check_keys, kinds
from mmqa_jax.weights.keymap import TRANSPOSE, KeyMap, Rule

MODEL_TYPE = "embedding_gemma2"
# transformers' defaults of text_config where they are not Gemma 4's.
_DEFAULTS = {
    **{"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256},
    **{"max_position_embeddings": 262144, "layer_types": None},
    **{"hidden_size_per_layer_input": 512, "sliding_window": 512},
    "rope_parameters": {SLIDING: {"rope_theta": 10000.0}, FULL: {"rope_theta": 1000000.0}},
}
_TOWERS = r"^(?:model\.)?(vision_tower|embed_vision|audio_tower|embed_audio)\."
_HARMLESS = (
    *("boi_token_id", "eoi_token_id", "image_token_id", "video_token_id", "boa_token_id"),
    *("eoa_token_index", "audio_token_id", "vision_config", "audio_config", "tie_word_embeddings"),
    "vision_soft_tokens_per_image",  # a copy of what a processor's file says
)
# Our names of tensors -> transformers', where its modules hold them.
_NAMES = (
    (re.compile(r"^(language_model\.)?model\."), "language_model."),
    (
        re.compile(r"^(language_model)\.(per_layer_model_projection|per_layer_projection_norm)\."),
        r"\1.ple.\2.",
    ),
    (
        re.compile(r"\.(per_layer_(input_gate|projection)|post_per_layer_input_norm)\."),
        r".ple_block.\1.",
    ),
    (re.compile(r"^vision_tower\.vision_model\."), "vision_tower."),
    (re.compile(r"^multi_modal_projector\."), "embed_vision."),
)


@dataclasses.dataclass(frozen=True)
class EmbeddingGemmaConfig(LlamaConfig):
    """A decoder's config; `projected`: the width of a token's vector behind the last linear."""

    projected: int = 768


class EmbeddingGemma(TextDecoder):
    """Gemma 4's layers and a linear."""

    stays = True  # of this kind, by lora.merge_lora
    config: EmbeddingGemmaConfig

    def __init__(self, config: EmbeddingGemmaConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.projection = Linear(
            config.hidden,
            config.projected,
            ("embed", "proj"),
            use_bias=False,
            rngs=rngs,
            kernel_init=normal_init(config.init_stddev),
        )

    @property
    def width(self) -> int:
        """Size of a token's vector."""
        return self.config.projected

    def __call__(self, input_ids: jax.Array, mask: jax.Array) -> jax.Array:
        """Right-padded texts, int [B, L], mask bool [B, L] -> [B, L, projected]."""
        return self.projection(super().__call__(input_ids, mask))


def embedding_gemma_config(published: Mapping[str, Any], where: str) -> EmbeddingGemmaConfig:
    """Our config of the encoder of texts in a `config.json`; absent values are transformers'."""
    check_keys(published, where, read=kinds(object="text_config"), harmless=_HARMLESS)
    towers = [kind for kind in ("vision_config", "audio_config") if published.get(kind)]
    if towers:
        logging.getLogger(__name__).warning(
            "%s: of this EmbeddingGemma 2 the encoder of texts is read; the towers of %s are left "
            "out, so that it embeds no pictures and no sound",
            where,
            " and ".join(towers),
        )
    text, projected = text_as_gemma4(published, where)
    return as_encoder(LlamaConfig.from_hf(text, f"{where}, text_config"), projected, where)


def text_as_gemma4(published: Mapping[str, Any], where: str) -> tuple[dict[str, Any], int]:
    """A `text_config` with Gemma 4's keys, and the width of a token's vector."""
    text = {**_DEFAULTS, **published["text_config"]}
    projected = text.pop("embedding_dim", 768)
    window = text["sliding_window"]
    for key, value in (("embedding_dim", projected), ("sliding_window", window)):
        if type(value) is not int or value < 1:
            raise UserError(
                f"{where}, text_config: {key} is {value!r}, expected a whole number from 1; use a "
                "checkpoint as it was published."
            )
    count = text["num_hidden_layers"]
    if not text.get("layer_types") and type(count) is int:
        every = text.pop("sliding_window_pattern", 6)
        ends = range(every - 1, count - 1, every)
        text["layer_types"] = [FULL if n in (*ends, count - 1) else SLIDING for n in range(count)]
    sizes = text.pop("global_head_dim", 512), text.pop("num_global_key_value_heads", 1)
    wide = dict(zip(("head_dim", "num_key_value_heads"), sizes, strict=True))
    if "per_layer_config" not in text and isinstance(text["layer_types"], list):
        full = [number for number, kind in enumerate(text["layer_types"]) if kind == FULL]
        text["per_layer_config"] = {str(number): wide for number in full}
    # Its window is the distance of the farthest token; ours counts the token itself.
    return text | {"model_type": "gemma4_text", "sliding_window": window + 1}, projected


def as_encoder(decoder: LlamaConfig, projected: int, where: str) -> EmbeddingGemmaConfig:
    """The config of Gemma 4's layers as EmbeddingGemma 2 has them."""
    if decoder.experts or decoder.borrowers:
        raise UserError(
            f"{where}, text_config: it has experts or layers that borrow keys, which no "
            "EmbeddingGemma 2 has; use a checkpoint as it was published."
        )
    fields = {field.name: getattr(decoder, field.name) for field in dataclasses.fields(decoder)}
    fields |= {"bidirectional": True, "side_table": False, "tied": True}
    return EmbeddingGemmaConfig(**fields, projected=projected)


def published_name(key: str, classifier: bool = False) -> str:
    """The name in a checkpoint of a key of `embedding_gemma_key_map`."""
    for pattern, replacement in _NAMES:
        key = pattern.sub(replacement, key)
    return key


def embedding_gemma_key_map(config: EmbeddingGemmaConfig) -> KeyMap:
    """Key map of transformers' EmbeddingGemma2Model."""
    key_map = llama_key_map(config)
    projection = Rule("model.embedding_projection.weight", "projection/kernel", TRANSPOSE)
    rename = (
        (r"^(?:model\.)?language_model\.", "model."),
        (r"^model\.ple\.", "model."),
        (r"\.ple_block\.", "."),
    )
    return dataclasses.replace(
        key_map,
        rules=[*key_map.rules, projection],
        rename=[*rename, *key_map.rename],
        ignore=[*key_map.ignore, _TOWERS],
        tied=(),
    )
