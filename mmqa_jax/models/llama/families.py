"""LLaMA and the families that are LLaMAs with other switches: what a config.json of each says.

Each family is one entry: the name of its class, the keys that it has beside the common ones, what
transformers takes for absent ones, and what its code fixes without a key. A key that a family's
class in transformers does not read is refused (`published_config.py`), whatever other families do
with it. To add a family: one entry here, its tensors' names in
`models/llama/keys.py` where they differ, and one case of
`tests/equivalence/test_decoder_families.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mmqa_jax.weights.config_json import kinds

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
DELTA_KEYS = {  # of DeltaConfig
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
    size="full_attention_interval " + " ".join(DELTA_KEYS.values()),
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
# DeepSeek-V3's router, and its expert that sees every token.
_BIASED_SIGMOIDS = {"router": "sigmoid", "choice_bias": True, "shared_gate": False}
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
CONV = "conv"
_MIXTRAL_LINEARS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


TEMPER = "llama_4_scaling_beta"  # of rope parameters


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
      dense_first: its key that says how many of its first layers have an MLP of `intermediate_size`
        in the place of experts; "": all have experts.
      experts_paired: whether its checkpoints keep gate and up of all experts as one tensor.
      experts_across: whether they keep these (E, in, out), with gate and up "in turn" or as
        "halves"; "": (E, out, in).
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
    dense_first: str = ""
    experts_paired: bool = False
    experts_across: str = ""


_ERNIE = Family(
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
)
_LFM2 = Family(
    title="LFM2, without experts",
    architecture="Lfm2ForCausalLM",
    keys=kinds(
        number="norm_eps block_ffn_dim_multiplier",
        size="conv_L_cache block_multiple_of",
        flag="block_auto_adjust_ff_dim",
        list_or_null="layer_types full_attn_idxs",
    ),
    defaults={
        "vocab_size": 65536,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    computes={"qk_norm": "head"},
    # Of its training, and what other keys say too.
    harmless=(
        *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale"),
        *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads"),
    ),
    fixed={"conv_bias": (False,), "block_use_swiglu": (True,), "use_pos_enc": (True,)},
    fused=("in",),
    names={"rms_norm_eps": "norm_eps"},
    renamed={"tie_word_embeddings": "tie_embedding", "intermediate_size": "block_ff_dim"},
    tensors={
        "feed_forward.expert_bias": "mlp.gate.e_score_correction_bias",
        **{"model.embedding_norm.": "model.norm.", "feed_forward.gate.": "mlp.gate."},
        **{"operator_norm.": "input_layernorm.", "ffn_norm.": "post_attention_layernorm."},
        **{"self_attn.out_proj.": "self_attn.o_proj.", "feed_forward.experts.": "mlp.experts."},
        **{f"{part}_layernorm.": f"{part}_norm." for part in "qk"},
        **{f"feed_forward.{one}.": f"mlp.{part}." for one, part in _MIXTRAL_LINEARS.items()},
        **{f".{one}.": f".{part}." for one, part in _MIXTRAL_LINEARS.items()},
    },
)
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
                **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, TEMPER: 0.1},
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
    "ernie4_5": _ERNIE,
    "paddleocr_vl_text": dataclasses.replace(
        _ERNIE,
        title="PaddleOCR-VL's language model",
        architecture="PaddleOCRVLForConditionalGeneration",
        neighbours=False,
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
    "glm4_moe": Family(
        title="GLM-4.5, 4.6 and 4.7",
        architecture="Glm4MoeForCausalLM",
        keys=kinds(
            size="intermediate_size moe_intermediate_size n_routed_experts num_experts_per_tok",
            integer="first_k_dense_replace n_shared_experts",
            flag="attention_bias norm_topk_prob use_qk_norm",
            number="routed_scaling_factor",
        ),
        defaults={
            "vocab_size": 151552,
            "intermediate_size": 10944,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_routed_experts": 128,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        computes={**_BIASED_SIGMOIDS, "out_bias": False},
        harmless=(*_BALANCING, "num_nextn_predict_layers", "num_mtp_layers"),
        fixed={"n_group": (1,), "topk_group": (1,)},
        names={"intermediate_size": "moe_intermediate_size", "num_experts": "n_routed_experts"},
        partial=True,
        dense_first="first_k_dense_replace",
        tensors={"mlp.shared_experts.": "mlp.shared_expert."},
    ),
    "dots1": Family(
        title="dots.llm1",
        architecture="Dots1ForCausalLM",
        keys={
            **_WINDOW,
            **kinds(
                size="intermediate_size moe_intermediate_size n_routed_experts num_experts_per_tok",
                integer="first_k_dense_replace max_window_layers n_shared_experts",
                flag="attention_bias norm_topk_prob",
                number="routed_scaling_factor",
                list_or_null="layer_types",
            ),
        },
        defaults={
            **{"vocab_size": 152064, "hidden_size": 4608, "intermediate_size": 10944},
            **{"moe_intermediate_size": 1408, "num_hidden_layers": 62},
            **{"first_k_dense_replace": 0, "sliding_window": 4096, "max_window_layers": 62},
        },
        computes={**_BIASED_SIGMOIDS, "qk_norm": "head"},
        harmless=_BALANCING,
        fixed={"n_group": (1,), "topk_group": (1,)},
        names={"intermediate_size": "moe_intermediate_size", "num_experts": "n_routed_experts"},
        dense_first="first_k_dense_replace",
        tensors={"mlp.shared_experts.": "mlp.shared_expert."},
    ),
    "helium": Family(
        title="Helium",
        architecture="HeliumForCausalLM",
        keys=_BIASES,
        defaults={
            **{"vocab_size": 48000, "hidden_size": 2560, "intermediate_size": 7040},
            **{"num_hidden_layers": 24, "num_attention_heads": 20, "head_dim": 128},
            **{"max_position_embeddings": 4096, "rms_norm_eps": 1e-8, "rope_theta": 100000.0},
        },
        computes={"out_bias": False},
        neighbours=True,
    ),
    "arcee": Family(
        title="Arcee's AFM",
        architecture="ArceeForCausalLM",
        keys=_BIASES,
        defaults={
            **{"hidden_size": 2560, "intermediate_size": 18432, "hidden_act": "relu2"},
            **{"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        },
        computes={"gated_mlp": False},
    ),
    "lfm2": _LFM2,
    "lfm2_moe": dataclasses.replace(
        _LFM2,
        title="LFM2's mixtures of experts",
        architecture="Lfm2MoeForCausalLM",
        keys=kinds(
            number="norm_eps routed_scaling_factor",
            size="conv_L_cache intermediate_size moe_intermediate_size num_experts "
            "num_experts_per_tok",
            integer="num_dense_layers",
            flag="norm_topk_prob use_expert_bias",
            list_or_null="layer_types",
        ),
        defaults={
            **_LFM2.defaults,
            **{"hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792},
            **{"num_experts": 32, "num_experts_per_tok": 4, "num_dense_layers": 2},
            "norm_topk_prob": True,
        },
        computes={"qk_norm": "head", "router": "sigmoid"},
        harmless=_BALANCING,
        names={"rms_norm_eps": "norm_eps", "intermediate_size": "moe_intermediate_size"},
        renamed={"tie_word_embeddings": "tie_embedding"},
        dense_first="num_dense_layers",
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
            size="sliding_window_pattern",
            size_or_null="sliding_window",
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
    "gemma": Family(
        title="Gemma 1",
        architecture="GemmaForCausalLM",
        keys=kinds(flag="attention_bias"),
        defaults={
            "vocab_size": 256000,
            "hidden_size": 3072,
            "intermediate_size": 24576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
        # transformers reads "gelu" as the same.
        computes={"unit_norms": True, "activation": "gelu_pytorch_tanh"},
        harmless=("cache_implementation",),
        fixed={
            **dict.fromkeys(("hidden_act", "hidden_activation"), ("gelu_pytorch_tanh", "gelu")),
            "use_bidirectional_attention": (False,),
        },
        scaled=True,
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
                flag="enable_moe_block use_double_wide_mlp",
                integer_or_null="hidden_size_per_layer_input",
                integer="num_kv_shared_layers",
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
                SLIDING: {"rope_theta": 10000.0},
                FULL: {
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
            "rope_scaling": (),  # rope_parameters say it
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
