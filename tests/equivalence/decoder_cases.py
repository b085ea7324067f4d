"""Tiny decoders of transformers, a case for each branch of a family: values off their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

LENGTH = 520  # short prompts hide mistakes in rotary positions
COMMON = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "max_position_embeddings": 640,
    "rms_norm_eps": 3e-4,
    "initializer_range": 0.08,
    "attn_implementation": "eager",
}
# Of families whose defaults are beyond this vocabulary.
TOKENS = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
THETA = {"rope_type": "default", "rope_theta": 1234.5}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 3000.0,
    "factor": 3.0,
    "original_max_position_embeddings": 200,
    "beta_fast": 16.0,
}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 5000.0, "factor": 6.0},
    **{"low_freq_factor": 0.5, "high_freq_factor": 5.0},
    "original_max_position_embeddings": 90,
}
# Layers of the gated delta rule: heads that share keys, more tokens than one chunk.
DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    **TOKENS,
}
SHARED = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
# Attention over latents.
LATENT = {
    **{"num_key_value_heads": 6, "kv_lora_rank": 14, "q_lora_rank": 22, "qk_nope_head_dim": 10},
    **{"qk_rope_head_dim": 8, "v_head_dim": 12, "moe_intermediate_size": 24},
    **{"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2},
    **{"routed_scaling_factor": 1.7, **TOKENS},
}
HALF = {**THETA, "partial_rotary_factor": 0.5}
NORM_EPS = {"rms_norm_eps": None, "norm_eps": 3e-4}
# Of families with layer norms.
LAYER_NORMS = {"rms_norm_eps": None, "layer_norm_eps": 3e-4, **TOKENS}
GEMMA4_ROTATIONS = {
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.5,
        "rope_theta": 4321.0,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 321.0},
}


class Case(NamedTuple):
    """A family's model: the prefix of its classes in transformers, and values of its config."""

    family: str
    values: Mapping[str, Any]


CASES = {
    "mistral": Case("Mistral", {"sliding_window": None, "rope_parameters": THETA}),
    "mistral, window": Case("Mistral", {"sliding_window": 37, "head_dim": 10}),
    "ministral, some windows": Case(
        "Ministral",
        {
            "sliding_window": 19,
            "head_dim": 12,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "ministral3": Case(
        "Ministral3",
        {
            "head_dim": 12,
            "max_position_embeddings": 1280,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 3000.0,
                "factor": 2.0,
                "original_max_position_embeddings": 640,
                "beta_fast": 16.0,
                "beta_slow": 1.5,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
                "llama_4_scaling_beta": 0.3,
            },
            **TOKENS,
        },
    ),
    "qwen2": Case("Qwen2", {"rope_parameters": THETA, "tie_word_embeddings": True}),
    "qwen2, windows from layer 1, yarn": Case(
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 50,
            "max_window_layers": 1,
            "rope_parameters": YARN,
        },
    ),
    "qwen3": Case("Qwen3", {"head_dim": 12, "attention_bias": True, "rope_parameters": THETA}),
    "qwen3, some windows, llama3 scaling": Case(
        "Qwen3",
        {
            "head_dim": 10,
            "use_sliding_window": True,
            "sliding_window": 30,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": LLAMA3,
        },
    ),
    "qwen3_moe": Case(
        "Qwen3Moe",
        {
            "head_dim": 12,
            "attention_bias": True,
            "moe_intermediate_size": 40,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "rope_parameters": THETA,
        },
    ),
    "qwen3_moe, weights as the router gives them": Case(
        "Qwen3Moe",
        {
            "head_dim": 10,
            "moe_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "tie_word_embeddings": True,
            "rope_parameters": YARN,
        },
    ),
    "qwen3_5": Case(
        "Qwen3_5",
        {
            **DELTA,
            "num_hidden_layers": 4,
            "full_attention_interval": 2,
            "attention_bias": True,
            "rope_parameters": {
                **THETA,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
            },
        },
    ),
    "qwen3_5, nothing repeats": Case(
        "Qwen3_5",
        {
            **DELTA,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_conv_kernel_dim": 4,
            "linear_num_value_heads": 2,
            "tie_word_embeddings": True,
            "rope_parameters": {**YARN, "partial_rotary_factor": 0.25},
        },
    ),
    "qwen3_5_moe": Case(
        "Qwen3_5Moe",
        {
            **DELTA,
            **SHARED,
            "layer_types": ["linear_attention", "full_attention"],
            "rope_parameters": HALF,
        },
    ),
    "qwen3_next": Case(
        "Qwen3Next",
        {
            **DELTA,
            **SHARED,
            "full_attention_interval": 2,
            "norm_topk_prob": False,
            "rope_parameters": HALF,
        },
    ),
    "olmoe": Case(
        "Olmoe",
        {
            "num_key_value_heads": 3,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "rope_parameters": THETA,
            **TOKENS,
        },
    ),
    "mixtral": Case(
        "Mixtral",
        {
            "head_dim": 12,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 61,
            "rope_parameters": THETA,
        },
    ),
    "granitemoe": Case(
        "GraniteMoe",
        {
            "embedding_multiplier": 5.5,
            "attention_multiplier": 0.21,
            "residual_multiplier": 0.4,
            "logits_scaling": 0.7,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "attention_bias": True,
            "rope_parameters": THETA,
        },
    ),
    "gpt_oss": Case(
        "GptOss",
        {
            "head_dim": 12,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 43,
            "swiglu_limit": 0.4,
            "rope_parameters": {**YARN, "truncate": False},
            **TOKENS,
        },
    ),
    "llama4_text": Case(
        "Llama4",
        {
            "head_dim": 12,
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 1],
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "attention_chunk_size": 110,
            "floor_scale": 90,
            "attn_scale": 0.3,
            "attention_bias": True,
            "rope_parameters": THETA,
            **TOKENS,
        },
    ),
    "llama4_text, every other layer a mixture": Case(
        "Llama4",
        {
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 3,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 112,
            "num_local_experts": 3,
            "attention_chunk_size": 300,
            "use_qk_norm": False,
            "rope_parameters": THETA,
            **TOKENS,
        },
    ),
    "llama4_text, Guard": Case(
        "Llama4",
        {
            **{"moe_layers": [], "intermediate_size_mlp": 72, "attention_chunk_size": 300},
            **{"head_dim": 12, "rope_parameters": THETA, **TOKENS},
        },
    ),
    "llama4_text, of long chunks": Case(
        "Llama4",
        {
            "head_dim": 16,
            "no_rope_layers": [0, 1],
            "num_local_experts": 4,
            "attention_chunk_size": 192,
            "floor_scale": 193,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 6.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 90,
            },
            **TOKENS,
        },
    ),
    "seed_oss": Case(
        "SeedOss", {"head_dim": 12, "mlp_bias": True, "rope_parameters": THETA, **TOKENS}
    ),
    "seed_oss, biases otherwise": Case(
        "SeedOss", {"attention_bias": False, "attention_out_bias": True, "head_dim": 10, **TOKENS}
    ),
    "ernie4_5": Case(
        "Ernie4_5", {"head_dim": 12, "use_bias": True, "rope_parameters": THETA, **TOKENS}
    ),
    "exaone4": Case(
        "Exaone4",
        {
            "num_hidden_layers": 3,
            "sliding_window": 41,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": THETA,
        },
    ),
    "exaone4, no windows": Case(
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2, "rope_parameters": YARN},
    ),
    "glm4": Case(
        "Glm4",
        {"head_dim": 12, "rope_parameters": HALF, **TOKENS},
    ),
    "glm4_moe": Case(
        "Glm4Moe",
        {
            "head_dim": 12,
            "num_hidden_layers": 3,
            "moe_intermediate_size": 24,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.7,
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_parameters": HALF,
            **TOKENS,
        },
    ),
    "glm4_moe, experts in all layers": Case(
        "Glm4Moe",
        {
            **{"moe_intermediate_size": 40, "n_routed_experts": 5, "num_experts_per_tok": 3},
            **{"first_k_dense_replace": 0, "norm_topk_prob": False, "attention_bias": False},
            **TOKENS,
        },
    ),
    "dots1": Case(
        "Dots1",
        {
            **{"head_dim": 12, "num_hidden_layers": 3, "moe_intermediate_size": 24},
            **{"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1},
            **{"first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.3},
            **{"sliding_window": 39, "max_window_layers": 2, "rope_parameters": THETA},
        },
    ),
    "glm": Case("Glm", {"head_dim": 12, "rope_parameters": HALF, **TOKENS}),
    "hyperclovax": Case(
        "HyperCLOVAX",
        {
            **{"embedding_multiplier": 5.5, "attention_multiplier": 0.21},
            **{"residual_multiplier": 0.4, "logits_scaling": 0.7, "attention_bias": True},
            "rope_parameters": THETA,
        },
    ),
    "iquestcoder": Case("IQuestCoder", {"head_dim": 12, "rope_parameters": THETA}),
    "internlm3": Case(
        "InternLM3",
        {
            "head_dim": 12,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 900.0, "factor": 6.0},
        },
    ),
    "cwm": Case(
        "Cwm",
        {
            **{"num_hidden_layers": 5, "head_dim": 12, "sliding_window": 39},
            "rope_parameters": LLAMA3,
            **TOKENS,
        },
    ),
    "granite_swa": Case(
        "GraniteSWA",
        {
            **{"embedding_multiplier": 5.5, "attention_multiplier": 0.21},
            **{"residual_multiplier": 0.4, "logits_scaling": 0.7, "sliding_window": 31},
            "layer_types": ["full_attention", "sliding_attention"],
            "layer_rope_theta": [0, 1234.5],
            **TOKENS,
        },
    ),
    "granitemoe_swa": Case(
        "GraniteMoeSWA",
        {
            **{"embedding_multiplier": 5.5, "attention_multiplier": 0.21, "num_hidden_layers": 5},
            **{"residual_multiplier": 0.4, "logits_scaling": 0.7, "sliding_window": 31},
            **{"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
            **TOKENS,
        },
    ),
    "granitemoeshared": Case(
        "GraniteMoeShared",
        {
            **{"embedding_multiplier": 5.5, "attention_multiplier": 0.21, "attention_bias": True},
            **{"residual_multiplier": 0.4, "logits_scaling": 0.7, "num_local_experts": 6},
            **{"num_experts_per_tok": 3, "shared_intermediate_size": 32, "rope_parameters": THETA},
        },
    ),
    "qwen2_moe": Case(
        "Qwen2Moe",
        {
            **{"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
            **{"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True},
            "rope_parameters": THETA,
        },
    ),
    "mellum": Case(
        "Mellum",
        {
            **{"head_dim": 12, "num_hidden_layers": 3, "sliding_window": 45, "num_experts": 6},
            **{"moe_intermediate_size": 24, "num_experts_per_tok": 2},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "rope_parameters": {"full_attention": YARN, "sliding_attention": THETA},
        },
    ),
    "flex_olmo": Case(
        "FlexOlmo",
        {
            **{"num_key_value_heads": 3, "num_experts": 7, "num_experts_per_tok": 3},
            **{"norm_topk_prob": True, "rope_parameters": THETA, **TOKENS},
        },
    ),
    "minimax_m2": Case(
        "MiniMaxM2",
        {
            **{"head_dim": 12, "rotary_dim": 6, "num_local_experts": 6, "num_experts_per_tok": 2},
            **{"rope_parameters": HALF, **TOKENS},
        },
    ),
    "solar_open": Case(
        "SolarOpen",
        {
            **{"head_dim": 12, "moe_intermediate_size": 24, "n_routed_experts": 6},
            **{"num_experts_per_tok": 2, "n_shared_experts": 2, "routed_scaling_factor": 1.7},
            **{"intermediate_size": None, "attention_bias": True, "rope_parameters": YARN},
        },
    ),
    "hy_v3": Case(
        "HYV3",
        {
            **{"head_dim": 12, "num_hidden_layers": 3, "moe_intermediate_size": 24},
            **{"num_experts": 6, "num_experts_per_tok": 2, "num_shared_experts": 2},
            **{"router_scaling_factor": 1.6, "attention_bias": True, "rope_parameters": THETA},
        },
    ),
    "exaone_moe": Case(
        "ExaoneMoe",
        {
            **{"num_hidden_layers": 3, "moe_intermediate_size": 24, "num_experts": 6},
            **{"num_experts_per_tok": 2, "num_shared_experts": 2, "sliding_window": 41},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": THETA,
        },
    ),
    "afmoe": Case(
        "Afmoe",
        {
            **{"head_dim": 12, "num_hidden_layers": 3, "moe_intermediate_size": 24},
            **{"num_experts": 6, "num_experts_per_tok": 2, "num_shared_experts": 2},
            **{"route_scale": 1.4, "mup_enabled": True, "sliding_window": 37},
            **{"global_attn_every_n_layers": 2, "rope_parameters": THETA},
        },
    ),
    "helium": Case(
        "Helium", {"head_dim": 8, "attention_bias": True, "rope_parameters": THETA, **TOKENS}
    ),
    "arcee": Case("Arcee", {"mlp_bias": True, "rope_parameters": YARN, **TOKENS}),
    "lfm2": Case(
        "Lfm2",
        {
            **{**NORM_EPS, "num_hidden_layers": 3, "conv_L_cache": 4},
            **{"block_multiple_of": 16, "block_ffn_dim_multiplier": 1.3},
            "layer_types": ["conv", "full_attention", "conv"],
            "rope_parameters": THETA,
            **TOKENS,
        },
    ),
    "lfm3": Case(
        "Lfm3",
        {
            **{"num_hidden_layers": 4, "head_dim": 12, "conv_L_cache": 6},
            "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
            **{"sliding_window": 41, "attention_bias": True},
            "rope_parameters": GEMMA4_ROTATIONS,
            **TOKENS,
        },
    ),
    "lfm2_moe": Case(
        "Lfm2Moe",
        {
            **{**NORM_EPS, "num_hidden_layers": 4},
            **{"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2},
            **{"num_dense_layers": 2, "routed_scaling_factor": 1.6},
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "tie_word_embeddings": False,
            "rope_parameters": THETA,
            **TOKENS,
        },
    ),
    "deepseek_v2": Case(
        "DeepseekV2",
        {
            **{**LATENT, "q_lora_rank": None, "num_hidden_layers": 3, "first_k_dense_replace": 1},
            **{"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
            **{"rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.6}},
        },
    ),
    "deepseek_v2, no groups": Case(
        "DeepseekV2", {**LATENT, "tie_word_embeddings": True, "rope_parameters": THETA}
    ),
    "deepseek_v3": Case(
        "DeepseekV3",
        {
            **{**LATENT, "num_hidden_layers": 3, "first_k_dense_replace": 1},
            **{"n_group": 3, "topk_group": 2, "num_nextn_predict_layers": 0},
            **{"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        },
    ),
    "glm4_moe_lite": Case(
        "Glm4MoeLite",
        {**LATENT, "mlp_layer_types": ["dense", "sparse"], "rope_parameters": THETA},
    ),
    "youtu": Case(
        "Youtu",
        {
            **{key: x for key, x in LATENT.items() if not key.startswith(("n_", "moe_", "routed"))},
            **{"num_experts_per_tok": None, "tie_word_embeddings": False, "rope_parameters": THETA},
        },
    ),
    "smollm3": Case("SmolLM3", {"no_rope_layers": [1, 0], "mlp_bias": True, **TOKENS}),
    "smollm3, windows, dynamic": Case(
        "SmolLM3",
        {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 44,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 900.0, "factor": 2.0},
            **TOKENS,
        },
    ),
    "olmo2": Case("Olmo2", {"num_key_value_heads": 3, "rope_parameters": THETA, **TOKENS}),
    "olmo3": Case(
        "Olmo3",
        {
            "sliding_window": 45,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": YARN, "sliding_attention": THETA},
            **TOKENS,
        },
    ),
    "phi3": Case("Phi3", {"sliding_window": 60, "rope_parameters": THETA, **TOKENS}),
    "phi3, a part of each head rotated": Case(
        "Phi3",
        {
            "hidden_size": 96,
            "rope_parameters": {**THETA, "partial_rotary_factor": 0.75},
            **TOKENS,
        },
    ),
    "granite": Case(
        "Granite",
        {
            "embedding_multiplier": 5.5,
            "attention_multiplier": 0.21,
            "residual_multiplier": 0.4,
            "logits_scaling": 0.7,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": THETA,
        },
    ),
    "phi3, longrope": Case(
        "Phi3",
        {
            "original_max_position_embeddings": 400,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 2345.0,
                "short_factor": [1.0, 1.2, 1.4, 1.9],
                "long_factor": [1.5, 2.0, 4.0, 9.0],
                "attention_factor": 1.3,
            },
            **TOKENS,
        },
    ),
    "cohere": Case(
        "Cohere",
        {**LAYER_NORMS, "logit_scale": 0.4, "attention_bias": True, "rope_parameters": THETA},
    ),
    "cohere2": Case(
        "Cohere2",
        {
            **LAYER_NORMS,
            "logit_scale": 0.8,
            "sliding_window": 47,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
            "rope_parameters": THETA,
        },
    ),
    "nemotron": Case(
        "Nemotron",
        {
            "rms_norm_eps": None,
            "norm_eps": 3e-4,
            "head_dim": 12,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": HALF,
        },
    ),
    "stablelm": Case(
        "StableLm",
        {**LAYER_NORMS, "use_qkv_bias": True, "rope_parameters": HALF},
    ),
    "stablelm, parallel": Case(
        "StableLm",
        {**LAYER_NORMS, "use_parallel_residual": True, "rope_parameters": HALF},
    ),
    "starcoder2": Case(
        "Starcoder2",
        {
            "rms_norm_eps": None,
            "norm_epsilon": 3e-4,
            "sliding_window": 51,
            "rope_parameters": THETA,
            **TOKENS,
        },
    ),
    "apertus": Case("Apertus", {"attention_bias": True, "rope_parameters": THETA, **TOKENS}),
    "gemma": Case(
        "Gemma", {"head_dim": 12, "attention_bias": True, "rope_parameters": THETA, **TOKENS}
    ),
    "gemma2": Case(
        "Gemma2",
        {
            "head_dim": 12,
            "query_pre_attn_scalar": 7,
            "sliding_window": 33,
            "attn_logit_softcapping": 1.3,
            "final_logit_softcapping": 2.5,
            "attention_bias": True,
            "rope_parameters": THETA,
            **TOKENS,
        },
    ),
    "vaultgemma": Case(
        "VaultGemma",
        {
            **{"head_dim": 12, "query_pre_attn_scalar": 7, "sliding_window": 33},
            **{"attn_logit_softcapping": 1.3, "final_logit_softcapping": 2.5},
            "rope_parameters": THETA,
            **TOKENS,
        },
    ),
    "gemma3_text": Case(
        "Gemma3",
        {
            "head_dim": 12,
            "query_pre_attn_scalar": 9,
            "sliding_window": 33,
            "sliding_window_pattern": 2,
            "final_logit_softcapping": 4.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 4321.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 321.0},
            },
            **TOKENS,
        },
    ),
    "gemma4_text": Case(
        "Gemma4",
        {
            "num_hidden_layers": 6,
            "head_dim": 8,
            "global_head_dim": 12,
            "num_global_key_value_heads": 3,
            "attention_k_eq_v": True,
            "sliding_window": 33,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "final_logit_softcapping": 4.0,
            "hidden_size_per_layer_input": 0,
            "rope_parameters": GEMMA4_ROTATIONS,
            **TOKENS,
        },
    ),
    "gemma4_text, heads alike, experts": Case(
        "Gemma4",
        {
            "head_dim": 12,
            "global_head_dim": 12,
            "sliding_window": 33,
            "layer_types": ["sliding_attention", "full_attention"],
            "final_logit_softcapping": 4.0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "hidden_size_per_layer_input": 10,
            "vocab_size_per_layer_input": 97,
            "attention_bias": True,
            "rope_parameters": GEMMA4_ROTATIONS,
            **TOKENS,
        },
    ),
    "gemma4_unified_text": Case(
        "Gemma4Unified",
        {
            **{"num_hidden_layers": 3, "head_dim": 8, "global_head_dim": 12},
            **{"num_global_key_value_heads": 3, "attention_k_eq_v": True, "sliding_window": 33},
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            **{"final_logit_softcapping": 4.0, "rope_parameters": GEMMA4_ROTATIONS, **TOKENS},
        },
    ),
    "gemma4_text, E2B": Case(
        "Gemma4",
        {
            "num_hidden_layers": 5,
            "head_dim": 4,
            "global_head_dim": 8,
            "sliding_window": 33,
            "layer_types": ["sliding_attention"] * 2
            + ["full_attention", "sliding_attention", "full_attention"],
            "final_logit_softcapping": 4.0,
            "hidden_size_per_layer_input": 10,
            "vocab_size_per_layer_input": 97,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "rope_parameters": GEMMA4_ROTATIONS,
            **TOKENS,
        },
    ),
}
