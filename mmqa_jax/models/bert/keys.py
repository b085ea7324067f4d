"""BERT checkpoints in transformers' layout, and export to it."""

import dataclasses
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.bert.network import Bert, BertConfig
from mmqa_jax.models.common.activations import ACTIVATIONS
from mmqa_jax.weights import keymap, layouts
from mmqa_jax.weights.config_json import check_keys, kinds

_LINEARS = {
    "attention.self.query": "query",
    "attention.self.key": "key",
    "attention.self.value": "value",
    "attention.output.dense": "out",
    "intermediate.dense": "up",
    "output.dense": "down",
}
_NORMS = {"attention.output.LayerNorm": "attention_norm", "output.LayerNorm": "mlp_norm"}

_READ = kinds(
    size="vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size "
    "max_position_embeddings type_vocab_size",
    number="layer_norm_eps hidden_dropout_prob attention_probs_dropout_prob",
    name="hidden_act position_embedding_type",
)
# Of Google's releases, which nothing reads, and of the head, which is the embedding table here.
_HARMLESS = (
    *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    *("pooler_size_per_head", "pooler_type", "tie_word_embeddings"),
)
_FIXED = {"is_causal": (False,)}
# Hidden units of the encoders that Google published, whose heads have 64 units.
_PUBLISHED_WIDTHS = (128, 256, 512, 768, 1024)

# Names of the first BERT release (TensorFlow's), still in many files.
OLD_NAMES = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))
BUFFERS = r"embeddings\.(position_ids|token_type_ids)$"


def bert_rules(prefix: str = "", path: str = "") -> list[keymap.Rule]:
    """Rules of the encoder without its pooler; `prefix` of the keys and `path` end in . and /."""
    embeddings = f"{prefix}embeddings."
    return [
        keymap.Rule(f"{embeddings}word_embeddings.weight", f"{path}embeddings/word/table"),
        keymap.Rule(f"{embeddings}position_embeddings.weight", f"{path}embeddings/position/table"),
        keymap.Rule(
            f"{embeddings}token_type_embeddings.weight", f"{path}embeddings/token_type/table"
        ),
        *keymap.norm_rules(f"{embeddings}LayerNorm", f"{path}embeddings/norm"),
        *keymap.transformer_rules(
            f"{prefix}encoder.layer.{{layer}}.", f"{path}layers", _LINEARS, _NORMS
        ),
    ]


def mlm_rules(path: str) -> list[keymap.Rule]:
    """Rules of the masked-LM head; its decoder is the embedding table (see `mlm_tied`)."""
    head = "cls.predictions."
    return [
        keymap.Rule(f"{head}bias", f"{path}/bias"),
        *keymap.linear_rules(f"{head}transform.dense", f"{path}/dense"),
        *keymap.norm_rules(f"{head}transform.LayerNorm", f"{path}/norm"),
    ]


def mlm_tied(prefix: str) -> tuple[tuple[str, str], ...]:
    """The two names of the embedding table and of the head's bias in BERT checkpoints."""
    return (
        ("cls.predictions.decoder.weight", f"{prefix}embeddings.word_embeddings.weight"),
        ("cls.predictions.decoder.bias", "cls.predictions.bias"),
    )


def bert_key_map(config: BertConfig) -> keymap.KeyMap:
    """Key map of transformers' BertModel; keys may start with `bert.`.

    Heads of BertForPreTraining and, if the config has none, the pooler are ignored.
    """
    pooler = keymap.linear_rules("pooler.dense", "pooler") if config.pooler else []
    return keymap.KeyMap(
        rules=[*bert_rules(), *pooler],
        rename=[(r"^bert\.", ""), *OLD_NAMES],
        ignore=[BUFFERS, r"^cls\."] + ([] if config.pooler else [r"^pooler\."]),
    )


def bert_classifier_key_map(config: BertConfig) -> keymap.KeyMap:
    """Key map of transformers' classifier of sequences and our CrossEncoder."""
    return keymap.KeyMap(
        rules=[
            *bert_rules("bert.", "bert/"),
            *keymap.linear_rules("bert.pooler.dense", "bert/pooler"),
            *keymap.linear_rules("classifier", "classifier"),
        ],
        rename=OLD_NAMES,
        ignore=[rf"^bert\.{BUFFERS}"],
    )


def bert_config(
    published: Mapping[str, Any],
    where: str = "config.json",
    *,
    read: Mapping[str, str] | None = None,
    harmless: Collection[str] = (),
    fixed: Mapping[str, tuple[Any, ...]] | None = None,
) -> BertConfig:
    """Our config from transformers' `config.json`; absent values are transformers' defaults.

    Args:
      published: the file's content.
      where: its name, for messages.
      read, harmless, fixed: keys of a model around the encoder, see `check_keys`.
    """
    check_keys(
        published,
        where,
        read={**_READ, **(read or {})},
        harmless=(*_HARMLESS, *harmless),
        fixed={**_FIXED, **(fixed or {})},
    )
    positions = published.get("position_embedding_type", "absolute")
    if positions != "absolute":
        raise UserError(
            f"{where}: position_embedding_type {positions!r} is not supported; use a checkpoint "
            "with absolute positions."
        )
    activation = published.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise UserError(
            f"{where}: hidden_act {activation!r} is not supported; use a checkpoint with one of "
            f"{', '.join(ACTIVATIONS)}."
        )
    return BertConfig(
        vocab_size=published.get("vocab_size", 30522),
        hidden=published.get("hidden_size", 768),
        layers=published.get("num_hidden_layers", 12),
        heads=published.get("num_attention_heads", 12),
        mlp=published.get("intermediate_size", 3072),
        positions=published.get("max_position_embeddings", 512),
        types=published.get("type_vocab_size", 2),
        eps=published.get("layer_norm_eps", 1e-12),
        activation=activation,
        dropout=published.get("hidden_dropout_prob", 0.1),
        attention_dropout=published.get("attention_probs_dropout_prob", 0.1),
    )


def read_bert_config(path: Path) -> BertConfig:
    """The config in a folder or beside a file, of BERT or of a sentence encoder that is one."""
    from mmqa_jax.models.encoders.sentence_pooling import check_mean_pooling

    file = layouts.config_file(path)
    config = bert_config(layouts.read_hf_config(path, "bert"), str(file))
    check_mean_pooling(file.parent)
    return config


def bert_to_hf(config: BertConfig) -> dict[str, Any]:
    """transformers' config.json of a BertModel."""
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp,
        "max_position_embeddings": config.positions,
        "type_vocab_size": config.types,
        "layer_norm_eps": config.eps,
        "hidden_act": config.activation,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "initializer_range": config.init_stddev,
        "position_embedding_type": "absolute",
    }


def open_bert(path: Path) -> layouts.Checkpoint:
    """A BERT of transformers, with its pooler if it has one."""
    config = read_bert_config(path)
    source = layouts.open_source(path)
    pooler = any(re.search(r"(^|\.)pooler\.dense\.weight$", key) for key in source.specs())
    config = dataclasses.replace(config, pooler=pooler)
    return layouts.Checkpoint(config, bert_key_map, source, "transformers")


def publish_bert(config: BertConfig, state: nnx.State) -> layouts.Published:
    """BertModel, without a pooler if the model has none (transformers makes a new one then)."""
    return layouts.Published(keymap.untied_source(state, bert_key_map(config)), bert_to_hf(config))


def bert_size_keys(prefix: str) -> tuple[str, ...]:
    """Keys of the tensors whose shapes `bert_sizes` reads."""
    embeddings = f"{prefix}embeddings."
    kinds = ("word", "position", "token_type")
    tables = tuple(f"{embeddings}{kind}_embeddings.weight" for kind in kinds)
    return (*tables, f"{prefix}encoder.layer.0.intermediate.dense.weight")


def unknown_heads(hidden: int, field: str) -> dict[str, int]:
    """`Checkpoint.unknown` of an encoder that is in a file of tensors alone.

    The heads of the widths that Google published have 64 units.
    """
    return {} if hidden in _PUBLISHED_WIDTHS else {field: max(hidden // 64, 1)}


def bert_sizes(shapes: layouts.Shapes, prefix: str) -> BertConfig:
    """A BERT's sizes; of heads of 64 units, see `unknown_heads`."""
    word, position, types, inner = (shapes[key] for key in bert_size_keys(prefix))
    layer = rf"{re.escape(prefix)}encoder\.layer\.(\d{{1,4}})\.output\.dense\.weight"
    return BertConfig(
        vocab_size=word[0],
        hidden=word[1],
        layers=len(layouts.numbered_keys(shapes, layer)),
        heads=max(word[1] // 64, 1),
        mlp=inner[0],
        positions=position[0],
        types=types[0],
    )


def fill_bert(
    model: Bert,
    folder: str | os.PathLike,
    *,
    num_layers: int | None = None,
    rows: np.ndarray | None = None,
) -> None:
    """Fills a BERT (the text tower of a dual encoder) in place.

    Args:
      model: its config must have the checkpoint's sizes and constants.
      folder: `config.json` and weights (see `open_source`), e.g. `minilm_path()`.
      num_layers: take only the checkpoint's first so many layers, the number of the model's;
        None requires that the numbers be equal.
      rows: int[vocab_size], the row of the checkpoint's embedding table for each of the model's
        tokens (data.tokenizers.vocabulary_rows); None where the vocabularies are the same.
    """
    published = read_bert_config(Path(folder))
    constants = ("heads", "activation", "eps")
    key_map = bert_key_map(model.config)
    key_map = fit_trunk(key_map, model.config, published, folder, num_layers, rows, constants)
    keymap.load_model(model, key_map, layouts.open_source(folder))


def fit_trunk(
    key_map: keymap.KeyMap,
    ours: BertConfig,
    published: BertConfig,
    folder: str | os.PathLike,
    num_layers: int | None,
    rows: np.ndarray | None,
    constants: tuple[str, ...],
) -> keymap.KeyMap:
    """The map that takes the first `num_layers` layers and `rows` of the embedding table."""
    wanted = published.layers if num_layers is None else num_layers
    if wanted != ours.layers:
        raise UserError(
            f"{folder}: the model has {ours.layers} layers, {wanted} of the checkpoint's "
            f"{published.layers} are to be read; give num_layers={ours.layers} to take the first "
            f"{ours.layers}, or change the model."
        )
    for field in constants:
        mine, theirs = getattr(ours, field), getattr(published, field)
        if mine != theirs:
            raise UserError(
                f"{folder}: the model's {field} is {mine!r}, the checkpoint's {theirs!r}; "
                "set it to the checkpoint's."
            )
    if not 0 < wanted <= published.layers:
        raise UserError(
            f"num_layers: {wanted} layers wanted, the checkpoint has {published.layers}; choose "
            f"1 to {published.layers}."
        )
    if dropped := "|".join(map(str, range(wanted, published.layers))):
        ignore = (*key_map.ignore, rf"encoder\.layer\.({dropped})\.")
        key_map = dataclasses.replace(key_map, ignore=ignore)
    if rows is not None:
        pick = keymap.Transform(lambda table: table[rows], None)
        key_map = key_map.with_transform("embeddings.word_embeddings.weight", pick)
    return key_map


# RoBERTa and XLM-R encoders in transformers' layout: a BERT whose positions begin further on.
#
# The table of positions has rows for the padding token and those before it, which no text uses;
# they are left out, so that the model is our BERT.


POSITIONS = "embeddings.position_embeddings.weight"


def roberta_config(
    published: Mapping[str, Any], where: str = "config.json", *, harmless: Collection[str] = ()
) -> BertConfig:
    """Our config from that of a RobertaModel or XLMRobertaModel; see `bert_config`."""
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


def last_rows(count: int) -> keymap.Transform:
    """The last `count` rows of a table."""
    return keymap.Transform(lambda table: table[-count:], None)


def roberta_key_map(config: BertConfig) -> keymap.KeyMap:
    """Key map of the encoder; keys may start with `roberta.`. Heads and the pooler are ignored."""
    return keymap.KeyMap(
        rules=bert_rules(),
        rename=[(r"^roberta\.", "")],
        ignore=[BUFFERS, r"^(pooler|lm_head|classifier)\."],
    ).with_transform(POSITIONS, last_rows(config.positions))


def roberta_classifier_key_map(config: BertConfig) -> keymap.KeyMap:
    """Key map of transformers' classifier of sequences and our CrossEncoder."""
    return keymap.KeyMap(
        rules=[
            *bert_rules("roberta.", "bert/"),
            *keymap.linear_rules("classifier.dense", "bert/pooler"),
            *keymap.linear_rules("classifier.out_proj", "classifier"),
        ],
        ignore=[rf"^roberta\.{BUFFERS}"],
    ).with_transform(POSITIONS, last_rows(config.positions))
