"""What is said of a family of decoders: the fields of an entry of `families.FAMILIES`."""

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
    """One family: what its config.json says, what its code fixes, what its tensors are called."""

    title: str  # what people call it
    architecture: str  # its class in transformers
    # What transformers calls it, where its checkpoints have another model_type.
    model_type: str = ""
    # Kinds of the keys of its config.json beside the common ones (`config_json.kinds`).
    keys: Mapping[str, str] = _none()
    # Of transformers, of all its keys, where they are not LLaMA's.
    defaults: Mapping[str, Any] = _none()
    computes: Mapping[str, Any] = _none()  # our fields that its code fixes, and no key says
    harmless: tuple[str, ...] = ()  # keys that change nothing in inference
    # Keys that its class does not read or that have only these values here.
    fixed: Mapping[str, tuple[Any, ...]] = _none()
    partial: bool = False  # whether it may rotate a part of each head
    fused: tuple[str, ...] = ()  # what its checkpoints keep as one tensor: "qkv" and "gate_up"
    names: Mapping[str, str] = _none()  # its keys in the place of common ones
    scaled: bool = False  # whether embeddings are multiplied by the root of their size
    # Whether its decoder scales whatever it is given, not the words alone: what comes of pictures
    # too.
    scales_all: bool = False
    # So many layers up to one that sees all, where `layer_types` does not say it; 0 is the rule of
    # its other keys.
    full_every: int = 0
    full_first: bool = False  # whether of so many layers it is the first one, not the last
    logit_factor: str = ""  # its key of a number that logits are multiplied by
    # Its keys that version 5 of transformers writes under another name -> that name.
    renamed: Mapping[str, str] = _none()
    # Whether layers with a window rotate without scaling, as `rope_local_base_freq` or the part
    # `sliding_attention` of `rope_parameters` say.
    local: bool = False
    # Whether the layers with a window alone rotate, in a model that has a window.
    near_rotates: bool = False
    # Whether queries grow with every context of pretraining that lies before them, by
    # `llama_4_scaling_beta` of its rope parameters: within the first one they do not, and longer
    # texts are refused.
    tempered: bool = False
    neighbours: bool = False  # whether a rotary pair is two neighbouring rows in its checkpoints
    # Parts of its tensors' names -> what `models.llama.keys` calls them.
    tensors: Mapping[str, str] = _none()
    # How tensors' names end that its code keeps beside its parameters -> their only value.
    constants: Mapping[str, float] = _none()
    # Its key that says how many of its first layers have an MLP of `intermediate_size` in the place
    # of experts, which the list `mlp_layer_types` may say too; "": all have experts.
    dense_first: str = ""
    # Whether its checkpoints keep gate and up of all experts as one tensor.
    experts_paired: bool = False
    # Whether they keep these (E, in, out), with gate and up "in turn" or as "halves"; "": (E, out,
    # in).
    experts_across: str = ""
