"""MPNet encoders in transformers' layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmqa_jax.models.bert.keys import BUFFERS, bert_config
from mmqa_jax.models.bert.network import BertConfig
from mmqa_jax.models.bert.roberta import POSITIONS, last_rows, without_first_positions
from mmqa_jax.models.mpnet.network import BUCKETS
from mmqa_jax.weights.keymap import KeyMap, Rule, norm_rules, transformer_rules

_LINEARS = {
    "attention.attn.q": "query",
    "attention.attn.k": "key",
    "attention.attn.v": "value",
    "attention.attn.o": "out",
    "intermediate.dense": "up",
    "output.dense": "down",
}
_NORMS = {"attention.LayerNorm": "attention_norm", "output.LayerNorm": "mlp_norm"}
MPNET_PADDING = 1  # transformers' MPNet counts positions from it, whatever its config says


def mpnet_config(published: Mapping[str, Any], where: str = "config.json") -> BertConfig:
    """Our config from transformers' config.json of MPNetModel."""
    fixed = {"relative_attention_num_buckets": (BUCKETS,)}
    filled = {"vocab_size": 30527, **published, "type_vocab_size": 1}
    config = bert_config(filled, where, fixed=fixed)
    return without_first_positions(config, MPNET_PADDING, where)


def mpnet_key_map(config: BertConfig) -> KeyMap:
    """Key map of the encoder; keys may start with `mpnet.`. Heads and the pooler are ignored."""
    return KeyMap(
        rules=[
            Rule("embeddings.word_embeddings.weight", "embeddings/word/table"),
            Rule(POSITIONS, "embeddings/position/table", last_rows(config.positions)),
            *norm_rules("embeddings.LayerNorm", "embeddings/norm"),
            Rule("encoder.relative_attention_bias.weight", "relative/table"),
            *transformer_rules("encoder.layer.{layer}.", "layers", _LINEARS, _NORMS),
        ],
        rename=[(r"^mpnet\.", "")],
        ignore=[BUFFERS, r"^(pooler|lm_head|classifier)\."],
    )
