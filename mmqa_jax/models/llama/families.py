"""The config.json of LLaMA and of the families that are LLaMAs with other switches, both ways.

Each family is one entry: the name of its class, the keys that it has beside the common ones, what
transformers takes for absent ones, and what its code fixes without a key. A key that a family's
class in transformers does not read is refused here (`config_json.check_keys`), whatever other
families do with it. To add a family: one entry here, its tensors' names in
`models/llama/keys.py` where they differ, and one case of
`tests/equivalence/test_decoder_families.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mmqa_jax.core.errors import UserError
from mmqa_jax.models.common.activations import ACTIVATIONS, LEARNED
from mmqa_jax.models.common.config_checks import check_known
from mmqa_jax.models.common.rope import scaling_from_hf, scaling_to_hf
from mmqa_jax.models.llama.layer_kinds import DeltaConfig, FullLayers
from mmqa_jax.weights.config_json import ForeignModel, check_keys, kinds
from mmqa_jax.weights.formats.mxfp4 import check_quantization

# Our fields that are plain values in transformers' config.json, with LLaMA's defaults there; a
# family has those of `_COMMON` and its own `keys`.
_PLAIN = {
    "vocab_size": ("vocab_size", 32000),
    "hidden": ("hidden_size", 4096),
    "layers": ("num_hidden_layers", 32),
    "heads": ("num_attention_heads", 32),
    "mlp": ("intermediate_size", 11008),
    "positions": ("max_position_embeddings", 2048),
    "eps": ("rms_norm_eps", 1e-6),
    "tied": ("tie_word_embeddings", False),
    "attention_bias": ("attention_bias", False),
    "mlp_bias": ("mlp_bias", False),
    "activation": ("hidden_act", "silu"),
    "attention_dropout": ("attention_dropout", 0.0),
    "embedding_scale": ("embedding_multiplier", 1.0),
    "residual_scale": ("residual_multiplier", 1.0),
    "attention_scale": ("attention_multiplier", 1.0),
    "logit_divisor": ("logits_scaling", 1.0),
    "attention_cap": ("attn_logit_softcapping", None),
    "logit_cap": ("final_logit_softcapping", None),
    "bidirectional": ("use_bidirectional_attention", False),
    "parallel": ("use_parallel_residual", False),
    "out_bias": ("attention_out_bias", None),
    "experts": ("num_experts", None),
    "active_experts": ("num_experts_per_tok", None),
    "normed_experts": ("norm_topk_prob", False),
    "gate_limit": ("swiglu_limit", None),
    "side": ("hidden_size_per_layer_input", 0),
    "chunk": ("attention_chunk_size", None),
    "shared_expert": ("shared_expert_intermediate_size", None),
}
_COMMON = kinds(
    size="vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size "
    "max_position_embeddings",
    size_or_null="num_key_value_heads head_dim original_max_position_embeddings",
    number="rms_norm_eps",
    number_or_null="attention_dropout rope_theta partial_rotary_factor",
    flag="tie_word_embeddings",
    name="hidden_act",
    object_or_null="rope_scaling rope_parameters",
)
_FIXED: Mapping[str, tuple[Any, ...]] = {"is_causal": (True,), "is_decoder": (True, False)}
_BIASES = kinds(flag="attention_bias mlp_bias")
_WINDOW = kinds(size_or_null="sliding_window")
_SWITCHED_WINDOW = kinds(
    flag="use_sliding_window", size_or_null="sliding_window", list_or_null="layer_types"
)
_MULTIPLIERS = kinds(
    number="embedding_multiplier residual_multiplier attention_multiplier logits_scaling"
)
_GEMMA = kinds(
    name="hidden_activation",
    size="query_pre_attn_scalar",
    number_or_null="final_logit_softcapping",
    flag="attention_bias",
    size_or_null="sliding_window",
    list_or_null="layer_types",
)
_DELTA = {  # of DeltaConfig
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_size": "linear_key_head_dim",
    "value_size": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim",
}
# Qwen3.5's: layers of the gated delta rule, and of attention with a gate.
_HYBRID = kinds(
    flag="attention_bias",
    list_or_null="layer_types",
    size="full_attention_interval " + " ".join(_DELTA.values()),
)
_HYBRID_DEFAULTS = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
}
_HYBRID_MIXTURE = {
    **_HYBRID,
    **kinds(
        size="moe_intermediate_size shared_expert_intermediate_size num_experts num_experts_per_tok"
    ),
}
_HYBRID_MIXTURE_DEFAULTS = {
    **_HYBRID_DEFAULTS,
    "hidden_size": 2048,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_HYBRID_COMPUTES = {"qk_norm": "head", "unit_norms": True, "gated": True}
# Of layers that propose tokens, which are no part of the model.
_HYBRID_HARMLESS = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
# Of layers that see all, where these have other heads than those with a window (Gemma 4);
# per_layer_config is how transformers writes the first two.
_WIDE_LAYERS = kinds(
    size_or_null="global_head_dim num_global_key_value_heads",
    flag="attention_k_eq_v",
    object_or_null="per_layer_config",
)
_HYBRID_FIXED = {
    "attn_output_gate": (True,),
    "output_gate_type": ("sigmoid",),
    "mamba_ssm_dtype": ("float32",),
}
# Gemma's key in the place of a common one.
_GEMMA_NAMES = {"hidden_act": "hidden_activation"}
_GEMMA_DEFAULTS = {
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
# cache_implementation is transformers', hidden_act is not read by these classes.
_GEMMA_HARMLESS = ("cache_implementation", "hidden_act", "sliding_window_size")
_COHERE_DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}
_COHERE_COMPUTES = {"norm_kind": "layer", "parallel": True}
# Notes of Cohere's own code, which transformers' does not read.
_COHERE_HARMLESS = (
    *("cache_implementation", "use_embedding_sharing", "use_parallel_embedding", "layer_switch"),
    *("order_of_interleaved_layers", "model_max_length", "pretraining_tp"),
)
_COHERE_FIXED: Mapping[str, tuple[Any, ...]] = {
    "use_qk_norm": (False,),
    "use_parallel_block": (True,),
    "use_gated_activation": (True,),
    "rotary_pct": (1.0,),
    "position_embedding_type": ("rope_gptj",),
}
# Of the loss that balances experts, which output_router_logits turns on.
_BALANCING = ("output_router_logits", "router_aux_loss_coef")
# Fields that are ours, or have another form in a config.json.
_OWN = ("dtype", "attention", "remat", "unroll", "init_stddev", "head_dim", "out_bias")
_OWN += ("picture_sight",)  # the family of a model that sees fixes it
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"


_TEMPER = "llama_4_scaling_beta"  # of rope parameters


def _none() -> Any:
    return dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
      title: what people call it.
      architecture: its class in transformers.
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
      experts_paired: whether its checkpoints keep gate and up of all experts as one tensor.
      experts_across: whether they keep these (E, in, out), with gate and up "in turn" or as
        "halves"; "": (E, out, in). Those in turn may be rounded (`weights.formats.mxfp4`).
    """

    title: str
    architecture: str
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
    renamed: Mapping[str, str] = _none()
    local: bool = False
    near_rotates: bool = False
    tempered: bool = False
    neighbours: bool = False
    tensors: Mapping[str, str] = _none()
    constants: Mapping[str, float] = _none()
    experts_paired: bool = False
    experts_across: str = ""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        title="LLaMA 1, 2, 3, Vicuna, SmolLM2",
        architecture="LlamaForCausalLM",
        keys=_BIASES,
        # pretraining_tp splits products (the same but for rounding).
        harmless=("pretraining_tp", "max_sequence_length", "is_llama_config"),
        fixed={"rope_interleaved": (False,)},  # SmolLM's
    ),
    "mistral": Family(
        title="Mistral",
        architecture="MistralForCausalLM",
        keys=_WINDOW,
        defaults={
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096 * 32,
            "sliding_window": 4096,
        },
    ),
    "ministral": Family(
        title="Ministral",
        architecture="MinistralForCausalLM",
        keys={**_WINDOW, **kinds(list_or_null="layer_types")},
        defaults={
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096 * 32,
            "sliding_window": 4096,
        },
    ),
    "ministral3": Family(
        title="Ministral 3",
        architecture="Ministral3ForCausalLM",
        keys=_WINDOW,
        defaults={
            "vocab_size": 131072,
            "intermediate_size": 14336,
            "num_hidden_layers": 34,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, _TEMPER: 0.1},
                **{"original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0},
            },
        },
        tempered=True,
    ),
    "qwen2": Family(
        title="Qwen2, Qwen2.5",
        architecture="Qwen2ForCausalLM",
        keys={**_SWITCHED_WINDOW, **kinds(integer="max_window_layers")},
        defaults={
            "vocab_size": 151936,
            "intermediate_size": 22016,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        computes={"attention_bias": True, "out_bias": False},
    ),
    "qwen3": Family(
        title="Qwen3, without experts",
        architecture="Qwen3ForCausalLM",
        keys={**_SWITCHED_WINDOW, **kinds(flag="attention_bias", integer="max_window_layers")},
        defaults={
            "vocab_size": 151936,
            "intermediate_size": 22016,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        computes={"qk_norm": "head"},
    ),
    "qwen3_moe": Family(
        title="Qwen3's mixtures of experts",
        architecture="Qwen3MoeForCausalLM",
        keys=kinds(
            flag="attention_bias norm_topk_prob",
            size="moe_intermediate_size num_experts num_experts_per_tok",
        ),
        defaults={
            "vocab_size": 151936,
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        computes={"qk_norm": "head"},
        # intermediate_size is that of layers without experts.
        harmless=("intermediate_size", "sliding_window", "max_window_layers", *_BALANCING),
        fixed={
            "mlp_only_layers": ([],),
            "decoder_sparse_step": (1,),
            "use_sliding_window": (False,),  # versions of transformers differ in its layers
        },
        names={"intermediate_size": "moe_intermediate_size"},
        renamed={"num_experts": "num_local_experts"},
    ),
    "qwen3_5_text": Family(
        title="Qwen3.5 and 3.6, without experts",
        architecture="Qwen3_5ForCausalLM",
        keys=_HYBRID,
        defaults={
            **_HYBRID_DEFAULTS,
            "vocab_size": 248320,
            "intermediate_size": 12288,
            "num_key_value_heads": 4,
        },
        computes=_HYBRID_COMPUTES,
        harmless=_HYBRID_HARMLESS,
        fixed=_HYBRID_FIXED,
        partial=True,
        fused=("q", "in_proj_qkv", "conv1d"),
    ),
    "qwen3_5_moe_text": Family(
        title="Qwen3.5's and 3.6's mixtures of experts",
        architecture="Qwen3_5MoeForCausalLM",
        keys=_HYBRID_MIXTURE,
        defaults={
            **_HYBRID_MIXTURE_DEFAULTS,
            "vocab_size": 248320,
            "num_hidden_layers": 40,
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
        computes={**_HYBRID_COMPUTES, "normed_experts": True},
        harmless=(*_HYBRID_HARMLESS, "intermediate_size", *_BALANCING),
        fixed={**_HYBRID_FIXED, "mlp_only_layers": ([],), "norm_topk_prob": (True,)},
        names={"intermediate_size": "moe_intermediate_size"},
        partial=True,
        fused=("q", "in_proj_qkv", "conv1d"),
    ),
    "qwen3_next": Family(
        title="Qwen3-Next",
        architecture="Qwen3NextForCausalLM",
        keys={**_HYBRID_MIXTURE, **kinds(flag="norm_topk_prob")},
        defaults={
            **_HYBRID_MIXTURE_DEFAULTS,
            "vocab_size": 151936,
            "num_hidden_layers": 48,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
        },
        computes=_HYBRID_COMPUTES,
        harmless=("intermediate_size", *_BALANCING),
        fixed={**_HYBRID_FIXED, "mlp_only_layers": ([],), "decoder_sparse_step": (1,)},
        names={"intermediate_size": "moe_intermediate_size"},
        partial=True,
        fused=("q", "in_proj_qkvz", "in_proj_ba", "conv1d"),
    ),
    "olmoe": Family(
        title="OLMoE",
        architecture="OlmoeForCausalLM",
        keys=kinds(flag="attention_bias norm_topk_prob", size="num_experts num_experts_per_tok"),
        defaults={
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
        computes={"qk_norm": "whole"},
        harmless=_BALANCING,
        fixed={"clip_qkv": ()},
    ),
    "mixtral": Family(
        title="Mixtral",
        architecture="MixtralForCausalLM",
        keys={**_WINDOW, **kinds(size="num_local_experts num_experts_per_tok")},
        defaults={
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096 * 32,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        computes={"normed_experts": True},
        harmless=(*_BALANCING, "router_jitter_noise"),
        names={"num_experts": "num_local_experts"},
        tensors={
            **{f"block_sparse_moe.{part}.": f"mlp.{part}." for part in ("gate", "experts")},
            **{".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."},
        },
    ),
    "gpt_oss": Family(
        title="gpt-oss",
        architecture="GptOssForCausalLM",
        keys={
            **_WINDOW,
            **kinds(
                list_or_null="layer_types",
                flag="attention_bias",
                number="swiglu_limit",
                size="num_local_experts num_experts_per_tok",
            ),
        },
        defaults={
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_scaling": {
                **{"rope_type": "yarn", "factor": 32.0, "truncate": False},
                "original_max_position_embeddings": 4096,
            },
            "attention_bias": True,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        # x * sigmoid(swiglu_alpha * x)
        computes={
            **{"sinks": True, "mlp_bias": True, "normed_experts": True},
            "activation": "quick_gelu",
        },
        harmless=(*_BALANCING, "initial_context_length", "experts_per_token"),
        fixed={"hidden_act": ("silu",), "swiglu_alpha": (1.702,)},
        names={"num_experts": "num_local_experts"},
        full_every=2,
        tensors={"mlp.router.": "mlp.gate."},
        experts_across="in turn",
    ),
    "seed_oss": Family(
        title="Seed-OSS",
        architecture="SeedOssForCausalLM",
        keys={**_BIASES, **kinds(flag="attention_out_bias")},
        defaults={
            "vocab_size": 155136,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "attention_bias": True,
            "attention_out_bias": False,
            "attention_dropout": 0.1,
        },
        harmless=("pretraining_tp", "residual_dropout"),
    ),
    "ernie4_5": Family(
        title="ERNIE 4.5, without experts",
        architecture="Ernie4_5ForCausalLM",
        keys=kinds(flag="use_bias"),
        defaults={
            "vocab_size": 103424,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 18,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
        names={"attention_bias": "use_bias", "mlp_bias": "use_bias"},
        neighbours=True,
    ),
    "exaone4": Family(
        title="EXAONE 4",
        architecture="Exaone4ForCausalLM",
        keys={**_WINDOW, **kinds(list_or_null="layer_types")},
        defaults={
            "vocab_size": 102400,
            "intermediate_size": 16384,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
        },
        computes={"qk_norm": "head", "norms": "after"},
        fixed={"sliding_window_pattern": (4, 0, "LLLG")},  # layer_types say it
        full_every=4,
        near_rotates=True,
    ),
    "glm4": Family(
        title="GLM-4 of April 2025 (0414), GLM-Z1",
        architecture="Glm4ForCausalLM",
        keys=kinds(flag="attention_bias"),
        defaults={
            "vocab_size": 151552,
            "intermediate_size": 13696,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1.5625e-7,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
        computes={"norms": "both", "out_bias": False},
        partial=True,
        fused=("gate_up",),
        neighbours=True,
        tensors={
            "post_attention_layernorm": "pre_feedforward_layernorm",
            "post_self_attn_layernorm": "post_attention_layernorm",
            "post_mlp_layernorm": "post_feedforward_layernorm",
        },
    ),
    "smollm3": Family(
        title="SmolLM3",
        architecture="SmolLM3ForCausalLM",
        keys={
            **_BIASES,
            **_SWITCHED_WINDOW,
            **kinds(list_or_null="no_rope_layers", size="no_rope_layer_interval"),
        },
        defaults={
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
        },
        harmless=("pretraining_tp",),
        fixed={"rope_interleaved": (False,)},
    ),
    "llama4_text": Family(
        title="Llama 4, its language model",
        architecture="Llama4ForCausalLM",
        keys=kinds(
            size="attention_chunk_size floor_scale interleave_moe_layer_step intermediate_size_mlp "
            "no_rope_layer_interval num_local_experts num_experts_per_tok",
            number="attn_scale",
            flag="attention_bias attn_temperature_tuning use_qk_norm",
            list_or_null="layer_types moe_layers no_rope_layers",
        ),
        defaults={
            "vocab_size": 202048,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096 * 32,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 8192,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        computes={"weighted_input": True, "shared_gate": False},
        harmless=(
            *_BALANCING,
            "router_jitter_noise",
            "for_llm_compressor",
        ),
        names={"num_experts": "num_local_experts"},
        neighbours=True,
        experts_across="halves",
        tensors={
            **{f"feed_forward.{part}.": f"mlp.{part}." for part in ("experts", "shared_expert")},
            **{
                f"feed_forward.{part}_proj.": f"mlp.{part}_proj." for part in ("gate", "up", "down")
            },
            "feed_forward.router.": "mlp.gate.",
        },
    ),
    "olmo2": Family(
        title="OLMo 2",
        architecture="Olmo2ForCausalLM",
        keys=kinds(flag="attention_bias"),
        defaults={"vocab_size": 50304, "rms_norm_eps": 1e-5},
        computes={"qk_norm": "whole", "norms": "after"},
    ),
    "olmo3": Family(
        title="OLMo 3",
        architecture="Olmo3ForCausalLM",
        keys={**_WINDOW, **kinds(flag="attention_bias", list_or_null="layer_types")},
        defaults={
            "vocab_size": 50304,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "sliding_window": 4096,
        },
        computes={"qk_norm": "whole", "norms": "after"},
        full_every=4,
        local=True,
    ),
    "phi3": Family(
        title="Phi-3, Phi-4",
        architecture="Phi3ForCausalLM",
        keys=_WINDOW,
        defaults={
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        fixed={
            **{"resid_pdrop": (0.0,), "embd_pdrop": (0.0,)},
            **dict.fromkeys(("attention_bias", "mlp_bias", "lm_head_bias"), (False,)),
            **dict.fromkeys(("full_attn_mod", "interpolate_factor"), (1,)),  # Phi-4-mini's
        },
        partial=True,
        fused=("qkv", "gate_up"),
    ),
    "granite": Family(
        title="Granite 3",
        architecture="GraniteForCausalLM",
        keys={**_BIASES, **_MULTIPLIERS},
        scales_all=True,
    ),
    "granitemoe": Family(
        title="Granite 3, mixtures of experts",
        architecture="GraniteMoeForCausalLM",
        keys={
            **_MULTIPLIERS,
            **kinds(flag="attention_bias", size="num_local_experts num_experts_per_tok"),
        },
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
        computes={"normed_experts": True},
        harmless=_BALANCING,
        names={"num_experts": "num_local_experts"},
        scales_all=True,
        tensors={
            "block_sparse_moe.router.layer.": "mlp.gate.",
            "block_sparse_moe.router.": "mlp.gate.",
            "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
            "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
            "block_sparse_moe.experts.": "mlp.experts.",
        },
        experts_paired=True,
    ),
    "cohere": Family(
        title="Command R",
        architecture="CohereForCausalLM",
        keys=kinds(flag="attention_bias", number="layer_norm_eps logit_scale"),
        defaults={**_COHERE_DEFAULTS, "rope_theta": 500000.0},
        computes=_COHERE_COMPUTES,
        harmless=_COHERE_HARMLESS,
        fixed=_COHERE_FIXED,
        names={"rms_norm_eps": "layer_norm_eps"},
        neighbours=True,
    ),
    "cohere2": Family(
        title="Command R7B and A, Tiny Aya",
        architecture="Cohere2ForCausalLM",
        keys=kinds(
            flag="attention_bias",
            number="layer_norm_eps logit_scale",
            size="sliding_window sliding_window_pattern",
            list_or_null="layer_types",
        ),
        defaults={**_COHERE_DEFAULTS, "sliding_window": 4096},
        computes=_COHERE_COMPUTES,
        harmless=_COHERE_HARMLESS,
        fixed=_COHERE_FIXED,
        names={"rms_norm_eps": "layer_norm_eps"},
        neighbours=True,
        full_every=4,
        near_rotates=True,
    ),
    "nemotron": Family(
        title="Nemotron 3 and 4, Minitron",
        architecture="NemotronForCausalLM",
        keys={**_BIASES, **kinds(number="norm_eps")},
        defaults={
            "vocab_size": 256000,
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_attention_heads": 48,
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
        computes={"norm_kind": "biased_layer", "unit_norms": True, "gated_mlp": False},
        harmless=("pretraining_tp", "kv_channels"),
        names={"rms_norm_eps": "norm_eps"},
        partial=True,
    ),
    "stablelm": Family(
        title="StableLM",
        architecture="StableLmForCausalLM",
        keys=kinds(flag="use_qkv_bias use_parallel_residual", number="layer_norm_eps"),
        defaults={
            "vocab_size": 50304,
            "intermediate_size": 6912,
            "hidden_size": 2560,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
        },
        computes={"norm_kind": "biased_layer", "out_bias": False},
        harmless=("hidden_dropout",),
        fixed={"qk_layernorm": (False,)},
        names={"rms_norm_eps": "layer_norm_eps", "attention_bias": "use_qkv_bias"},
        partial=True,
    ),
    "starcoder2": Family(
        title="StarCoder 2",
        architecture="Starcoder2ForCausalLM",
        keys={**_WINDOW, **kinds(flag="use_bias", number="norm_epsilon")},
        defaults={
            "vocab_size": 49152,
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_hidden_layers": 30,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
        computes={"norm_kind": "biased_layer", "gated_mlp": False},
        harmless=("residual_dropout", "embedding_dropout"),
        names={
            "rms_norm_eps": "norm_epsilon",
            "attention_bias": "use_bias",
            "mlp_bias": "use_bias",
        },
        tensors={"mlp.c_fc.": "mlp.up_proj.", "mlp.c_proj.": "mlp.down_proj."},
    ),
    "apertus": Family(
        title="Apertus",
        architecture="ApertusForCausalLM",
        keys=kinds(flag="attention_bias"),
        defaults={
            "vocab_size": 131072,
            "intermediate_size": 14336,
            "hidden_act": "xielu",
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-5,
            "rope_theta": 12000000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
        computes={"qk_norm": "head", "gated_mlp": False},
        harmless=("hidden_dropout",),
        fixed={"mlp_bias": (False,), "post_norm": (False,), "qk_norm": (True,)},
        tensors={
            "attention_layernorm": "input_layernorm",
            "feedforward_layernorm": "post_attention_layernorm",
        },
        constants={"mlp.act_fn.beta": 0.5, "mlp.act_fn.eps": -1e-6},
    ),
    "gemma2": Family(
        title="Gemma 2",
        architecture="Gemma2ForCausalLM",
        keys={**_GEMMA, **kinds(number_or_null="attn_logit_softcapping")},
        defaults={
            **_GEMMA_DEFAULTS,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        computes={"norms": "both", "unit_norms": True},
        harmless=_GEMMA_HARMLESS,
        fixed={"use_bidirectional_attention": (False,)},
        names=_GEMMA_NAMES,
        scaled=True,
        full_every=2,
    ),
    "gemma3_text": Family(
        title="Gemma 3, its language model",
        architecture="Gemma3ForCausalLM",
        keys={
            **_GEMMA,
            **kinds(
                size="sliding_window_pattern",
                number_or_null="rope_local_base_freq",
                flag="use_bidirectional_attention",
            ),
        },
        defaults={
            **_GEMMA_DEFAULTS,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
        },
        computes={"norms": "both", "unit_norms": True, "qk_norm": "head"},
        harmless=_GEMMA_HARMLESS,
        # transformers' class has a cap of scores, and does not use it.
        fixed={"attn_logit_softcapping": ()},
        names=_GEMMA_NAMES,
        scaled=True,
        full_every=6,
        local=True,
    ),
    "gemma4_text": Family(
        title="Gemma 4, its language model",
        architecture="Gemma4ForCausalLM",
        keys={
            **{key: kind for key, kind in _GEMMA.items() if key != "query_pre_attn_scalar"},
            **_WIDE_LAYERS,
            **kinds(
                flag="enable_moe_block",
                integer_or_null="hidden_size_per_layer_input",
                size="vocab_size_per_layer_input",
                size_or_null="num_experts top_k_experts moe_intermediate_size",
            ),
        },
        defaults={
            **_GEMMA_DEFAULTS,
            "vocab_size": 262144,
            "num_hidden_layers": 30,
            "max_position_embeddings": 131072,
            "sliding_window": 512,
            "rope_parameters": {
                _SLIDING: {"rope_theta": 10000.0},
                _FULL: {
                    "rope_type": "proportional",
                    "rope_theta": 1000000.0,
                    "partial_rotary_factor": 0.25,
                },
            },
            "global_head_dim": 512,
            "hidden_size_per_layer_input": 256,
        },
        computes={
            "norms": "both",
            "qk_norm": "head",
            "attention_scale": 1.0,
            "value_norm": True,
            "layer_scales": True,
            "normed_experts": True,
        },
        harmless=_GEMMA_HARMLESS,
        fixed={
            # "vision": of pictures' tokens, of which the language model alone has none.
            "use_bidirectional_attention": ("vision",),
            "num_kv_shared_layers": (0,),
            "rope_scaling": (),  # rope_parameters say it
            "use_double_wide_mlp": (False,),
        },
        names={
            **_GEMMA_NAMES,
            "num_experts_per_tok": "top_k_experts",
        },
        scaled=True,
        full_every=6,
        local=True,
        tensors={".router.proj.weight": ".mlp.gate.weight", ".experts.": ".mlp.experts."},
        experts_paired=True,
    ),
}


def fields_from_hf(published: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Fields of LlamaConfig from transformers' `config.json`; see `LlamaConfig.from_hf`."""
    model_type = published.get("model_type", "llama")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ForeignModel(where, model_type, f"one of {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    read = _read(family)
    published = {**published}
    if "attn_temperature_tuning" in read and "attn_temperature_tuning" in published:
        tuning = published["attn_temperature_tuning"]  # a number in the first files
        published["attn_temperature_tuning"] = bool(tuning) if isinstance(tuning, int) else tuning
    for key, newer in family.renamed.items():
        if newer in published:
            published.setdefault(key, published.pop(newer))
    if published.get("output_router_logits") and "num_experts_per_tok" in read:
        raise UserError(
            f"{where}: output_router_logits is true, with which training adds a loss that balances "
            "experts (router_aux_loss_coef), and this one does not; set output_router_logits to "
            "false there to train and answer without."
        )
    if family.experts_across == "in turn":
        check_quantization(published.pop("quantization_config", None), where)
    check_keys(
        published, where, read=read, harmless=family.harmless, fixed={**_FIXED, **family.fixed}
    )

    if published.get("rope_parameters") is None and "rope_parameters" in family.defaults:
        published["rope_parameters"] = family.defaults["rope_parameters"]

    def value(key: str, default: Any = None) -> Any:
        return published.get(key, family.defaults.get(key, default))

    plain = _plain(family)
    fields = {field: value(key, default) for field, (key, default) in plain.items()}
    if "activation" in plain:
        known = (*ACTIVATIONS, *([] if family.computes.get("gated_mlp", True) else LEARNED))
        check_known(f"{where}: {plain['activation'][0]}", fields["activation"], known)
    rope = published.get("rope_scaling") or published.get("rope_parameters")
    rope = rope or family.defaults.get("rope_scaling", {})
    near: Mapping[str, Any] = {}
    beta = None
    if family.tempered:
        rope, beta = _without_temper(rope, where)
    if family.local:
        rope, near = _both_ropes(published, rope)
    partial = rope.get("partial_rotary_factor", value("partial_rotary_factor"))
    if rope.get("rope_type") == "proportional":
        partial = None  # it is the scaling's
    if partial not in (None, 1.0) and not family.partial:
        raise UserError(
            f"{where}: partial_rotary_factor {partial} is not supported; use a checkpoint "
            "whose heads are rotated whole."
        )
    heads, head_dim = fields["heads"], value("head_dim")
    fields |= {
        "family": model_type,
        "attention_dropout": fields["attention_dropout"] or 0.0,
        "kv_heads": value("num_key_value_heads") or heads,
        "head_dim": None if head_dim == fields["hidden"] / heads else head_dim,
        "rope_theta": _first(rope.get("rope_theta"), value("rope_theta"), 10000.0),
        "rope_scaling": scaling_from_hf(
            rope, value("original_max_position_embeddings"), fields["positions"], where
        ),
        "rotary_fraction": 1.0 if partial is None else float(partial),
        **family.computes,
    }
    if beta is not None:
        scaling = fields["rope_scaling"]
        fields["rope_scaling"] = dataclasses.replace(scaling, query_beta=beta)
        fields["positions"] = min(fields["positions"], scaling.original_positions)
    if _DELTA["key_heads"] in read:
        sizes = DeltaConfig()
        sizes = {ours: value(key, getattr(sizes, ours)) for ours, key in _DELTA.items()}
        fields |= {"delta": DeltaConfig(**sizes), "kinds": _layer_kinds(value, fields, where)}
    if "logit_scale" in read:
        if not (scale := value("logit_scale")):
            raise UserError(f"{where}: logit_scale is {scale}, expected more; repair the file.")
        fields["logit_divisor"] = 1 / scale
    if family.scaled:
        fields["embedding_scale"] = fields["hidden"] ** 0.5
    if "query_pre_attn_scalar" in read:
        fields["attention_scale"] = _scale(value("query_pre_attn_scalar"), head_dim)
    fields["rotated"] = _rotated(value, fields["layers"], where) if "no_rope_layers" in read else ()
    if "attention_chunk_size" in read:
        fields |= _of_llama4(value, fields, where)
    if "sliding_window" in read:
        slides = _slides(family, value, read, fields, where)
        window = value("sliding_window")
        if window and fields.get("bidirectional"):
            window = window // 2 + 1  # on each side, the token itself included
        fields["windows"] = _windows(slides, window, fields["positions"])
        if family.local:
            fields["local"] = slides if any(slides) else ()
        if family.near_rotates and window and not all(slides):
            fields["rotated"] = slides
    if family.local:
        if scaling_from_hf(near, None, fields["positions"], where) is not None:
            raise UserError(
                f"{where}: rope_parameters.{_SLIDING} is scaled, which is not supported; use a "
                "checkpoint whose layers with a window are not."
            )
        theta = _first(near.get("rope_theta"), value("rope_local_base_freq"), fields["rope_theta"])
        fields["local_theta"] = theta
    if "enable_moe_block" in read:
        fields["experts_beside"] = value("moe_intermediate_size")
        of_experts = ("experts", "active_experts", "experts_beside", "normed_experts")
        if not value("enable_moe_block", False):
            fields = {field: x for field, x in fields.items() if field not in of_experts}
        elif None in [fields[name] for name in of_experts]:
            raise UserError(
                f"{where}: enable_moe_block is true, and num_experts, top_k_experts or "
                "moe_intermediate_size is missing; add it."
            )
    if "global_head_dim" in read:
        fields["full_layers"] = _full_layers(value, slides, fields, where)
        if fields["full_layers"]:
            fields["kinds"] = tuple("near" if slide else "full" for slide in slides)
    if fields.get("side", 0) is None:  # null is none, what is absent is not
        fields["side"] = 0
    if fields.get("side"):
        fields["side_table"] = True
        if value("vocab_size_per_layer_input", fields["vocab_size"]) != fields["vocab_size"]:
            raise UserError(
                f"{where}: vocab_size_per_layer_input is {value('vocab_size_per_layer_input')}, "
                f"expected vocab_size = {fields['vocab_size']}; use a checkpoint of these."
            )
    return fields


def _full_layers(
    value: Any, slides: tuple[bool, ...], fields: Mapping[str, Any], where: str
) -> FullLayers | None:
    """`LlamaConfig.full_layers`; None where all layers have the same heads."""
    if slides[-1]:
        raise UserError(
            f"{where}: layer_types ends with {_SLIDING}, and the last layer of this family sees "
            f"all; end it with {_FULL}."
        )
    usual = {"head_dim": value("head_dim"), "num_key_value_heads": fields["kv_heads"]}
    shared, per_layer = value("attention_k_eq_v", False), value("per_layer_config")
    sizes = {**usual, "head_dim": value("global_head_dim")}
    if shared and value("num_global_key_value_heads"):
        sizes["num_key_value_heads"] = value("num_global_key_value_heads")
    if per_layer is not None:  # of layers by number, each of which may have a zero in front
        of_layers = {key.lstrip("0") or "0": one for key, one in per_layer.items()}
        sizes = {**usual, **_object(of_layers.get(str(len(slides) - 1)))}
        full = {str(number) for number, slide in enumerate(slides) if not slide}
        same = all({**usual, **_object(of_layers.get(number))} == sizes for number in full)
        if not same or sizes.keys() != usual.keys() or not of_layers.keys() <= full:
            raise UserError(
                f"{where}: per_layer_config is {per_layer!r}, expected head_dim and "
                f"num_key_value_heads, the same of all layers that are {_FULL} and of no other; "
                "use a checkpoint of these."
            )
    if not all(type(size) is int and size > 0 for size in sizes.values()):
        raise UserError(
            f"{where}: its layers that are {_FULL} have {sizes!r}, expected whole numbers from 1; "
            "repair the file or fetch it again."
        )
    if sizes == usual and not shared:
        return None
    return FullLayers(sizes["head_dim"], sizes["num_key_value_heads"], shared)


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _read(family: Family) -> dict[str, str]:
    """Kinds of the keys that are read of a family's config.json."""
    others = {*family.names, *family.fixed}
    return {key: kind for key, kind in _COMMON.items() if key not in others} | {**family.keys}


def _plain(family: Family) -> dict[str, tuple[str, Any]]:
    """Finds what a family has of `_PLAIN`, with its own names."""
    named = {field: (family.names.get(key, key), x) for field, (key, x) in _PLAIN.items()}
    return {field: pair for field, pair in named.items() if pair[0] in _read(family)}


def _without_temper(rope: Mapping[str, Any], where: str) -> tuple[dict[str, Any], float]:
    """Rope parameters as other families have them, and `llama_4_scaling_beta`."""
    beta = rope.get(_TEMPER)
    is_number = isinstance(beta, int | float) and not isinstance(beta, bool)
    if not is_number or not 0 < beta < 100 or not rope.get("original_max_position_embeddings"):
        raise UserError(
            f"{where}: rope_parameters have {_TEMPER} {beta!r} and "
            f"original_max_position_embeddings {rope.get('original_max_position_embeddings')!r}, "
            "expected numbers above 0; use a checkpoint of Ministral 3."
        )
    left_out = (_TEMPER, "max_position_embeddings")
    return {key: value for key, value in rope.items() if key not in left_out}, float(beta)


def _both_ropes(
    published: Mapping[str, Any], rope: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Rope parameters of the layers that see all and of the others (transformers 5 keeps both)."""
    parameters = published.get("rope_parameters") or {}
    if parameters.keys().isdisjoint((_SLIDING, _FULL)):
        return rope, {}
    far = {**(parameters.get(_FULL) or {}), **(published.get("rope_scaling") or {})}
    return far, parameters.get(_SLIDING) or {}


def _scale(size: float, head_dim: int) -> float | None:
    """`LlamaConfig.attention_scale` of Gemma's `query_pre_attn_scalar`."""
    return None if size == head_dim else size**-0.5


def _first(*values: float | None) -> float:
    """The first that is given."""
    return next(value for value in values if value is not None)


def _rotated(value: Any, layers: int, where: str) -> tuple[bool, ...]:
    """`LlamaConfig.rotated`: every fourth layer is not, if `no_rope_layers` does not say it."""
    rotated, every = value("no_rope_layers"), value("no_rope_layer_interval", 4)
    if not rotated:
        rotated = [(number + 1) % every != 0 for number in range(layers)]
    if len(rotated) < layers or any(one not in (0, 1) for one in rotated):
        raise UserError(
            f"{where}: no_rope_layers is {rotated!r}, expected 0 or 1 for each of {layers} layers; "
            "repair the file or fetch it again."
        )
    rotated = tuple(bool(one) for one in rotated[:layers])
    return () if all(rotated) else rotated


def _layer_kinds(value: Any, fields: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """`LlamaConfig.kinds` of a decoder with layers of the gated delta rule."""
    layers, every = fields["layers"], value("full_attention_interval", 4)
    types = value("layer_types") or [
        _LINEAR if (number + 1) % every else _FULL for number in range(layers)
    ]
    names = {_LINEAR: "linear", _FULL: "full"}
    if len(types) != layers or any(one not in names for one in types):
        raise UserError(
            f"{where}: layer_types is {types!r}, expected {_LINEAR} or {_FULL} for each of "
            f"{layers} layers; use a checkpoint of these."
        )
    return tuple(names[one] for one in types)


def _of_llama4(value: Any, fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of Llama 4's own keys. Layers that rotate see chunks, the others all."""
    layers, rotated = fields["layers"], fields["rotated"]
    chunks = ["chunked_attention" if one else _FULL for one in rotated or (True,) * layers]
    every = value("interleave_moe_layer_step", 1)
    mixtures = value("moe_layers")
    mixtures = [*range(every - 1, layers, every)] if mixtures is None else mixtures
    known = all(isinstance(one, int) and 0 <= one < layers for one in mixtures) and mixtures
    for key, right, wanted in (
        ("layer_types", value("layer_types") in (None, chunks), f"{chunks}"),
        ("moe_layers", known, f"numbers of layers below {layers}, one at least"),
    ):
        if not right:
            raise UserError(
                f"{where}: {key} is {value(key)!r}, expected {wanted}; use a checkpoint of these."
            )
    kinds = tuple("full" if number in mixtures else "plain" for number in range(layers))
    plain = "plain" in kinds
    grows = value("attn_temperature_tuning", True) and rotated
    return {
        "qk_norm": "rotated" if value("use_qk_norm", True) else "none",
        "growth": (float(value("attn_scale")), value("floor_scale")) if grows else (),
        "shared_expert": fields["mlp"],
        "kinds": kinds if plain else (),
        "plain_mlp": value("intermediate_size_mlp") if plain else None,
    }


def _slides(
    family: Family, value: Any, read: Mapping[str, str], fields: Mapping[str, Any], where: str
) -> tuple[bool, ...]:
    """Which layers have a window, if it is smaller than the text."""
    layers, window = fields["layers"], value("sliding_window")
    if "use_sliding_window" in read and not value("use_sliding_window", False):
        window = None
    kinds = value("layer_types") if "layer_types" in read else None
    if kinds is None and window is None and not family.full_every:
        return (False,) * layers
    if kinds is None:  # transformers' own choice
        slides = [True] * layers
        if family.full_every:
            every = value("sliding_window_pattern", family.full_every)
            slides = [(number + 1) % every != 0 for number in range(layers)]
            slides[-1] &= "global_head_dim" not in read
        elif "max_window_layers" in read:
            slides = [number >= value("max_window_layers") for number in range(layers)]
        elif "no_rope_layers" in read:
            slides = [not rotated for rotated in fields["rotated"] or (True,) * layers]
    else:
        if len(kinds) != layers or any(one not in (_SLIDING, _FULL) for one in kinds):
            raise UserError(
                f"{where}: layer_types is {kinds!r}, expected {_SLIDING} or {_FULL} for each of "
                f"{layers} layers; use a checkpoint of these."
            )
        slides = [one == _SLIDING for one in kinds]
    if window is None and any(slides):
        raise UserError(
            f"{where}: layer_types has {_SLIDING}, but no sliding_window is in use; give "
            f"sliding_window, or make all layers {_FULL}."
        )
    return tuple(slides)


def _windows(slides: tuple[bool, ...], window: int | None, positions: int) -> tuple[int, ...]:
    """`LlamaConfig.windows`; () where no layer's window is smaller than the positions."""
    if window is None or window >= positions or not any(slides):
        return ()
    return tuple(window * slide for slide in slides)


def fields_to_hf(config: Any) -> dict[str, Any]:
    """transformers' `config.json` of a config; see `LlamaConfig.to_hf`."""
    family = FAMILIES[config.family]
    read = _read(family)
    published: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": config.family,
        **{key: getattr(config, field) for field, (key, _) in _plain(family).items()},
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling_to_hf(config.rope_scaling),
        "initializer_range": config.init_stddev,
    }
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "longrope":  # where Phi-3 looks for it
        published["original_max_position_embeddings"] = scaling.original_positions
    if "query_pre_attn_scalar" in read:
        scale = config.attention_scale
        published["query_pre_attn_scalar"] = round(scale**-2) if scale else config.head_size
    if family.local:
        published |= _local_to_hf(config, published["rope_scaling"])
        if "rope_local_base_freq" in read:
            published["rope_local_base_freq"] = config.local_theta
        if "rope_parameters" in family.defaults:  # younger classes read nothing else
            del published["rope_theta"], published["rope_scaling"]
    if "rope_scaling" in family.defaults and scaling is None:
        rope = {"rope_type": "default", "rope_theta": config.rope_theta}
        published["rope_scaling"] = published["rope_parameters"] = rope
    if "logit_scale" in read:
        published["logit_scale"] = 1 / config.logit_divisor
    if family.partial:
        published["partial_rotary_factor"] = config.rotary_fraction
    if "no_rope_layers" in read:
        rotated = config.rotated or (True,) * config.layers
        published["no_rope_layers"] = [int(one) for one in rotated]
    if config.delta:
        published |= {key: getattr(config.delta, ours) for ours, key in _DELTA.items()}
        types = {"linear": _LINEAR, "full": _FULL}
        published["layer_types"] = [types[kind] for kind in config.kinds]
    if "attention_chunk_size" in read:
        by, tokens = config.growth or (
            family.defaults["attn_scale"],
            family.defaults["floor_scale"],
        )
        published |= {"use_qk_norm": config.qk_norm == "rotated", "attn_scale": by}
        published |= {"attn_temperature_tuning": bool(config.growth), "floor_scale": tokens}
        kinds = config.kinds or ("full",) * config.layers
        published["moe_layers"] = [number for number, kind in enumerate(kinds) if kind == "full"]
        if config.plain_mlp:
            published["intermediate_size_mlp"] = config.plain_mlp
    if "sliding_window" in read:
        published |= _windows_to_hf(config, read)
    if "enable_moe_block" in read:
        published |= {"enable_moe_block": bool(config.experts)}
        published["moe_intermediate_size"] = config.experts_beside
    if "vocab_size_per_layer_input" in read:
        published["vocab_size_per_layer_input"] = config.vocab_size
    if "global_head_dim" in read:
        full = config.full_layers or FullLayers(config.head_size, config.kv_heads, False)
        published["global_head_dim"] = full.head_dim
        published["num_global_key_value_heads"] = full.kv_heads
        published["attention_k_eq_v"] = full.keys_are_values
    again = type(config)(**fields_from_hf(published, "the exported config.json"))
    names = [field.name for field in dataclasses.fields(config) if field.name not in _OWN]
    for name in (*names, "head_size", "biases"):
        if getattr(again, name) != getattr(config, name):
            raise UserError(
                f"model.{name} is {getattr(config, name)!r}, for which {family.architecture} has "
                "no key in its config.json; it cannot be exported."
            )
    return published


def _local_to_hf(config: Any, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """What `_both_ropes` reads."""
    far = {"rope_type": "default", "rope_theta": config.rope_theta, **(scaling or {})}
    near = {"rope_type": "default", "rope_theta": config.local_theta}
    return {"rope_parameters": {_FULL: far, _SLIDING: near}}


def _windows_to_hf(config: Any, read: Mapping[str, str]) -> dict[str, Any]:
    sizes = {window for window in config.windows if window}
    window = max(sizes, default=None)
    if window and config.bidirectional:
        window = 2 * (window - 1)
    published: dict[str, Any] = {"sliding_window": window}
    if "use_sliding_window" in read:
        published["use_sliding_window"] = bool(sizes)
    if "layer_types" in read:
        near = config.local or config.windows
        if FAMILIES[config.family].near_rotates:
            near = config.rotated
        near = near or (0,) * config.layers
        published["layer_types"] = [_SLIDING if slides else _FULL for slides in near]
        if any(near) and not sizes:  # it is no smaller than the positions
            published["sliding_window"] = (1 + config.bidirectional) * config.positions
    if "max_window_layers" in read:
        published["max_window_layers"] = config.layers  # layer_types say it
    return published
