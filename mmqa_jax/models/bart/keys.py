"""BART checkpoints: transformers' folders, BARTScore's `bart.pth`, and export to transformers."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.models.bart.network import Bart, BartConfig, BartStack
from mmqa_jax.models.common import comparison
from mmqa_jax.models.common.layers import scan_layers
from mmqa_jax.weights import keymap
from mmqa_jax.weights.formats.safetensors import TensorSource
from mmqa_jax.weights.layouts import Checkpoint, Published, config_file, open_source, shapes_of

_ATTENTION = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}
_BIAS = "final_logits_bias"
# Published as (1, tokens); a tensor of two rows has no meaning and is refused.
_ROW = keymap.Transform(lambda x: x.squeeze(0), lambda x: x[None])


def bart_rules() -> list[keymap.Rule]:
    """Rules of transformers' BartForConditionalGeneration."""
    rules = [keymap.Rule("model.shared.weight", "tokens/table"), keymap.Rule(_BIAS, _BIAS, _ROW)]
    self_attention = {
        f"self_attn.{theirs}": f"attention/{ours}" for theirs, ours in _ATTENTION.items()
    }
    cross = {f"encoder_attn.{theirs}": f"cross/{ours}" for theirs, ours in _ATTENTION.items()}
    mlp = {"fc1": "up", "fc2": "down"}
    norms = {"self_attn_layer_norm": "attention_norm", "final_layer_norm": "mlp_norm"}
    cross_norm = {"encoder_attn_layer_norm": "cross_norm"}
    for stack, linears, layer_norms in (
        ("encoder", self_attention | mlp, norms),
        ("decoder", self_attention | cross | mlp, norms | cross_norm),
    ):
        prefix = f"model.{stack}."
        rules += [
            keymap.Rule(f"{prefix}embed_positions.weight", f"{stack}/positions/table"),
            *keymap.norm_rules(f"{prefix}layernorm_embedding", f"{stack}/norm"),
            *keymap.transformer_rules(
                f"{prefix}layers.{{layer}}.", f"{stack}/layers", linears, layer_norms
            ),
        ]
    return rules


def bart_key_map() -> keymap.KeyMap:
    """Key map of transformers' BartForConditionalGeneration, and of BartModel.

    The embedding table has four names, of which a file may hold any. bart-base is published as a
    BartModel: its keys lack `model.`, and it has no `final_logits_bias` (see `open_bart`).
    """
    table = "model.shared.weight"
    aliases = (
        "model.encoder.embed_tokens.weight",
        "model.decoder.embed_tokens.weight",
        "lm_head.weight",
    )
    return keymap.KeyMap(
        rules=bart_rules(),
        rename=((r"^(shared|encoder|decoder)\.", r"model.\1."),),
        ignore=(r"^model\.(encoder|decoder)\.version$",),  # fairseq's
        tied=tuple((alias, table) for alias in aliases),
    )


def open_bart(path: Path) -> Checkpoint:
    """A BART of transformers, or a state dict by itself (BARTScore's `bart.pth`).

    A state dict is read with the config.json beside it; if there is none, it must have
    bart-large-cnn's sizes, of which alone the heads are known. A `final_logits_bias` that a folder
    or a BartModel lacks is zeros, as in transformers.
    """
    file = config_file(path)
    config, layout = BartConfig(), "state dict"
    if path.is_dir() or file.exists():
        config, layout = BartConfig.from_hf(read_json(file), str(file)), "transformers"
    source, key_map = open_source(path), bart_key_map()
    keys = source.specs()
    if layout == "state dict":
        _check_large_cnn(source, config, file)
    is_base = not any(key.startswith("model.") for key in keys)
    if _BIAS not in keys and (path.is_dir() or is_base):
        key_map = dataclasses.replace(key_map, fresh=(rf"^{_BIAS}$",))
    return Checkpoint(config, lambda _: key_map, source, layout)


def _check_large_cnn(source: TensorSource, config: BartConfig, file: Path) -> None:
    """Refuses other sizes than bart-large-cnn's, whose heads no tensor shows."""
    shapes = shapes_of(source, [(r"^model\.", "")])
    sizes = {
        "shared.weight": (config.vocab_size, config.hidden),
        "encoder.layers.0.fc1.weight": (config.encoder_mlp, config.hidden),
    }
    other = [key for key, size in sizes.items() if shapes.get(key, size) != size]
    if other:
        raise UserError(
            f"{source.name}: {other[0]} is {list(shapes[other[0]])}, bart-large-cnn's is "
            f"{list(sizes[other[0]])}; of another BART, put its config.json beside the weights "
            f"({file})."
        )


def publish_bart(config: BartConfig, state: nnx.State) -> Published:
    """BartForConditionalGeneration."""
    return Published(keymap.untied_source(state, bart_key_map()), config.to_hf())


# Beside transformers.


def _run(model: Bart, inputs: Mapping[str, jax.Array]) -> comparison.Outputs:
    ids, columns = inputs["ids"], inputs["mask"][:, None, None, :]

    def run(stack: BartStack, *columns_and_states: Any) -> jax.Array:
        def body(layer: Any, x: jax.Array, _: Any, key: Any):
            x = layer(x, *columns_and_states)
            return x, x

        embedded = stack.embed(model.embed(ids))
        return comparison.states_of(embedded, scan_layers(stack.layers, embedded, body)[1])

    encoder = run(model.encoder, columns)
    decoder = run(model.decoder, None, encoder[-1], columns)
    stacks = {"encoder": encoder, "decoder": decoder}
    return comparison.Outputs(stacks, {"logits": model.logits(decoder[-1])})


CHECK = comparison.Check(
    "BartForConditionalGeneration",
    _run,
    {"logits": "logits"},
    {"encoder": "model.encoder", "decoder": "model.decoder"},
    peer_inputs=lambda x: {**comparison.texts_for_transformers(x), "decoder_input_ids": x["ids"]},
)
