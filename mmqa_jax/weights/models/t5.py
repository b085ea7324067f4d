"""T5, Flan-T5 and mT5 checkpoints: transformers' folders, both directions."""

from __future__ import annotations

from pathlib import Path

from flax import nnx

from mmqa_jax.models.t5_config import FAMILIES, T5Config
from mmqa_jax.weights.keymap import TRANSPOSE, KeyMap, Rule, untied_source
from mmqa_jax.weights.layouts import Checkpoint, Published, config_file, read_hf_config
from mmqa_jax.weights.sources import open_source

_ATTENTION = {"q": "query", "k": "key", "v": "value", "o": "out"}
_TABLE, _HEAD = "shared.weight", "lm_head.weight"


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


def t5_key_map(config: T5Config) -> KeyMap:
    """Key map of transformers' T5ForConditionalGeneration.

    The embedding table has up to four names, of which a file may hold any.
    """
    aliases = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    if config.tied:
        aliases.append(_HEAD)
    return KeyMap(
        t5_rules(config),
        # A table that the first T5s had between the stacks, and did not use.
        ignore=(
            r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",
        ),
        tied=tuple((alias, _TABLE) for alias in aliases),
    )


def open_t5(path: Path) -> Checkpoint:
    """A T5, Flan-T5 or mT5 of transformers.

    Raises:
      UserError: a missing or broken file, another model's config.
    """
    published = read_hf_config(path, *FAMILIES)
    source = open_source(path)
    has_head = _HEAD in source.specs()
    config = T5Config.from_hf(published, str(config_file(path)), has_head=has_head)
    return Checkpoint(config, t5_key_map, source, "transformers")


def publish_t5(config: T5Config, state: nnx.State) -> Published:
    """T5ForConditionalGeneration, or MT5ForConditionalGeneration."""
    return Published(untied_source(state, t5_key_map(config)), config.to_hf())
