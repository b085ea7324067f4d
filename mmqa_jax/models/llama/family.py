"""What is said of a family of decoders: the fields of an entry of `families.FAMILIES`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mmqa_jax.weights.config_json import kinds

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
CONV = "conv"
# Of the loss that balances experts, which output_router_logits turns on.
BALANCING = ("output_router_logits", "router_aux_loss_coef")
TEMPER = "llama_4_scaling_beta"  # of rope parameters
# Kinds of keys that several families have.
BIASES = kinds(flag="attention_bias mlp_bias")
WINDOW = kinds(size_or_null="sliding_window")
MULTIPLIERS = kinds(
    number="embedding_multiplier residual_multiplier attention_multiplier logits_scaling"
)
WINDOWED_GRANITE = kinds(list_or_null="layer_types layer_rope_theta")


def _none() -> Any:
    return dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Family:
    """One family: what its config.json says, what its code fixes, and what its tensors are called.

    Attributes:
      title: what people call it.
      architecture: its class in transformers.
      model_type: what transformers calls it, where its checkpoints have another model_type.
      keys: kinds of the keys of its config.json beside the common ones (`config_json.kinds`).
      defaults: of transformers, of all its keys, where they are not LLaMA's.
      computes: our fields that its code fixes, and no key says.
      harmless: keys that change nothing in inference.
      fixed: keys that its class does not read or that have only these values here.
      partial: whether it may rotate a part of each head.
      fused: what its checkpoints keep as one tensor: "qkv" and "gate_up".
      names: its keys in the place of common ones.
      scaled: whether embeddings are multiplied by the root of their size.
      scales_all: whether its decoder scales whatever it is given, not the words alone: what comes
        of pictures too.
      full_every: so many layers up to one that sees all, where `layer_types` does not say it; 0 is
        the rule of its other keys.
      full_first: whether of so many layers it is the first one, not the last.
      logit_factor: its key of a number that logits are multiplied by.
      renamed: its keys that version 5 of transformers writes under another name -> that name.
      local: whether layers with a window rotate without scaling, as `rope_local_base_freq` or the
        part `sliding_attention` of `rope_parameters` say.
      near_rotates: whether the layers with a window alone rotate, in a model that has a window.
      tempered: whether queries grow with every context of pretraining that lies before them, by
        `llama_4_scaling_beta` of its rope parameters: within the first one they do not, and longer
        texts are refused.
      neighbours: whether a rotary pair is two neighbouring rows in its checkpoints.
      tensors: parts of its tensors' names -> what `models.llama.keys` calls them.
      constants: how tensors' names end that its code keeps beside its parameters -> their only
        value.
      dense_first: its key that says how many of its first layers have an MLP of `intermediate_size`
        in the place of experts, which the list `mlp_layer_types` may say too; "": all have experts.
      experts_paired: whether its checkpoints keep gate and up of all experts as one tensor.
      experts_across: whether they keep these (E, in, out), with gate and up "in turn" or as
        "halves"; "": (E, out, in).
    """

    title: str
    architecture: str
    model_type: str = ""
    keys: Mapping[str, str] = _none()
    defaults: Mapping[str, Any] = _none()
    computes: Mapping[str, Any] = _none()
    harmless: tuple[str, ...] = ()
    fixed: Mapping[str, tuple[Any, ...]] = _none()
    partial: bool = False
    fused: tuple[str, ...] = ()
    names: Mapping[str, str] = _none()
    scaled: bool = False
    scales_all: bool = False
    full_every: int = 0
    full_first: bool = False
    logit_factor: str = ""
    renamed: Mapping[str, str] = _none()
    local: bool = False
    near_rotates: bool = False
    tempered: bool = False
    neighbours: bool = False
    tensors: Mapping[str, str] = _none()
    constants: Mapping[str, float] = _none()
    dense_first: str = ""
    experts_paired: bool = False
    experts_across: str = ""
