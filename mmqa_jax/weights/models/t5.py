"""T5, Flan-T5 and mT5 checkpoints: transformers' folders, both directions.

Fusion-in-Decoder's and KAT's (`FiDT5`) are read too: a T5's tensors, with the names that their
wrappers of the encoder and of its layers give them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.t5_config import FAMILIES, T5Config
from mmqa_jax.weights.formats.safetensors import TensorSource
from mmqa_jax.weights.keymap import TRANSPOSE, KeyMap, Rule, untied_source
from mmqa_jax.weights.layouts import Checkpoint, Published, config_file, read_hf_config
from mmqa_jax.weights.sources import open_source

_ATTENTION = {"q": "query", "k": "key", "v": "value", "o": "out"}
_TABLE, _HEAD = "shared.weight", "lm_head.weight"
_BETWEEN = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
_WRAPPED = "encoder.encoder."  # of FiD's EncoderWrapper; its CheckpointWrapper adds `module`
_UNWRAPPED = (
    (r"^encoder\.encoder\.", "encoder."),
    (r"^(encoder\.block\.\d+\.)module\.", r"\1"),
)


def t5_rules(config: T5Config) -> list[Rule]:
    """Rules of transformers' T5ForConditionalGeneration."""
    rules = [Rule(_TABLE, "tokens/table")]
    if not config.tied:
        rules.append(Rule(_HEAD, "head/kernel", TRANSPOSE))
    mlp = {"wi_0": "gate", "wi_1": "up"} if config.gated else {"wi": "up"}
    mlp["wo"] = "down"
    self_attention, cross = ("SelfAttention", "attention"), ("EncDecAttention", "cross")
    for stack, attentions in (("encoder", (self_attention,)), ("decoder", (self_attention, cross))):
        first = f"{stack}.block.0.layer.0.SelfAttention"
        rules += [
            Rule(f"{first}.relative_attention_bias.weight", f"{stack}/relative/table"),
            Rule(f"{stack}.final_layer_norm.weight", f"{stack}/norm/scale"),
        ]
        block, path = f"{stack}.block.{{layer}}.layer", f"{stack}/layers"
        for number, (theirs, ours) in enumerate(attentions):
            rules.append(Rule(f"{block}.{number}.layer_norm.weight", f"{path}/{ours}_norm/scale"))
            for their_linear, our_linear in _ATTENTION.items():
                key = f"{block}.{number}.{theirs}.{their_linear}.weight"
                rules.append(Rule(key, f"{path}/{ours}/{our_linear}/kernel", TRANSPOSE))
        last = f"{block}.{len(attentions)}"
        rules.append(Rule(f"{last}.layer_norm.weight", f"{path}/mlp_norm/scale"))
        for their_linear, our_linear in mlp.items():
            key = f"{last}.DenseReluDense.{their_linear}.weight"
            rules.append(Rule(key, f"{path}/{our_linear}/kernel", TRANSPOSE))
    return rules


def t5_key_map(config: T5Config, rename: Sequence[tuple[str, str]] = ()) -> KeyMap:
    """Key map of transformers' T5ForConditionalGeneration.

    The embedding table has up to four names, of which a file may hold any.

    Args:
      rename: see KeyMap.
    """
    aliases = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    if config.tied:
        aliases.append(_HEAD)
    return KeyMap(
        t5_rules(config),
        rename=rename,
        # A table that the first T5s had between the stacks; transformers from 4 on ignores it.
        ignore=(f"^{re.escape(_BETWEEN)}$",),
        tied=tuple((alias, _TABLE) for alias in aliases),
    )


def open_t5(path: Path) -> Checkpoint:
    """A T5, Flan-T5 or mT5 of transformers, or Fusion-in-Decoder's.

    Raises:
      UserError: a missing or broken file, another model's config, or a Fusion-in-Decoder that was
        trained with relative positions between encoder and decoder.
    """
    published = read_hf_config(path, *FAMILIES)
    source = open_source(path)
    has_head = _HEAD in source.specs()
    config = T5Config.from_hf(published, str(config_file(path)), has_head=has_head)
    if not any(key.startswith(_WRAPPED) for key in source.specs()):
        return Checkpoint(config, t5_key_map, source, "transformers")
    key_map = functools.partial(t5_key_map, rename=_UNWRAPPED)
    return Checkpoint(config, key_map, source, "FiD", check=_check_between)


def _check_between(source: TensorSource, config: T5Config) -> None:
    """Refuses a table between the stacks that training has changed.

    T5's own is zero there. transformers 3.0.2, with which FiD and KAT were trained, adds it to the
    scores of the decoder's attention over the source.
    """
    if _BETWEEN in source.specs() and np.any(source.read(_BETWEEN)):
        raise UserError(
            f"{source.name}: tensor {_BETWEEN} is not zero: this reader was trained with relative "
            "positions between encoder and decoder, as transformers before 4 has them; no T5 here "
            "has these. Train one with task fusion_in_decoder, or zero the tensor and lose what "
            "it learned."
        )


def publish_t5(config: T5Config, state: nnx.State) -> Published:
    """T5ForConditionalGeneration, or MT5ForConditionalGeneration."""
    return Published(untied_source(state, t5_key_map(config)), config.to_hf())
