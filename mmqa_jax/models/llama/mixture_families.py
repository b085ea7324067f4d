"""Families whose layers have mixtures of experts in the place of MLPs.

Those whose attention is over latents come first: DeepSeek's, Kimi K2, GLM-4.7-Flash, Youtu-LLM.
"""

import dataclasses
from collections.abc import Mapping

from mmqa_jax.models.llama.family import (
    BALANCING,
    FULL,
    MULTIPLIERS,
    SLIDING,
    WINDOW,
    WINDOWED_GRANITE,
    Family,
)
from mmqa_jax.weights.config_json import kinds

# DeepSeek-V3's router, and its expert that sees every token.
BIASED_SIGMOIDS = {"router": "sigmoid", "choice_bias": True, "shared_gate": False}
SHARED = {"mlp.shared_experts.": "mlp.shared_expert."}
PROPOSING = ("num_nextn_predict_layers", "num_mtp_layers")
_ROUTED = {"num_experts_per_tok": 8, "norm_topk_prob": True}
_ROUTED_KEYS = kinds(size="intermediate_size moe_intermediate_size num_experts num_experts_per_tok")
_DENSE_FIRST = kinds(
    integer="num_shared_experts first_k_dense_replace", list_or_null="mlp_layer_types"
)
_ROUTED_NAMES = {
    **{"intermediate_size": "moe_intermediate_size"},
    "n_shared_experts": "num_shared_experts",
}
_ONE_GROUP = {"n_group": (1,), "topk_group": (1,)}
_GLM4_MOE = Family(
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
    computes={**BIASED_SIGMOIDS, "out_bias": False},
    harmless=(*BALANCING, *PROPOSING),
    fixed=_ONE_GROUP,
    names={"intermediate_size": "moe_intermediate_size", "num_experts": "n_routed_experts"},
    partial=True,
    dense_first="first_k_dense_replace",
    tensors=SHARED,
)
_OLMOE = Family(
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
    harmless=BALANCING,
    fixed={"clip_qkv": ()},
)
_GRANITE_MOE = Family(
    title="Granite 3, mixtures of experts",
    architecture="GraniteMoeForCausalLM",
    keys={
        **MULTIPLIERS,
        **kinds(flag="attention_bias", size="num_local_experts num_experts_per_tok"),
    },
    defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    computes={"normed_experts": True},
    harmless=BALANCING,
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
)
_GRANITE_MOE_SHARED = dataclasses.replace(
    _GRANITE_MOE,
    title="Granite, mixtures with an expert that sees every token",
    architecture="GraniteMoeSharedForCausalLM",
    keys={**_GRANITE_MOE.keys, **kinds(integer="shared_intermediate_size")},
    defaults={**_GRANITE_MOE.defaults, "shared_intermediate_size": 0},
    computes={**_GRANITE_MOE.computes, "shared_gate": False},
    names={**_GRANITE_MOE.names, "shared_expert_intermediate_size": "shared_intermediate_size"},
    fused=("shared_expert",),
    tensors={
        **_GRANITE_MOE.tensors,
        "shared_mlp.input_linear.": "mlp.shared_expert.gate_up_proj.",
        "shared_mlp.output_linear.": "mlp.shared_expert.down_proj.",
    },
)
MIXTURES: Mapping[str, Family] = {
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
        harmless=("intermediate_size", "sliding_window", "max_window_layers", *BALANCING),
        fixed={
            "mlp_only_layers": ([],),
            "decoder_sparse_step": (1,),
            "use_sliding_window": (False,),  # versions of transformers differ in its layers
        },
        names={"intermediate_size": "moe_intermediate_size"},
        renamed={"num_experts": "num_local_experts"},
    ),
    "olmoe": _OLMOE,
    "mixtral": Family(
        title="Mixtral",
        architecture="MixtralForCausalLM",
        keys={**WINDOW, **kinds(size="num_local_experts num_experts_per_tok")},
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
        harmless=(*BALANCING, "router_jitter_noise"),
        names={"num_experts": "num_local_experts"},
        tensors={
            **{f"block_sparse_moe.{part}.": f"mlp.{part}." for part in ("gate", "experts")},
            **{".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."},
        },
    ),
    "granitemoe": _GRANITE_MOE,
    "glm4_moe": _GLM4_MOE,
    "dots1": Family(
        title="dots.llm1",
        architecture="Dots1ForCausalLM",
        keys={
            **WINDOW,
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
        computes={**BIASED_SIGMOIDS, "qk_norm": "head"},
        harmless=BALANCING,
        fixed=_ONE_GROUP,
        names={"intermediate_size": "moe_intermediate_size", "num_experts": "n_routed_experts"},
        dense_first="first_k_dense_replace",
        tensors=SHARED,
    ),
    "qwen2_moe": Family(
        title="Qwen1.5's and Qwen2's mixtures of experts",
        architecture="Qwen2MoeForCausalLM",
        keys=kinds(
            flag="norm_topk_prob qkv_bias",
            size="moe_intermediate_size shared_expert_intermediate_size num_experts "
            "num_experts_per_tok",
            list_or_null="layer_types",
        ),
        defaults={
            **{"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24},
            **{"num_attention_heads": 16, "num_key_value_heads": 16},
            **{"max_position_embeddings": 32768, "moe_intermediate_size": 1408},
            **{"shared_expert_intermediate_size": 5632, "num_experts": 60},
            **{"num_experts_per_tok": 4, "qkv_bias": True},
        },
        computes={"out_bias": False},
        harmless=("intermediate_size", "sliding_window", "max_window_layers", *BALANCING),
        fixed={
            **{"mlp_only_layers": ([],), "decoder_sparse_step": (1,)},
            "use_sliding_window": (False,),
        },
        names={"intermediate_size": "moe_intermediate_size", "attention_bias": "qkv_bias"},
    ),
    "mellum": Family(
        title="Mellum 2",
        architecture="MellumForCausalLM",
        keys={
            **WINDOW,
            **_ROUTED_KEYS,
            **kinds(
                flag="attention_bias norm_topk_prob", list_or_null="layer_types mlp_layer_types"
            ),
        },
        defaults={
            **{"vocab_size": 98304, "hidden_size": 2304, "intermediate_size": 7168},
            **{"num_hidden_layers": 28, "num_key_value_heads": 4, "head_dim": 128},
            **{"max_position_embeddings": 131072, "sliding_window": 1024},
            **{"moe_intermediate_size": 896, "num_experts": 64, **_ROUTED},
            "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": 500000.0},
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        computes={"qk_norm": "head"},
        harmless=(*BALANCING, *PROPOSING, "mtp_layer_types", "mtp_mlp_layer_types"),
        fixed={"use_sliding_window": (True,)},
        names={"intermediate_size": "moe_intermediate_size"},
        renamed={"num_experts": "num_local_experts"},
        local=True,
        dense_first="mlp_layer_types",
    ),
    "flex_olmo": dataclasses.replace(
        _OLMOE,
        title="FlexOlmo",
        architecture="FlexOlmoForCausalLM",
        defaults={
            **{"vocab_size": 100352, "max_position_embeddings": 4096, "rope_theta": 500000.0},
            **{"num_experts": 7, "num_experts_per_tok": 5},
        },
        computes={"qk_norm": "whole", "norms": "after"},
        fixed={},
    ),
    "minimax_m2": Family(
        title="MiniMax M2",
        architecture="MiniMaxM2ForCausalLM",
        keys=kinds(size="num_local_experts num_experts_per_tok", size_or_null="rotary_dim"),
        defaults={
            **{"vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536},
            **{"num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8},
            **{"head_dim": 128, "max_position_embeddings": 196608, "rope_theta": 5000000.0},
            **{"num_local_experts": 256, "num_experts_per_tok": 8},
        },
        computes={**BIASED_SIGMOIDS, "normed_experts": True, "qk_norm": "whole"},
        harmless=(
            *(*BALANCING, "router_jitter_noise", "num_mtp_modules", "use_mtp", "shared_moe_mode"),
            *("mtp_transformer_layers", "attn_type_list", "mlp_intermediate_size"),
            *(f"layernorm_{part}_beta" for part in ("full_attention", "linear_attention", "mlp")),
        ),
        fixed={
            **{"scoring_func": ("sigmoid",), "use_routing_bias": (True,), "use_qk_norm": (True,)},
            **{"qk_norm_type": ("per_layer",), "shared_intermediate_size": (0,)},
        },
        names={"num_experts": "num_local_experts"},
        partial=True,
        tensors={
            "block_sparse_moe.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
            "mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
            **{f"block_sparse_moe.{part}.": f"mlp.{part}." for part in ("gate", "experts")},
            **{".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."},
        },
    ),
    "solar_open": dataclasses.replace(
        _GLM4_MOE,
        title="Solar Open",
        architecture="SolarOpenForCausalLM",
        keys={
            key: kind
            for key, kind in _GLM4_MOE.keys.items()
            if key not in ("intermediate_size", "first_k_dense_replace", "use_qk_norm")
        },
        defaults={
            **{"vocab_size": 196608, "num_hidden_layers": 48, "num_attention_heads": 64},
            **{"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072},
            **{"rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "moe_intermediate_size": 1280},
            **{"n_routed_experts": 128, **_ROUTED},
        },
        harmless=(*_GLM4_MOE.harmless, "intermediate_size"),
        fixed={**_GLM4_MOE.fixed, "first_k_dense_replace": (0,), "use_qk_norm": (False,)},
        dense_first="",
    ),
    "hy_v3": Family(
        title="Hy3",
        architecture="HYV3ForCausalLM",
        keys={
            **{**_ROUTED_KEYS, **_DENSE_FIRST},
            **kinds(flag="attention_bias", number="router_scaling_factor"),
        },
        defaults={
            **{"vocab_size": 120832, "intermediate_size": 13312, "num_hidden_layers": 80},
            **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128},
            **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 11158840.0},
            **{"num_experts": 192, "num_experts_per_tok": 8, "moe_intermediate_size": 1536},
            **{"router_scaling_factor": 2.826, "first_k_dense_replace": 1},
        },
        computes={**BIASED_SIGMOIDS, "normed_experts": True, "qk_norm": "head"},
        harmless=(*BALANCING, *PROPOSING, "enable_moe_fp32_combine", "expert_hidden_dim"),
        fixed={"mlp_bias": (False,), "qk_norm": (True,)},
        names={**_ROUTED_NAMES, "routed_scaling_factor": "router_scaling_factor"},
        renamed={"num_experts": "num_local_experts"},
        dense_first="first_k_dense_replace",
        tensors={
            "mlp.expert_bias": "mlp.gate.e_score_correction_bias",
            **{"mlp.router.gate.": "mlp.gate.", "mlp.shared_mlp.": "mlp.shared_expert."},
            # As transformers holds them.
            "mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
            **SHARED,
        },
    ),
    "exaone_moe": Family(
        title="K-EXAONE",
        architecture="ExaoneMoeForCausalLM",
        keys={
            **WINDOW,
            **{**_ROUTED_KEYS, **_DENSE_FIRST},
            **kinds(
                flag="norm_topk_prob", number="routed_scaling_factor", list_or_null="layer_types"
            ),
        },
        defaults={
            **{"vocab_size": 102400, "intermediate_size": 16384, "num_key_value_heads": 32},
            **{"rms_norm_eps": 1e-5, "sliding_window": 4096, "first_k_dense_replace": 1},
            **{"moe_intermediate_size": 1024, "num_experts": 64, **_ROUTED},
            "routed_scaling_factor": 2.5,
        },
        computes={**BIASED_SIGMOIDS, "qk_norm": "head"},
        harmless=(*BALANCING, *PROPOSING),
        fixed={
            **_ONE_GROUP,
            "sliding_window_pattern": (4, 0, "LLLG"),  # layer_types say it
        },
        names=_ROUTED_NAMES,
        full_every=4,
        near_rotates=True,
        dense_first="first_k_dense_replace",
        tensors={
            "mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
            **SHARED,
        },
    ),
    "afmoe": Family(
        title="Trinity",
        architecture="AfmoeForCausalLM",
        keys={
            **WINDOW,
            **_ROUTED_KEYS,
            **kinds(
                size="global_attn_every_n_layers",
                integer="num_dense_layers num_shared_experts",
                flag="mup_enabled",
                number="route_scale",
                list_or_null="layer_types",
            ),
        },
        defaults={
            **{"vocab_size": 200192, "hidden_size": 2048, "intermediate_size": 6144},
            **{"num_attention_heads": 16, "head_dim": 128, "max_position_embeddings": 16384},
            **{"rms_norm_eps": 1e-5, "sliding_window": 1024, "num_dense_layers": 1},
            **{"moe_intermediate_size": 1408, "num_experts": 64, "num_experts_per_tok": 6},
            "num_shared_experts": 2,
        },
        computes={
            **{**BIASED_SIGMOIDS, "normed_experts": True, "qk_norm": "head"},
            **{"norms": "both", "gated": True},
        },
        harmless=(*BALANCING, "use_grouped_mm", "load_balance_coeff"),
        fixed={
            **{**_ONE_GROUP, "num_expert_groups": (1,), "num_limited_groups": (1,)},
            **{"route_norm": (True,), "score_func": ("sigmoid",)},
            "attention_bias": (False,),
        },
        names={
            **{**_ROUTED_NAMES, "routed_scaling_factor": "route_scale"},
            "sliding_window_pattern": "global_attn_every_n_layers",
        },
        full_every=4,
        near_rotates=True,
        scales_all=True,
        dense_first="num_dense_layers",
        tensors={
            "mlp.expert_bias": "mlp.gate.e_score_correction_bias",
            **{"mlp.router.gate.": "mlp.gate.", **SHARED},
            **{"pre_mlp_layernorm": "pre_feedforward_layernorm"},
            "post_mlp_layernorm": "post_feedforward_layernorm",
        },
    ),
    "granitemoeshared": _GRANITE_MOE_SHARED,
    "granitemoe_swa": dataclasses.replace(
        _GRANITE_MOE_SHARED,
        title="Granite with windows, mixtures of experts",
        architecture="GraniteMoeSWAForCausalLM",
        keys={**_GRANITE_MOE_SHARED.keys, **WINDOW, **WINDOWED_GRANITE},
        computes={**_GRANITE_MOE_SHARED.computes, "sinks": True},
        tensors={
            theirs: ours
            for theirs, ours in _GRANITE_MOE_SHARED.tensors.items()
            if not theirs.startswith(("block_sparse_moe.router.layer", "block_sparse_moe.input"))
            and not theirs.startswith("block_sparse_moe.output")
        },
        full_every=4,
        full_first=True,
    ),
}


LATENT_KEYS = {  # of LatentConfig
    "rank": "kv_lora_rank",
    "query_rank": "q_lora_rank",
    "resting": "qk_nope_head_dim",
    "turning": "qk_rope_head_dim",
    "value": "v_head_dim",
}
_KEYS = kinds(
    size="kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim", size_or_null="q_lora_rank"
)
_LATENT_ROUTED = kinds(
    size="intermediate_size moe_intermediate_size n_routed_experts num_experts_per_tok",
    integer="first_k_dense_replace n_shared_experts",
    flag="norm_topk_prob",
    number="routed_scaling_factor",
    size_or_null="n_group topk_group",
)
# What only training and other code read; head_dim and the number of key heads follow from others.
_HARMLESS = (
    *(*BALANCING, *PROPOSING, "pretraining_tp", "aux_loss_alpha", "seq_aux", "ep_size"),
    *("head_dim", "qk_head_dim", "num_key_value_heads"),
)
_FIXED = {"attention_bias": (False,), "moe_layer_freq": (1,)}
_NAMES = {"intermediate_size": "moe_intermediate_size", "num_experts": "n_routed_experts"}
_DEEPSEEK_V3 = Family(
    title="DeepSeek-V3, V3.1 and R1",
    architecture="DeepseekV3ForCausalLM",
    keys={**_KEYS, **_LATENT_ROUTED},
    defaults={
        **{"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432},
        **{"moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128},
        **{"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4},
        **{"first_k_dense_replace": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        "max_position_embeddings": 4096,
    },
    computes=BIASED_SIGMOIDS,
    harmless=_HARMLESS,
    fixed={
        **{**_FIXED, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        "rope_interleave": (True,),
    },
    names=_NAMES,
    fused=("kv_b",),
    neighbours=True,
    tensors=SHARED,
    dense_first="first_k_dense_replace",
)
LATENT: Mapping[str, Family] = {
    "deepseek_v2": Family(
        title="DeepSeek-V2, V2-Lite and V2.5",
        architecture="DeepseekV2ForCausalLM",
        keys={**_KEYS, **_LATENT_ROUTED, **kinds(name="topk_method")},
        defaults={
            **{"vocab_size": 102400, "intermediate_size": 11008, "moe_intermediate_size": 1407},
            **{"n_routed_experts": 64, "n_shared_experts": 2, "topk_method": "greedy"},
        },
        computes={"shared_gate": False},
        harmless=_HARMLESS,
        fixed={
            **{**_FIXED, "scoring_func": ("softmax",), "mlp_bias": (False,)},
            "norm_topk_prob": (False,),
        },
        names=_NAMES,
        fused=("kv_b",),
        neighbours=True,
        tensors=SHARED,
        dense_first="first_k_dense_replace",
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": dataclasses.replace(
        _DEEPSEEK_V3, title="Kimi K2, K2-Thinking", model_type="deepseek_v3"
    ),
    "glm4_moe_lite": dataclasses.replace(
        _DEEPSEEK_V3,
        title="GLM-4.7-Flash",
        architecture="Glm4MoeLiteForCausalLM",
        keys={**_DEEPSEEK_V3.keys, **kinds(list_or_null="mlp_layer_types")},
        defaults={
            **{"vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240},
            **{"moe_intermediate_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 20},
            **{"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256},
            **{"n_routed_experts": 64, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1},
            **{"first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8},
            **{"max_position_embeddings": 202752, "rms_norm_eps": 1e-5},
        },
    ),
    "youtu": Family(
        title="Youtu-LLM",
        architecture="YoutuForCausalLM",
        keys=_KEYS,
        defaults={
            **{"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 6144},
            **{"num_attention_heads": 16, "max_position_embeddings": 131072},
            "tie_word_embeddings": True,
        },
        harmless=(*_HARMLESS, "embedding_initializer_range"),
        fixed={**_FIXED, "rope_interleave": (True,), "mlp_bias": (False,)},
        fused=("kv_b",),
        neighbours=True,
    ),
}
