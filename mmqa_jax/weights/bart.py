"""BART checkpoints: transformers' folders, BARTScore's `bart.pth`, and export to transformers."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.files import read_json
from mmqa_jax.core.mesh import DEFAULT_RULES, Rules
from mmqa_jax.models.bart import Bart
from mmqa_jax.models.bart_config import BartConfig
from mmqa_jax.weights.keymap import (
    KeyMap,
    Rule,
    Transform,
    make_loaded,
    norm_rules,
    transformer_rules,
)
from mmqa_jax.weights.published import PublishedSource
from mmqa_jax.weights.sources import open_source

_ATTENTION = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}
_BIAS = "final_logits_bias"
# Published as (1, words); a tensor of two rows has no meaning and is refused.
_ROW = Transform(lambda x: x.squeeze(0), lambda x: x[None])


def bart_rules() -> list[Rule]:
    """Rules of transformers' BartForConditionalGeneration."""
    rules = [Rule("model.shared.weight", "tokens/table"), Rule(_BIAS, _BIAS, _ROW)]
    own = {f"self_attn.{theirs}": f"attention/{ours}" for theirs, ours in _ATTENTION.items()}
    cross = {f"encoder_attn.{theirs}": f"cross/{ours}" for theirs, ours in _ATTENTION.items()}
    mlp = {"fc1": "up", "fc2": "down"}
    norms = {"self_attn_layer_norm": "attention_norm", "final_layer_norm": "mlp_norm"}
    cross_norm = {"encoder_attn_layer_norm": "cross_norm"}
    for stack, linears, layer_norms in (
        ("encoder", own | mlp, norms),
        ("decoder", own | cross | mlp, norms | cross_norm),
    ):
        prefix = f"model.{stack}."
        rules += [
            Rule(f"{prefix}embed_positions.weight", f"{stack}/positions/table"),
            *norm_rules(f"{prefix}layernorm_embedding", f"{stack}/norm"),
            *transformer_rules(
                f"{prefix}layers.{{layer}}.", f"{stack}/layers", linears, layer_norms
            ),
        ]
    return rules


def bart_key_map() -> KeyMap:
    """Key map of transformers' BartForConditionalGeneration, and of BartModel.

    The word table has four names, of which a file may hold any. bart-base is published as a
    BartModel: its keys lack `model.`, and it has no `final_logits_bias` (see `load_bart`).
    """
    table = "model.shared.weight"
    aliases = (
        "model.encoder.embed_tokens.weight",
        "model.decoder.embed_tokens.weight",
        "lm_head.weight",
    )
    return KeyMap(
        rules=bart_rules(),
        rename=((r"^(shared|encoder|decoder)\.", r"model.\1."),),
        ignore=(r"^model\.(encoder|decoder)\.version$",),  # fairseq's
        tied=tuple((alias, table) for alias in aliases),
    )


def load_bart(
    folder: str | os.PathLike,
    *,
    state_dict: str | os.PathLike | None = None,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
    param_dtype: str = "float32",
    **changes: Any,
) -> Bart:
    """Reads a BART checkpoint.

    A folder without `final_logits_bias` has zeros there, as in transformers.

    Args:
      folder: with transformers' `config.json` and weights (see `open_source`).
      state_dict: a file of all tensors that takes the place of the folder's: BARTScore's
        `bart.pth` (ParaBank2) over bart-large-cnn's folder, of which only `config.json` is read.
      mesh: where the parameters go, each tensor straight onto its shards; None is the default
        device.
      rules: logical axis -> mesh axis.
      param_dtype: of the parameters; bfloat16 halves memory where nothing is trained.
      changes: fields of BartConfig that the checkpoint does not decide (dtype, attention, remat,
        unroll, dropouts).

    Raises:
      UserError: a missing or broken file, another model's config, tensors that do not fit.
    """
    folder = Path(folder)
    file = folder / "config.json"
    config = dataclasses.replace(BartConfig.from_hf(read_json(file), str(file)), **changes)
    source = open_source(folder if state_dict is None else state_dict)
    if state_dict is None and _BIAS not in source.specs():
        zeros = np.zeros((1, config.vocab_size), np.float32)
        source = PublishedSource(source, {}, {_BIAS: zeros})
    where = {"mesh": mesh, "rules": rules, "param_dtype": param_dtype}
    return make_loaded(lambda: Bart(config, rngs=nnx.Rngs(0)), bart_key_map(), source, **where)
