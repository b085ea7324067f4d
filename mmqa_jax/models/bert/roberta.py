"""RoBERTa and XLM-R encoders in transformers' layout: a BERT whose positions begin further on.

The table of positions has rows for the padding token and those before it, which no text uses; they
are left out, so that the model is our BERT.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.bert.keys import BUFFERS, bert_config, bert_rules
from mmqa_jax.models.bert.network import BertConfig
from mmqa_jax.weights.keymap import KeyMap, Transform, linear_rules

POSITIONS = "embeddings.position_embeddings.weight"


def roberta_config(
    published: Mapping[str, Any], where: str = "config.json", *, harmless: Collection[str] = ()
) -> BertConfig:
    """Our config from transformers' config.json of RobertaModel or XLMRobertaModel.

    Args:
      published, where, harmless: as of `bert_config`.
    """
    config = bert_config(published, where, harmless=harmless)
    return without_first_positions(config, roberta_padding(published), where)


def roberta_padding(published: Mapping[str, Any]) -> Any:
    """The token that has no position of its own, after whose number positions are counted."""
    return published.get("pad_token_id", 1)


def without_first_positions(config: BertConfig, padding: Any, where: str) -> BertConfig:
    """The config without the rows of positions up to that of the padding token."""
    whole = isinstance(padding, int) and not isinstance(padding, bool)
    if not whole or not 0 <= padding < config.positions - 1:
        raise UserError(
            f"{where}: pad_token_id is {padding!r}, a number from 0 to {config.positions - 2} was "
            "expected: positions of texts follow it; fetch the file again."
        )
    return dataclasses.replace(config, positions=config.positions - padding - 1)


def last_rows(count: int) -> Transform:
    """The last `count` rows of a table."""
    return Transform(lambda table: table[-count:], None)


def roberta_key_map(config: BertConfig) -> KeyMap:
    """Key map of the encoder; keys may start with `roberta.`. Heads and the pooler are ignored."""
    return KeyMap(
        rules=bert_rules(),
        rename=[(r"^roberta\.", "")],
        ignore=[BUFFERS, r"^(pooler|lm_head|classifier)\."],
    ).with_transform(POSITIONS, last_rows(config.positions))


def roberta_classifier_key_map(config: BertConfig) -> KeyMap:
    """Key map of transformers' classifier of sequences and our CrossEncoder."""
    return KeyMap(
        rules=[
            *bert_rules("roberta.", "bert/"),
            *linear_rules("classifier.dense", "bert/pooler"),
            *linear_rules("classifier.out_proj", "classifier"),
        ],
        ignore=[rf"^roberta\.{BUFFERS}"],
    ).with_transform(POSITIONS, last_rows(config.positions))
